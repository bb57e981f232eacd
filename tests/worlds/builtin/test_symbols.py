"""Single symbol worlds: absent agents, observations by step, and rewards."""

from itertools import pairwise

import pytest

from helpers.play_world import anything, live, stacked
from holdfast.worlds import make_world

NOTHING = [0xFF, 0xFF, 0xFF]


def lives_of(told, agent):
    """Cut an agent's steps into whole episodes, by `first`."""
    starts = [t for t, step in enumerate(told) if step.first[agent]]
    return [told[a:b] for a, b in pairwise(starts)]


@pytest.mark.parametrize(
    ("name", "options", "lengths"),
    [
        ("n_back", {"back": 3, "length": 9}, range(4, 10)),
        ("parity", {"length": 8}, range(2, 9)),
        ("key_value", {"pairs": 4}, range(5, 9)),
    ],
)
def test_first_episodes_put_agents_out_of_phase(name, options, lengths):
    told = live(world := make_world(name, agents=300, **options), 40, anything(world))
    firsts = [[len(life) for life in lives_of(told, agent)] for agent in range(300)]
    assert {each[0] for each in firsts} == set(lengths)
    assert {length for each in firsts for length in each[1:]} == {max(lengths)}


def test_repeat_first_lengths_and_symbols_are_uniform():
    world = make_world("repeat_first", agents=500, length=(4, 6), symbols=3)
    told = live(world, 30, anything(world))
    lengths = [len(life) for agent in range(500) for life in lives_of(told, agent)[:3]]
    shares = [lengths.count(length) / len(lengths) for length in (4, 5, 6)]
    assert max(abs(share - 1 / 3) for share in shares) < 0.06
    symbols = stacked(told, "obs")[:, :, 0, 1].flatten().long().bincount()
    assert float((symbols / symbols.sum() - 1 / 3).abs().max()) < 0.02
    assert all(E > 64 for E in (world._bounds[0] for world in [make_world("repeat_first")]))


def test_key_value_shows_and_queries_every_key_once():
    world = make_world("key_value", agents=20, pairs=3, values=4)
    told = live(world, 30, anything(world))
    orders = set()
    for agent in range(20):
        for life in lives_of(told, agent)[1:]:
            seen = [step.obs[agent, 0, 1].item() for step in life]
            assert sorted(seen[:3]) == [0, 1, 2]
            assert sorted(seen[3:]) == [3, 4, 5]
            assert all(6 <= step.obs[agent, 1, 1] < 10 for step in life[:3])
            assert all(step.obs[agent, 1].tolist() == NOTHING for step in life[3:])
            orders.add(tuple(seen))
    assert len(orders) > 20
