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
from holdfast.values import Count, HowOften, first_complaint, optional, plain_name
from holdfast.which_world import Parts, SomeWorld, knobs_of


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
    compile: bool = Field(default=False, description="compile encoder and heads with torch.compile")


class Memory(Knobs):
    """When memory forgets."""

    clear_on: Literal["episode", "trial", "never"] = Field(
        default="episode",
        description="what empties the memory: a new episode, also a new trial, or nothing",
    )


class Optimizer(Knobs):
    """Adam."""

    learning_rate: float = Field(default=0.000457, gt=0, description="step size at the start")
    learning_rate_end: Annotated[float | None, BeforeValidator(optional)] = Field(
        default=None, ge=0, description="step size at the end, reached linearly; none: constant"
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean of gradients")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean of squared gradients")
    eps: float = Field(default=1e-8, gt=0, description="added to the denominator")


class PPO(Knobs):
    """The loss."""

    gamma: float = Field(default=0.977, ge=0, le=1, description="discount of rewards a step later")
    gae_lambda: float = Field(default=0.916, ge=0, le=1, description="mix of short and long advantages")
    clip_coef: float = Field(default=0.1, gt=0, description="how far the probability ratio may move")
    vf_coef: float = Field(default=0.44, ge=0, description="weight of the value loss")
    vf_clip_coef: float = Field(default=0.1, gt=0, description="how far the value may move if clip_vloss")
    clip_vloss: bool = Field(default=True, description="clip the value loss")
    ent_coef: float = Field(default=0.0021, ge=0, description="weight of the entropy bonus at the start")
    ent_coef_end: Annotated[float | None, BeforeValidator(optional)] = Field(
        default=None, ge=0, description="weight of the entropy bonus at the end, linearly; none: constant"
    )
    norm_adv: bool = Field(default=True, description="normalise advantages in each minibatch")
    max_grad_norm: float = Field(default=0.5, gt=0, description="gradients longer than this are shortened")


class Trainer(Knobs):
    """The loop."""

    total_timesteps: Count = Field(
        default=50_000_000,
        ge=1,
        description="steps of the whole run, in whole batches; rows nobody acts in are among them",
    )
    batch_size: Count = Field(
        default=524288, ge=1, le=2**40, description="steps collected before each update"
    )
    minibatch_size: Count = Field(default=16384, ge=1, description="steps of one gradient step")
    bptt_horizon: Count = Field(default=64, ge=1, description="steps of a segment: how far gradients reach")
    update_epochs: Count = Field(default=1, ge=1, description="times each collected step is trained on")
    num_workers: Count = Field(
        default=1, ge=1, description="worker processes; worlds run in this one whatever it says"
    )
    check: HowOften = Field(
        default="first",
        description="check replay and clear on what is stored: first (two updates), every:N updates, off",
    )
    eval_episodes: Count = Field(default=2000, ge=1, description="episodes of the final evaluation")
    eval_worlds: Parts = Field(
        default=(), description="other worlds to evaluate on, too: 'recall delay=16 + recall delay=32'"
    )
    optimizer: Optimizer = Optimizer()
    ppo: PPO = PPO()


class Config(Knobs):
    """A run: everything that decides what happens."""

    run: Annotated[str | None, BeforeValidator(optional), AfterValidator(plain_name)] = Field(
        default=None, description="the run's name; none: made from world and time"
    )
    runs_dir: str = Field(default="runs", description="where runs are kept")
    seed: Count = Field(default=0, ge=0, lt=2**63, description="decides every random number of the run")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="where to compute")
    threads: Count = Field(
        default=1, ge=0, description="CPU threads of torch, 0 for its own choice; small networks want 1"
    )
    wandb: Literal["off"] = Field(default="off", description="off: nothing leaves this machine")
    world: SomeWorld = RecallWorld()
    policy: Policy = Policy()
    memory: Memory = Memory()
    trainer: Trainer = Trainer()

    @model_validator(mode="after")
    def _sizes_fit(self) -> "Config":
        """Demand whole segments in a minibatch, whole minibatches in a batch, and every step trained on."""
        t, rows = self.trainer, self.world.agents * self.trainer.bptt_horizon
        if t.batch_size % rows:
            is_what = f"world.agents * trainer.bptt_horizon = {self.world.agents} * {t.bptt_horizon} = {rows}"
        elif t.minibatch_size % t.bptt_horizon:
            raise ValueError(
                f"trainer.minibatch_size={t.minibatch_size} is not a multiple of trainer.bptt_horizon="
                f"{t.bptt_horizon}; try trainer.minibatch_size={_join(self._minibatches_nearby())}."
            )
        elif t.batch_size % t.minibatch_size:
            is_what = f"trainer.minibatch_size={t.minibatch_size}"
        else:
            return self
        minibatch = t.minibatch_size
        if minibatch % t.bptt_horizon:
            fit = [size for size in range(1, self.world.agents + 1) if self.world.agents % size == 0]
            want = minibatch / t.bptt_horizon
            minibatch = t.bptt_horizon * min(fit, key=lambda size: abs(size - want))
        whole = math.lcm(rows, minibatch)
        below = t.batch_size // whole * whole
        sizes = [size for size in (below, below + whole, below + 2 * whole) if size > 0]
        also = "" if minibatch == t.minibatch_size else f" with trainer.minibatch_size={minibatch}"
        raise ValueError(
            f"trainer.batch_size={t.batch_size} is not a multiple of {is_what}, so some steps would never be "
            f"trained on; try trainer.batch_size={_join(sizes)}{also}."
        )

    def _minibatches_nearby(self) -> list[int]:
        """Find the nearest sizes on both sides that hold whole segments and divide the batch."""
        segments = self.trainer.batch_size // self.trainer.bptt_horizon
        want = self.trainer.minibatch_size / self.trainer.bptt_horizon
        small = [size for size in range(1, math.isqrt(segments) + 1) if segments % size == 0]
        fit = sorted({*small, *(segments // size for size in small)})
        below = [size for size in fit if size < want][-1:]
        return [
            size * self.trainer.bptt_horizon for size in below + [size for size in fit if size > want][:1]
        ]

    @property
    def rollout_length(self) -> int:
        """Steps each agent lives between two updates."""
        return self.trainer.batch_size // self.world.agents

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
    for word, given in overrides.items():
        key, value = _canonical(word, given)
        if key in changed:
            raise ConfigError(f"{word}={given} says {key} a second time; which one is meant?")
        changed.add(key)
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


def _world_meant(config: Config, overrides: Mapping[str, Any]) -> str:
    """Find which world there will be: its name decides which other keys there are."""
    names = [str(value) for key, value in overrides.items() if key in ("world", "world.name")]
    return names[0] if names else config.world.name


def read_config(text: str) -> Config:
    """Read a config back from the JSON of a run's folder."""
    try:
        return Config.model_validate_json(text)
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
