"""Every knob in one frozen tree, checked when it is born; the same keys on the command line and in Python."""

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from holdfast.errors import ConfigError, did_you_mean
from holdfast.knobs import WORLD_KNOBS, Knobs, RecallWorld
from holdfast.saved import up_to_date
from holdfast.sizes import misfit
from holdfast.trainer_knobs import KINDS, SCHEDULED, Schedule, Trainer, scheduled_from, with_numbers
from holdfast.values import Count, first_complaint, optional, plain_name
from holdfast.which_world import SomeWorld, knobs_of

SCHEDULE = "schedule."


class Policy(Knobs):
    """The network."""

    name: str = Field(
        default="auto",
        description="auto, fast, latent_attn_tiny (small, med), example, component:NAME, or module:Class",
    )
    hidden_size: Annotated[Count | None, BeforeValidator(optional)] = Field(
        default=None, ge=1, description="numbers a layer remembers; none: the policy's own"
    )
    num_layers: Annotated[Count | None, BeforeValidator(optional)] = Field(
        default=None, ge=1, description="layers of memory; none: the policy's own"
    )
    memory: str = Field(
        default="auto",
        description="what remembers: auto (the policy's own), lstm, gru, minlstm, none, package.module:Class",
    )
    memory_init: Literal["auto", "standard", "original"] = Field(
        default="auto", description="auto (the policy's own), standard: forget bias 1, original: all biases 1"
    )
    kernel: Literal["auto", "torch", "triton"] = Field(
        default="auto",
        description="what runs LSTM and GRU: torch, triton (ours, on a GPU), auto: ours on a GPU, else torch",
    )
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="what layers compute in: float32 or bfloat16; weights and memories are float32",
    )
    compile: bool = Field(default=False, description="compile encoder and heads with torch.compile")


class Memory(Knobs):
    """When memory forgets."""

    clear_on: Literal["episode", "trial", "never"] = Field(
        default="episode",
        description="what empties the memory: episode, trial (a new trial too), or never",
    )


def _schedules(value: Any) -> Any:
    """Read none; single schedules are given by their keys."""
    if isinstance(value, str):
        if optional(value) is None:
            return ()
        raise ValueError("write schedule.KEY=KIND:END, or schedule=none for no schedule at all")
    return value


class Config(Knobs):
    """A run: everything that decides what happens."""

    run: Annotated[str | None, BeforeValidator(optional), AfterValidator(plain_name)] = Field(
        default=None, description="the run's name; none: made from world and time"
    )
    runs_dir: str = Field(default="runs", description="where runs are kept")
    seed: Count = Field(default=0, ge=0, lt=2**63, description="decides every random number of the run")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="where to compute: auto, cpu or cuda"
    )
    threads: Count = Field(
        default=1, ge=0, description="CPU threads of torch, 0 for its own choice; small networks want 1"
    )
    wandb: Literal["off", "offline", "online"] = Field(
        default="off", description="off, offline or online: mirror the metrics to Weights & Biases"
    )
    tensorboard: Literal["off", "on"] = Field(
        default="off", description="off or on: mirror the metrics to TensorBoard"
    )
    trackio: Literal["off", "on"] = Field(
        default="off", description="off or on: mirror the metrics to Trackio"
    )
    trace: Annotated[Count | None, BeforeValidator(optional)] = Field(
        default=None, ge=0, description="tell the life of this agent as it goes on; none: of nobody"
    )
    world: SomeWorld = RecallWorld()
    policy: Policy = Policy()
    memory: Memory = Memory()
    trainer: Trainer = Trainer()
    schedule: Annotated[tuple[Schedule, ...], BeforeValidator(_schedules)] = Field(
        default=(),
        description="how numbers change over the run; schedule.KEY=KIND:END changes one, none: nothing does",
    )

    @model_validator(mode="after")
    def _sizes_fit(self) -> "Config":
        """Demand whole segments in a minibatch, whole minibatches in a batch, and every step trained on."""
        told = misfit(
            agents=self.world.agents,
            horizon=self.trainer.bptt_horizon,
            batch=self.trainer.batch_size,
            minibatch=self.trainer.minibatch_size,
            accumulate=self.trainer.accumulate,
        )
        if told:
            raise ValueError(told)
        if self.trainer.stale == "burn_in" and self.trainer.burn_in > self.trainer.bptt_horizon:
            raise ValueError(
                f"trainer.burn_in={self.trainer.burn_in} is longer than a segment; "
                f"try trainer.burn_in={self.trainer.bptt_horizon} or less."
            )
        return self

    @model_validator(mode="after")
    def _schedules_can_be(self) -> "Config":
        """Demand numbers that may change while a run goes on, and ends that they may have."""
        for each in self.schedule:
            start = scheduled_from(self.trainer, each)
            if each.kind == "exponential" and min(start, each.end) <= 0:
                raise ValueError(
                    f"schedule.{each.key}={each.kind}:{each.end:g} goes from {start:g} to {each.end:g}; an "
                    "exponential needs both above 0: use linear or cosine."
                )
            with_numbers(self.trainer, {each.key: each.end})
        return self

    @property
    def rollout_length(self) -> int:
        """Steps each agent lives between two updates."""
        return self.trainer.batch_size // self.world.agents

    @property
    def steps(self) -> int:
        """Steps of the whole run, in whole batches."""
        return self.iterations * self.trainer.batch_size

    @property
    def iterations(self) -> int:
        """Rollouts and updates of the whole run."""
        return math.ceil(self.trainer.total_timesteps / self.trainer.batch_size)


