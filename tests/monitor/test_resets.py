"""Clears as they are made against those that are due: equal in right lives, different in wrong ones."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from check import own
from gym_envs import BOTH, MODES, TERMINATED, TRUNCATED, counting
from holdfast.errors import ContractError
from holdfast.experience import Collector, evaluate, value_of
from holdfast.monitor import Resets, remembered
from holdfast.policies import make_policy
from holdfast.worlds import make_world
from holdfast.worlds.gym import GymWorld
from monitor.lives import POLICIES, Bundled, Overheard, T, graph, hand_written, scripted, world_for
from scripted import Scripted, make_reader, random_script
from small import Small, make_small


def watch(policy, world, rollouts=3, segments=2):
    """Live some rollouts; return what was counted in each, what was told in all, and the counter."""
    resets, told = Resets(policy, world.agents), []
    heard = Overheard(Overheard(world, resets.saw), told.append)
    collector = Collector(heard, policy, length=segments * T, horizon=T, seed=0)
    found = []
    for version in range(rollouts):
        with resets.listening():
            collector.rollout(version)
        found.append(resets.take())
    return found, told, resets


def pairs(found):
    return [(each["memory/resets"], each["memory/resets_due"]) for each in found]


def by_hand(told, rollouts=3, segments=2, trials=False):
    """How many starts were given to the policy in each rollout."""
    length = segments * T
    starts = [step.first | step.trial if trials else step.first for step in told]
    return [int(torch.stack(starts[k * length : (k + 1) * length]).sum()) for k in range(rollouts)]


@pytest.mark.parametrize("clear_on", ["episode", "trial"])
@pytest.mark.parametrize("kind", POLICIES)
def test_a_right_policy_clears_what_is_due_in_every_rollout(kind, clear_on):
    policy = POLICIES[kind](clear_on=clear_on)
    found, told, _ = watch(policy, world_for(policy))
    due = by_hand(told, trials=clear_on == "trial")
    assert pairs(found) == [(count, count) for count in due]
    assert min(due) > 0


def test_trials_owe_clears_only_where_they_clear():
    counts = {
        clear_on: pairs(watch(make_small(clear_on=clear_on), scripted())[0])
        for clear_on in ("episode", "trial")
    }
    assert counts["episode"] != counts["trial"]


def test_where_memory_is_never_cleared_nothing_is_due():
    policy = make_small(clear_on="never")
    found, told, resets = watch(policy, scripted())
    assert pairs(found) == [(0, 0)] * 3
    lived = torch.stack([step.valid for step in told[: 3 * 2 * T]]).sum(0)
    assert torch.equal(resets.age, lived)


@pytest.mark.parametrize("name", ["recall", "ragged", "forage", "constant"])
@pytest.mark.parametrize("segments", [1, 3])
def test_in_worlds_of_ours_they_are_equal(name, segments):
    world = make_world(name, agents=9)
    found, told, _ = watch(make_policy("fast", world, hidden_size=8), world, segments=segments)
    assert pairs(found) == [(count, count) for count in by_hand(told, segments=segments)]
    assert pairs(found)[0][0] >= 9


@pytest.mark.parametrize("mode", MODES)
def test_in_every_way_to_restart_they_are_equal(mode):
    scripts = [
        [(1, TERMINATED), (3, TRUNCATED)],
        [(2, BOTH), (1, TRUNCATED)],
        [(5, TRUNCATED), (2, TERMINATED)],
    ]
    world = GymWorld(3, env=counting(*scripts), autoreset=mode, seed=0)
    found, told, _ = watch(make_policy("fast", world, hidden_size=8), world)
    assert pairs(found) == [(count, count) for count in by_hand(told)]
    assert all(due > 9 for _, due in pairs(found))


@settings(max_examples=12)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.2, 0.7]), st.sampled_from([0.0, 0.2, 0.6]))
def test_whatever_the_world_tells_a_right_policy_clears_what_is_due(seed, ends, gone):
    found, told, _ = watch(make_reader(), random_script(4, 60, seed, ends, gone))
    assert pairs(found) == [(count, count) for count in by_hand(told)]


def test_an_episode_that_nobody_lived_in_may_be_opened_again():
    none = torch.zeros(1, 60, dtype=torch.bool)
    valid, first = ~none, none.clone()
    valid[0, :4] = False
    first[0, [0, 2, 3]] = True
    found, _, _ = watch(make_reader(), Scripted(1, 60, valid=valid, first=first))
    assert pairs(found) == [(3, 3), (0, 0), (0, 0)]


def test_a_step_told_but_not_given_to_the_policy_is_due_in_the_next_rollout():
    ended = torch.zeros(2, 60, dtype=torch.bool)
    ended[0, 2 * T] = ended[1, 4 * T - 1] = True
    found, _, _ = watch(make_reader(), Scripted(2, 60, terminated=ended))
    assert pairs(found) == [(2, 2), (2, 2), (0, 0)]


def watch_unguarded(world, steps=6):
    """Live in a world whose flags nobody looks at."""
    policy = make_reader()
    policy.bind(world.spec)
    policy.store.open({0: world.agents})
    resets, step = Resets(policy, world.agents), world.reset()
    with resets.listening(), torch.no_grad():
        for _ in range(steps):
            resets.saw(step)
            policy(own.as_batch(step, 0, torch.zeros(world.agents)))
            step = world.step(torch.zeros(world.agents, dtype=torch.long))
        resets.saw(step)
    return pairs([resets.take()])


def test_who_acts_on_after_an_end_is_owed_a_clear():
    ended = torch.zeros(2, 60, dtype=torch.bool)
    ended[:, 3] = True
    first = (torch.arange(60) == 0).expand(2, 60)
    assert watch_unguarded(Scripted(2, 60, terminated=ended, first=first)) == [(2, 4)]


def test_a_start_in_the_middle_of_a_life_is_owed_nothing():
    first = ((torch.arange(60) == 0) | (torch.arange(60) == 3)).expand(2, 60)
    assert watch_unguarded(Scripted(2, 60, first=first)) == [(4, 2)]


def test_a_clear_in_a_replay_is_none():
    world, policy = scripted(agents=3), make_small()
    resets, step = Resets(policy, 3), world.reset()
    with resets.listening():
        resets.saw(step)
        value_of(policy, policy.lstm.cell.initial(3), step.obs, step.first, step.trial)
        resets.saw(world.step(torch.zeros(3)))
    assert pairs([resets.take()]) == [(0, 3)]


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

    def think(self, obs, first, state, valid):
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
def test_a_wrong_one_does_not(sabotage, fewer):
    found, told, _ = watch(make_small(sabotage), scripted())
    assert [due for _, due in pairs(found)] == by_hand(told)
    for made, due in pairs(found):
        assert made < due if fewer else made > due


def test_a_memory_that_is_none_of_ours_is_never_seen_to_clear():
    torch.manual_seed(0)
    found, told, _ = watch(own.NoDetach(), scripted())
    assert pairs(found) == [(0, due) for due in by_hand(told)]


class AsksTwice(Small):
    """Asks its memory twice about a step; with `ticks` the second time from where the first one led."""

    ticks = False

    def unroll(self, obs, first, state, valid=None):
        _, after = super().unroll(obs, first, state, valid)
        if self.ticks:
            return super().unroll(obs, torch.zeros_like(first), after, valid)
        return super().unroll(obs, first, state, valid)


@pytest.mark.parametrize("ticks", [False, True])
def test_a_memory_that_is_asked_twice_a_step_is_cleared_once(ticks):
    policy = make_small(AsksTwice)
    policy.ticks = ticks
    found, told, _ = watch(policy, scripted())
    assert pairs(found) == [(count, count) for count in by_hand(told)]


def test_what_is_not_heard_is_missing():
    policy, world = make_small(), scripted()
    resets = Resets(policy, world.agents)
    Collector(Overheard(world, resets.saw), policy, length=T, horizon=T, seed=0).rollout(0)
    found = resets.take()
    assert found["memory/resets"] == 0 < found["memory/resets_due"]


def test_a_copy_that_is_evaluated_is_not_counted():
    world = make_world("recall", agents=4)
    policy = make_policy("fast", world, hidden_size=8)
    resets = Resets(policy, 4)
    collector = Collector(Overheard(world, resets.saw), policy, length=T, horizon=T, seed=0)
    with resets.listening():
        collector.rollout(0)
    evaluate(policy, make_world("recall", agents=4, seed=1), episodes=8)
    assert not policy.lstm.cell._forward_pre_hooks
    assert pairs([resets.take()]) == [(4, 4)]


def test_without_a_memory_there_is_nothing_to_count():
    found, _, _ = watch(make_small(memory="none"), scripted())
    assert found == [{}] * 3


def test_counts_begin_anew_after_each_taking():
    _, _, resets = watch(make_small(), scripted())
    assert pairs([resets.take()]) == [(0, 0)]


def test_slices_are_refused_rather_than_miscounted():
    policy = make_small()
    resets = Resets(policy, 6)
    with resets.listening(), pytest.raises(ContractError, match=r"for all 6 agents at once.*\[3\]"):
        policy(own.as_batch(scripted(agents=3).reset(), 0, torch.zeros(3)))


def ages(told, length):
    """Count by hand: a clear begins anew, a step that is read makes it one older."""
    age = torch.zeros_like(told[0].reward, dtype=torch.long)
    for step in told[:length]:
        age = torch.where(step.first, 0, age) + step.valid
    return age


@pytest.mark.parametrize("kind", POLICIES)
def test_an_age_is_the_number_of_steps_read_since_the_last_clear(kind):
    policy = POLICIES[kind]()
    _, told, resets = watch(policy, world_for(policy))
    expected = ages(told, 3 * 2 * T)
    assert torch.equal(resets.age, expected)
    found = remembered(policy, resets.age)
    assert found["memory/age_mean"] == float(expected.double().mean())
    assert found["memory/age_max"] == int(expected.max())


def test_who_never_clears_grows_old():
    _, told, resets = watch(make_small(own.NoClear), scripted())
    assert torch.equal(resets.age, torch.stack([step.valid for step in told[: 6 * T]]).sum(0))


class Overwrites:
    """A world that tells every step in the same tensors."""

    def __init__(self, world):
        self.world, self.agents, self.spec = world, world.agents, world.spec

    def reset(self):
        self.told = copy.deepcopy(self.world.reset())
        return self.told

    def step(self, actions):
        for name, part in vars(self.world.step(actions)).items():
            getattr(self.told, name).copy_(part)
        return self.told


def test_a_world_may_write_over_what_it_told():
    found, _, resets = watch(make_small(), Overwrites(scripted()))
    expected, _, same = watch(make_small(), scripted())
    assert found == expected
    assert torch.equal(resets.age, same.age)


def test_hand_written_and_graph_are_heard_cell_by_cell():
    for policy, cells in ((hand_written(), 1), (graph(), 3)):
        assert len(Resets(policy, 4)._memories) == cells
