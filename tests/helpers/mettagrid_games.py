"""mettagrid games for tests, and a slow reference reader of the engine."""

import numpy as np
import torch
from mettagrid.config.handler_config import Handler, logStat, withdraw
from mettagrid.config.mettagrid_config import (
    ActionsConfig,
    AgentConfig,
    ChangeVibeActionConfig,
    GameConfig,
    GlobalObsConfig,
    GridObjectConfig,
    InventoryConfig,
    InventoryValue,
    MettaGridConfig,
    NoopActionConfig,
    ObsConfig,
    WallConfig,
)
from mettagrid.config.reward_config import reward
from mettagrid.config.vibes import VIBES
from mettagrid.map_builder.ascii import AsciiMapBuilder
from mettagrid.map_builder.random_map import RandomMapBuilder
from mettagrid.mapgen.mapgen import MapGen
from mettagrid.simulator.simulator import Buffers, Simulator

from holdfast import rng


def altar(tags):
    """Gives three hearts; a game stat counts them."""
    return GridObjectConfig(
        name="altar",
        tags=list(tags),
        vibe=2,
        inventory=InventoryConfig(initial={"heart": 3}),
        on_use_handler=Handler(mutations=[withdraw({"heart": 1}), logStat("hearts")]),
    )


def meadow(
    agents=3,
    size=8,
    window=5,
    limit=7,
    resources=("heart",),
    tags=(),
    vibes=4,
    global_obs=True,
    place=False,
    truncates=False,
    tokens=80,
    ends_at=0.0,
    seed=None,
    noop=True,
):
    """Altars on a meadow; options cover the switches of a config."""
    vibe_action = ChangeVibeActionConfig(enabled=bool(vibes), vibes=list(VIBES[-vibes:] if vibes else VIBES))
    features = GlobalObsConfig(
        episode_completion_pct=global_obs,
        last_action=global_obs,
        last_action_move=global_obs,
        local_position=place,
    )
    return MettaGridConfig(
        game=GameConfig(
            num_agents=agents,
            max_steps=limit,
            episode_truncates=truncates,
            resource_names=list(resources),
            obs=ObsConfig(width=window, height=window, num_tokens=tokens, global_obs=features),
            actions=ActionsConfig(change_vibe=vibe_action, noop=NoopActionConfig(enabled=noop)),
            agent=AgentConfig(rewards={"heart": reward(InventoryValue(item="heart"))}),
            objects={"wall": WallConfig(), "altar": altar(tags)},
            end_episode_on_game_stats={"hearts": ends_at} if ends_at else {},
            map_builder=RandomMapBuilder.Config(
                width=size, height=size, border_width=1, agents=agents, objects={"altar": 5}, seed=seed
            ),
        )
    )


def drawn(rows, agents=1):
    """A map without a seed."""
    config = meadow(agents=agents)
    config.game.map_builder = AsciiMapBuilder.Config(map_data=rows, char_to_map_name={})
    return config


def nested(inner_seed=None):
    """A nested map builder, random inside the engine."""
    config = meadow()
    inner = RandomMapBuilder.Config(width=8, height=8, agents=3, objects={"altar": 5}, seed=inner_seed)
    config.game.map_builder = MapGen.Config(instance=inner, border_width=1)
    return config


class Bare:
    """The engine stepped directly, read token by token."""

    def __init__(self, config, seed, number, agent_id=False):
        self.config, self.seed, self.number, self.agent_id = config, seed, number, agent_id
        self.episode = -1
        self.features = {feature.id: feature.name for feature in config.game.id_map().features()}
        self.tags = config.game.id_map().tag_names()
        self.actions = [action.name for action in config.game.actions.actions()]
        self.open()

    def open(self):
        self.episode += 1
        number = torch.tensor(self.number)
        seed = int(rng.randint(1 << 31, self.seed, rng.STREAM_WORLD, number, self.episode))
        config = self.config.model_copy(deep=True)
        config.game.map_builder.seed = seed
        agents, tokens = config.game.num_agents, config.game.obs.num_tokens
        kinds = [((tokens, 3), np.uint8), ((), bool), ((), bool), ((), np.float32), ((), bool)]
        columns = [np.zeros((agents, *shape), kind) for shape, kind in kinds]
        streams = [np.zeros(agents, np.int32) for _ in range(3)]
        self.buffers = Buffers(*columns, streams[0], streams[1], streams[2])
        self.simulation = Simulator().new_simulation(config, seed, buffers=self.buffers)

    def step(self, actions):
        for agent, action in enumerate(actions):
            self.simulation.agent(agent).set_action(self.actions[action])
        self.simulation.step()
        return self.buffers.rewards.copy(), self.simulation.is_done()

    def tokens_of(self, agent):
        """Return location, name and value of an agent's tokens, in the engine's order."""
        tokens = []
        for place, number, value in self.buffers.observations[agent].tolist():
            if place == 255:
                continue
            name = self.features[number]
            if name in ("last_reward", "goal") or (name == "agent_id" and not self.agent_id):
                continue
            names = {"tag": self.tags, "last_action": self.actions, "vibe": self.config.game.vibe_names}
            if name == "vibe" and self.config.game.vibe_names == [vibe.name for vibe in VIBES]:
                names = {}
            if name in names:
                name, value = f"{name}:{names[name][value]}", 255
            tokens.append((place, name, value))
        return tokens


def named(world, obs):
    """Return the tokens of an observation with names for feature ids; padding must come last."""
    rows = obs.tolist()
    tokens = [row for row in rows if row[0] != 255]
    assert rows[len(tokens) :] == [[255] * 3] * (len(rows) - len(tokens))
    return [(place, world.spec.features[number].name, value) for place, number, value in tokens]
