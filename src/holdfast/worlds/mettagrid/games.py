"""Games of mettagrid: user games by name, and the built-in `tmaze` and `collect`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mettagrid.config import handler_config as handlers
from mettagrid.config.action_config import ActionsConfig, ChangeVibeActionConfig
from mettagrid.config.game_value import InventoryValue
from mettagrid.config.mettagrid_config import (
    AgentConfig,
    GameConfig,
    GridObjectConfig,
    InventoryConfig,
    MettaGridConfig,
    WallConfig,
)
from mettagrid.config.obs_config import GlobalObsConfig, ObsConfig
from mettagrid.config.reward_config import reward
from mettagrid.map_builder.ascii import AsciiMapBuilder
from mettagrid.map_builder.random_map import RandomMapBuilder

from holdfast import rng
from holdfast.errors import ConfigError, HoldfastError, MakeError, did_you_mean, located_error_text
from holdfast.registry import import_object
from holdfast.trust import require_trust_to_call
from holdfast.worlds.gym.wrappers import name_of
from holdfast.worlds.tensor_world import require


@dataclass(frozen=True)
class Game:
    """A MettaGridConfig, with its best returns if known."""

    config: Any
    draw_map: Callable[[int], Any] | None = None
    """Makes the map of an episode from its seed; None: use the map builder of the config, seeded."""
    best_return: float | None = None
    best_return_without_memory: float | None = None


def find_game(env: str | Callable[..., Any], options: Mapping[str, Any]) -> tuple[str, Game]:
    """Make a game; return the world's name in errors, and the game."""
    name = f"mettagrid:{name_of(env)}"
    if not isinstance(env, str):
        make = env
    elif env in GAMES:
        make = GAMES[env]
    elif ":" in env:
        make = import_object(env, "world.name=mettagrid:")
        # A class is no better here: any callable makes a game.
        require_trust_to_call(env, None)
    else:
        hint = did_you_mean(env, GAMES, f"choose from {', '.join(GAMES)}.")
        raise ConfigError(
            f"world.name={name}: there is no such game; {hint} Write mettagrid:package.module:function for your own."
        )
    _require_options(name, make, options)
    try:
        result = make(**options)
    except HoldfastError:
        raise
    except Exception as error:
        raise MakeError(f"{name} cannot be made: {located_error_text(error)}.") from error
    game = result if isinstance(result, Game) else Game(result)
    if not isinstance(game.config, MettaGridConfig):
        raise ConfigError(f"{name} returns {type(result).__name__}; it must return a MettaGridConfig.")
    return name, game


def _require_options(name: str, make: Any, options: Mapping[str, Any]) -> None:
    if not callable(make):
        raise ConfigError(f"{name} is {make!r}; give a function that returns a MettaGridConfig.")
    parameters = inspect.signature(make).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for key in options:
        if key not in parameters:
            hint = did_you_mean(key, parameters, f"it has {', '.join(parameters) or 'none'}.")
            raise ConfigError(f"The world {name!r} has no option {key!r}; {hint}")


TMAZE_RESOURCES = ("debt", "ticket", "heart")
"""Inventory of an agent: the charge of the first step, the right to use one altar, the good altar's heart."""
ALTARS_USED = "altars_used"
"""Game stat that counts used altars."""
TMAZE_TOKENS = 16
"""Enough for five cells and six features of an agent."""


def _game_config(side: int, tokens: int, **game: Any) -> Any:
    """Return a config with a window of `side` x `side` cells, and the actions noop and move.

    There are no global features. Moving into an object uses it.
    """
    features = GlobalObsConfig(episode_completion_pct=False, last_action=False, last_reward=False)
    return MettaGridConfig(
        game=GameConfig(
            protocol_details_obs=False,
            obs=ObsConfig(width=side, height=side, num_tokens=tokens, global_obs=features),
            actions=ActionsConfig(change_vibe=ChangeVibeActionConfig(enabled=False)),
            **game,
        )
    )


def _require_new(resources: Sequence[str], builtin: Sequence[str]) -> None:
    duplicates = sorted(set(resources) & set(builtin))
    if duplicates:
        raise ConfigError(f"world.resources: {duplicates[0]} is built in; give other names.")


