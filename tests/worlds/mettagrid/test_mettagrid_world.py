"""MettaGridWorld: against the engine, in shards, and resumed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("mettagrid")

from helpers.mettagrid_games import Bare, meadow, named
from helpers.play_world import ALL, anything, live
from holdfast import make_policy
from holdfast.check import check_world
from holdfast.errors import ContractError
from holdfast.worlds.checked_world import CheckedWorld
from holdfast.worlds.mettagrid import MettaGridWorld
from holdfast.worlds.mettagrid.games import Game
from holdfast.worlds.save_restore import resume_world, save_world

CONFIGS = st.fixed_dictionaries(
    {
        "agents": st.integers(1, 4),
        "size": st.integers(6, 9),
        "window": st.sampled_from([3, 5, 9, 15]),
        "limit": st.integers(1, 6),
        "resources": st.permutations(["ore", "heart", "gem"]),
        "tags": st.sampled_from([(), ("holy",), ("zebra", "a")]),
        "vibes": st.sampled_from([0, 3, 152]),
        "global_obs": st.booleans(),
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
def test_observations_equal_the_engine_tokens_by_name(options, agent_id, seed, data):
    agents_per_env = options["agents"]
    world = CheckedWorld(MettaGridWorld(2 * agents_per_env, env=meadow, options=options, seed=seed, agent_id=agent_id))
    engines = [Bare(meadow(**options), seed, number, agent_id) for number in range(2)]
    step, act = world.reset(), anything(world, data.draw(st.integers(0, 99)))
    for _ in range(10):
        for row in range(2 * agents_per_env):
            assert named(world, step.obs[row]) == engines[row // agents_per_env].tokens_of(row % agents_per_env)
        actions = act(step.obs, step.first)
        step = world.step(actions)
        for number, engine in enumerate(engines):
            rows = slice(number * agents_per_env, (number + 1) * agents_per_env)
            rewards, done = engine.step(actions[rows].tolist())
            assert step.reward[rows].tolist() == rewards.tolist()
            assert step.first[rows].tolist() == step.truncated[rows].tolist() == [done] * agents_per_env
            for agent in range(agents_per_env):
                assert named(world, step.last_obs[rows][agent]) == engine.tokens_of(agent)
            if done:
                engine.open()


@settings(max_examples=8)
@given(options=CONFIGS, seed=st.integers(0, 1 << 40), sizes=st.lists(st.integers(1, 2), min_size=1, max_size=3))
def test_shards_equal_the_whole_world(options, seed, sizes):
    agents_per_env, count = options["agents"], sum(sizes)
    full_world = MettaGridWorld(count * agents_per_env, env=meadow, options=options, seed=seed)
    placed, start = [], 0
    for size in sizes:
        shard = MettaGridWorld(size * agents_per_env, env=meadow, options=options, seed=seed)
        shard.set_agent_offset(start)
        placed.append((shard, slice(start, start + size * agents_per_env)))
        start += size * agents_per_env
    step, act = full_world.reset(), anything(full_world)
    assert all(same(shard.reset(), step, rows) for shard, rows in placed)
    for _ in range(8):
        actions = act(step.obs, step.first)
        step = full_world.step(actions)
        assert all(same(shard.step(actions[rows]), step, rows) for shard, rows in placed)


@settings(max_examples=8)
@given(options=CONFIGS, seed=st.integers(0, 1 << 40), before=st.integers(0, 12), lost=st.integers(0, 5))
def test_resume_at_any_step_replays_the_episode(options, seed, before, lost):
    options, agents = {**options, "limit": options["limit"] + 3}, 2 * options["agents"]

    def made():
        return CheckedWorld(MettaGridWorld(agents, env=meadow, options=options, seed=seed))

    one, other = made(), made()
    act = anything(one)
    step = live(one, before, act)[-1]
    state = save_world(one)
    live(other, lost, anything(other, 1))
    again, restarted = resume_world(other, state, step)
    assert restarted is None
    assert same(again, step)
    for _ in range(8):
        actions = act(step.obs, step.first)
        step = one.step(actions)
        assert same(other.step(actions), step)


def test_steps_are_not_overwritten_and_reset_repeats_the_first():
    world = MettaGridWorld(6, env=meadow)
    steps = live(world, 20, anything(world))
    again = live(MettaGridWorld(6, env=meadow), 20, anything(world))
    assert all(same(one, other) for one, other in zip(steps, again, strict=True))
    assert same(world.reset(), steps[0])


def test_episode_that_does_not_replay_restarts():
    count = [0]

    def restless():
        game = meadow(limit=30)

        def draw_map(seed):
            count[0] += 1
            return game.game.map_builder.model_copy(update={"seed": count[0]})

        return Game(game, draw_map=draw_map)

    world = CheckedWorld(MettaGridWorld(6, env=restless))
    act = anything(world)
    pending = live(world, 5, act)[-1]
    step, restarted = resume_world(world, save_world(world), pending)
    assert restarted is not None
    assert restarted.mask.all()
    assert "it depends on more than seed and actions (2 of 2 simulations)" in restarted.reason
    assert step.first.all()
    assert not torch.equal(step.obs, pending.obs)
    world.step(act(step.obs, step.first))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"simulations": []}, "0 simulations"),
        ({"seed": 9}, "seed=9"),
    ],
)
def test_state_of_another_world_is_rejected(change, message):
    world = MettaGridWorld(3, env=meadow)
    world.reset()
    with pytest.raises(ContractError, match=message):
        world.restore({**world.state(), **change})


def test_policy_outputs_do_not_depend_on_feature_ids():
    few, many = (
        MettaGridWorld(3, env=meadow, options={"resources": names, "tags": tags, "vibes": 0})
        for names, tags in ((("heart",), ()), (("ore", "gem", "heart"), ("angel",)))
    )
    assert [feature.name for feature in few.spec.features] != [feature.name for feature in many.spec.features]
    policy = make_policy("fast", few, hidden_size=16).eval()
    steps = [world.reset() for world in (few, many)]
    outputs = []
    for world, step in zip((few, many), steps, strict=True):
        policy.bind(world.spec, learn=False)
        out, _ = policy.unroll(step.obs, step.first, policy.lstm.cell.initial(3))
        outputs.append(out)
    assert not torch.equal(steps[0].obs, steps[1].obs)
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    assert torch.equal(outputs[0].values, outputs[1].values)


@pytest.mark.parametrize(("name", "limit"), [("mettagrid:tmaze", 7), ("mettagrid:collect", 5)])
def test_builtin_games_pass_check_world(name, limit):
    laws = check_world(name, limit=limit, steps=40)
    assert laws.ok, str(laws)
