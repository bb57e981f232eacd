"""Recorded rollouts, with a stand-in for CUDA graphs: the same steps as rollouts that run step by step."""

import gc
import random
import weakref
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

import holdfast
from helpers import recorded_ops
from holdfast import rng
from holdfast.errors import ContractError
from holdfast.monitor.state_audit import ResetAudit
from holdfast.rollout import Collector
from holdfast.worlds import Step, WorldSpec

AGENTS, T = 24, 8


class Bits:
    """Show a bit at the start of an episode, and pay for naming it at its end; each subclass breaks one rule."""

    def __init__(self, agents=AGENTS):
        self.agents, self.spec = agents, WorldSpec(obs_shape=(2,), action_names=("zero", "one"))
        self.agent, self.clock, self.parts = torch.arange(agents), 0, {"left": [torch.zeros(0)]}

    def reset(self):
        self.clock, self.bit, self.parts["left"][0] = 0, torch.zeros_like(self.agent), self.agent % 3
        return self.observe(torch.zeros(self.agents), torch.zeros(self.agents, dtype=torch.bool), starts=None)

    def step(self, actions):
        self.clock += 1
        ended = self.parts["left"][0] == 0
        reward = (ended & (actions == self.bit)).float()
        self.parts["left"][0] = self.parts["left"][0] - 1
        return self.observe(reward, ended, ended)

    def observe(self, reward, ended, starts):
        starts = torch.ones_like(ended) if starts is None else starts
        self.bit = torch.where(starts, self.draw(), self.bit)
        self.parts["left"][0] = torch.where(starts, 4, self.parts["left"][0])
        obs = torch.stack([torch.where(starts, 2 * self.bit - 1, 0), self.parts["left"][0]], dim=1).float()
        none = torch.zeros_like(ended)
        return Step(obs, reward, ended, none, starts, ~none, none)

    def draw(self):
        return rng.randint(2, 5, rng.STREAM_WORLD, self.agent, self.clock)


class ReadsOnHost(Bits):
    def draw(self):
        return super().draw() + int(self.bit.sum() > 1000)


class DrawsOnHost(Bits):
    def draw(self):
        return torch.full_like(self.agent, int(torch.rand(()).numpy() > 0.5))


class NamesOnHost(Bits):
    word = "a"

    def draw(self):
        self.word = self.word + "a"
        return super().draw()


class WritesInPlace(Bits):
    """Reuses the tensors of its steps."""

    def observe(self, reward, ended, starts):
        step = super().observe(reward, ended, starts)
        if starts is None:
            self.obs, self.rewards, self.ends = step.obs, step.reward, step.terminated
        self.obs.copy_(step.obs)
        self.rewards.copy_(step.reward)
        self.ends.copy_(step.terminated)
        return Step(self.obs, self.rewards, self.ends, step.truncated, step.first, step.valid, step.trial)


class Exchanges(Bits):
    """Exchanges two tensors in every step."""

    def __init__(self, agents=AGENTS):
        super().__init__(agents)
        self.now, self.next = torch.zeros_like(self.agent), torch.ones_like(self.agent)

    def draw(self):
        self.now, self.next = self.next, self.now
        return (self.now + super().draw()) % 2


@dataclass
class Counts:
    """A part of a world."""

    number: int
    left: torch.Tensor


class HoldsParts(Bits):
    """Holds its state in a dataclass and a TensorDict, beside what cannot be written."""

    def __init__(self, agents=AGENTS):
        super().__init__(agents)
        self.counts, self.tree = Counts(0, self.agent), TensorDict({"sum": self.agent}, [agents])
        self.zeros, self.numbers = torch.zeros(1).expand(agents), np.broadcast_to(np.full(1, np.nan), (3,))

    def draw(self):
        self.counts.number += 1
        self.counts.left = self.counts.left * 3 % 7 + self.counts.number
        self.tree["sum"] = self.tree["sum"] + self.counts.left
        return self.tree["sum"] % 5 % 2


class ReplacesParts(Bits):
    def draw(self):
        self.parts = {"left": [self.parts["left"][0] * 1]}
        return super().draw()


