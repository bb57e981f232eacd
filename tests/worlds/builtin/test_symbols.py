"""Single symbol worlds: absent agents, observations by step, and rewards."""

from itertools import pairwise

import pytest

from helpers.play_world import anything, live, stacked
from holdfast.worlds import make_world

NOTHING = [0xFF, 0xFF, 0xFF]


def lives_of(steps, agent):
    """Cut an agent's steps into whole episodes, by `first`."""
    starts = [t for t, step in enumerate(steps) if step.first[agent]]
    return [steps[a:b] for a, b in pairwise(starts)]


@pytest.mark.parametrize(
    ("name", "options", "lengths"),
    [
        ("n_back", {"back": 3, "length": 9}, range(4, 10)),
        ("parity", {"length": 8}, range(2, 9)),
        ("key_value", {"pairs": 4}, range(5, 9)),
    ],
)
def test_first_episodes_put_agents_out_of_phase(name, options, lengths):
    steps = live(world := make_world(name, agents=300, **options), 40, anything(world))
    firsts = [[len(episode) for episode in lives_of(steps, agent)] for agent in range(300)]
    assert {each[0] for each in firsts} == set(lengths)
    assert {length for each in firsts for length in each[1:]} == {max(lengths)}


def test_repeat_first_lengths_and_symbols_are_uniform():
    world = make_world("repeat_first", agents=500, length=(4, 6), symbols=3)
    steps = live(world, 30, anything(world))
    lengths = [len(episode) for agent in range(500) for episode in lives_of(steps, agent)[:3]]
    shares = [lengths.count(length) / len(lengths) for length in (4, 5, 6)]
    assert max(abs(share - 1 / 3) for share in shares) < 0.06
    symbols = stacked(steps, "obs")[:, :, 0, 1].flatten().long().bincount()
    assert float((symbols / symbols.sum() - 1 / 3).abs().max()) < 0.02
    assert all(E > 64 for E in (world._bounds[0] for world in [make_world("repeat_first")]))


def test_key_value_shows_and_queries_every_key_once():
    world = make_world("key_value", agents=20, pairs=3, values=4)
    steps = live(world, 30, anything(world))
    orders = set()
    for agent in range(20):
        for episode in lives_of(steps, agent)[1:]:
            features = [step.obs[agent, 0, 1].item() for step in episode]
            assert sorted(features[:3]) == [0, 1, 2]
            assert sorted(features[3:]) == [3, 4, 5]
            assert all(6 <= step.obs[agent, 1, 1] < 10 for step in episode[:3])
            assert all(step.obs[agent, 1].tolist() == NOTHING for step in episode[3:])
            orders.add(tuple(features))
    assert len(orders) > 20
