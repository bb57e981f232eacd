"""CheckedWorld raises at the first violation, and names the world, the agent and the step."""

import sys
from dataclasses import replace

import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from helpers.play_world import anything, live
from helpers.scripted_world import random_script
from holdfast.config.worlds import WORLD_CONFIGS
from holdfast.errors import ContractError
from holdfast.evaluation.evaluate import evaluate
from holdfast.policies import make_policy
from holdfast.rollout import Collector
from holdfast.worlds import Step, WorldSpec, make_world
from holdfast.worlds.checked_world import VIOLATIONS, CheckedWorld, checked, raise_violations

A, END = 3, 4


class Honest:
    """Shows a number and a choice; episodes of four steps end by truncation, agent 2's by termination."""

    spec = WorldSpec(
        obs_shape=(),
        action_names=("left", "right"),
        truncates="always",
        observation=spaces.Dict({"number": spaces.Box(-9, 9, (1,)), "which": spaces.Discrete(3)}),
    )

    def __init__(self):
        self.agents, self.t = A, 0

    def reset(self):
        self.t = 0
        return self.make_step()

    def step(self, actions):
        self.t += 1
        return self.make_step()

    def obs(self):
        number = torch.full((self.agents, 1), float(self.t % END))
        return TensorDict({"number": number, "which": torch.full((self.agents,), self.t % 3)}, batch_size=[self.agents])

    def make_step(self):
        over = torch.full((self.agents,), self.t > 0 and self.t % END == 0)
        dies = torch.arange(self.agents) == 2
        step = Step(
            obs=self.obs(),
            reward=torch.ones(self.agents),
            terminated=over & dies,
            truncated=over & ~dies,
            first=over | (self.t == 0),
            valid=torch.ones(self.agents, dtype=torch.bool),
            trial=torch.zeros(self.agents, dtype=torch.bool),
            last_obs=self.obs(),
        )
        return self.change(step)

    def change(self, step):
        return step


def at(t, change):
    """A world that keeps the contract except in one step."""

    class Liar(Honest):
        def change(self, step):
            return change(step) if self.t == t else step

    return Liar()


def row(agent, value, of):
    other = of.clone()
    other[agent] = value
    return other


def with_obs(step, key, leaf):
    return replace(step, obs=step.obs.clone().set(key, leaf))


def test_checked_world_passes_steps_through():
    world = CheckedWorld(Honest())
    plain = live(Honest(), 10, lambda obs, first: torch.zeros(A, dtype=torch.long))
    for plain_step, guarded in zip(
        plain, live(world, 10, lambda obs, first: torch.zeros(A, dtype=torch.long)), strict=True
    ):
        assert torch.equal(plain_step.first, guarded.first)
        assert torch.equal(plain_step.obs["number"], guarded.obs["number"])
    assert checked(world) is world
    world.raise_violations()


@pytest.mark.parametrize("name", WORLD_CONFIGS)
def test_builtin_worlds_keep_the_contract(name):
    world = make_world(name, agents=24)
    live(CheckedWorld(world), 150, anything(world))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.2, 0.6]))
def test_any_consistent_flags_pass(seed, gone):
    live(CheckedWorld(random_script(4, 41, seed, gone=gone)), 40, lambda obs, first: torch.zeros(4).long())


NAN = float("nan")
ROWS = {
    "reward": (2, lambda step: replace(step, reward=row(1, NAN, step.reward)), "agent 1 got a reward"),
    "huge": (3, lambda step: replace(step, reward=row(2, -1e30, step.reward)), r"agent 2 got a rew.* beyond 1e\+15"),
    "infinite": (3, lambda step: replace(step, reward=row(2, -torch.inf, step.reward)), "agent 2 got a rew"),
    "obs": (1, lambda step: with_obs(step, "number", row(0, NAN, step.obs["number"])), "agent 0 got an obs"),
    "choice": (
        2,
        lambda step: with_obs(step, "which", row(1, 3, step.obs["which"])),
        "agent 1 got an obs.* outside",
    ),
    "last": (
        4,
        lambda step: replace(step, last_obs=step.obs.clone().set("number", row(1, NAN, step.obs["number"]))),
        "agent 1 was truncated, and its last_obs",
    ),
    "first is missing": (4, lambda step: replace(step, first=row(2, False, step.first)), "agent 2 acts after"),
    "ends are missing": (
        4,
        lambda step: replace(step, truncated=row(0, False, step.truncated)),
        "agent 0 starts an episode",
    ),
    "over twice": (
        5,
        lambda step: replace(step, terminated=row(2, True, step.terminated), valid=row(2, False, step.valid)),
        "agent 2 ends .* twice",
    ),
    "first too early": (2, lambda step: replace(step, first=row(1, True, step.first)), "agent 1 starts an"),
}