class OwnGenerators(Bits):
    def __init__(self, agents=AGENTS):
        super().__init__(agents)
        self.generators = torch.Generator().manual_seed(1), np.random.default_rng(1), random.Random(1)
        self.torch, self.numpy, self.python = self.generators

    def draw(self):
        bits = torch.randint(2, (self.agents,), generator=self.torch)
        number = int(self.numpy.integers(2)) + self.python.randrange(2) + int(np.random.randint(2))
        return (bits + number) % 2


class InferenceMode(Bits):
    def __init__(self, agents=AGENTS):
        super().__init__(agents)
        with torch.inference_mode():
            self.table = torch.zeros(3)


class LastObsComesLater(Bits):
    """Gives `last_obs` in some steps only."""

    def observe(self, reward, ended, starts):
        step = super().observe(reward, ended, starts)
        return replace(step, last_obs=step.obs) if self.clock % 3 else step


def rollouts(make, monkeypatch, *, recorded, count=4, length=2 * T, log=None, **options):
    with monkeypatch.context() as patches:
        if recorded:
            recorded_ops.use_on_cpu(patches)
        torch.manual_seed(0)
        np.random.seed(0)
        world = make()
        policy = holdfast.make_policy("fast", world, seed=0, hidden_size=8, num_layers=2)
        audit = ResetAudit(policy, world.agents)
        graphs = (log if log is not None else []).append
        collector = Collector(world, policy, length=length, horizon=T, seed=3, audit=audit, graphs=graphs, **options)
        results = []
        for version in range(count):
            with audit.track():
                segments = collector.rollout(version)
            trees = [segments.steps, segments.entry_state, segments.tail, *filter(None, [segments.burn_in])]
            trees = [tree if isinstance(tree, TensorDictBase) else tree.steps for tree in trees]
            leaves = {f"{n} {key}": leaf.clone() for n, tree in enumerate(trees) for key, leaf in tree.items()}
            counted = collector.episodes.pop() | audit.pop_metrics() | {"age": audit.age.tolist()}
            results.append((leaves | dict(policy.store.view(0).clone().items()), counted, segments.version.tolist()))
        return results


def assert_equal(results, expected):
    for (leaves, counted, version), (wanted, numbers, number) in zip(results, expected, strict=True):
        assert leaves.keys() == wanted.keys()
        for key, leaf in leaves.items():
            assert torch.allclose(leaf.double(), wanted[key].double(), atol=1e-5), key
        assert counted == pytest.approx(numbers)
        assert version == number


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("recall", {"delay": (0, 3)}),
        ("recall", {"delay": (0, 3), "truncate": True}),
        ("ragged", {}),
        ("arena", {}),
        ("forage", {}),
    ],
)
def test_recorded_rollout_equals_steps(name, options, monkeypatch):
    def make():
        return holdfast.make_world(name, agents=AGENTS, **options)

    log = []
    results = rollouts(make, monkeypatch, recorded=True, log=log)
    assert log == ["rollouts are replayed as CUDA graphs"]
    assert_equal(results, rollouts(make, monkeypatch, recorded=False))


@pytest.mark.parametrize("world", [Bits, WritesInPlace, Exchanges, HoldsParts])
def test_world_of_a_user_is_recorded_with_its_counter(world, monkeypatch):
    log = []
    results = rollouts(world, monkeypatch, recorded=True, log=log)
    assert log == ["rollouts are replayed as CUDA graphs"]
    assert_equal(results, rollouts(world, monkeypatch, recorded=False))


