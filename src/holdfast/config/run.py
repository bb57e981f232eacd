"""Config: the frozen tree of a run, validated on construction; overrides by dotted keys."""

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from holdfast.config.base import (
    ConfigBase,
    Int,
    OptionalInt,
    first_error_message,
    key_hint,
    keys_of,
    parse_name,
    parse_optional,
)
from holdfast.config.trainer import (
    KINDS,
    SCHEDULED,
    Schedule,
    TeacherConfig,
    TrainerConfig,
    check_batch_sizes,
    check_schedule,
)
from holdfast.config.world_names import AnyWorldConfig, MixturePart, world_config_class
from holdfast.config.worlds import WORLD_CONFIGS, RecallConfig, WorldConfig
from holdfast.errors import ConfigError, did_you_mean

SCHEDULE = "schedule."


class PolicyConfig(ConfigBase):
    """The policy network."""

    name: str = Field(
        default="auto",
        description="fast, latent_attn_tiny (small, med), example, component:NAME, package.module:Class; auto: fast",
    )
    hidden_size: OptionalInt = Field(
        default=None, ge=1, description="hidden units per memory layer; none: the policy's default"
    )
    num_layers: OptionalInt = Field(
        default=None, ge=1, le=1000, description="memory layers; none: the policy's default"
    )
    memory: str = Field(
        default="auto",
        description="cell: lstm, gru, minlstm, none, your own as package.module:Class; auto: the policy's default",
    )
    memory_init: Literal["auto", "standard", "original"] = Field(
        default="auto", description="auto (the policy's default), standard: forget bias 1, original: all biases 1"
    )
    encoder_init: Literal["auto", "standard", "original"] = Field(
        default="auto",
        description="of latent_attn_*: standard (auto), original: small feature embeddings, encodings not scaled down",
    )
    kernel: Literal["auto", "torch", "triton"] = Field(
        default="auto",
        description="kernel of LSTM and GRU: torch, triton (GPU only), auto: triton on a GPU, else torch",
    )
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32", description="compute dtype: float32 or bfloat16; weights and hidden states are float32"
    )
    compile: bool = Field(default=False, description="compile encoder and heads with torch.compile")
    normalize_obs: bool = Field(
        default=False, description="normalize numeric observations by their running mean and variance"
    )
    normalize_value: bool = Field(default=False, description="scale values by the running mean and variance of returns")


class MemoryConfig(ConfigBase):
    """When memory is cleared."""

    clear_on: Literal["episode", "trial", "never"] = Field(
        default="episode", description="what clears the memory: episode, trial (new trials too), or never"
    )


def _schedules(value: Any) -> Any:
    """Parse none; single schedules are set by their keys."""
    if isinstance(value, str):
        if parse_optional(value) is None:
            return ()
        raise ValueError("write schedule.KEY=KIND:END, or schedule=none for no schedule at all")
    return value


class Config(ConfigBase):
    """The config of a run."""

    run: Annotated[str | None, BeforeValidator(parse_optional), AfterValidator(parse_name)] = Field(
        default=None, description="the run's name; none: from world and time"
    )
    runs_dir: str = Field(default="runs", description="folder of all runs")
    seed: Int = Field(default=0, ge=0, lt=2**63, description="seed of all random numbers of the run")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="cpu, cuda; auto: a GPU if present")
    threads: Int = Field(
        default=1, ge=0, description="CPU threads of torch (0: torch's default); 1 is fastest for small networks"
    )
    wandb: Literal["off", "offline", "online"] = Field(
        default="off", description="off, offline or online: log metrics to Weights & Biases"
    )
    tensorboard: Literal["off", "on"] = Field(default="off", description="off or on: log metrics to TensorBoard")
    trackio: Literal["off", "on"] = Field(default="off", description="off or on: log metrics to Trackio")
    tracker: str = Field(default="off", description="off, or your own: a registered name or package.module:Class")
    trace: OptionalInt = Field(
        default=None, ge=0, description="log what happens to this agent's memory, step by step (none: off)"
    )
    report: Literal["on", "off"] = Field(default="on", description="on or off: write runs/NAME/report.html at the end")
    world: AnyWorldConfig = RecallConfig()
    policy: PolicyConfig = PolicyConfig()
    memory: MemoryConfig = MemoryConfig()
    trainer: TrainerConfig = TrainerConfig()
    schedule: Annotated[tuple[Schedule, ...], BeforeValidator(_schedules)] = Field(
        default=(), description="schedules of numbers; schedule.KEY=KIND:END sets one, none: no schedules"
    )

    @model_validator(mode="after")
    def _check_sizes_and_schedules(self) -> "Config":
        check_batch_sizes(self.world.agents, self.trainer)
        for schedule in self.schedule:
            check_schedule(self.trainer, schedule)
        return self

    @property
    def rollout_length(self) -> int:
        """Steps of each agent between two updates."""
        return self.trainer.batch_size // self.world.agents

    @property
    def steps(self) -> int:
        """Steps of the run, a multiple of the batch size."""
        return self.iterations * self.trainer.batch_size

    @property
    def iterations(self) -> int:
        """Iterations of the run: one rollout and one update each."""
        return math.ceil(self.trainer.total_timesteps / self.trainer.batch_size)


