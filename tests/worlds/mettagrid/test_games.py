"""Built-in and user games of mettagrid, features by name, and error messages."""

import sys

import pytest
import torch

pytest.importorskip("mettagrid")

from helpers.mettagrid_games import drawn, meadow, named, nested
from helpers.play_world import anything, is_mean_of, live, returns_of, stacked
from holdfast import make_world
from holdfast.config.run import Config, override
from holdfast.errors import ConfigError, ContractError
from holdfast.recipes import recipe_for
from holdfast.worlds.mettagrid import MettaGridWorld

NORTH, SOUTH, EAST = 1, 2, 4


def cues(world, obs):
    """Return which agents observe a north cue, and which a south cue."""
    features = [{name for _, name, _ in named(world, row)} for row in obs]
    return [torch.tensor([f"tag:type:cue_{way}" in names for names in features]) for way in ("north", "south")]


def walker(world, corridor, remembers):
    """Walk to the junction, then as the cue says; without memory always north."""
    step, way = torch.zeros(world.agents, dtype=torch.long), torch.zeros(world.agents, dtype=torch.long)

    def act(obs, first):
        step[first] = 0
        north, _ = cues(world, obs)
        cue = torch.where(north, NORTH, SOUTH) if remembers else torch.full_like(way, NORTH)
        way.copy_(torch.where(first, cue, way))
        step.add_(1)
        return torch.where(step <= corridor, EAST, way)

    return act


@pytest.mark.parametrize("corridor", [1, 4])
def test_tmaze_return_is_1_with_memory_and_0_without(corridor):
    world = make_world("mettagrid:tmaze", agents=120, corridor=corridor, limit=corridor + 1, mazes=60)
    assert (world.spec.best_return, world.spec.best_return_without_memory) == (1.0, 0.0)
    returns = returns_of(live(world, 3 * (corridor + 1), walker(world, corridor, True)))
    assert set(returns.tolist()) == {1.0}
    blind = returns_of(live(world, 24 * (corridor + 1), walker(world, corridor, False)))
    assert set(blind.tolist()) == {1.0, -1.0}
    assert is_mean_of(blind, 0.0)


def test_tmaze_charges_1_and_an_altar_is_used_once():
    world = make_world("mettagrid:tmaze", agents=32, limit=12)
    assert set(returns_of(live(world, 24, lambda obs, first: torch.zeros(32).long())).tolist()) == {-1.0}
    clock = iter([*[EAST] * 4, NORTH, NORTH, SOUTH, SOUTH, NORTH, 0, 0, 0])
    # One agent on each map stays, so that the episodes do not end.
    goes = torch.arange(32) % 8 != 0
    steps = live(world, 12, lambda obs, first: torch.where(goes, next(clock), 0))
    assert steps[-1].truncated.all()
    assert set(returns_of(steps)[goes].tolist()) == {1.0, -1.0}


def test_tmaze_terminates_when_all_agents_used_an_altar():
    world = make_world("mettagrid:tmaze", agents=16, limit=12)
    clock = iter([*[EAST] * 4, NORTH, NORTH])
    stays = torch.arange(16) == 9
    steps = live(world, 6, lambda obs, first: torch.where(stays, 0, next(clock)))
    assert steps[5].terminated.tolist() == [True] * 8 + [False] * 8
    assert not stacked(steps, "truncated").any()


def test_tmaze_cue_is_visible_at_the_start_only():
    world = make_world("mettagrid:tmaze", agents=64)
    steps = live(world, 5, walker(world, 4, True))
    north, south = cues(world, steps[0].obs)
    assert torch.equal(north, ~south)
    assert 0 < int(north.sum()) < 64
    for step in steps[1:5]:
        assert not any(mask.any() for mask in cues(world, step.obs))
        assert len({tuple(row.flatten().tolist()) for row in step.obs}) == 1
    assert {name for _, name, _ in named(world, steps[4].obs[0])} >= {"tag:type:altar"}


def test_tmaze_sides_are_drawn_per_maze_and_episode():
    world = make_world("mettagrid:tmaze", agents=32, limit=5)
    steps = live(world, 200, lambda obs, first: torch.zeros(32).long())
    sides = torch.stack([cues(world, step.obs)[0] for step in steps if step.first.all()]).float()
    assert sides.shape == (41, 32)
    assert abs(float(sides.mean()) - 0.5) < 0.07
    between = torch.corrcoef(sides.T) - torch.eye(32)
    assert float(between.abs().max()) < 0.7


def test_collect_altars_give_one_heart_and_disappear():
    world = make_world("mettagrid:collect", agents=48, limit=300)
    steps = live(world, 300, anything(world))
    returns = returns_of(steps)
    assert 3.0 < float(returns.mean()) <= world.spec.best_return == 4.0
    altars = [
        sum(name == "tag:type:altar" for row in step.obs for _, name, _ in named(world, row))
        for step in (steps[0], steps[299])
    ]
    assert altars[1] < altars[0] / 4


def test_agent_id_and_last_reward_are_not_observed():
    plain, with_id = (MettaGridWorld(3, env=meadow, agent_id=flag) for flag in (False, True))
    names = [{feature.name for feature in world.spec.features} for world in (plain, with_id)]
    assert names[1] - names[0] == {"agent_id"}
    assert not any("last_reward" in group or "goal" in group for group in names)
    ids = [value for _, name, value in named(with_id, with_id.reset().obs[2]) if name == "agent_id"]
    assert 2 in ids


