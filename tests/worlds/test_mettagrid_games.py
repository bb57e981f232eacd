"""The games that come with Holdfast, words by name, and what is said when something is wrong."""

import sys

import pytest
import torch

pytest.importorskip("mettagrid")

from holdfast import make_world
from holdfast.config import Config, change
from holdfast.errors import ConfigError, ContractError
from holdfast.recipes import recipe_for
from holdfast.worlds.mettagrid import MettaGridWorld
from lived import anything, is_mean_of, live, returns_of, stacked
from mettagrid_games import drawn, meadow, named, nested

NORTH, SOUTH, EAST = 1, 2, 4


def cues(world, obs):
    """Whether each agent sees a cue to the north, or one to the south."""
    seen = [{name for _, name, _ in named(world, row)} for row in obs]
    return [torch.tensor([f"tag:type:cue_{way}" in names for names in seen]) for way in ("north", "south")]


def walker(world, corridor, remembers):
    """Walks to the junction, and then where the cue told; or always north."""
    step, way = torch.zeros(world.agents, dtype=torch.long), torch.zeros(world.agents, dtype=torch.long)

    def act(obs, first):
        step[first] = 0
        north, _ = cues(world, obs)
        told = torch.where(north, NORTH, SOUTH) if remembers else torch.full_like(way, NORTH)
        way.copy_(torch.where(first, told, way))
        step.add_(1)
        return torch.where(step <= corridor, EAST, way)

    return act


@pytest.mark.parametrize("corridor", [1, 4])
def test_the_maze_pays_1_for_remembering_and_0_without(corridor):
    world = make_world("mettagrid:tmaze", agents=120, corridor=corridor, limit=corridor + 1, mazes=60)
    assert (world.spec.best_return, world.spec.best_return_without_memory) == (1.0, 0.0)
    returns = returns_of(live(world, 3 * (corridor + 1), walker(world, corridor, True)))
    assert set(returns.tolist()) == {1.0}
    blind = returns_of(live(world, 24 * (corridor + 1), walker(world, corridor, False)))
    assert set(blind.tolist()) == {1.0, -1.0}
    assert is_mean_of(blind, 0.0)


def test_staying_away_costs_1_and_an_altar_is_used_once():
    world = make_world("mettagrid:tmaze", agents=32, limit=12)
    assert set(returns_of(live(world, 24, lambda obs, first: torch.zeros(32).long())).tolist()) == {-1.0}
    clock = iter([*[EAST] * 4, NORTH, NORTH, SOUTH, SOUTH, NORTH, 0, 0, 0])
    # One on each map stays at home, so that the others' episodes go on.
    goes = torch.arange(32) % 8 != 0
    told = live(world, 12, lambda obs, first: torch.where(goes, next(clock), 0))
    assert told[-1].truncated.all()
    assert set(returns_of(told)[goes].tolist()) == {1.0, -1.0}


def test_the_maze_ends_when_everybody_on_a_map_has_chosen():
    world = make_world("mettagrid:tmaze", agents=16, limit=12)
    clock = iter([*[EAST] * 4, NORTH, NORTH])
    stays = torch.arange(16) == 9
    told = live(world, 6, lambda obs, first: torch.where(stays, 0, next(clock)))
    assert told[5].terminated.tolist() == [True] * 8 + [False] * 8
    assert not stacked(told, "truncated").any()


def test_the_cue_is_seen_at_the_start_only_and_altars_look_alike():
    world = make_world("mettagrid:tmaze", agents=64)
    told = live(world, 5, walker(world, 4, True))
    north, south = cues(world, told[0].obs)
    assert torch.equal(north, ~south)
    assert 0 < int(north.sum()) < 64
    for step in told[1:5]:
        assert not any(seen.any() for seen in cues(world, step.obs))
        assert len({tuple(row.flatten().tolist()) for row in step.obs}) == 1
    assert {name for _, name, _ in named(world, told[4].obs[0])} >= {"tag:type:altar"}


def test_sides_are_drawn_for_every_maze_and_episode():
    world = make_world("mettagrid:tmaze", agents=32, limit=5)
    told = live(world, 200, lambda obs, first: torch.zeros(32).long())
    sides = torch.stack([cues(world, step.obs)[0] for step in told if step.first.all()]).float()
    assert sides.shape == (41, 32)
    assert abs(float(sides.mean()) - 0.5) < 0.07
    between = torch.corrcoef(sides.T) - torch.eye(32)
    assert float(between.abs().max()) < 0.7


def test_altars_give_one_heart_each_and_are_gone():
    world = make_world("mettagrid:collect", agents=48, limit=300)
    told = live(world, 300, anything(world))
    returns = returns_of(told)
    assert 3.0 < float(returns.mean()) <= world.spec.best_return == 4.0
    altars = [
        sum(name == "tag:type:altar" for row in step.obs for _, name, _ in named(world, row))
        for step in (told[0], told[299])
    ]
    assert altars[1] < altars[0] / 4


def test_numbers_of_agents_and_rewards_are_not_shown():
    plain, shown = (MettaGridWorld(3, env=meadow, agent_id=asked) for asked in (False, True))
    names = [{each.name for each in world.spec.features} for world in (plain, shown)]
    assert names[1] - names[0] == {"agent_id"}
    assert not any("last_reward" in each or "goal" in each for each in names)
    seen = [value for _, name, value in named(shown, shown.reset().obs[2]) if name == "agent_id"]
    assert 2 in seen


