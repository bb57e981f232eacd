"""Simulations of mettagrid as a world: against the engine itself, in shares, and lived again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("mettagrid")

from holdfast import make_policy
from holdfast.check import check_world
from holdfast.errors import ContractError
from holdfast.worlds.going_on import go_on, state_of
from holdfast.worlds.mettagrid import MettaGridWorld, room
from holdfast.worlds.mettagrid.game import Game
from holdfast.worlds.watched import Watched
from lived import ALL, anything, live, stacked
from mettagrid_games import Bare, meadow, named, nested

CONFIGS = st.fixed_dictionaries(
    {
        "agents": st.integers(1, 4),
        "size": st.integers(6, 9),
        "window": st.sampled_from([3, 5, 9, 15]),
        "limit": st.integers(1, 6),
        "resources": st.permutations(["ore", "heart", "gem"]),
        "tags": st.sampled_from([(), ("holy",), ("zebra", "a")]),
        "vibes": st.sampled_from([0, 3, 152]),
        "told": st.booleans(),
        "place": st.booleans(),
        "truncates": st.booleans(),
        "seed": st.sampled_from([None, 7]),
        "tokens": st.just(400),
    }
)


def same(one, other, rows=slice(None)):
    return all(torch.equal(getattr(one, key), getattr(other, key)[rows]) for key in (*ALL, "last_obs"))


@settings(max_examples=12)
@given(options=CONFIGS, agent_id=st.booleans(), seed=st.integers(0, 1 << 40), data=st.data())
def test_it_tells_what_the_engine_tells_with_names_for_numbers(options, agent_id, seed, data):
    crowd = options["agents"]
    world = Watched(MettaGridWorld(2 * crowd, env=meadow, options=options, seed=seed, agent_id=agent_id))
    bare = [Bare(meadow(**options), seed, number, agent_id) for number in range(2)]
    told, act = world.reset(), anything(world, data.draw(st.integers(0, 99)))
    for _ in range(10):
        for row in range(2 * crowd):
            assert named(world, told.obs[row]) == bare[row // crowd].seen(row % crowd)
        actions = act(told.obs, told.first)
        told = world.step(actions)
        for number, each in enumerate(bare):
            rows = slice(number * crowd, (number + 1) * crowd)
            rewards, done = each.step(actions[rows].tolist())
            assert told.reward[rows].tolist() == rewards.tolist()
            assert told.first[rows].tolist() == told.truncated[rows].tolist() == [done] * crowd
            for agent in range(crowd):
                assert named(world, told.last_obs[rows][agent]) == each.seen(agent)
            if done:
                each.open()


@settings(max_examples=8)
@given(
    options=CONFIGS, seed=st.integers(0, 1 << 40), shares=st.lists(st.integers(1, 2), min_size=1, max_size=3)
)
def test_shares_live_as_the_whole_does(options, seed, shares):
    crowd, count = options["agents"], sum(shares)
    whole = MettaGridWorld(count * crowd, env=meadow, options=options, seed=seed)
    parts, start = [], 0
    for share in shares:
        part = MettaGridWorld(share * crowd, env=meadow, options=options, seed=seed)
        part.count_from(start)
        parts.append((part, slice(start, start + share * crowd)))
        start += share * crowd
    told, act = whole.reset(), anything(whole)
    assert all(same(part.reset(), told, rows) for part, rows in parts)
    for _ in range(8):
        actions = act(told.obs, told.first)
        told = whole.step(actions)
        assert all(same(part.step(actions[rows]), told, rows) for part, rows in parts)


@settings(max_examples=8)
@given(options=CONFIGS, seed=st.integers(0, 1 << 40), before=st.integers(0, 12), lost=st.integers(0, 5))
def test_it_is_put_back_to_where_it_was(options, seed, before, lost):
    options, agents = {**options, "limit": options["limit"] + 3}, 2 * options["agents"]

    def made():
        return Watched(MettaGridWorld(agents, env=meadow, options=options, seed=seed))

    one, other = made(), made()
    act = anything(one)
    told = live(one, before, act)[-1]
    state = state_of(one)
    live(other, lost, anything(other, 1))
    again, anew = go_on(other, state, told)
    assert anew is None
    assert same(again, told)
    for _ in range(8):
        actions = act(told.obs, told.first)
        told = one.step(actions)
        assert same(other.step(actions), told)


def test_what_it_told_does_not_change_when_it_goes_on():
    world = MettaGridWorld(6, env=meadow)
    told = live(world, 20, anything(world))
    again = live(MettaGridWorld(6, env=meadow), 20, anything(world))
    assert all(same(one, other) for one, other in zip(told, again, strict=True))
    assert same(world.reset(), told[0])


def test_seeds_simulations_and_episodes_draw_maps_of_their_own():
    for make in (meadow, nested, lambda: meadow(seed=3)):
        worlds = [MettaGridWorld(6, env=make, seed=seed, options={}) for seed in (0, 1)]
        told = [live(world, 14, lambda obs, first: torch.zeros(6, dtype=torch.long)) for world in worlds]
        firsts = [
            step.obs[rows].clone()
            for life in told
            for step in life
            if step.first.all()
            for rows in (slice(0, 3), slice(3, 6))
        ]
        assert len(firsts) == 2 * 3 * 2
        assert len({tuple(obs.flatten().tolist()) for obs in firsts}) == len(firsts)
        again = live(MettaGridWorld(6, env=make, seed=1), 14, lambda obs, first: torch.zeros(6).long())
        assert all(same(one, other) for one, other in zip(told[1], again, strict=True))


@pytest.mark.parametrize("truncates", [False, True])
def test_a_time_limit_is_truncation_and_a_decided_end_termination(truncates):
    world = Watched(MettaGridWorld(3, env=meadow, options={"truncates": truncates}))
    told = live(world, 7, anything(world))
    assert told[-1].truncated.all()
    assert not stacked(told, "terminated").any()
    decided = {"truncates": truncates, "ends_at": 1.0, "limit": 40}
    world = Watched(MettaGridWorld(3, env=meadow, options=decided))
    told = live(world, 80, anything(world))
    ended = next(step for step in told if (step.terminated | step.truncated).any())
    assert ended.terminated.all()
    assert not ended.truncated.any()
    assert float(ended.reward.sum()) == 1.0


def test_an_end_that_is_decided_in_the_last_step_is_termination():
    options = {"limit": 40, "ends_at": 1.0}
    world = MettaGridWorld(3, env=meadow, options=options)
    told = live(world, 40, anything(world))
    steps = next(number for number, step in enumerate(told) if step.terminated.any())
    assert steps > 1
    world = MettaGridWorld(3, env=meadow, options={**options, "limit": steps})
    told = live(world, steps, anything(world))
    assert told[-1].terminated.all()
    assert not told[-1].truncated.any()


def test_an_episode_that_another_thing_decides_begins_anew():
    count = [0]

    def restless():
        game = meadow(limit=30)

        def draw_map(seed):
            count[0] += 1
            return game.game.map_builder.model_copy(update={"seed": count[0]})

        return Game(game, draw_map=draw_map)

    world = Watched(MettaGridWorld(6, env=restless))
    act = anything(world)
    pending = live(world, 5, act)[-1]
    told, anew = go_on(world, state_of(world), pending)
    assert anew is not None
    assert anew.who.all()
    assert "more decides it than seed and actions (2 of 2 simulations)" in anew.why
    assert told.first.all()
    assert not torch.equal(told.obs, pending.obs)
    world.step(act(told.obs, told.first))


def test_an_episode_that_is_too_long_is_not_lived_again(monkeypatch):
    monkeypatch.setattr(room, "LONGEST", 4)
    world = MettaGridWorld(3, env=meadow)
    act = anything(world)
    live(world, 4, act)
    assert world.restore(world.state()) is None
    world.step(act(None, torch.zeros(3)))
    anew = world.restore(world.state())
    assert anew is not None
    assert "is not lived again" in anew.why
    assert [each["episode"] for each in world.state()["rooms"]] == [1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rooms": []}, "0 simulations"),
        ({"seed": 9}, "seed=9"),
        ({"first": 3}, "first=3"),
    ],
)
def test_what_was_saved_of_another_one_is_refused(change, said):
    world = MettaGridWorld(3, env=meadow)
    world.reset()
    with pytest.raises(ContractError, match=said):
        world.restore({**world.state(), **change})


def test_actions_that_were_saved_must_be_whole():
    world = MettaGridWorld(3, env=meadow)
    live(world, 2, anything(world))
    state = world.state()
    state["rooms"][0]["actions"] = state["rooms"][0]["actions"][:-1]
    with pytest.raises(ContractError, match="'actions' of simulation 0 must be 6 bytes"):
        world.restore(state)


def test_a_policy_bound_to_one_list_of_resources_thinks_the_same_with_another():
    few, many = (
        MettaGridWorld(3, env=meadow, options={"resources": names, "tags": tags, "vibes": 0})
        for names, tags in ((("heart",), ()), (("ore", "gem", "heart"), ("angel",)))
    )
    assert [each.name for each in few.spec.features] != [each.name for each in many.spec.features]
    policy = make_policy("fast", few, hidden_size=16).eval()
    told = [world.reset() for world in (few, many)]
    thought = []
    for world, step in zip((few, many), told, strict=True):
        policy.bind(world.spec, learn=False)
        out, _ = policy.unroll(step.obs, step.first, policy.lstm.cell.initial(3))
        thought.append(out)
    assert not torch.equal(told[0].obs, told[1].obs)
    assert torch.equal(thought[0].logits, thought[1].logits)
    assert torch.equal(thought[0].values, thought[1].values)


@pytest.mark.parametrize(("name", "limit"), [("mettagrid:tmaze", 7), ("mettagrid:collect", 5)])
def test_our_games_keep_every_law_of_a_world(name, limit):
    laws = check_world(name, limit=limit, steps=40)
    assert laws.ok, str(laws)
