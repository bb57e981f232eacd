"""What is special about single worlds: who is away, what is seen when, and what is worth what."""

from itertools import pairwise

import pytest
import torch

from holdfast.worlds import make_world
from holdfast.worlds.oracles import ORACLES
from lived import anything, live, stacked

NOTHING = [0xFF, 0xFF, 0xFF]


def lives_of(told, agent):
    """Cut an agent's steps into whole episodes, by `first`."""
    starts = [t for t, step in enumerate(told) if step.first[agent]]
    return [told[a:b] for a, b in pairwise(starts)]


def test_who_is_away_sees_nothing_gets_nothing_and_comes_back_in_time():
    world = make_world("ragged", agents=50, delay=(0, 3), absent=(2, 5), seed=1)
    told = live(world, 80, ORACLES["ragged"](world))
    away, there = set(), set()
    for agent in range(50):
        for life in lives_of(told, agent):
            valid = [bool(step.valid[agent]) for step in life]
            assert valid == sorted(valid, reverse=True)
            present, absent = valid.count(True), valid.count(False)
            assert [bool(step.terminated[agent]) for step in life[1:]].index(True) == present - 1
            assert float(life[present].reward[agent]) == 1.0
            for step in life[present:]:
                assert step.obs[agent].tolist() == [NOTHING] * 4
            for step in life[present + 1 :]:
                assert float(step.reward[agent]) == 0.0
                assert not step.terminated[agent]
            away.add(absent)
            there.add(present)
    assert (away, there) == ({2, 3, 4, 5}, {2, 3, 4, 5})


def test_what_is_done_while_away_does_nothing():
    world = make_world("ragged", agents=30, seed=2)
    chance = torch.randint(4, (60, 30))
    plain, other = live_both(world, chance)
    for a, b in zip(plain, other, strict=True):
        for name in ("obs", "reward", "terminated", "first", "valid"):
            assert torch.equal(getattr(a, name), getattr(b, name))


def live_both(world, chance):
    """Live twice, with other actions where nobody is."""
    told = []
    for shift in (0, 1):
        steps = [world.reset()]
        for actions in chance:
            steps.append(world.step(torch.where(steps[-1].valid, actions, (actions + shift) % 4)))
        told.append(steps)
    return told


@pytest.mark.parametrize("gamma", [0.0, 0.9, 0.977])
def test_the_value_of_a_constant_reward_is_known(gamma):
    cut = make_world("constant", agents=2, length=6, truncate=True)
    whole = make_world("constant", agents=2, length=6)
    for t in range(6):
        assert cut.value(gamma, t) == pytest.approx(1 / (1 - gamma))
        # The finite sum, and the rewards that are really told.
        assert whole.value(gamma, t) == pytest.approx((1 - gamma ** (6 - t)) / (1 - gamma))
    told = live(whole, 6, anything(whole))
    paid = sum(gamma**t * float(step.reward[0]) for t, step in enumerate(told[1:]))
    assert whole.value(gamma, 0) == pytest.approx(paid)


def test_constant_counts_and_shows_at_last_what_comes_after():
    world = make_world("constant", agents=1, length=3, truncate=True)
    told = live(world, 6, anything(world))
    assert stacked(told, "obs")[:, 0, 0, 2].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert [step.last_obs[0, 0].tolist() for step in told[1:]] == 2 * [NOTHING, NOTHING, [0xFE, 0, 3]]


def test_the_cue_of_the_tmaze_is_seen_on_the_start_cell_only_and_arms_look_alike():
    world = make_world("tmaze", agents=64, corridor=3)
    step = world.reset()
    cue = (step.obs[..., 1] == 2).any(1)
    assert cue.unique().tolist() == [False, True]
    west = torch.full((64,), 2)
    assert torch.equal(world.step(west).obs, step.obs)
    for _ in range(3):
        seen = world.step(torch.full((64,), 3)).obs
        assert bool((seen == seen[0]).all())
    # At the junction the walls are the same to both sides.
    places = set(seen[0, :, 0].tolist()) - {0xFF}
    assert places == {0x44, 0x64, 0x46, 0x56, 0x66}
    assert world.step(torch.full((64,), 0)).reward.tolist() == [-1.0 if south else 1.0 for south in cue]


def test_who_stays_away_from_the_arms_pays_for_it_at_the_limit():
    world = make_world("tmaze", agents=3, corridor=2, limit=5)
    told = live(world, 10, lambda obs, first: torch.tensor([0, 2, 3]))
    assert stacked(told, "reward")[:, 0].tolist() == [0, *[0, 0, 0, 0, -1] * 2]
    assert bool(told[5].terminated.all() & told[10].terminated.all())


def test_forage_leads_back_to_the_hub_and_the_goal_stays():
    world = make_world("forage", agents=200, reach=2, trials=3)
    told = live(world, 9, lambda obs, first: torch.zeros(200, dtype=torch.long))
    hub = told[0].obs[0]
    assert [bool((step.obs == hub).all()) for step in told] == [True, False, False] * 3 + [True]
    assert [step.trial.unique().tolist() for step in told] == [[t in (3, 6)] for t in range(10)]
    paid = stacked(told, "reward") > 0
    assert torch.equal(paid[2], paid[5])
    assert torch.equal(paid[2], paid[8])
    assert torch.equal(paid[2], (told[2].obs[..., 1] == 1).any(1))
    assert torch.equal(told[1].obs[0], told[1].obs[1])
    assert 20 < int(paid[2].sum()) < 80
    assert bool(told[9].first.all() & told[9].terminated.all())


@pytest.mark.parametrize(
    ("name", "options", "lengths"),
    [
        ("n_back", {"back": 3, "length": 9}, range(4, 10)),
        ("parity", {"length": 8}, range(2, 9)),
        ("key_value", {"pairs": 4}, range(5, 9)),
    ],
)
def test_agents_are_out_of_step_by_their_first_episode(name, options, lengths):
    told = live(world := make_world(name, agents=300, **options), 40, anything(world))
    firsts = [[len(life) for life in lives_of(told, agent)] for agent in range(300)]
    assert {each[0] for each in firsts} == set(lengths)
    assert {length for each in firsts for length in each[1:]} == {max(lengths)}


def test_repeat_first_draws_lengths_and_symbols_evenly():
    world = make_world("repeat_first", agents=500, length=(4, 6), symbols=3)
    told = live(world, 30, anything(world))
    lengths = [len(life) for agent in range(500) for life in lives_of(told, agent)[:3]]
    shares = [lengths.count(length) / len(lengths) for length in (4, 5, 6)]
    assert max(abs(share - 1 / 3) for share in shares) < 0.06
    symbols = stacked(told, "obs")[:, :, 0, 1].flatten().long().bincount()
    assert float((symbols / symbols.sum() - 1 / 3).abs().max()) < 0.02
    assert all(E > 64 for E in (world._shortest for world in [make_world("repeat_first")]))


def test_key_value_shows_every_key_once_and_asks_every_key_once():
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
