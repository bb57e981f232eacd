"""WithPreviousInputs: previous action, previous reward and episode start."""

from dataclasses import replace

import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from helpers.gym_envs import MODES, TERMINATED, TRUNCATED, counting
from helpers.scripted_world import Scripted, random_script
from helpers.space_worlds import NamePlace, SayNumber
from holdfast import make_policy, make_world
from holdfast.errors import ConfigError, ContractError
from holdfast.rollout import Collector
from holdfast.worlds import World
from holdfast.worlds.gym import GymWorld
from holdfast.worlds.previous_inputs import WithPreviousInputs

EVERYTHING = {"previous_action": True, "previous_reward": True, "tell_first": True}


def by_hand(steps, actions, count):
    """The expected inputs of each agent, row by row, from the steps of its world."""
    shown = []
    for agent in range(len(steps[0].first)):
        action, reward, rows = [0.0] * count, 0.0, []
        for t, step in enumerate(steps):
            if t and steps[t - 1].valid[agent]:
                action = [float(int(actions[t - 1][agent]) == number) for number in range(count)]
                reward = float(step.reward[agent])
            led = (action, reward)
            if step.first[agent]:
                action, reward = [0.0] * count, 0.0
            rows.append(((action, reward, float(step.first[agent])), (*led, 0.0)))
        shown.append(rows)
    return shown


def shown_by(obs, agent):
    action, reward, first = (obs[key][agent].tolist() for key in ("previous_action", "previous_reward", "first"))
    return action, reward[0], first[0]


@given(st.integers(0, 1000))
def test_previous_inputs_across_ends_and_invalid_rows(seed):
    steps = 24
    actions = torch.randint(3, (steps, 4), generator=torch.Generator().manual_seed(seed))
    plain = random_script(4, steps + 1, seed)
    world = WithPreviousInputs(random_script(4, steps + 1, seed), **EVERYTHING)
    assert isinstance(world, World)
    plain_steps, shown = [plain.reset()], [world.reset()]
    for taken in actions:
        plain_steps.append(plain.step(taken))
        shown.append(world.step(taken))
    for agent, rows in enumerate(by_hand(plain_steps, actions, 3)):
        for before, step, (now, led) in zip(plain_steps, shown, rows, strict=True):
            assert shown_by(step.obs, agent) == now
            assert shown_by(step.last_obs, agent) == led
            assert torch.equal(step.obs["obs"], before.obs)
            assert torch.equal(step.last_obs["obs"], before.last_obs)
            assert torch.equal(step.reward, before.reward)


@pytest.mark.parametrize("mode", MODES)
def test_previous_inputs_agree_with_the_environment(mode):
    world = GymWorld(2, env=counting([(1, TRUNCATED), (3, TERMINATED)], [(2, TRUNCATED)]), autoreset=mode, **EVERYTHING)
    step = world.reset()
    for t in range(20):
        before, step = step, world.step(torch.tensor([t % 3, (t + 1) % 3]))
        for obs, fresh in ((step.obs, step.first), (step.last_obs, torch.zeros(2, dtype=torch.bool))):
            ended = step.terminated | step.truncated
            rows = torch.ones_like(ended) if obs is step.obs else ended & before.valid
            own = obs["obs"][:, 1]
            one_hot = torch.nn.functional.one_hot(own.clamp(min=0).long(), 3) * (own >= 0)[:, None]
            assert torch.equal(obs["previous_action"][rows], one_hot[rows].float())
            assert torch.equal(obs["first"][rows, 0], fresh[rows].float())
            assert torch.equal(obs["first"][rows, 0] == 1, own[rows] == -1)
            paid = torch.where(fresh, 0.0, step.reward)
            assert torch.equal(obs["previous_reward"][rows, 0], paid[rows])


def test_previous_action_encoding():
    world = WithPreviousInputs(SayNumber(2), previous_action=True, previous_reward=False, tell_first=False)
    world.reset()
    assert world.step(torch.tensor([[3.0], [-0.25]])).obs["previous_action"].tolist() == [[1.0], [-0.25]]
    assert set(world.spec.observation.spaces) == {"obs", "previous_action"}
    place = WithPreviousInputs(NamePlace(2), previous_action=True, previous_reward=False, tell_first=True)
    place.reset()
    shown = place.step(torch.tensor([[2, 0], [0, 1]])).obs
    assert shown["previous_action"].tolist() == [[0, 0, 1, 1, 0], [1, 0, 0, 0, 1]]
    assert isinstance(place.spec.observation, spaces.Dict)
    for each in (world, place):
        policy = make_policy("auto", each, seed=0, hidden_size=8, num_layers=1)
        Collector(each, policy, length=8, horizon=4, seed=0).rollout(0)


def test_previous_inputs_without_last_obs():
    inner = SayNumber(2)
    assert WithPreviousInputs(inner, **EVERYTHING).reset().last_obs is None


def test_previous_inputs_reject_tokens_and_step_before_reset():
    with pytest.raises(ConfigError, match="has tokens"):
        WithPreviousInputs(make_world("recall", agents=2), **EVERYTHING)
    with pytest.raises(ContractError, match=r"Call reset\(\)"):
        WithPreviousInputs(Scripted(2, 4), **EVERYTHING).step(torch.zeros(2, dtype=torch.long))


class Forgets(WithPreviousInputs):
    """Counts actions in invalid rows."""

    def step(self, actions):
        self._acted = torch.ones_like(self._acted)
        return super().step(actions)


class Carries(WithPreviousInputs):
    """Shows the last action of the previous episode at an episode start."""

    def _make_step(self, step, action, reward):
        result = super()._make_step(replace(step, first=torch.zeros_like(step.first)), action, reward)
        return replace(result, first=step.first)


@pytest.mark.parametrize("kind", [Forgets, Carries])
def test_broken_previous_inputs_are_detected(monkeypatch, kind):
    wrong = test_previous_inputs_across_ends_and_invalid_rows.hypothesis.inner_test
    wrong(3)
    monkeypatch.setitem(wrong.__globals__, "WithPreviousInputs", kind)
    with pytest.raises(AssertionError):
        wrong(3)
