"""One config class per world; `family` names what builds it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from holdfast.config.base import ConfigBase, Int, IntList, IntOrRange, NameList, Options, parse_optional, parse_yaml
from holdfast.config.wrapper_list import WrapperList


@dataclass(frozen=True)
class Family:
    """How the worlds of one config class are named, built and run."""

    constructor: str = ""
    """`module:name` of a callable `(agents, *, seed, device, ...)`, imported when a world is built.

    Worlds named `prefix:ID` get the ID as `env`.
    """
    ids: str = "ID"
    """What follows the prefix, in help texts."""
    package: str = ""
    """The package it needs."""
    needs: str = ""
    """What its extra, of the same name, needs besides."""
    max_shards: int | None = None
    """Shards that workers may split it into. None: any number. 0: it runs threads of its own."""
    sync: Mapping[str, Any] = field(default_factory=dict)
    """Values that make stepping synchronous."""
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Values of keys, by a pattern of how the ID starts; they apply unless `wrappers` is set."""

    def with_preset(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Add the preset of a world's ID to the keys that are set; options are merged."""
        env_id = name.rpartition(":")[2]
        preset = next((preset for start, preset in self.presets.items() if re.match(start, env_id)), None)
        if preset is None or "wrappers" in values or values.get("vector", "sync") != "sync":
            return dict(values)
        options = parse_yaml(values.get("options", {}))
        if not isinstance(options, dict):
            return dict(values)
        return {**preset, **values, "options": {**preset.get("options", {}), **options}}


class WorldConfig(ConfigBase):
    """The keys of every world."""

    agents_per_env: ClassVar[int] = 1
    """`agents` is a multiple of this."""
    family: ClassVar[Family] = Family()
    name: str = Field(description="name of the world")
    agents: Int = Field(default=64, ge=1, description="number of parallel agents")
    clip_reward: Annotated[float | None, BeforeValidator(parse_optional)] = Field(
        default=None, gt=0, description="clip rewards to [-x,x] in the update (none: off); scores stay raw"
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        is_named = isinstance(values, dict) and isinstance(values.get("name"), str)
        return cls.family.with_preset(values["name"], values) if is_named else values

    @field_validator("name")
    @classmethod
    def _require_name(cls, name: str) -> str:
        default = cls.model_fields["name"]
        if not default.is_required() and name != default.default:
            raise ValueError(f"this is the config of {default.default}")
        return name


class _TruncatedConfig(WorldConfig):
    truncate: bool = Field(default=False, description="end episodes by truncation, not termination")


class RecallConfig(_TruncatedConfig):
    """Name a cue after a delay; needs memory."""

    family: ClassVar[Family] = Family("holdfast.worlds.builtin.symbols:Recall")
    name: str = Field(default="recall", description="name of the world")
    delay: IntOrRange = Field(default=8, description="empty steps between cue and query; 4..24: drawn per episode")
    cues: Int = Field(default=4, ge=2, le=100, description="number of cues")


class RepeatFirstConfig(_TruncatedConfig):
    """Name the first symbol at every step; nothing marks where an episode begins."""

    family: ClassVar[Family] = Family("holdfast.worlds.builtin.symbols:RepeatFirst")
    name: str = Field(default="repeat_first", description="name of the world")
    symbols: Int = Field(default=4, ge=2, le=100, description="number of symbols")
    length: IntOrRange = Field(default=(65, 95), description="steps of an episode; 65..95: drawn per episode")


class NBackConfig(_TruncatedConfig):
    """Name the symbol of `back` steps ago, at every step."""

    family: ClassVar[Family] = Family("holdfast.worlds.builtin.symbols:NBack")
    name: str = Field(default="n_back", description="name of the world")
    back: Int = Field(default=2, ge=1, description="steps between a symbol and its query")
    symbols: Int = Field(default=4, ge=2, le=100, description="number of symbols")
    length: Int = Field(default=32, ge=2, description="steps of an episode")


class TMazeConfig(WorldConfig):
    """Walk through a corridor into the arm that the cue at its start names."""

    family: ClassVar[Family] = Family("holdfast.worlds.builtin.mazes:TMaze")
    name: str = Field(default="tmaze", description="name of the world")
    corridor: Int = Field(default=4, ge=1, description="cells from the start to the junction")
    limit: Int = Field(default=20, ge=1, description="steps of an episode; reaching no arm costs 1")


class KeyValueConfig(_TruncatedConfig):
    """Remember the value of each key, and name it when the key is queried."""

    family: ClassVar[Family] = Family("holdfast.worlds.builtin.symbols:KeyValue")
    name: str = Field(default="key_value", description="name of the world")
    pairs: Int = Field(default=4, ge=1, description="keys to remember")
    values: Int = Field(default=4, ge=2, description="values a key may have")


class ParityConfig(_TruncatedConfig):
    """Name the parity of all bits so far, at every step."""

    family: ClassVar[Family] = Family("holdfast.worlds.builtin.symbols:Parity")
    name: str = Field(default="parity", description="name of the world")
    length: Int = Field(default=16, ge=2, description="steps of an episode")


class ForageConfig(WorldConfig):
    """Find a goal that stays hidden in the same arm for several trials."""

    family: ClassVar[Family] = Family("holdfast.worlds.builtin.mazes:Forage")
    name: str = Field(default="forage", description="name of the world")
    arms: Int = Field(default=4, ge=2, le=4, description="arms around the hub")
    reach: Int = Field(default=2, ge=1, description="cells of an arm")
    trials: Int = Field(default=8, ge=1, description="trials of an episode")


class ArenaConfig(_TruncatedConfig):
    """24 agents per map collect resources that regrow; measures throughput."""

    family: ClassVar[Family] = Family("holdfast.worlds.builtin.arena:Arena")
    agents_per_env: ClassVar[int] = 24
    name: str = Field(default="arena", description="name of the world")
    agents: Int = Field(default=96, ge=24, multiple_of=24, description="number of parallel agents")
    size: Int = Field(default=32, ge=1, description="rows and columns of a map")
    walls: Int = Field(default=20, ge=0, description="percent of cells that are walls")
    resources: Int = Field(default=20, ge=0, description="percent of free cells with a resource")
    regrow: Int = Field(default=50, ge=1, description="steps until a resource regrows")
    length: Int = Field(default=500, ge=1, description="steps of an episode")
    sight: Int = Field(default=200, ge=1, description="maximum number of tokens in an observation")


class RaggedConfig(_TruncatedConfig):
    """As recall, with agents that leave and return at different steps."""

    family: ClassVar[Family] = Family("holdfast.worlds.builtin.diagnostic:Ragged")
    name: str = Field(default="ragged", description="name of the world")
    delay: IntOrRange = Field(default=(0, 8), description="empty steps between cue and query")
    absent: IntOrRange = Field(default=(1, 8), description="steps an agent is away between episodes")
    cues: Int = Field(default=4, ge=2, le=100, description="number of cues")


class ConstantConfig(_TruncatedConfig):
    """Every step pays 1, so the value function is known exactly."""

    family: ClassVar[Family] = Family("holdfast.worlds.builtin.diagnostic:Constant")
    name: str = Field(default="constant", description="name of the world")
    length: Int = Field(default=20, ge=1, description="steps of an episode")


WORLD_CONFIGS: dict[str, type[WorldConfig]] = {
    kind.model_fields["name"].default: kind
    for kind in (
        RecallConfig,
        RepeatFirstConfig,
        NBackConfig,
        TMazeConfig,
        KeyValueConfig,
        ParityConfig,
        ForageConfig,
        ArenaConfig,
        RaggedConfig,
        ConstantConfig,
    )
}
"""The built-in worlds."""


class _MettaGridBase(WorldConfig):
    family: ClassVar[Family] = Family(
        "holdfast.worlds.mettagrid:MettaGridWorld",
        ids="package.module:function",
        package="mettagrid",
        needs=" (Python 3.11 or 3.12)",
    )
    agent_id: bool = Field(default=False, description="add the agent's id to the observation")


class MettaGridConfig(_MettaGridBase):
    """A configuration of mettagrid: mettagrid:package.module:function."""

    name: str = Field(description="name of the world")
    options: Options = Field(default={}, description="arguments of the function, as in '{size: 5}'")


class MettaGridTMazeConfig(_MettaGridBase):
    """As tmaze, built of altars, in the engine of mettagrid."""

    agents_per_env: ClassVar[int] = 8
    name: str = Field(default="mettagrid:tmaze", description="name of the world")
    corridor: Int = Field(default=4, ge=1, description="cells from the start to the junction")
    limit: Int = Field(default=16, ge=1, description="steps of an episode")
    mazes: Int = Field(default=8, ge=1, le=250, description="mazes on a map, one agent each")
    resources: NameList = Field(default=(), description="further resources, which no agent holds")


class MettaGridCollectConfig(_MettaGridBase):
    """24 agents per map use altars, each of which gives once, in the engine of mettagrid."""

    agents_per_env: ClassVar[int] = 24
    name: str = Field(default="mettagrid:collect", description="name of the world")
    agents: Int = Field(default=96, ge=24, multiple_of=24, description="number of parallel agents")
    limit: Int = Field(default=50, ge=1, description="steps of an episode")
    resources: NameList = Field(default=(), description="further resources, which no agent holds")


class ExternalEnvConfig(WorldConfig):
    """The keys of environments of other packages."""

    name: str = Field(description="name of the world")
    options: Options = Field(default={}, description="arguments of the environment, as in '{max_episode_steps: 200}'")
    keep: IntList = Field(default=(), description="observation indices to keep (none: all)")
    previous_action: bool = Field(default=False, description="add the previous action to the observation")
    previous_reward: bool = Field(default=False, description="add the previous reward to the observation")
    tell_first: bool = Field(default=False, description="add the episode start to the observation")


GYM_PRESETS: dict[str, dict[str, Any]] = {
    r"ALE/|\w+NoFrameskip-v\d": {
        # AtariPreprocessing skips the frames itself: it takes the maximum of the last two.
        "options": {"frameskip": 1},
        "wrappers": ("holdfast.worlds.gym.seed_episodes:SeedEpisodes", "gymnasium.wrappers:AtariPreprocessing"),
        "frame_stack": 4,
    },
    "MiniGrid-": {"wrappers": ("holdfast.worlds.gym.minigrid_cells:MiniGridCells",)},
    "BabyAI-": {"wrappers": ("holdfast.worlds.gym.minigrid_cells:MiniGridCells",)},
}
"""Usual preprocessing of well-known environments."""


class GymConfig(ExternalEnvConfig):
    """A Gymnasium environment: gym:ID, or package.module:Class."""

    family: ClassVar[Family] = Family("holdfast.worlds.gym:GymWorld", presets=GYM_PRESETS)
    vector: Literal["sync", "native"] = Field(
        default="sync", description="sync: SyncVectorEnv; native: the vector environment of the id"
    )
    autoreset: Literal["auto", "same_step", "next_step", "disabled"] = Field(
        default="auto", description="autoreset mode; auto: same_step, or that of a native vector environment"
    )
    wrappers: WrapperList = Field(
        default=(), description="wrappers, innermost first: package.module:Class(argument=value),...; none: no preset"
    )
    frame_stack: Int = Field(default=1, ge=1, le=1000, description="observations stacked; 1: the current one alone")


class PythonConfig(GymConfig):
    """An environment that a Python program passes: holdfast.train(env=...)."""

    family: ClassVar[Family] = Family("holdfast.worlds.env_source:python_world", ids="NAME")
    source: Any = Field(default=None, exclude=True, repr=False, description="the `EnvSource`; in no file")


class PopGymConfig(GymConfig):
    """An environment of POPGym: popgym:NAME."""

    family: ClassVar[Family] = Family("holdfast.worlds.popgym:popgym_world", ids="NAME", package="popgym")


class PettingZooConfig(ExternalEnvConfig):
    """Parallel environments of PettingZoo, shared by several agents: MODULE or package.module:function."""

    family: ClassVar[Family] = Family("holdfast.worlds.pettingzoo:PettingZooWorld", ids="MODULE", package="pettingzoo")
    wrappers: WrapperList = Field(
        default=(), description="wrappers, innermost first: package.module:function(argument=value),..."
    )


class EnvpoolConfig(ExternalEnvConfig):
    """An environment of envpool, which steps many in threads: envpool:ID."""

    family: ClassVar[Family] = Family(
        "holdfast.worlds.envpool:envpool_world", package="envpool", max_shards=0, sync={"vector": "sync", "batch": 0}
    )
    vector: Literal["sync", "async"] = Field(
        default="sync", description="sync: step all agents at once; async: those that finish first"
    )
    batch: Int = Field(default=0, ge=0, description="async: agents stepped at once; 0: half of them")
    threads: Int = Field(default=0, ge=0, description="threads; 0: chosen by envpool")


EXTERNAL_CONFIGS: dict[str, type[WorldConfig]] = {
    "gym": GymConfig,
    "python": PythonConfig,
    "popgym": PopGymConfig,
    "pettingzoo": PettingZooConfig,
    "envpool": EnvpoolConfig,
    "mettagrid": MettaGridConfig,
    "mettagrid:tmaze": MettaGridTMazeConfig,
    "mettagrid:collect": MettaGridCollectConfig,
}
"""Worlds of other packages, by name or by the prefix of `prefix:ID`."""
