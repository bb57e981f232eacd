"""Default hyperparameters: TrainerConfig, PPOConfig, OptimizerConfig, schedules; batch-size arithmetic."""

import math
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationError

from holdfast.config.base import (
    ConfigBase,
    Int,
    Interval,
    first_error_message,
    key_hint,
    keys_of,
    parse_named_list,
    parse_optional,
)
from holdfast.config.world_names import Parts
from holdfast.errors import ConfigError, did_you_mean

ScheduleKind = Literal["constant", "linear", "cosine", "exponential", "logarithmic"]
KINDS: tuple[str, ...] = get_args(ScheduleKind)


class OptimizerConfig(ConfigBase):
    """The optimizer."""

    name: Literal["adam", "adamw", "muon"] = Field(
        default="adam", description="adam, adamw, or muon for hidden matrices with adamw for the rest"
    )
    learning_rate: float = Field(default=0.000457, ge=0, le=1000, description="learning rate")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay rate of the first moment")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="decay rate of the second moment")
    eps: float = Field(default=1e-8, gt=0, description="added to the denominator for stability")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay")
    momentum: float = Field(default=0.95, ge=0, lt=1, description="momentum of muon")


class PPOConfig(ConfigBase):
    """The PPO loss."""

    gamma: float = Field(default=0.977, ge=0, le=1, description="discount factor")
    gae_lambda: float = Field(default=0.916, ge=0, le=1, description="lambda of generalized advantage estimation")
    advantage: Literal["gae", "vtrace"] = Field(
        default="gae", description="gae, or vtrace: importance-weighted, needs a second forward pass"
    )
    rho_clip: float = Field(default=1.0, gt=0, description="vtrace: clipping threshold of rho")
    c_clip: float = Field(default=1.0, gt=0, description="vtrace: clipping threshold of c")
    clip_coef: float = Field(default=0.1, gt=0, description="clipping range of the probability ratio")
    vf_coef: float = Field(default=0.44, ge=0, description="coefficient of the value loss")
    vf_clip_coef: float = Field(default=0.1, gt=0, description="clipping range of the value, with clip_vloss")
    clip_vloss: bool = Field(default=True, description="clip the value loss")
    ent_coef: float = Field(default=0.0021, ge=0, description="coefficient of the entropy bonus")
    norm_adv: bool = Field(default=True, description="normalize advantages per minibatch")
    max_grad_norm: float = Field(default=0.5, gt=0, description="gradient-norm clipping threshold")
    target_kl: Annotated[float | None, BeforeValidator(parse_optional)] = Field(
        default=None, gt=0, description="stop an update after the epoch in which approx_kl exceeds this"
    )
    l2_reg: float = Field(default=0.0, ge=0, description="coefficient of the squared norm of all weights")
    l2_init: float = Field(
        default=0.0, ge=0, description="coefficient of the squared distance of weights from their initial values"
    )


class SamplingConfig(ConfigBase):
    """How segments are sampled into minibatches."""

    method: Literal["sequential", "uniform", "prioritized"] = Field(
        default="sequential",
        description="sequential: each segment once per epoch; uniform: at random; prioritized: by advantage",
    )
    alpha: float = Field(default=0.6, ge=0, description="prioritized: exponent of sum |advantage|; 0 is uniform")
    beta0: float = Field(
        default=0.6, ge=0, le=1, description="prioritized: initial importance correction, annealed to 1"
    )


class TeacherConfig(ConfigBase):
    """A trained policy to imitate; it has its own memory."""

    run: str = Field(min_length=1, description="run folder of the teacher")
    action: float = Field(default=1.0, ge=0, description="coefficient of the action loss")
    value: float = Field(default=1.0, ge=0, description="coefficient of the value loss")
    steps: Int = Field(default=1_000_000_000, ge=1, description="steps after which both coefficients are 0")
    anneal: float = Field(default=0.65, ge=0, le=1, description="fraction of these steps over which they decay")

    def __str__(self) -> str:
        words = (f"{key}={getattr(self, key):.15g}" for key in ("action", "value", "steps", "anneal"))
        return " ".join([self.run, *words])


def _parse_teachers(value: Any) -> Any:
    if parse_optional(value) is None:
        return ()
    if not isinstance(value, str):
        return value
    teachers = []
    for name, keys in parse_named_list(value, "runs/a action=1 + runs/b"):
        for key in keys.keys() - TeacherConfig.model_fields.keys():
            words = [word for word in TeacherConfig.model_fields if word != "run"]
            hint = did_you_mean(key, words, f"choose from {', '.join(words)}.")
            raise ValueError(f"there is no {key}; {hint}")
        teachers.append({"run": name, **keys})
    return teachers


