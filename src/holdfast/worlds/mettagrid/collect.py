"""`mettagrid:collect`: 24 agents on a map, and altars with one heart each."""

from collections.abc import Sequence

from holdfast.errors import ConfigError
from holdfast.worlds.embedded import require
from holdfast.worlds.mettagrid import engine
from holdfast.worlds.mettagrid.game import Game

AGENTS, ALTARS = 24, 96
SIZE, TOKENS = 30, 160
"""Rows and columns of the map, with the wall around it; and how many tokens are seen at most."""


def collect(limit: int = 50, resources: Sequence[str] = ()) -> Game:
    """Use altars: each gives its one heart to who comes first, pays 1, and is gone.

    96 altars for 24 agents, drawn anew every episode: the best mean return is 4.0, when all are used within
    `limit` steps. Nothing has to be remembered.
    """
    require("limit", limit, 1, 1_000_000)
    if "heart" in resources:
        raise ConfigError("world.resources: heart is there already; give other names.")
    made, rewards = engine.part(engine.CONFIG), engine.part(engine.REWARDS)
    handlers = engine.part(engine.HANDLERS)
    take = handlers.Handler(mutations=[handlers.withdraw({"heart": 1}, remove_when_empty=True)])
    altar = made.GridObjectConfig(
        name="altar", inventory=made.InventoryConfig(initial={"heart": 1}), on_use_handler=take
    )
    config = made.MettaGridConfig(
        game=made.GameConfig(
            num_agents=AGENTS,
            max_steps=limit,
            resource_names=[*resources, "heart"],
            protocol_details_obs=False,
            obs=engine.sees(9, TOKENS),
            actions=engine.moves(),
            agent=made.AgentConfig(
                rewards={"heart": rewards.reward(made.InventoryValue(item="heart"), weight=1.0)}
            ),
            objects={"wall": made.WallConfig(), "altar": altar},
            map_builder=engine.part("mettagrid.map_builder.random_map").RandomMapBuilder.Config(
                width=SIZE, height=SIZE, border_width=1, agents=AGENTS, objects={"altar": ALTARS}
            ),
        )
    )
    return Game(config, best_return=ALTARS / AGENTS)