def require_ranks(config: Config, count: int) -> None:
    """Require that agents and minibatches can be divided over some ranks; the error proposes sizes that can."""
    if count == 1:
        return
    world = config.world
    if world.family.max_shards is not None and world.family.max_shards < count:
        raise ConfigError(f"{world.name} cannot be split over {count} ranks; train it in one process.")
    problem = _split_problem(config, count)
    if problem:
        fewer = next(n for n in range(count - 1, 0, -1) if n == 1 or not _split_problem(config, n))
        raise ConfigError(f"{problem}; {_sizes_for_ranks(config, count)}{fewer} rank{'s' * (fewer > 1)}.")


def _agents_per_split(config: Config, count: int) -> int:
    """Return what the number of agents must be a multiple of."""
    return count * (config.trainer.num_workers * config.trainer.async_factor or 1) * config.world.agents_per_env


def _split_problem(config: Config, count: int) -> str:
    """Describe why a config cannot be divided over some ranks; "": it can."""
    world, trainer = config.world, config.trainer
    if world.agents % _agents_per_split(config, count):
        shards = trainer.num_workers * trainer.async_factor
        each = f" with {shards} shards each (trainer.num_workers x trainer.async_factor)" * (shards > 1)
        envs = f" of whole environments of {world.agents_per_env} agents" * (world.agents_per_env > 1)
        return f"world.agents={world.agents} cannot be split evenly over {count} ranks{each}{envs}"
    segments = trainer.minibatch_size // trainer.bptt_horizon
    if segments < count:
        return (
            f"trainer.minibatch_size={trainer.minibatch_size} is {segments} segment{'s' * (segments > 1)} of "
            f"{trainer.bptt_horizon} steps for {count} ranks"
        )
    return ""


