"""The knobs of the loop: phases, sampling, the loss, the optimiser, teachers and schedules."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationError

from holdfast.errors import did_you_mean
from holdfast.knobs import Knobs
from holdfast.values import Count, HowOften, first_complaint, optional, several_named
from holdfast.which_world import Parts

ScheduleKind = Literal["constant", "linear", "cosine", "exponential", "logarithmic"]
KINDS: tuple[str, ...] = get_args(ScheduleKind)


class Optimizer(Knobs):
    """What makes steps of gradients."""

    name: Literal["adam", "adamw", "muon"] = Field(
        default="adam", description="adam, adamw, or muon for hidden matrices with adamw for the rest"
    )
    learning_rate: float = Field(default=0.000457, ge=0, le=1000, description="step size")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean of gradients")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean of squared gradients")
    eps: float = Field(default=1e-8, gt=0, description="added to the denominator")
    weight_decay: float = Field(default=0.0, ge=0, description="how fast weights shrink by themselves")
    momentum: float = Field(default=0.95, ge=0, lt=1, description="muon's decay of the mean of gradients")


class PPO(Knobs):
    """The loss."""

    gamma: float = Field(default=0.977, ge=0, le=1, description="discount of rewards a step later")
    gae_lambda: float = Field(default=0.916, ge=0, le=1, description="mix of short and long advantages")
    advantage: Literal["gae", "vtrace"] = Field(
        default="gae",
        description="gae, or vtrace: weighted by how likely actions still are; a second forward",
    )
    rho_clip: float = Field(default=1.0, gt=0, description="vtrace: largest weight of a step's own surprise")
    c_clip: float = Field(default=1.0, gt=0, description="vtrace: largest weight of what comes after it")
    clip_coef: float = Field(default=0.1, gt=0, description="how far the probability ratio may move")
    vf_coef: float = Field(default=0.44, ge=0, description="weight of the value loss")
    vf_clip_coef: float = Field(default=0.1, gt=0, description="how far the value may move if clip_vloss")
    clip_vloss: bool = Field(default=True, description="clip the value loss")
    ent_coef: float = Field(default=0.0021, ge=0, description="weight of the entropy bonus")
    norm_adv: bool = Field(default=True, description="normalise advantages in each minibatch")
    max_grad_norm: float = Field(default=0.5, gt=0, description="gradients longer than this are shortened")
    target_kl: Annotated[float | None, BeforeValidator(optional)] = Field(
        default=None, gt=0, description="an update ends after the epoch in which approx_kl exceeds this"
    )
    l2_reg: float = Field(default=0.0, ge=0, description="weight of the squared length of all weights")
    l2_init: float = Field(default=0.0, ge=0, description="weight of their squared distance from the start")


class Sampling(Knobs):
    """Which segments make a minibatch."""

    method: Literal["sequential", "uniform", "prioritized"] = Field(
        default="sequential",
        description="sequential: each segment once an epoch; uniform: drawn; prioritized: drawn by advantage",
    )
    alpha: float = Field(
        default=0.6, ge=0, description="prioritized: 0 draws all alike, 1 by sum |advantage|"
    )
    beta0: float = Field(
        default=0.6, ge=0, le=1, description="prioritized: how much is corrected for it, growing to 1"
    )


class Teacher(Knobs):
    """A trained policy that the new one imitates for a while; it keeps a memory of its own."""

    run: str = Field(min_length=1, description="the teacher's run folder")
    action: float = Field(default=1.0, ge=0, description="weight of imitating its actions")
    value: float = Field(default=1.0, ge=0, description="weight of imitating its values")
    steps: Count = Field(default=1_000_000_000, ge=1, description="when its weight has become 0")
    anneal: float = Field(default=0.65, ge=0, le=1, description="share of that time in which it goes down")

    def __str__(self) -> str:
        words = (f"{key}={getattr(self, key):.15g}" for key in ("action", "value", "steps", "anneal"))
        return " ".join([self.run, *words])


def _teachers(value: Any) -> Any:
    if optional(value) is None:
        return ()
    if not isinstance(value, str):
        return value
    found = []
    for name, keys in several_named(value, "runs/a action=1 + runs/b"):
        for key in keys.keys() - Teacher.model_fields.keys():
            words = [word for word in Teacher.model_fields if word != "run"]
            meant = did_you_mean(key, words, f"there is {', '.join(words)}.")
            raise ValueError(f"there is no {key}; {meant}")
        found.append({"run": name, **keys})
    return found


class Schedule(Knobs):
    """How a number of the config changes in the course of a run."""

    key: str
    kind: ScheduleKind
    end: float

    def __str__(self) -> str:
        return f"{self.key}={self.kind}:{self.end:.15g}"


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
    accumulate: Count = Field(
        default=1, ge=1, description="pieces a minibatch is computed in, to save memory; gradients add up"
    )
    refresh: Literal["once", "epoch"] = Field(
        default="once",
        description="once or epoch: advantages are computed once an update, or before each epoch",
    )
    stale: Literal["keep", "recompute", "burn_in"] = Field(
        default="keep",
        description="states after weights changed: keep (as stored), recompute, or burn_in (warmed up)",
    )
    burn_in: Count = Field(default=16, ge=1, description="steps that warm up a state if stale=burn_in")
    num_workers: Count = Field(
        default=0, ge=0, description="processes the agents' worlds live in; 0: in this one"
    )
    async_factor: Count = Field(
        default=2, ge=1, description="with workers: shares of the agents; one is answered while others act"
    )
    worker_timeout: float = Field(
        default=120.0, gt=0, description="seconds in which a worker must answer, else it is lost"
    )
    restart_workers: bool = Field(
        default=False, description="start a lost worker anew, its agents forget; else the run ends"
    )
    check: HowOften = Field(
        default="first",
        description="check replay and clear on what is stored: first (two updates), every:N updates, off",
    )
    monitor: HowOften = Field(
        default="every:10", description="measure reach of gradients and bytes of graphs: first, every:N, off"
    )
    analyze_weights_interval: Count = Field(
        default=0, ge=0, description="iterations between singular values of all weights; 0: never"
    )
    checkpoint_interval: Count = Field(
        default=50, ge=0, description="iterations between checkpoints; 0: only at the end"
    )
    keep_checkpoints: Count = Field(
        default=3, ge=0, description="how many checkpoints are kept, the best beside them; 0: all"
    )
    clip_range: float = Field(
        default=0.0, ge=0, description="weights stay below this many times the largest at the start; 0: off"
    )
    eval_episodes: Count = Field(default=2000, ge=1, description="episodes of each evaluation")
    eval_interval: Count = Field(
        default=0, ge=0, description="iterations between evaluations; 0: only at the end"
    )
    eval_worlds: Parts = Field(
        default=(), description="other worlds to evaluate on, too: 'recall delay=16 + recall delay=32'"
    )
    teachers: Annotated[tuple[Teacher, ...], BeforeValidator(_teachers)] = Field(
        default=(), description="runs to imitate: 'runs/a action=1 value=1 steps=1e6 anneal=0.65 + runs/b'"
    )
    optimizer: Optimizer = Optimizer()
    ppo: PPO = PPO()
    sampling: Sampling = Sampling()


SCHEDULED = (
    *(f"trainer.{name}" for name, field in Trainer.model_fields.items() if field.annotation is float),
    *(
        f"trainer.{branch}.{name}"
        for branch, kind in (("optimizer", Optimizer), ("ppo", PPO), ("sampling", Sampling))
        for name, field in kind.model_fields.items()
        if field.annotation in (float, float | None)
    ),
)
"""The keys of numbers that are read anew in every iteration."""


def scheduled_from(trainer: Trainer, schedule: Schedule) -> float:
    """Say where a schedule starts: at what the config says."""
    if schedule.key not in SCHEDULED:
        hint = did_you_mean(
            schedule.key, SCHEDULED, f"numbers that can be scheduled: {', '.join(SCHEDULED)}."
        )
        raise ValueError(
            f"schedule.{schedule.key}: it is read once, when a run begins, or is no number; {hint}"
        )
    _, *path = schedule.key.split(".")
    found: Any = trainer
    for part in path:
        found = getattr(found, part)
    if found is None:
        raise ValueError(f"schedule.{schedule.key}: it is none; give {schedule.key}=NUMBER to start from.")
    return found


def with_numbers(trainer: Trainer, numbers: Mapping[str, float]) -> Trainer:
    """Return the knobs with some numbers changed, each within its bounds."""
    for key, number in numbers.items():
        _, *path, leaf = key.split(".")
        branch = getattr(trainer, path[0]) if path else trainer
        try:
            changed = type(branch).model_validate({**dict(branch), leaf: number})
        except ValidationError as error:
            told = first_complaint(error, f"schedule.{key.removesuffix(leaf)}")
            raise ValueError(f"{told}") from None
        trainer = trainer.model_copy(update={path[0]: changed}) if path else changed
    return trainer
