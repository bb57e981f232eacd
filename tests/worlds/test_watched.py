"""A guarded world: what breaks the contract stops there, with the world, the agent and the step named."""

from dataclasses import replace

import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from holdfast.errors import ContractError
from holdfast.experience import Collector, evaluate
from holdfast.policies import make_policy
from holdfast.worlds import WORLDS, Step, WorldSpec, make_world
from holdfast.worlds.watched import Watched, settle, watched
from lived import anything, live
from scripted import random_script

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
        return self.tell()

    def step(self, actions):
        self.t += 1
        return self.tell()

    def obs(self):
        number = torch.full((self.agents, 1), float(self.t % END))
        return TensorDict(
            {"number": number, "which": torch.full((self.agents,), self.t % 3)}, batch_size=[self.agents]
        )

    def tell(self):
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
    """A world that is honest but for one step."""

    class Liar(Honest):
        def change(self, step):
            return change(step) if self.t == t else step

    return Liar()


def row(agent, value, of):
    other = of.clone()
    other[agent] = value
    return other


def seen(step, key, leaf):
    return replace(step, obs=step.obs.clone().set(key, leaf))


def test_an_honest_world_is_left_alone():
    world = Watched(Honest())
    plain = live(Honest(), 10, lambda obs, first: torch.zeros(A, dtype=torch.long))
    for told, guarded in zip(
        plain, live(world, 10, lambda obs, first: torch.zeros(A, dtype=torch.long)), strict=True
    ):
        assert torch.equal(told.first, guarded.first)
        assert torch.equal(told.obs["number"], guarded.obs["number"])
    assert watched(world) is world
    world.settle()


@pytest.mark.parametrize("name", WORLDS)
def test_our_own_worlds_keep_the_contract(name):
    world = make_world(name, agents=24)
    live(Watched(world), 150, anything(world))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.2, 0.6]))
def test_any_story_of_ends_starts_and_absences_is_believed_if_it_fits(seed, gone):
    live(Watched(random_script(4, 41, seed, gone=gone)), 40, lambda obs, first: torch.zeros(4).long())


NAN = float("nan")
ROWS = {
    "reward": (2, lambda step: replace(step, reward=row(1, NAN, step.reward)), "agent 1 got a reward"),
    "infinite": (3, lambda step: replace(step, reward=row(2, -torch.inf, step.reward)), "agent 2 got a rew"),
    "seen": (1, lambda step: seen(step, "number", row(0, NAN, step.obs["number"])), "agent 0 sees something"),
    "choice": (2, lambda step: seen(step, "which", row(1, 3, step.obs["which"])), "agent 1 sees a choice"),
    "last": (
        4,
        lambda step: replace(step, last_obs=step.obs.clone().set("number", row(1, NAN, step.obs["number"]))),
        "agent 1 was truncated, and its last_obs",
    ),
    "first is missing": (4, lambda step: replace(step, first=row(2, False, step.first)), "agent 2 acts on"),
    "ends are missing": (
        4,
        lambda step: replace(step, truncated=row(0, False, step.truncated)),
        "agent 0 begins an episode",
    ),
    "over twice": (
        5,
        lambda step: replace(step, terminated=row(2, True, step.terminated), valid=row(2, False, step.valid)),
        "agent 2 is told of an end .*, but its episode was over already",
    ),
    "first too early": (2, lambda step: replace(step, first=row(1, True, step.first)), "agent 1 begins an"),
}


def away(step):
    """Agent 2 is away from the row of its end on."""
    gone = torch.arange(A) == 2
    return replace(step, first=step.first & ~gone, valid=step.valid & ~gone)


@pytest.mark.parametrize("fault", ROWS)
def test_a_wrong_row_is_named_with_its_agent_and_step(fault):
    t, change, told = ROWS[fault]
    world = at(t, change)
    if fault == "over twice":
        inner = world.change
        world.change = lambda step: away(step) if world.t == END else inner(step)
    with pytest.raises(ContractError, match=f"^World Liar, step {t}: {told}"):
        live(Watched(world), 8, lambda obs, first: torch.zeros(A, dtype=torch.long))