def _sizes_for_ranks(config: Config, count: int) -> str:
    """Propose the nearest number of agents, and minibatches, that can be divided over some ranks."""
    unit, horizon = _agents_per_split(config, count), config.trainer.bptt_horizon
    agents = max(1, round(config.world.agents / unit)) * unit
    batch_size = agents * config.rollout_length
    rows, segments = batch_size // horizon, config.trainer.minibatch_size // horizon
    divisors = {n for d in range(1, math.isqrt(rows) + 1) if rows % d == 0 for n in (d, rows // d)}
    for size in sorted((n for n in divisors if n >= count), key=lambda n: (abs(n - segments), n)):
        sizes = {"world.agents": agents, "trainer.batch_size": batch_size, "trainer.minibatch_size": size * horizon}
        if _is_valid(config, sizes):
            return f"try {' '.join(f'{key}={n}' for key, n in sizes.items() if lookup(config, key) != n)}, or "
    return "try "


def _is_valid(config: Config, overrides: Mapping[str, Any]) -> bool:
    try:
        override(config, overrides)
    except ConfigError:
        return False
    return True


def all_keys(world: str = "recall") -> dict[str, Any]:
    """Return every dotted key with its pydantic field, for the named world."""
    return keys_of(Config, world=world_config_class(world))


def override(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return a config with the given dotted keys changed."""
    # The world decides which other keys exist.
    names = [str(value) for key, value in overrides.items() if key in ("world", "world.name")]
    world = names[0] if names else config.world.name
    keys = all_keys(world)
    tree, changed = config.model_dump(), set()
    if world != config.world.name:
        # Batch sizes are made for the recipe's number of agents, unless the new world has a number of its own.
        has_own_number = keys["world.agents"].default != WorldConfig.model_fields["agents"].default
        tree["world"] = {"name": world, **({} if has_own_number else {"agents": config.world.agents})}
    if parse_optional(overrides.get("schedule", ())) is None:
        # Before single schedules, whatever the order of the keys.
        tree["schedule"] = ()
    for word, override_value in overrides.items():
        key, value = expand_alias(word, override_value)
        if key in changed:
            raise ConfigError(f"{word}={override_value} sets {key} a second time; keep one.")
        changed.add(key)
        if key == "schedule" and parse_optional(value) is None:
            continue
        if key.startswith(SCHEDULE):
            tree["schedule"] = _merge_schedules(tree["schedule"], key.removeprefix(SCHEDULE), value, keys)
            continue
        if key not in keys:
            hint = _world_hint(key, world, keys) if key.startswith("world.") else key_hint(key, keys)
            raise ConfigError(f"There is no key {key!r}; {hint}")
        branch = tree
        *path, leaf = key.split(".")
        for part in path:
            branch = branch[part]
        branch[leaf] = value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(first_error_message(error)) from None


def format_value(value: object) -> str:
    """Format a config value as typed on the command line."""
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple) and all(isinstance(item, MixturePart) for item in value):
        return " + ".join(f"{item.label} weight={item.weight:g}" for item in value if isinstance(item, MixturePart))
    if isinstance(value, tuple) and all(isinstance(item, Schedule | TeacherConfig) for item in value):
        return " + ".join(map(str, value))
    if isinstance(value, tuple) and all(isinstance(item, str) for item in value):
        return ",".join(map(str, value))
    return str(value)


def lookup(config: Config, key: str) -> object:
    """Return the value of a dotted key."""
    return attrgetter(key)(config)


def _merge_schedules(schedules: Iterable[Any], key: str, value: Any, keys: Iterable[str]) -> list[Any]:
    """Return the schedules with that of one key replaced; constant removes it."""
    kind, colon, end = str(value).partition(":")
    if key not in SCHEDULED:
        everything = f"choose from {', '.join(SCHEDULED)}."
        same_leaf = [name for name in SCHEDULED if name.rpartition(".")[2] == key]
        # A key that exists is not misspelt.
        near = everything if key in keys else did_you_mean(key, SCHEDULED, everything)
        hint = f"did you mean schedule.{same_leaf[0]}?" if same_leaf else near
        raise ConfigError(f"schedule.{key} is not a number that is read in every iteration; {hint}")
    rest = [schedule for schedule in schedules if schedule["key"] != key]
    if kind == "constant":
        return rest
    if not colon:
        raise ConfigError(f"schedule.{key}={value}: write KIND:END, for example linear:0, or constant for no schedule.")
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS, f"choose from {', '.join(KINDS)}.")
        raise ConfigError(f"schedule.{key}={value}: there is no {kind!r}; {hint}")
    return [*rest, {"key": key, "kind": kind, "end": end}]


def read_config(text: str) -> Config:
    """Parse the config.json of a run."""
    try:
        return Config.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"this is not a config of this version: {first_error_message(error)}") from None


def expand_alias(key: str, value: Any) -> tuple[str, Any]:
    """Expand aliases: `world=X` is `world.name=X`; `py_agent` and `agent` name policies."""
    if key in ("world", "policy"):
        return f"{key}.name", value
    if key == "py_agent":
        return "policy.name", str(value).removesuffix(".py")
    if key == "agent":
        return "policy.name", f"component:{value}"
    return key, value


def _world_hint(key: str, world: str, keys: Iterable[str]) -> str:
    """Name the keys of this world, and the worlds that have this key."""
    world_keys = [name.removeprefix("world.") for name in keys if name.startswith("world.")]
    leaf = key.removeprefix("world.")
    near = get_close_matches(leaf, world_keys, n=1, cutoff=0.6)
    if near:
        return f"did you mean world.{near[0]}?"
    owners = [name for name, kind in WORLD_CONFIGS.items() if leaf in kind.model_fields]
    hint = f"; {leaf} belongs to {', '.join(owners)}" if owners else ""
    if "options" in world_keys:
        hint += f"; set arguments of the environment with world.options='{{{leaf}: ...}}'"
    return f"{world} has {', '.join(world_keys)}{hint}."