class Schedule(ConfigBase):
    """The schedule of one number of the config over a run."""

    key: str
    kind: ScheduleKind
    end: float

    def __str__(self) -> str:
        return f"{self.key}={self.kind}:{self.end:.15g}"


class TrainerConfig(ConfigBase):
    """The training loop."""

    total_timesteps: Int = Field(
        default=50_000_000, ge=1, description="steps of the run, rounded up to whole batches; invalid rows count"
    )
    batch_size: Int = Field(default=524288, ge=1, le=2**40, description="steps collected before each update")
    minibatch_size: Int = Field(default=16384, ge=1, description="steps per gradient step")
    bptt_horizon: Int = Field(
        default=64, ge=1, description="steps of a segment: truncation length of backpropagation through time"
    )
    update_epochs: Int = Field(default=1, ge=1, le=1000, description="epochs over each batch")
    accumulate: Int = Field(
        default=1, ge=1, description="gradient accumulation: parts a minibatch is split into, to save memory"
    )
    normalize_reward: bool = Field(
        default=False, description="divide rewards by the running deviation of discounted returns; scores stay raw"
    )
    action_noise: Literal["white", "pink"] = Field(
        default="white",
        description="noise of a Box's actions in rollouts: white, or pink: correlated over time, reaches further",
    )
    refresh: Literal["once", "epoch"] = Field(
        default="once", description="compute advantages once per update, or before each epoch"
    )
    stale: Literal["keep", "recompute", "burn_in"] = Field(
        default="keep", description="entry states after weight changes: keep (as stored), recompute, or burn_in"
    )
    burn_in: Int = Field(default=16, ge=1, description="burn-in steps, with stale=burn_in")
    num_workers: Int = Field(default=0, ge=0, description="worker processes (0: run worlds in the trainer)")
    async_factor: Int = Field(
        default=2, ge=1, description="with workers: groups of agents; the policy acts for one while others step"
    )
    worker_timeout: float = Field(
        default=120.0, gt=0, description="seconds before a worker that does not answer counts as crashed"
    )
    restart_workers: bool = Field(
        default=False, description="restart crashed workers with new episodes and cleared memory (false: stop the run)"
    )
    cuda_graphs: bool = Field(
        default=True,
        description="on a GPU, replay rollouts and minibatches as CUDA graphs; what cannot be recorded is logged",
    )
    check: Interval = Field(
        default="first",
        description="check replay and clear on stored segments: first (two updates), every:N updates, off",
    )
    monitor: Interval = Field(
        default="every:10", description="measure gradient reach and graph memory: first, every:N, off"
    )
    analyze_weights_interval: Int = Field(
        default=0, ge=0, description="iterations between singular-value analyses of the weights; 0: off"
    )
    checkpoint_interval: Int = Field(default=50, ge=0, description="iterations between checkpoints; 0: only at the end")
    keep_checkpoints: Int = Field(default=3, ge=0, description="checkpoints to keep, besides the best; 0: all")
    clip_range: float = Field(
        default=0.0, ge=0, description="clip weights to this multiple of the largest initial one; 0: off"
    )
    eval_episodes: Int = Field(default=2000, ge=1, description="episodes of each evaluation")
    eval_max_steps: Int = Field(
        default=100_000, ge=1, description="steps after which an episode of an evaluation that has not ended is cut"
    )
    eval_interval: Int = Field(default=0, ge=0, description="iterations between evaluations; 0: only at the end")
    eval_worlds: Parts = Field(default=(), description="further evaluation worlds: 'recall delay=16 + recall delay=32'")
    teachers: Annotated[tuple[TeacherConfig, ...], BeforeValidator(_parse_teachers)] = Field(
        default=(), description="runs to imitate: 'runs/a action=1 value=1 steps=1e6 anneal=0.65 + runs/b'"
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    ppo: PPOConfig = PPOConfig()
    sampling: SamplingConfig = SamplingConfig()


SCHEDULED = tuple(
    key for key, field in keys_of(TrainerConfig, "trainer.").items() if field.annotation in (float, float | None)
)
"""The keys of numbers that are read in every iteration."""


def require_scheduled(key: str) -> None:
    """Require the key of a number that is read in every iteration."""
    if key not in SCHEDULED:
        everything = f"choose from {', '.join(SCHEDULED)}."
        # A key that exists is not misspelt.
        hint = everything if key in keys_of(TrainerConfig, "trainer.") else key_hint(key, SCHEDULED, everything)
        raise ConfigError(f"{key} is not a number that is read in every iteration; {hint}")


def with_number(trainer: TrainerConfig, key: str, value: int | float, *, prefix: str = "") -> TrainerConfig:
    """Return the config with a number that is read in every iteration; one outside of its bounds is an error.

    `prefix` comes before the key in errors.
    """
    try:
        require_scheduled(key)
    except ConfigError as error:
        raise ValueError(f"{prefix}{error}") from None
    _, *path, name = key.split(".")
    branch = getattr(trainer, path[0]) if path else trainer
    try:
        changed = type(branch).model_validate({**dict(branch), name: value})
    except ValidationError as error:
        raise ValueError(first_error_message(error, f"{prefix}{key.removesuffix(name)}")) from None
    return trainer.model_copy(update={path[0]: changed} if path else {name: getattr(changed, name)})


def check_schedule(trainer: TrainerConfig, schedule: Schedule) -> None:
    """Require the key of a number that is read in every iteration, and an end within its bounds."""
    key, end = schedule.key, schedule.end
    with_number(trainer, key, end, prefix="schedule.")
    _, *path, name = key.split(".")
    start = getattr(getattr(trainer, path[0]) if path else trainer, name)
    if start is None:
        raise ValueError(f"schedule.{key}: it is none; give {key}=NUMBER to start from.")
    if schedule.kind == "exponential" and min(start, end) <= 0:
        raise ValueError(
            f"schedule.{key}={schedule.kind}:{end:g} goes from {start:g} to {end:g}; an exponential needs both above "
            "0: use linear or cosine."
        )


PROPOSALS = 3


def check_batch_sizes(agents: int, trainer: TrainerConfig) -> None:
    """Require sizes with which every step is trained on; the error proposes three."""
    horizon, batch, minibatch = trainer.bptt_horizon, trainer.batch_size, trainer.minibatch_size
    rows = agents * horizon
    if batch % rows:
        raise _batch_error(f"world.agents * trainer.bptt_horizon = {agents} * {horizon} = {rows}", agents, trainer)
    if minibatch % horizon:
        multiples = [size * horizon for size in _divisors(batch // horizon)]
        raise ValueError(
            f"trainer.minibatch_size={minibatch} is not a multiple of trainer.bptt_horizon={horizon}; "
            f"try trainer.minibatch_size={_nearest(multiples, minibatch)}."
        )
    if batch % minibatch:
        raise _batch_error(f"trainer.minibatch_size={minibatch}", agents, trainer)
    segments, accumulate = minibatch // horizon, trainer.accumulate
    if segments % accumulate:
        raise ValueError(
            f"trainer.accumulate={accumulate} does not divide the {segments} segments of a minibatch "
            f"({minibatch} / {horizon}); try trainer.accumulate={_nearest(_divisors(segments), accumulate)}."
        )
    if trainer.stale == "burn_in" and trainer.burn_in > horizon:
        what = f"trainer.burn_in={trainer.burn_in} is longer than a segment"
        raise ValueError(f"{what}; try trainer.burn_in={horizon} or less.")


def fit_batch_sizes(agents: int, horizon: int, batch: int, minibatch: int) -> dict[str, int]:
    """Return the sizes nearest to these with which every step of a number of agents is trained on."""
    unit = agents * horizon
    batch = unit * max(1, round(batch / unit))
    fitting = [horizon * segments for segments in _divisors(batch // horizon)]
    nearest = min(fitting, key=lambda size: abs(size - minibatch))
    return {"trainer.batch_size": batch, "trainer.minibatch_size": nearest}


def _batch_error(what: str, agents: int, trainer: TrainerConfig) -> ValueError:
    horizon, batch, minibatch = trainer.bptt_horizon, trainer.batch_size, trainer.minibatch_size
    fitting = minibatch
    if minibatch % horizon:
        fitting = horizon * min(_divisors(agents), key=lambda size: abs(size - minibatch / horizon))
    unit = math.lcm(agents * horizon, fitting)
    first = max(1, batch // unit)
    sizes = " or ".join(str(unit * (first + more)) for more in range(PROPOSALS))
    also = "" if fitting == minibatch else f" with trainer.minibatch_size={fitting}"
    return ValueError(
        f"trainer.batch_size={batch} is not a multiple of {what}, so some steps would never be trained on; "
        f"try trainer.batch_size={sizes}{also}."
    )


def _nearest(sizes: list[int], wanted: int) -> str:
    nearest = sorted(sizes, key=lambda size: abs(size - wanted))[:PROPOSALS]
    return " or ".join(map(str, sorted(nearest)))


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
