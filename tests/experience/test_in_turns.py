"""Who is answered when does not matter: every agent lives as if all were answered at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ContractError
from holdfast.experience import Collector
from holdfast.experience.turns import Edges
from holdfast.memory import LiveStore, make_cell
from holdfast.monitor.resets import Resets
from holdfast.policies import make_policy
from holdfast.worlds import make_world
from holdfast.worlds.turns import Turn, joined, picked, place_of
from turning import Turning

LENGTH, HORIZON = 16, 8


def lived(world, *, lead=0, rollouts=3, clear_on="episode"):
    """Live some rollouts, and tell all that was stored, counted and remembered."""
    policy = make_policy("fast", world, seed=0, hidden_size=16, clear_on=clear_on).double()
    resets = Resets(policy, world.agents)
    collector = Collector(
        world, policy, length=LENGTH, horizon=HORIZON, seed=7, lead=lead, saw=resets.saw, shorten=False
    )
    told = []
    for version in range(rollouts):
        with resets.listening():
            segments = collector.rollout(version)
        told.append((segments.steps.clone(), segments.entry.clone(), segments.tail.clone()))
        if segments.lead is not None:
            told.append((segments.lead.steps.clone(), segments.lead.entry.clone()))
    # The last turn is compared when the next one comes; at once, the last step of everybody is.
    resets._close()
    counted = {**collector.episodes.take(), **resets.take()}
    return told, counted, resets.age, policy.store.live(0).clone(), collector


def assert_same_life(one, other):
    for these, those in zip(one[0], other[0], strict=True):
        for mine, theirs in zip(these, those, strict=True):
            for key in mine.keys(True, True):
                torch.testing.assert_close(mine[key], theirs[key], rtol=1e-9, atol=1e-9, msg=str(key))
    assert one[1] == pytest.approx(other[1])
    assert one[2].equal(other[2])
    torch.testing.assert_close(one[3]["h"], other[3]["h"], rtol=1e-9, atol=1e-9)
    for name in ("reward", "terminated", "truncated", "first", "valid", "trial"):
        assert getattr(one[4].pending, name).equal(getattr(other[4].pending, name)), name


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
def test_whoever_is_answered_first_everybody_lives_the_same(which, agents, together, chance, lead, clear_on):
    name, crowd, options = which
    words = {"lead": lead, "clear_on": clear_on}
    whole = lived(make_world(name, agents * crowd, seed=3, **options), **words)
    turning = Turning(name, agents * crowd, seed=3, crowd=crowd, together=together, chance=chance, **options)
    assert_same_life(lived(turning, **words), whole)


def test_resets_are_counted_by_turns_as_they_are_at_once():
    turning = lived(Turning("ragged", 6, seed=1, chance=5))
    counted = turning[1]
    assert counted["memory/resets"] == counted["memory/resets_due"] > 20


def test_a_state_that_goes_to_the_wrong_agent_is_another_life(monkeypatch):
    whole = lived(make_world("recall", 6, seed=3))
    right = LiveStore.among
    monkeypatch.setattr(
        LiveStore, "among", lambda self, rows: right(self, rows if isinstance(rows, slice) else rows.roll(1))
    )
    with pytest.raises(AssertionError):
        assert_same_life(lived(Turning("recall", 6, seed=3, chance=1)), whole)


def test_an_entry_noted_at_another_step_is_noticed(monkeypatch):
    whole = lived(make_world("recall", 6, seed=3))
    right = Edges.pass_by
    monkeypatch.setattr(
        Edges, "pass_by", lambda self, rows, when, state: right(self, rows, (when - 1).clamp(min=0), state)
    )
    with pytest.raises(AssertionError):
        assert_same_life(lived(Turning("recall", 6, seed=3, chance=1)), whole)


def test_some_agents_of_a_store_read_and_write_their_own_memories():
    store = LiveStore(make_cell("lstm", 3, 4, 1))
    store.open({0: 5})
    everybody = store.live(0)
    for key in ("h", "c"):
        everybody[key].copy_(torch.arange(5.0)[:, None, None].expand_as(everybody[key]))
    for rows in (slice(1, 3), torch.tensor([4, 0])):
        with store.among(rows):
            mine = store.read(0, 2)
            assert mine["h"][:, 0, 0].tolist() == torch.arange(5.0)[rows].tolist()
            store.write(0, mine.apply(lambda leaf: leaf + 10))
        assert store.live(0)["h"][rows, 0, 0].tolist() == (torch.arange(5.0)[rows] + 10).tolist()
    assert store.live(0)["c"][3, 0, 0] == 3
    assert dict(store.slices) == {0: 5}


def test_what_is_raised_among_some_agents_leaves_their_memories_as_they_were():
    store = LiveStore(make_cell("lstm", 3, 4, 1))
    store.open({0: 3})

    def fail():
        with store.among(torch.tensor([2, 0])):
            store.write(0, store.read(0, 2).apply(lambda leaf: leaf + 1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not store.live(0)["h"].any()


def test_nobody_lives_within_a_replay():
    store = LiveStore(make_cell("lstm", 3, 4, 1))
    store.open({0: 3})
    with (
        store.replaying(store.live(0).clone()),
        pytest.raises(ContractError, match="within a replay"),
        store.among(slice(0, 1)),
    ):
        pass


@given(st.permutations(range(5)), st.integers(1, 5))
def test_turns_are_joined_in_the_order_of_the_agents(order, size):
    step = make_world("recall", 5, truncate=True).reset()
    rows = [torch.tensor(order[at : at + size]) for at in range(0, 5, size)]
    whole = joined([Turn(each, picked(step, each)) for each in rows])
    assert whole.obs.equal(step.obs)
    assert whole.last_obs.equal(step.last_obs)
    assert whole.first.equal(step.first)


def test_rows_that_follow_each_other_are_a_slice():
    assert place_of(torch.tensor([2, 3, 4]), torch.device("cpu")) == slice(2, 5)
    assert place_of(torch.tensor([4, 3]), torch.device("cpu")).tolist() == [4, 3]


class Twice(Turning):
    """Gives somebody's turn twice."""

    def turn(self):
        turn = super().turn()
        rows = turn.rows.clone()
        rows[:] = rows[0]
        return Turn(rows, turn.step)


def test_a_turn_with_an_agent_twice_is_refused():
    with pytest.raises(ContractError, match="it is the turn of"):
        lived(Twice("recall", 6, together=6, chance=4))


class Late(Turning):
    """Leaves out that an episode begins."""

    def turn(self):
        turn = super().turn()
        turn.step.first[:] = False
        return turn


def test_turns_are_guarded_as_steps_are():
    with pytest.raises(ContractError, match="acts on after its episode has ended"):
        lived(Late("recall", 6, chance=4))
