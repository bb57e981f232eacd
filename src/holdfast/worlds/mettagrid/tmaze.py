"""`mettagrid:tmaze`: a cue at the start of a corridor says which of two equal altars at its end is good."""

from collections.abc import Sequence
from typing import Any

import torch

from holdfast.errors import ConfigError
from holdfast.worlds import draws
from holdfast.worlds.embedded import require
from holdfast.worlds.mettagrid import engine
from holdfast.worlds.mettagrid.game import Game

OWN = ("debt", "ticket", "heart")
"""What agents carry: what they owe, the right to one altar, and what a good one gives."""
USED = "altars_used"
"""How the engine calls the number of altars that were used."""
TOKENS = 16
"""Five cells are seen, and six things may be told of an agent."""


def tmaze(corridor: int = 4, limit: int = 16, mazes: int = 8, resources: Sequence[str] = ()) -> Game:
    """Walk east through `corridor` cells to a junction, and into the altar that the cue told.

    Only the four neighbours of a cell are seen. The cue stands north of the start cell, so it is seen from
    there only; both altars are called `altar` and look alike. An agent may use one altar once. Every agent is
    charged 1 at its first step, and the good altar pays 2: the return is 1 for it, and -1 for the other one
    or for none within `limit` steps, after which an episode is cut off. It ends before that when everybody on
    the map has used one. The best return is 1.0.

    Without memory it is 0.0, by the argument of `tmaze` on tensors: away from the start nothing that is seen
    before an altar is used depends on the cue, so of those who use one, a share p uses the northern one,
    whatever the cue. Let one be used with chance s when the cue says north and s' when it says south. The
    mean return is s p + s' (1 - p) - 1 <= 0, and always going to the same altar gets 0.

    `mazes` lie on one map, out of each other's sight. `resources` are further things that could be carried
    and are not: with them the engine numbers its features otherwise.
    """
    require("corridor", corridor, 1, 1000)
    require("mazes", mazes, 1, 250)
    if limit < corridor + 1:
        raise ConfigError(
            f"world.limit={limit}: the way is {corridor + 1} steps; give a number from there on."
        )
    taken = sorted(set(resources) & set(OWN))
    if taken:
        raise ConfigError(f"world.resources: {taken[0]} is there already; give other names.")
    return Game(
        config=_config(limit, mazes, [*resources, *OWN]),
        draw_map=lambda seed: engine.ascii_map(
            plan(corridor, norths(seed, mazes)),
            {"n": "cue_north", "s": "cue_south", "g": "good", "b": "bad"},
        ),
        best_return=1.0,
        best_return_without_memory=0.0,
    )


def norths(seed: int, mazes: int) -> list[bool]:
    """Draw for each maze whether its good altar is the northern one."""
    return draws.below(2, seed, draws.STREAM_WORLD, torch.arange(mazes), 0).bool().tolist()


def plan(corridor: int, norths: Sequence[bool]) -> list[str]:
    """Draw the mazes one below the other."""
    wall = "#" * (corridor + 3)
    rows = [wall]
    for north in norths:
        cue, upper, lower = ("n", "g", "b") if north else ("s", "b", "g")
        rows += [
            f"#{cue}{'#' * (corridor - 1)}{upper}#",
            f"#@{'.' * corridor}#",
            f"{'#' * (corridor + 1)}{lower}#",
            wall,
        ]
    return rows


def _config(limit: int, mazes: int, resources: list[str]) -> Any:
    made, rewards = engine.part(engine.CONFIG), engine.part(engine.REWARDS)
    carried = {name: made.InventoryValue(item=name) for name in OWN}
    agent = made.AgentConfig(
        inventory=made.InventoryConfig(initial={"debt": 1, "ticket": 1}),
        rewards={
            "debt": rewards.reward(carried["debt"], weight=-1.0),
            "heart": rewards.reward(carried["heart"], weight=2.0),
        },
    )
    things = {name: made.GridObjectConfig(name=name) for name in ("cue_north", "cue_south")}
    for name, hearts in (("good", 1), ("bad", 0)):
        things[name] = made.GridObjectConfig(name="altar", map_name=name, on_use_handler=_paid(hearts))
    return made.MettaGridConfig(
        game=made.GameConfig(
            num_agents=mazes,
            max_steps=limit,
            end_episode_on_game_stats={USED: float(mazes)},
            resource_names=resources,
            protocol_details_obs=False,
            obs=engine.sees(3, TOKENS),
            actions=engine.moves(),
            agent=agent,
            objects={"wall": made.WallConfig(), **things},
        )
    )


def _paid(hearts: int) -> Any:
    """Let whoever has a ticket use an altar: the ticket is gone then."""
    handlers = engine.part(engine.HANDLERS)
    given = {"heart": hearts} if hearts else {}
    return handlers.Handler(
        filters=[handlers.actorHas({"ticket": 1})],
        mutations=[handlers.updateActor({"ticket": -1, **given}), handlers.logStat(USED)],
    )
