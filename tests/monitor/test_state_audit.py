"""Resets against episode starts: equal in correct policies, different in broken ones."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import broken_policies as own
from helpers.gym_envs import BOTH, MODES, TERMINATED, TRUNCATED, counting
from helpers.monitored_policies import (
    POLICIES,
    Bundled,
    Overheard,
    T,
    graph,
    hand_written,
    scripted,
    world_for,
)
from helpers.scripted_world import Scripted, make_reader, random_script
from helpers.small_policy import Small, make_small
from holdfast.errors import ContractError
from holdfast.evaluation.evaluate import evaluate
from holdfast.monitor.state_audit import ResetAudit, state_metrics
from holdfast.policies import make_policy
from holdfast.rollout import Collector, bootstrap_value
from holdfast.worlds import make_world
from holdfast.worlds.gym import GymWorld


def watch(policy, world, rollouts=3, segments=2):
    """Collect some rollouts; return the metrics of each, all alarms, and the audit."""
    resets, steps = ResetAudit(policy, world.agents), []
    recorder = Overheard(world, steps.append)
    collector = Collector(recorder, policy, length=segments * T, horizon=T, seed=0, audit=resets)
    metrics = []
    for version in range(rollouts):
        with resets.track():
            collector.rollout(version)
        metrics.append(resets.pop_metrics())
    return metrics, steps, resets


def pairs(metrics):
    return [(each["memory/resets"], each["memory/resets_due"]) for each in metrics]


def by_hand(steps, rollouts=3, segments=2, trials=False):
    """Number of episode starts that the policy gets in each rollout."""
    length = segments * T
    starts = [step.first | step.trial if trials else step.first for step in steps]
    return [int(torch.stack(starts[k * length : (k + 1) * length]).sum()) for k in range(rollouts)]


@pytest.mark.parametrize("clear_on", ["episode", "trial"])
@pytest.mark.parametrize("kind", POLICIES)
def test_correct_policy_makes_all_due_resets(kind, clear_on):
    policy = POLICIES[kind](clear_on=clear_on)
    metrics, steps, _ = watch(policy, world_for(policy))
    due = by_hand(steps, trials=clear_on == "trial")
    assert pairs(metrics) == [(count, count) for count in due]
    assert min(due) > 0


def test_trials_require_resets_with_clear_on_trial():
    counts = {clear_on: pairs(watch(make_small(clear_on=clear_on), scripted())[0]) for clear_on in ("episode", "trial")}
    assert counts["episode"] != counts["trial"]


def test_where_memory_is_never_cleared_nothing_is_due():
    policy = make_small(clear_on="never")
    metrics, steps, resets = watch(policy, scripted())
    assert pairs(metrics) == [(0, 0)] * 3
    step_counts = torch.stack([step.valid for step in steps[: 3 * 2 * T]]).sum(0)
    assert torch.equal(resets.age, step_counts)


@pytest.mark.parametrize("name", ["recall", "ragged", "forage", "constant"])
@pytest.mark.parametrize("segments", [1, 3])
def test_reset_counts_in_builtin_worlds(name, segments):
    world = make_world(name, agents=9)
    metrics, steps, _ = watch(make_policy("fast", world, hidden_size=8), world, segments=segments)
    assert pairs(metrics) == [(count, count) for count in by_hand(steps, segments=segments)]
    assert pairs(metrics)[0][0] >= 9


@pytest.mark.parametrize("mode", MODES)
def test_reset_counts_in_every_autoreset_mode(mode):
    scripts = [
        [(1, TERMINATED), (3, TRUNCATED)],
        [(2, BOTH), (1, TRUNCATED)],
        [(5, TRUNCATED), (2, TERMINATED)],
    ]
    world = GymWorld(3, env=counting(*scripts), autoreset=mode, seed=0)
    metrics, steps, _ = watch(make_policy("fast", world, hidden_size=8), world)
    assert pairs(metrics) == [(count, count) for count in by_hand(steps)]
    assert all(due > 9 for _, due in pairs(metrics))


@settings(max_examples=12)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.2, 0.7]), st.sampled_from([0.0, 0.2, 0.6]))
def test_reset_counts_for_any_flags(seed, ends, gone):
    metrics, steps, _ = watch(make_reader(), random_script(4, 60, seed, ends, gone))
    assert pairs(metrics) == [(count, count) for count in by_hand(steps)]


def test_repeated_first_without_action():
    none = torch.zeros(1, 60, dtype=torch.bool)
    valid, first = ~none, none.clone()
    valid[0, :4] = False
    first[0, [0, 2, 3]] = True
    metrics, _, _ = watch(make_reader(), Scripted(1, 60, valid=valid, first=first))
    assert pairs(metrics) == [(3, 3), (0, 0), (0, 0)]


def test_resets_count_in_the_rollout_whose_step_they_are_due_in():
    ended = torch.zeros(2, 60, dtype=torch.bool)
    ended[0, 2 * T] = ended[1, 4 * T - 1] = True
    metrics, _, _ = watch(make_reader(), Scripted(2, 60, terminated=ended))
    assert pairs(metrics) == [(2, 2), (2, 2), (0, 0)]


def watch_unguarded(world, steps=6):
    """Collect in a world whose flags are not checked."""
    policy = make_reader()
    policy.bind(world.spec)
    policy.store.allocate({0: world.agents})
    resets, step = ResetAudit(policy, world.agents), world.reset()
    with resets.track(), torch.no_grad():
        for _ in range(steps):
            resets.on_step(step)
            policy(own.step_to_td(step, 0, torch.zeros(world.agents)))
            step = world.step(torch.zeros(world.agents, dtype=torch.long))
    return pairs([resets.pop_metrics()])


def test_acting_without_first_requires_reset():
    ended = torch.zeros(2, 60, dtype=torch.bool)
    ended[:, 3] = True
    first = (torch.arange(60) == 0).expand(2, 60)
    assert watch_unguarded(Scripted(2, 60, terminated=ended, first=first)) == [(2, 4)]


def test_first_within_an_episode_requires_no_reset():
    first = ((torch.arange(60) == 0) | (torch.arange(60) == 3)).expand(2, 60)
    assert watch_unguarded(Scripted(2, 60, first=first)) == [(4, 2)]


def test_resets_in_replay_do_not_count():
    world, policy = scripted(agents=3), make_small()
    resets, step = ResetAudit(policy, 3), world.reset()
    with resets.track():
        resets.on_step(step)
        bootstrap_value(policy, policy.lstm.cell.initial(3), step.obs, step.first, step.trial)
    assert pairs([resets.pop_metrics()]) == [(0, 3)]


class ClearsOften(Small):
    """Clears at every third step too."""

    step = 0

    def unroll(self, obs, first, state, valid=None):
        if not self.store.is_replaying:
            self.step += 1
            first = first | (self.step % 3 == 0)
        return super().unroll(obs, first, state, valid)


class ForgetsItsSecond(Bundled):
    """Clears one of its two memories only."""

    def unroll(self, obs, first, state, valid=None):
        cell, x = self.lstm.cell, self.encode(obs.flatten(0, first.dim() - 1)).unflatten(0, first.shape)
        states, shares = cell.split(state), x.split([7, 5], -1)
        a, after_a = cell.cells["a"](shares[0], states["a"], first, valid)
        b, after_b = cell.cells["b"](shares[1], states["b"], torch.zeros_like(first), valid)
        thoughts = self.decode(torch.cat([a, b], -1).flatten(0, first.dim() - 1))
        thoughts = type(thoughts)(*(part.unflatten(0, first.shape) for part in thoughts))
        return thoughts, cell.join({"a": after_a, "b": after_b})


@pytest.mark.parametrize(
    ("sabotage", "fewer"),
    [
        (own.LateClear, True),
        (own.NoClear, True),
        (own.ClearsOnTerminatedOnly, True),
        (own.ClearsOnTruncatedOnly, True),
        (own.OtherLayerNotCleared, True),
        (own.NoClearInTraining, True),
        (ForgetsItsSecond, True),
        (ClearsOften, False),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_broken_policies_miss_resets(sabotage, fewer):
    metrics, steps, _ = watch(make_small(sabotage), scripted())
    assert [due for _, due in pairs(metrics)] == by_hand(steps)
    for made, due in pairs(metrics):
        assert made < due if fewer else made > due


def test_foreign_memory_has_no_counted_resets():
    torch.manual_seed(0)
    metrics, steps, _ = watch(own.NoDetach(), scripted())
    assert pairs(metrics) == [(0, due) for due in by_hand(steps)]


class AsksTwice(Small):
    """Asks its memory twice about a step; with `ticks` the second time from where the first one led."""

    ticks = False

    def unroll(self, obs, first, state, valid=None):
        _, after = super().unroll(obs, first, state, valid)
        if self.ticks:
            return super().unroll(obs, torch.zeros_like(first), after, valid)
        return super().unroll(obs, first, state, valid)


@pytest.mark.parametrize("ticks", [False, True])
def test_cell_called_twice_counts_one_reset(ticks):
    policy = make_small(AsksTwice)
    policy.ticks = ticks
    metrics, steps, _ = watch(policy, scripted())
    assert pairs(metrics) == [(count, count) for count in by_hand(steps)]


def test_untracked_resets_are_missing():
    policy, world = make_small(), scripted()
    resets = ResetAudit(policy, world.agents)
    Collector(world, policy, length=T, horizon=T, seed=0, audit=resets).rollout(0)
    metrics = resets.pop_metrics()
    assert metrics["memory/resets"] == 0 < metrics["memory/resets_due"]


def test_resets_of_evaluation_copies_do_not_count():
    world = make_world("recall", agents=4)
    policy = make_policy("fast", world, hidden_size=8)
    resets = ResetAudit(policy, 4)
    collector = Collector(world, policy, length=T, horizon=T, seed=0, audit=resets)
    with resets.track():
        collector.rollout(0)
    evaluate(policy, make_world("recall", agents=4, seed=1), episodes=8)
    assert not policy.lstm.cell._forward_pre_hooks
    assert pairs([resets.pop_metrics()]) == [(4, 4)]


def test_no_reset_counts_without_memory():
    metrics, _, _ = watch(make_small(memory="none"), scripted())
    assert metrics == [{}] * 3


def test_pop_metrics_resets_counts():
    _, _, resets = watch(make_small(), scripted())
    assert pairs([resets.pop_metrics()]) == [(0, 0)]


def test_slices_are_refused():
    policy = make_small()
    resets = ResetAudit(policy, 6)
    with resets.track(), pytest.raises(ContractError, match=r"for all 6 agents at once.*\[3\]"):
        policy(own.step_to_td(scripted(agents=3).reset(), 0, torch.zeros(3)))


def ages(steps, length):
    """Count ages by hand: a clear sets 0, a step that is read adds one."""
    age = torch.zeros_like(steps[0].reward, dtype=torch.long)
    for step in steps[:length]:
        age = torch.where(step.first, 0, age) + step.valid
    return age


@pytest.mark.parametrize("kind", POLICIES)
def test_an_age_is_the_number_of_steps_read_since_the_last_clear(kind):
    policy = POLICIES[kind]()
    _, steps, resets = watch(policy, world_for(policy))
    expected = ages(steps, 3 * 2 * T)
    assert torch.equal(resets.age, expected)
    metrics = state_metrics(policy, resets.age)
    assert metrics["memory/age_mean"] == float(expected.double().mean())
    assert metrics["memory/age_max"] == int(expected.max())


def test_age_without_resets():
    _, steps, resets = watch(make_small(own.NoClear), scripted())
    assert torch.equal(resets.age, torch.stack([step.valid for step in steps[: 6 * T]]).sum(0))


class Overwrites:
    """A world that returns every step in the same tensors."""

    def __init__(self, world):
        self.world, self.agents, self.spec = world, world.agents, world.spec

    def reset(self):
        self.last_step = copy.deepcopy(self.world.reset())
        return self.last_step

    def step(self, actions):
        for name, part in vars(self.world.step(actions)).items():
            getattr(self.last_step, name).copy_(part)
        return self.last_step


def test_world_may_reuse_step_tensors():
    metrics, _, resets = watch(make_small(), Overwrites(scripted()))
    expected, _, same = watch(make_small(), scripted())
    assert metrics == expected
    assert torch.equal(resets.age, same.age)


def test_resets_of_manual_and_graph_policies():
    for policy, cells in ((hand_written(), 1), (graph(), 3)):
        assert len(ResetAudit(policy, 4)._memories) == cells
