"""Asynchronous collection: the order of groups does not change any agent's steps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.async_world import Turning
from holdfast.errors import ContractError
from holdfast.memory import StateStore, make_cell
from holdfast.monitor.state_audit import ResetAudit
from holdfast.policies import make_policy
from holdfast.rollout import Collector
from holdfast.rollout.collector import EntryStateRecorder
from holdfast.worlds import make_world
from holdfast.worlds.step import PartialStep, as_slice, concat, select

LENGTH, HORIZON = 16, 8


def collect(world, *, lead=0, rollouts=3, clear_on="episode"):
    """Collect some rollouts; return stored segments, statistics and states."""
    policy = make_policy("fast", world, seed=0, hidden_size=16, clear_on=clear_on).double()
    resets = ResetAudit(policy, world.agents)
    collector = Collector(
        world,
        policy,
        length=LENGTH,
        horizon=HORIZON,
        seed=7,
        burn_in=lead,
        audit=resets,
        trim_tokens=False,
    )
    records = []
    for version in range(rollouts):
        with resets.track():
            segments = collector.rollout(version)
        records.append((segments.steps.clone(), segments.entry_state.clone(), segments.tail.clone()))
        if segments.burn_in is not None:
            records.append((segments.burn_in.steps.clone(), segments.burn_in.entry_state.clone()))
    # The last turn is compared when the next one comes; at once, the last step of everybody is.
    resets._close()
    counted = {**collector.episodes.pop(), **resets.pop_metrics()}
    return records, counted, resets.age, policy.store.view(0).clone(), collector


def assert_same_life(one, other):
    for these, those in zip(one[0], other[0], strict=True):
        for actual, expected in zip(these, those, strict=True):
            for key in actual.keys(True, True):
                torch.testing.assert_close(actual[key], expected[key], rtol=1e-9, atol=1e-9, msg=str(key))
    assert one[1] == pytest.approx(other[1])
    assert one[2].equal(other[2])
    torch.testing.assert_close(one[3]["h"], other[3]["h"], rtol=1e-9, atol=1e-9)
    for name in ("reward", "terminated", "truncated", "first", "valid", "trial"):
        assert getattr(one[4].next_step, name).equal(getattr(other[4].next_step, name)), name


WORLDS = st.sampled_from(
    [
        ("recall", 1, {"delay": (0, 5), "truncate": True}),
        ("repeat_first", 1, {"length": (3, 9)}),
        ("ragged", 1, {"delay": (0, 3), "absent": (1, 4)}),
        ("key_value", 1, {}),
        ("forage", 1, {}),
    ]
)


@settings(max_examples=8, deadline=None)
@given(
    which=WORLDS,
    agents=st.integers(1, 7),
    together=st.integers(1, 7),
    chance=st.integers(0, 99),
    lead=st.sampled_from([0, 3, HORIZON]),
    clear_on=st.sampled_from(["episode", "trial", "never"]),
)
def test_async_rollout_equals_sync_rollout(which, agents, together, chance, lead, clear_on):
    name, crowd, options = which
    words = {"lead": lead, "clear_on": clear_on}
    sync_run = collect(make_world(name, agents * crowd, seed=3, **options), **words)
    turning = Turning(name, agents * crowd, seed=3, crowd=crowd, together=together, chance=chance, **options)
    assert_same_life(collect(turning, **words), sync_run)


def test_resets_are_counted_in_async_rollouts():
    turning = collect(Turning("ragged", 6, seed=1, chance=5))
    counted = turning[1]
    assert counted["memory/resets"] == counted["memory/resets_due"] > 20


def test_swapped_states_are_detected(monkeypatch):
    sync_run = collect(make_world("recall", 6, seed=3))
    right = StateStore.subset
    monkeypatch.setattr(
        StateStore,
        "subset",
        lambda self, rows: right(self, rows if isinstance(rows, slice) else rows.roll(1)),
    )
    with pytest.raises(AssertionError):
        assert_same_life(collect(Turning("recall", 6, seed=3, chance=1)), sync_run)


def test_late_entry_state_is_detected(monkeypatch):
    sync_run = collect(make_world("recall", 6, seed=3))
    right = EntryStateRecorder.record
    monkeypatch.setattr(
        EntryStateRecorder,
        "record",
        lambda self, rows, t: right(self, rows, max(t - 1, 0) if isinstance(t, int) else (t - 1).clamp(min=0)),
    )
    with pytest.raises(AssertionError):
        assert_same_life(collect(Turning("recall", 6, seed=3, chance=1)), sync_run)


def test_store_subset_reads_and_writes_selected_agents():
    store = StateStore(make_cell("lstm", 3, 4, 1))
    store.allocate({0: 5})
    all_states = store.view(0)
    for key in ("h", "c"):
        all_states[key].copy_(torch.arange(5.0)[:, None, None].expand_as(all_states[key]))
    for rows in (slice(1, 3), torch.tensor([4, 0])):
        with store.subset(rows):
            states = store.read(0, 2)
            assert states["h"][:, 0, 0].tolist() == torch.arange(5.0)[rows].tolist()
            store.write(0, states.apply(lambda leaf: leaf + 10))
        assert store.view(0)["h"][rows, 0, 0].tolist() == (torch.arange(5.0)[rows] + 10).tolist()
    assert store.view(0)["c"][3, 0, 0] == 3
    assert dict(store.slices) == {0: 5}


def test_store_subset_is_unchanged_after_an_exception():
    store = StateStore(make_cell("lstm", 3, 4, 1))
    store.allocate({0: 3})

    def fail():
        with store.subset(torch.tensor([2, 0])):
            store.write(0, store.read(0, 2).apply(lambda leaf: leaf + 1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not store.view(0)["h"].any()


def test_store_subset_is_refused_in_replay():
    store = StateStore(make_cell("lstm", 3, 4, 1))
    store.allocate({0: 3})
    with (
        store.replaying(store.view(0).clone()),
        pytest.raises(ContractError, match="within a replay"),
        store.subset(slice(0, 1)),
    ):
        pass


@given(st.permutations(range(5)), st.integers(1, 5))
def test_concat_orders_turns_by_agent(order, size):
    step = make_world("recall", 5, truncate=True).reset()
    rows = [torch.tensor(order[at : at + size]) for at in range(0, 5, size)]
    full_step = concat([PartialStep(each, select(step, each)) for each in rows])
    assert full_step.obs.equal(step.obs)
    assert full_step.last_obs.equal(step.last_obs)
    assert full_step.first.equal(step.first)


def test_as_slice_of_consecutive_rows():
    assert as_slice(torch.tensor([2, 3, 4]), torch.device("cpu")) == slice(2, 5)
    assert as_slice(torch.tensor([4, 3]), torch.device("cpu")).tolist() == [4, 3]


class Twice(Turning):
    """Returns a group twice."""

    def recv(self):
        turn = super().recv()
        rows = turn.rows.clone()
        rows[:] = rows[0]
        return PartialStep(rows, turn.step)


def test_turn_with_duplicate_agent_is_refused():
    with pytest.raises(ContractError, match=r"recv\(\) returns rows"):
        collect(Twice("recall", 6, together=6, chance=4))


class Late(Turning):
    """Leaves out that an episode begins."""

    def recv(self):
        turn = super().recv()
        turn.step.first[:] = False
        return turn


def test_async_steps_are_checked():
    with pytest.raises(ContractError, match="acts after its episode ended"):
        collect(Late("recall", 6, chance=4))