def away(step):
    """Agent 2 is invalid from the row of its end on."""
    gone = torch.arange(A) == 2
    return replace(step, first=step.first & ~gone, valid=step.valid & ~gone)


@pytest.mark.parametrize("fault", ROWS)
def test_violation_names_agent_and_step(fault):
    t, change, message = ROWS[fault]
    world = at(t, change)
    if fault == "over twice":
        inner = world.change
        world.change = lambda step: away(step) if world.t == END else inner(step)
    with pytest.raises(ContractError, match=f"^World Liar, step {t}: {message}"):
        live(CheckedWorld(world), 8, lambda obs, first: torch.zeros(A, dtype=torch.long))


def test_invalid_rows_may_be_nan():
    class Away(Honest):
        def change(self, step):
            gone = self.t % END == 2
            number = torch.full((A, 1), NAN) if gone else step.obs["number"]
            reward = torch.full((A,), NAN) if self.t % END == 3 else step.reward
            return replace(with_obs(step, "number", number), valid=step.valid & (not gone), reward=reward)

    live(CheckedWorld(Away()), 12, lambda obs, first: torch.zeros(A, dtype=torch.long))


KINDS = {
    "reward": (
        lambda step: replace(step, reward=step.reward[:2]),
        r"reward is \[2\], must be a tensor \[3\]",
    ),
    "whole": (
        lambda step: replace(step, reward=step.reward.long()),
        "reward is torch.int64, must be a float",
    ),
    "flag": (lambda step: replace(step, first=step.first.float()), "first is torch.float32, must be torch.b"),
    "none": (lambda step: replace(step, valid=None), "valid is NoneType, must be a tensor"),
    "shape": (
        lambda step: with_obs(step, "number", torch.zeros(A, 2)),
        r"obs\['number'\] is \[3, 2\], must be \[3, 1",
    ),
    "kind": (
        lambda step: with_obs(step, "which", torch.zeros(A)),
        r"obs\['which'\] is torch.float32, must be torch",
    ),
    "key": (
        lambda step: replace(step, obs=step.obs.exclude("which")),
        r"obs is obs\['number'\], must be obs",
    ),
    "tensor": (lambda step: replace(step, obs=torch.zeros(A)), r"obs is obs, must be obs\['number'\]"),
    "no last": (lambda step: replace(step, last_obs=None), "there is no last_obs, and the world declares"),
    "last": (lambda step: replace(step, last_obs=torch.zeros(A)), "last_obs is last_obs, must be last_obs"),
    "tuple": (lambda step: (step.obs, step.reward), "the world returns tuple, must be holdfast.Step"),
}


@pytest.mark.parametrize("fault", KINDS)
@pytest.mark.parametrize("t", [0, 2])
def test_wrong_shape_or_dtype_names_the_step(fault, t, annotations_asleep):
    change, message = KINDS[fault]
    when = "reset\\(\\)" if t == 0 else f"step {t}"
    with pytest.raises(ContractError, match=f"^World Liar, {when}: {message}"):
        live(CheckedWorld(at(t, change)), 8, lambda obs, first: torch.zeros(A, dtype=torch.long))


def test_reset_flags_are_checked():
    with pytest.raises(ContractError, match=r"reset\(\): agent 1 starts its first .* first is false"):
        CheckedWorld(at(0, lambda step: replace(step, first=row(1, False, step.first)))).reset()
    with pytest.raises(ContractError, match=r"reset\(\): agent 2 starts its first episode, but an end"):
        CheckedWorld(at(0, lambda step: replace(step, terminated=row(2, True, step.terminated)))).reset()