def test_change_vibe_action_by_name():
    world = MettaGridWorld(3, env=meadow, options={"vibes": 4})
    name = world.spec.action_names[-1]
    assert name.startswith("change_vibe_")
    world.reset()
    step = world.step(torch.full((3,), len(world.spec.action_names) - 1))
    tokens = {name for _, name, _ in named(world, step.obs[0])}
    assert {f"vibe:{name.removeprefix('change_vibe_')}", f"last_action:{name}"} <= tokens


def test_default_vibes_keep_their_values():
    world = MettaGridWorld(3, env=meadow, options={"vibes": 152, "global_obs": False})
    names = [feature.name for feature in world.spec.features]
    assert "vibe" in names
    assert not any(name.startswith("vibe:") for name in names)


def crowded(**options):
    """Too few tokens for two altars."""
    return meadow(**{"tokens": 9, "window": 15, **options})


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        (meadow, {"window": 17}, "has a window of 17x17 cells; set game.obs.height and width to 15"),
        (meadow, {"noop": False}, "enable game.actions.noop"),
        (meadow, {"vibes": 151}, "151 of vibe; tokens can name 254"),
        (meadow, {"resources": [f"r{n}" for n in range(130)] + ["heart"]}, "features; tokens can name 254"),
        (meadow, {"limits": 3}, "has no option 'limits'; did you mean limit?"),
        (lambda: 3, {}, "returns int; it must return a MettaGridConfig"),
        (lambda: 1 / 0, {}, "cannot be made: ZeroDivisionError: division by zero"),
        (drawn, {"rows": ["#####", "#@.@#", "#####"]}, "has 2 spawn points for 1 agents"),
        ("tmase", {}, "there is no such game; did you mean tmaze?"),
        ("helpers.mettagrid_games:VIBES", {}, "give a function that returns a MettaGridConfig"),
        ("tmaze", {"limit": 3}, "world.limit=3: the shortest path has 5 steps"),
        ("tmaze", {"resources": ["heart"]}, "heart is built in"),
        ("collect", {"resources": ["heart"]}, "heart is built in"),
    ],
)
def test_invalid_games_are_rejected_with_one_line(env, options, message):
    with pytest.raises(ConfigError) as error:
        MettaGridWorld(48, env=env, options=options)
    assert message.lower() in str(error.value).lower()
    assert "\n" not in str(error.value)


def test_agents_must_be_a_multiple_of_agents_per_simulation():
    with pytest.raises(ConfigError, match=r"mettagrid:tmaze has 8 agents per environment; .* try 48 or 56"):
        make_world("mettagrid:tmaze", agents=50)
    world = make_world("mettagrid:tmaze", agents=32)
    with pytest.raises(ContractError, match="a shard starts at a multiple of 8, not 4"):
        world.set_agent_offset(4)
    world.reset()
    with pytest.raises(ContractError, match="before reset"):
        world.set_agent_offset(16)


def test_token_overflow_names_num_tokens():
    with pytest.raises(ContractError) as error:
        live(MettaGridWorld(3, env=crowded), 1, lambda obs, first: torch.zeros(3).long())
    message = str(error.value)
    assert message.startswith("mettagrid:crowded, simulation 0, step 0: an episode cannot start: RuntimeError")
    assert "raise game.obs.num_tokens, now 9." in message
    world = MettaGridWorld(6, env=meadow, options={"tokens": 24, "window": 5, "limit": 500})
    world.set_agent_offset(60)
    with pytest.raises(ContractError, match=r"simulation 2\d, step [1-9]\d*: step\(\) failed: .*num_tokens, now 24"):
        live(world, 400, anything(world))


def test_unknown_token_is_an_error(monkeypatch):
    from mettagrid.config.id_map import IdMap

    tag_names = IdMap.tag_names
    world = None
    with monkeypatch.context() as patch:
        patch.setattr(IdMap, "tag_names", lambda self: tag_names(self)[:1])
        world = MettaGridWorld(3, env=meadow)
    with pytest.raises(ContractError, match=r"simulation 0, step 0: agent \d observes a token"):
        world.reset()


def test_missing_mettagrid_names_its_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("holdfast.worlds.mettagrid")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mettagrid.config.mettagrid_config", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[mettagrid\]'"):
        make_world("mettagrid:tmaze")


def test_user_game_by_name_with_options():
    config = override(
        Config(),
        {"world.name": "mettagrid:helpers.mettagrid_games:meadow", "world.options": "{limit: 3, agents: 2}"},
    )
    world = make_world(config.world.name, agents=4, options=config.world.options)
    steps = live(world, 3, anything(world))
    assert steps[-1].truncated.all()
    assert world.spec.agents_per_env == 2


def test_recipes_and_config_of_mettagrid_names():
    assert recipe_for("mettagrid:tmaze") == "mettagrid_tmaze"
    assert recipe_for("mettagrid:collect") == "mettagrid_collect"
    assert recipe_for("mettagrid:package.module:function") == "general"
    world = override(Config(), {"world.name": "mettagrid:tmaze", "world.resources": "a,b"}).world
    assert world.model_dump()["resources"] == ("a", "b")
    with pytest.raises(ConfigError, match="corridor"):
        override(Config(), {"world.name": "mettagrid:tmaze", "world.coridor": "3"})


def test_nested_map_builder_keeps_its_seed():
    worlds = [MettaGridWorld(3, env=nested, options={"inner_seed": 5}, seed=seed) for seed in (0, 1)]
    altars = []
    for world in worlds:
        steps = live(world, 1, lambda obs, first: torch.zeros(3).long())
        altars.append(sorted(tuple(row.flatten().tolist()) for row in steps[0].obs))
    assert stacked(steps, "first")[0].all()
    assert altars[0] == altars[1]