def test_what_is_shown_where_nobody_acts_may_be_anything():
    class Away(Honest):
        def change(self, step):
            gone = self.t % END == 2
            number = torch.full((A, 1), NAN) if gone else step.obs["number"]
            reward = torch.full((A,), NAN) if self.t % END == 3 else step.reward
            return replace(seen(step, "number", number), valid=step.valid & (not gone), reward=reward)

    live(Watched(Away()), 12, lambda obs, first: torch.zeros(A, dtype=torch.long))


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
        lambda step: seen(step, "number", torch.zeros(A, 2)),
        r"obs\['number'\] is \[3, 2\], must be \[3, 1",
    ),
    "kind": (
        lambda step: seen(step, "which", torch.zeros(A)),
        r"obs\['which'\] is torch.float32, must be torch",
    ),
    "key": (
        lambda step: replace(step, obs=step.obs.exclude("which")),
        r"obs is obs\['number'\], must be obs",
    ),
    "tensor": (lambda step: replace(step, obs=torch.zeros(A)), r"obs is obs, must be obs\['number'\]"),
    "no last": (lambda step: replace(step, last_obs=None), "there is no last_obs, and the world declares"),
    "last": (lambda step: replace(step, last_obs=torch.zeros(A)), "last_obs is last_obs, must be last_obs"),
    "tuple": (lambda step: (step.obs, step.reward), "the world says tuple, must be holdfast.Step"),
}


@pytest.mark.parametrize("fault", KINDS)
@pytest.mark.parametrize("t", [0, 2])
def test_what_has_the_wrong_kind_is_named_with_its_step(fault, t, annotations_asleep):
    change, told = KINDS[fault]
    when = "reset\\(\\)" if t == 0 else f"step {t}"
    with pytest.raises(ContractError, match=f"^World Liar, {when}: {told}"):
        live(Watched(at(t, change)), 8, lambda obs, first: torch.zeros(A, dtype=torch.long))


def test_a_reset_that_begins_nothing_or_ends_something_is_refused():
    with pytest.raises(ContractError, match=r"reset\(\): agent 1 is not told that its first episode begins"):
        Watched(at(0, lambda step: replace(step, first=row(1, False, step.first)))).reset()
    with pytest.raises(ContractError, match=r"reset\(\): agent 2 is told of an end"):
        Watched(at(0, lambda step: replace(step, terminated=row(2, True, step.terminated)))).reset()


def test_a_world_that_raises_is_named_with_the_step_and_what_it_raised():
    def fail(step):
        raise ValueError("no such\n  thing")

    world = Watched(at(3, fail))
    told = r"^World Liar, step 3: it raised ValueError: no such thing \(test_watched.py, line \d+\)\.$"
    with pytest.raises(ContractError, match=told) as caught:
        live(world, 8, lambda obs, first: torch.zeros(A, dtype=torch.long))
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_world_that_says_it_never_truncates_is_taken_at_its_word():
    world = Honest()
    world.spec = replace(Honest.spec, truncates="never", name="mine")
    with pytest.raises(ContractError, match="World mine, step 4: agent 0 was truncated, but the world decla"):
        live(Watched(world), 8, lambda obs, first: torch.zeros(A, dtype=torch.long))


def test_what_was_noted_is_told_when_it_is_asked_for(monkeypatch):
    t, change, told = ROWS["seen"]
    world = Watched(at(t, change))
    with monkeypatch.context() as patch:
        # As on a GPU, where nobody looks at once.
        patch.setattr(Watched, "settle", lambda self: None)
        live(world, 8, lambda obs, first: torch.zeros(A, dtype=torch.long))
    with pytest.raises(ContractError, match=f"World Liar, step {t}: {told}"):
        settle(world)


@pytest.mark.parametrize("fault", ["reward", "seen", "first is missing"])
def test_collecting_and_evaluating_guard_the_world(fault):
    t, change, told = ROWS[fault]
    policy = make_policy("auto", Honest(), hidden_size=4)
    with pytest.raises(ContractError, match=f"step {t}: {told}"):
        Collector(at(t, change), policy, length=8, horizon=8, seed=0).rollout(0)
    with pytest.raises(ContractError, match=f"step {t}: {told}"):
        evaluate(policy, at(t, change), episodes=6)


class Latecomers(Honest):
    """Agent 0 is away at first, agent 1 after each episode; both are told twice that they begin."""

    def change(self, step):
        absent = torch.tensor([self.t < 2, self.t % END in (0, 1) and self.t > 0, False])
        late = torch.tensor([self.t == 2, self.t % END == 2 and self.t > 2, False])
        return replace(step, valid=step.valid & ~absent, first=step.first | late)


def test_who_is_away_at_first_may_begin_later():
    live(Watched(Latecomers()), 12, lambda obs, first: torch.zeros(A, dtype=torch.long))


def test_a_tree_without_its_number_of_agents_is_refused():
    class Bare(Honest):
        def change(self, step):
            return replace(step, obs=TensorDict(dict(step.obs.items()), batch_size=[]))

    with pytest.raises(ContractError, match=r"World Bare, reset\(\): obs has batch_size \[\], must be \[3\]"):
        Watched(Bare()).reset()