def test_exception_of_a_world_names_the_step():
    def fail(step):
        raise ValueError("no such\n  thing")

    world = CheckedWorld(at(3, fail))
    message = r"^World Liar, step 3: it raised ValueError: no such thing \(test_checked_world.py:\d+\)\.$"
    with pytest.raises(ContractError, match=message) as caught:
        live(world, 8, lambda obs, first: torch.zeros(A, dtype=torch.long))
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_world_that_exits_is_an_error():
    def leave(step):
        sys.exit(0)

    with pytest.raises(ContractError, match=r"^World Liar, step 3: it raised SystemExit: 0 \(test_checked_world.py:"):
        live(CheckedWorld(at(3, leave)), 8, lambda obs, first: torch.zeros(A, dtype=torch.long))


def test_truncation_against_truncates_never():
    world = Honest()
    world.spec = replace(Honest.spec, truncates="never", name="mine")
    with pytest.raises(ContractError, match="World mine, step 4: agent 0 was truncated, but the world decla"):
        live(CheckedWorld(world), 8, lambda obs, first: torch.zeros(A, dtype=torch.long))


def test_recorded_violations_are_raised_on_request(monkeypatch):
    t, change, message = ROWS["obs"]
    world = CheckedWorld(at(t, change))
    with monkeypatch.context() as patch:
        # As on a GPU, where violations are not read at once.
        patch.setattr(CheckedWorld, "raise_violations", lambda self: None)
        live(world, 8, lambda obs, first: torch.zeros(A, dtype=torch.long))
    with pytest.raises(ContractError, match=f"World Liar, step {t}: {message}"):
        raise_violations(world)


@pytest.mark.parametrize("fault", ["reward", "obs", "first is missing"])
def test_collector_and_evaluate_check_the_world(fault):
    t, change, message = ROWS[fault]
    policy = make_policy("auto", Honest(), hidden_size=4)
    with pytest.raises(ContractError, match=f"step {t}: {message}"):
        Collector(at(t, change), policy, length=8, horizon=8, seed=0).rollout(0)
    with pytest.raises(ContractError, match=f"step {t}: {message}"):
        evaluate(policy, at(t, change), episodes=6)


class Latecomers(Honest):
    """Agent 0 is away at first, agent 1 after each episode; both are message twice that they begin."""

    def change(self, step):
        absent = torch.tensor([self.t < 2, self.t % END in (0, 1) and self.t > 0, False])
        late = torch.tensor([self.t == 2, self.t % END == 2 and self.t > 2, False])
        return replace(step, valid=step.valid & ~absent, first=step.first | late)


def test_agent_invalid_at_reset_may_join_later():
    live(CheckedWorld(Latecomers()), 12, lambda obs, first: torch.zeros(A, dtype=torch.long))


def test_tensordict_batch_size_is_checked():
    class Bare(Honest):
        def change(self, step):
            return replace(step, obs=TensorDict(dict(step.obs.items()), batch_size=[]))

    with pytest.raises(ContractError, match=r"World Bare, reset\(\): obs has batch_size \[\], must be \[3\]"):
        CheckedWorld(Bare()).reset()


@pytest.mark.parametrize("bits", [1 << len(VIOLATIONS), 1 << 40, -1])
def test_saved_violations_that_do_not_exist_are_refused(bits):
    world = CheckedWorld(make_world("recall", agents=4))
    world.reset()
    saved = world.state()
    saved["violations"][2] = bits
    with pytest.raises(ContractError, match="'violations' has bits that stand for no violation"):
        world.restore(saved)


@pytest.mark.parametrize("name", ["obs", "reward", "terminated", "truncated", "first", "valid", "trial", "last_obs"])
@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_later_steps_of_plain_tensors_are_checked_too(name, change, annotations_asleep):
    class Changing:
        def __init__(self):
            self.world, self.t = make_world("recall", agents=3, truncate=True), 0
            self.agents, self.spec = self.world.agents, self.world.spec

        def reset(self):
            return self.world.reset()

        def step(self, actions):
            step, self.t = self.world.step(actions), self.t + 1
            if self.t < 3:
                return step
            tensor = getattr(step, name)
            other = tensor[:2] if change == "shape" else tensor.int()
            return replace(step, **{name: other})

    world = CheckedWorld(Changing())
    world.reset()
    actions = torch.zeros(3, dtype=torch.long)
    for _ in range(2):
        world.step(actions)
    with pytest.raises(ContractError, match=f"step 3: {name} is"):
        world.step(actions)
