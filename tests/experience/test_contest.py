from dataclasses import replace

import pytest
import torch

from holdfast.errors import ContractError
from holdfast.experience import compete, evaluate
from holdfast.policies import make_policy
from holdfast.worlds import make_world
from keeping import NOTHING, Keeper
from scripted import Scripted, make_reader

LENGTH = 4


class Crowds(Scripted):
    """Crowds of three; everybody's episodes last four steps, and pay 100 * action + row at their end."""

    def __init__(self, agents=6, crowd=3):
        steps = torch.arange(100)
        ends = ((steps % LENGTH == 0) & (steps > 0)).expand(agents, 100)
        super().__init__(agents, 100, terminated=ends)
        self.spec = replace(self.spec, crowd=crowd)

    def step(self, actions):
        told = super().step(actions)
        paid = 100.0 * actions + torch.arange(self.agents)
        return replace(told, reward=torch.where(told.terminated, paid, 0.0))


def test_every_second_of_a_crowd_is_the_others_and_then_sides_are_swapped():
    # Action 1 is mine, action 2 theirs; of each three the odd one is the first's.
    found = compete(Keeper(1), Keeper(2), Crowds(), episodes=24)
    first, swapped = ([100 + row for row in rows] for rows in ([0, 2, 3, 5], [1, 4]))
    assert [side.returns.tolist() for side in found.mine] == [2 * first, 2 * swapped]
    assert [side.returns.tolist() for side in found.theirs] == [
        2 * [201.0, 204.0],
        2 * [200.0, 202.0, 203.0, 205.0],
    ]
    assert [side.together for side in (*found.mine, *found.theirs)] == [2, 1, 1, 2]
    assert all(side.lengths.tolist() == [LENGTH] * len(side.returns) for side in (*found.mine, *found.theirs))


def test_the_lead_is_that_of_each_place_and_round():
    found = compete(Keeper(1), Keeper(2), Crowds(), episodes=24)
    # Rows 0 and 2 with 100 more for mine against row 1; then the other way round.
    assert [lead.flatten().tolist() for lead in found.leads] == [[-100.0] * 4, [-100.0] * 4]


def test_as_many_rounds_are_played_as_are_needed_and_all_rows_equally_many():
    for episodes, rounds in ((1, 1), (12, 1), (13, 2), (24, 2), (25, 3)):
        found = compete(Keeper(1), Keeper(2), Crowds(), episodes=episodes)
        assert sum(len(side.returns) for side in (*found.mine, *found.theirs)) == 12 * rounds


def test_each_has_memories_of_its_own_rows():
    mine, theirs = Keeper(1), Keeper(2)
    compete(mine, theirs, Crowds(), episodes=12)
    for policy, rows in ((mine, ([0, 2, 3, 5], [1, 4])), (theirs, ([1, 4], [0, 2, 3, 5]))):
        due = [
            [NOTHING if t == 0 else 1000.0 * row + t - 1 for row in side]
            for side in rows
            for t in range(LENGTH)
        ]
        assert policy.noted == due


def test_only_ones_own_memory_is_tampered_with():
    mine, theirs = Keeper(1), Keeper(2)
    found = compete(mine, theirs, Crowds(), episodes=12, memory="cleared")
    assert {number for noted in mine.noted for number in noted} == {NOTHING}
    assert {number for noted in theirs.noted for number in noted} > {NOTHING}
    assert {side.memory for side in found.mine} == {"cleared"}
    assert {side.memory for side in found.theirs} == {"intact"}


def test_against_itself_nobody_leads():
    world = make_world("arena", agents=48, length=12, size=14, seed=2)
    policy = make_policy("fast", world, hidden_size=8, num_layers=1, seed=0)
    found = compete(policy, policy, world, episodes=96, greedy=False, seed=1)
    first, swapped = found.leads
    assert bool(first.any())
    assert torch.equal(first, -swapped)
    # Two copies of one policy live as one of them would, row by row.
    whole = evaluate(policy, world, episodes=48, greedy=False, seed=1).returns.unflatten(0, (-1, 2))
    assert found.mine[0].returns.tolist() == whole[:, 0].tolist()
    assert found.theirs[0].returns.tolist() == whole[:, 1].tolist()


def test_where_everybody_is_alone_there_is_no_contest():
    with pytest.raises(ContractError, match=r"In Scripted everybody is alone.*such as arena\."):
        compete(make_reader(), make_reader(), Scripted(4, 20), episodes=4)