def tmaze(corridor: int = 4, limit: int = 16, mazes: int = 8, resources: Sequence[str] = ()) -> Game:
    """Walk east through `corridor` cells to a junction, and into the altar that the cue names.

    Agents see the four neighbours of their cell. The cue stands north of the start cell, so it is visible
    only there; both altars are called `altar` and look alike. An agent may use one altar once. Every agent is
    charged 1 at its first step, and the good altar pays 2: the return is 1 for it, and -1 for the other altar
    or none within `limit` steps, after which the episode is truncated. It terminates earlier when every agent
    on the map has used one. The best return is 1.0.

    Without memory it is 0.0, by the argument of the built-in `tmaze`: after the start cell no observation
    before an altar is used depends on the cue, so of the agents that use one, a share p uses the northern
    one, whatever the cue. Let an altar be used with probability s when the cue is north and s' when it is
    south. The mean return is s p + s' (1 - p) - 1 <= 0, and always using the same altar gets 0.

    `mazes` lie on one map, out of each other's sight. `resources` are further inventory items that do not
    occur: with them the engine numbers its features differently.
    """
    require("corridor", corridor, 1, 1000)
    require("mazes", mazes, 1, 250)
    if limit < corridor + 1:
        raise ConfigError(f"world.limit={limit}: the shortest path has {corridor + 1} steps; give at least that.")
    _require_new(resources, TMAZE_RESOURCES)
    names = {"n": "cue_north", "s": "cue_south", "g": "good", "b": "bad"}

    def draw_map(seed: int) -> Any:
        rows = plan(corridor, draw_sides(seed, mazes))
        return AsciiMapBuilder.Config(map_data=[list(row) for row in rows], char_to_map_name=names)

    game = _tmaze_config(limit, mazes, [*resources, *TMAZE_RESOURCES])
    return Game(game, draw_map, best_return=1.0, best_return_without_memory=0.0)


def draw_sides(seed: int, mazes: int) -> list[bool]:
    """Draw for each maze whether its good altar is the northern one."""
    return rng.randint(2, seed, rng.STREAM_WORLD, torch.arange(mazes), 0).bool().tolist()


def plan(corridor: int, sides: Sequence[bool]) -> list[str]:
    """Return the rows of a map with the mazes one below the other: `#` is a wall, `.` empty, `@` an agent."""
    wall = "#" * (corridor + 3)
    rows = [wall]
    for north in sides:
        cue, upper, lower = ("n", "g", "b") if north else ("s", "b", "g")
        rows += [
            f"#{cue}{'#' * (corridor - 1)}{upper}#",
            f"#@{'.' * corridor}#",
            f"{'#' * (corridor + 1)}{lower}#",
            wall,
        ]
    return rows


def _tmaze_config(limit: int, mazes: int, resources: list[str]) -> Any:
    agent = AgentConfig(
        inventory=InventoryConfig(initial={"debt": 1, "ticket": 1}),
        rewards={
            "debt": reward(InventoryValue(item="debt"), weight=-1.0),
            "heart": reward(InventoryValue(item="heart"), weight=2.0),
        },
    )
    objects = {name: GridObjectConfig(name=name) for name in ("cue_north", "cue_south")}
    for name, gain in (("good", {"heart": 1}), ("bad", {})):
        # Using an altar costs the ticket.
        use = handlers.Handler(
            filters=[handlers.actorHas({"ticket": 1})],
            mutations=[handlers.updateActor({"ticket": -1, **gain}), handlers.logStat(ALTARS_USED)],
        )
        objects[name] = GridObjectConfig(name="altar", map_name=name, on_use_handler=use)
    return _game_config(
        side=3,
        tokens=TMAZE_TOKENS,
        num_agents=mazes,
        max_steps=limit,
        end_episode_on_game_stats={ALTARS_USED: float(mazes)},
        resource_names=resources,
        agent=agent,
        objects={"wall": WallConfig(), **objects},
    )


AGENTS, ALTARS = 24, 96
SIZE, COLLECT_TOKENS = 30, 160
"""Side of the map with its wall, and the maximum number of tokens in an observation."""


def collect(limit: int = 50, resources: Sequence[str] = ()) -> Game:
    """Use altars: each gives its one heart to the first agent that uses it, pays 1, and disappears.

    96 altars for 24 agents, on a new map every episode: the best mean return is 4.0, when all altars are used
    within `limit` steps. No memory is needed.
    """
    require("limit", limit, 1, 1_000_000)
    _require_new(resources, ["heart"])
    take = handlers.Handler(mutations=[handlers.withdraw({"heart": 1}, remove_when_empty=True)])
    altar = GridObjectConfig(name="altar", inventory=InventoryConfig(initial={"heart": 1}), on_use_handler=take)
    game = _game_config(
        side=9,
        tokens=COLLECT_TOKENS,
        num_agents=AGENTS,
        max_steps=limit,
        resource_names=[*resources, "heart"],
        agent=AgentConfig(rewards={"heart": reward(InventoryValue(item="heart"), weight=1.0)}),
        objects={"wall": WallConfig(), "altar": altar},
        map_builder=RandomMapBuilder.Config(
            width=SIZE, height=SIZE, border_width=1, agents=AGENTS, objects={"altar": ALTARS}
        ),
    )
    return Game(game, best_return=ALTARS / AGENTS)


GAMES: dict[str, Callable[..., Game]] = {"tmaze": tmaze, "collect": collect}
"""The built-in games."""