def keys_of(world: str = "recall") -> dict[str, Any]:
    """List every key of the tree with its pydantic field, for a world of some name."""
    return _keys_in(Config, "", knobs_of(world))


def _keys_in(model: type[BaseModel], prefix: str, world: type[BaseModel]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in sorted(model.model_fields.items(), key=_name_first):
        kind = world if prefix + name == "world" else field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= _keys_in(kind, f"{prefix}{name}.", world)
        else:
            found[prefix + name] = field
    return found


def _name_first(named: tuple[str, Any]) -> bool:
    return named[0] != "name"


def change(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return a config that differs in the given dotted keys; a misspelt key or a bad value is told."""
    world = _world_meant(config, overrides)
    known = keys_of(world)
    tree, changed = config.model_dump(), set()
    if world != config.world.name:
        # Another world has knobs of its own.
        tree["world"] = {"name": world}
    if optional(overrides.get("schedule", ())) is None:
        # Before single schedules, wherever it stands.
        tree["schedule"] = ()
    for word, given in overrides.items():
        key, value = _canonical(word, given)
        if key in changed:
            raise ConfigError(f"{word}={given} says {key} a second time; which one is meant?")
        changed.add(key)
        if key == "schedule" and optional(given) is None:
            continue
        if key.startswith(SCHEDULE):
            tree["schedule"] = _rescheduled(tree["schedule"], key.removeprefix(SCHEDULE), value, known)
            continue
        if key not in known:
            hint = _world_hint(key, world, known) if key.startswith("world.") else _hint(key, known)
            raise ConfigError(f"There is no key {key!r}; {hint}")
        branch = tree
        *path, leaf = key.split(".")
        for part in path:
            branch = branch[part]
        branch[leaf] = value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(first_complaint(error)) from None


def _rescheduled(schedules: Iterable[Any], key: str, value: Any, keys: Iterable[str]) -> list[Any]:
    """Put one schedule in the place of another; constant is none."""
    kind, colon, end = str(value).partition(":")
    if key not in SCHEDULED:
        known = f"what can be scheduled is {', '.join(SCHEDULED)}."
        ends_so = [name for name in SCHEDULED if name.rpartition(".")[2] == key]
        # A key that exists was meant.
        near = known if key in keys else did_you_mean(key, SCHEDULED, known)
        hint = f"did you mean schedule.{ends_so[0]}?" if ends_so else near
        raise ConfigError(f"schedule.{key}: that is no number which is read in every iteration; {hint}")
    others = [each for each in schedules if each["key"] != key]
    if kind == "constant":
        return others
    if not colon:
        raise ConfigError(
            f"schedule.{key}={value}: write KIND:END, for example linear:0, or constant for no schedule."
        )
    if kind not in KINDS:
        meant = did_you_mean(kind, KINDS, f"there is {', '.join(KINDS)}.")
        raise ConfigError(f"schedule.{key}={value}: there is no {kind!r}; {meant}")
    return [*others, {"key": key, "kind": kind, "end": end}]


def _world_meant(config: Config, overrides: Mapping[str, Any]) -> str:
    """Find which world there will be: its name decides which other keys there are."""
    names = [str(value) for key, value in overrides.items() if key in ("world", "world.name")]
    return names[0] if names else config.world.name


def read_config(text: str) -> Config:
    """Read a config back from the JSON of a run's folder."""
    try:
        return Config.model_validate_json(up_to_date(text))
    except ValidationError as error:
        raise ConfigError(f"this is not a config of this version: {first_complaint(error)}") from None


def _canonical(key: str, value: Any) -> tuple[str, Any]:
    """Translate the short words and those of the seeds: `world=X` means `world.name=X`."""
    if key in ("world", "policy"):
        return f"{key}.name", value
    if key == "py_agent":
        return "policy.name", str(value).removesuffix(".py")
    if key == "agent":
        return "policy.name", f"component:{value}"
    return key, value


def _hint(key: str, known: Iterable[str]) -> str:
    leaf = key.rpartition(".")[2]
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside:
        return f"it is a branch; its keys are {', '.join(inside[:3])} and so on."
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    if same_leaf and "." not in key:
        return f"did you mean {_join(same_leaf)}?"
    return did_you_mean(key, known, "`holdfast train --help` lists all keys.")


def _world_hint(key: str, world: str, known: Iterable[str]) -> str:
    """Say which keys this world has, and which world has this one."""
    own = [each.removeprefix("world.") for each in known if each.startswith("world.")]
    leaf = key.removeprefix("world.")
    near = get_close_matches(leaf, own, n=1, cutoff=0.6)
    if near:
        return f"did you mean world.{near[0]}?"
    others = [name for name, kind in WORLD_KNOBS.items() if leaf in kind.model_fields]
    theirs = f"; {leaf} belongs to {', '.join(others)}" if others else ""
    if "options" in own:
        theirs += f"; what the environment is made with goes by world.options='{{{leaf}: ...}}'"
    return f"{world} has {', '.join(own)}{theirs}."


def _join(things: Iterable[Any]) -> str:
    return " or ".join(map(str, things))