def test_a_vibe_is_changed_by_its_name():
    world = MettaGridWorld(3, env=meadow, options={"vibes": 4})
    name = world.spec.action_names[-1]
    assert name.startswith("change_vibe_")
    world.reset()
    told = world.step(torch.full((3,), len(world.spec.action_names) - 1))
    said = {name for _, name, _ in named(world, told.obs[0])}
    assert {f"vibe:{name.removeprefix('change_vibe_')}", f"last_action:{name}"} <= said


def test_many_vibes_stay_numbers():
    world = MettaGridWorld(3, env=meadow, options={"vibes": 152, "told": False})
    names = [each.name for each in world.spec.features]
    assert "vibe" in names
    assert not any(name.startswith("vibe:") for name in names)


def crowded(**options):
    """Two altars beside each other do not fit into so few tokens."""
    return meadow(**{"tokens": 9, "window": 15, **options})


@pytest.mark.parametrize(
    ("env", "options", "said"),
    [
        (meadow, {"window": 17}, "sees 17x17 cells; set game.obs.height and width to 15"),
        (meadow, {"noop": False}, "enable game.actions.noop"),
        (meadow, {"vibes": 151}, "151 of vibe; tokens can name 254"),
        (meadow, {"resources": [f"r{n}" for n in range(130)] + ["heart"]}, "features; tokens can name 254"),
        (meadow, {"limits": 3}, "has no option 'limits'; did you mean limit?"),
        (lambda: 3, {}, "returns int; what is wanted is a MettaGridConfig"),
        (lambda: 1 / 0, {}, "cannot be made: ZeroDivisionError: division by zero"),
        (drawn, {"rows": ["#####", "#@.@#", "#####"]}, "has 2 places for 1 agents"),
        ("tmase", {}, "there is no such game; did you mean tmaze?"),
        ("mettagrid_games:VIBES", {}, "give a function that returns a MettaGridConfig"),
        ("tmaze", {"limit": 3}, "world.limit=3: the way is 5 steps"),
        ("tmaze", {"resources": ["heart"]}, "heart is there already"),
        ("collect", {"resources": ["heart"]}, "heart is there already"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_built(env, options, said):
    with pytest.raises(ConfigError) as error:
        MettaGridWorld(48, env=env, options=options)
    assert said.lower() in str(error.value).lower()
    assert "\n" not in str(error.value)


def test_agents_come_in_whole_simulations():
    with pytest.raises(ConfigError, match=r"8 agents share a simulation of mettagrid:tmaze; .* such as 48"):
        make_world("mettagrid:tmaze", agents=50)
    world = make_world("mettagrid:tmaze", agents=32)
    with pytest.raises(ContractError, match="first_agent=4 is no multiple of the 8"):
        world.count_from(4)
    world.reset()
    with pytest.raises(ContractError, match="before reset"):
        world.count_from(16)


def test_tokens_that_do_not_fit_name_the_key_to_change():
    with pytest.raises(ContractError) as error:
        live(MettaGridWorld(3, env=crowded), 1, lambda obs, first: torch.zeros(3).long())
    said = str(error.value)
    assert said.startswith("mettagrid:crowded, simulation 0, step 0: an episode cannot begin: RuntimeError")
    assert "raise game.obs.num_tokens, now 9." in said
    world = MettaGridWorld(6, env=meadow, options={"tokens": 24, "window": 5, "limit": 500})
    world.count_from(60)
    with pytest.raises(
        ContractError, match=r"simulation 2\d, step [1-9]\d*: step\(\) failed: .*num_tokens, now 24"
    ):
        live(world, 400, anything(world))


def test_a_token_that_nobody_explains_is_told(monkeypatch):
    from mettagrid.config.id_map import IdMap

    whole = IdMap.tag_names
    world = None
    with monkeypatch.context() as patch:
        patch.setattr(IdMap, "tag_names", lambda self: whole(self)[:1])
        world = MettaGridWorld(3, env=meadow)
    with pytest.raises(ContractError, match=r"simulation 0, step 0: agent \d sees a token"):
        world.reset()


def test_a_package_that_is_missing_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mettagrid.config.mettagrid_config", None)
    with pytest.raises(ConfigError, match=r"pip install 'holdfast\[mettagrid\]'"):
        make_world("mettagrid:tmaze")


def test_functions_of_yours_go_by_their_name_with_options():
    config = change(
        Config(), {"world.name": "mettagrid:mettagrid_games:meadow", "world.options": "{limit: 3, agents: 2}"}
    )
    world = make_world(config.world.name, agents=4, options=config.world.options)
    told = live(world, 3, anything(world))
    assert told[-1].truncated.all()
    assert world.spec.crowd == 2


def test_names_find_their_recipes_and_knobs():
    assert recipe_for("mettagrid:tmaze") == "mettagrid_tmaze"
    assert recipe_for("mettagrid:collect") == "mettagrid_collect"
    assert recipe_for("mettagrid:package.module:function") == "general"
    world = change(Config(), {"world.name": "mettagrid:tmaze", "world.resources": "a,b"}).world
    assert world.model_dump()["resources"] == ("a", "b")
    with pytest.raises(ConfigError, match="corridor"):
        change(Config(), {"world.name": "mettagrid:tmaze", "world.coridor": "3"})


def test_a_map_inside_a_map_keeps_the_seed_it_has():
    worlds = [MettaGridWorld(3, env=nested, options={"inner_seed": 5}, seed=seed) for seed in (0, 1)]
    altars = []
    for world in worlds:
        told = live(world, 1, lambda obs, first: torch.zeros(3).long())
        altars.append(sorted(tuple(row.flatten().tolist()) for row in told[0].obs))
    assert stacked(told, "first")[0].all()
    assert altars[0] == altars[1]