def test_burn_in_is_recorded(monkeypatch):
    results = rollouts(Bits, monkeypatch, recorded=True, burn_in=3)
    assert_equal(results, rollouts(Bits, monkeypatch, recorded=False, burn_in=3))


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        (ReadsOnHost, "makes the host wait"),
        (DrawsOnHost, "other numbers"),
        (NamesOnHost, "NamesOnHost.word changes on the host"),
        (ReplacesParts, "ReplacesParts.parts is replaced"),
        (OwnGenerators, "other numbers"),
        (InferenceMode, "InferenceMode.table was made in torch.inference_mode"),
        (LastObsComesLater, "a step has tensors of other shapes"),
    ],
)
def test_world_that_cannot_be_recorded_runs_step_by_step(world, reason, monkeypatch):
    log = []
    results = rollouts(world, monkeypatch, recorded=True, log=log)
    assert len(log) == 1
    assert "step by step" in log[0]
    assert reason in log[0]
    if world is not DrawsOnHost:
        assert_equal(results, rollouts(world, monkeypatch, recorded=False))


class Broken(Bits):
    """Breaks the contract in a late step."""

    wrong = "again"

    def observe(self, reward, ended, starts):
        step = super().observe(reward, ended, starts)
        late = torch.as_tensor(self.clock == 3 * T + 5) & (self.agent == 7)
        fields = (
            vars(step)
            | {
                "reward": {"reward": torch.where(late, torch.nan, step.reward)},
                "obs": {"obs": torch.where(late[:, None], torch.inf, step.obs)},
                "never": {"truncated": late},
                "no end": {"first": step.first | late},
                "no first": {"first": step.first & ~late, "terminated": step.terminated | late},
            }[self.wrong]
        )
        return Step(**fields)


@pytest.mark.parametrize("wrong", ["reward", "obs", "never", "no end", "no first"])
def test_violation_in_a_recorded_rollout_is_named_as_step_by_step(wrong, monkeypatch):
    errors = []
    for recorded in (True, False):
        monkeypatch.setattr(Broken, "wrong", wrong)
        with pytest.raises(ContractError) as error:
            rollouts(Broken, monkeypatch, recorded=recorded)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    assert f"step {3 * T + 5}: agent 7" in errors[0] or f"step {3 * T + 6}: agent 7" in errors[0]


def small_collector(world):
    policy = holdfast.make_policy("fast", world, seed=0, hidden_size=8, num_layers=1)
    return Collector(world, policy, length=T, horizon=T, seed=0, graphs=[].append), policy


def test_recording_again_after_the_state_has_moved(monkeypatch):
    recorded_ops.use_on_cpu(monkeypatch)
    collector, policy = small_collector(Bits())
    for version in range(2):
        collector.rollout(version)
    before = policy.store.snapshot()
    policy.store.restore(before)
    segments = collector.rollout(2)
    key = policy.store.state_keys[0]
    assert torch.equal(segments.entry_state[key], before.tree[key])


class Leveled(Bits):
    """Has a difficulty, which a user changes between rollouts."""

    level, inverts = 0, torch.zeros(())

    def draw(self):
        return (super().draw() + self.level + self.inverts.long()) % 2


@pytest.mark.parametrize(("name", "numbers"), [("level", [0, 0, 1, 1]), ("inverts", [0.0, 0.0, 1.0, 1.0])])
def test_world_that_is_changed_between_rollouts_is_recorded_again(name, numbers, monkeypatch):
    stored = []
    for recorded in (True, False):
        with monkeypatch.context() as patches:
            if recorded:
                recorded_ops.use_on_cpu(patches)
            world = Leveled()
            world.level, world.inverts = 0, torch.zeros(())
            collector, _ = small_collector(world)
            observations = []
            for version, number in enumerate(numbers):
                setattr(world, name, torch.tensor(number) if isinstance(number, float) else number)
                observations.append(collector.rollout(version).steps["env_obs"].clone())
            stored.append(torch.stack(observations))
    assert torch.equal(*stored)


@pytest.mark.parametrize("recorded", [False, True])
def test_collector_is_freed_at_once(recorded, monkeypatch):
    """In a cycle it would keep the shared memory of its workers until the cycle is collected."""
    if recorded:
        recorded_ops.use_on_cpu(monkeypatch)
    collector, _ = small_collector(Bits())
    for version in range(3):
        collector.rollout(version)
    freed = weakref.ref(collector)
    gc.disable()
    try:
        del collector
        assert freed() is None
    finally:
        gc.enable()
