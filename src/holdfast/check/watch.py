"""The check inside a run: replay and clear, on segments the trainer really stored, by its own replay."""

import torch
from tensordict import TensorDictBase

from holdfast.check.compare import ROUNDED, Spread, most
from holdfast.errors import ContractError
from holdfast.experience import Segments
from holdfast.learn import replay
from holdfast.policies import LSTMWrapper, PurePolicy
from holdfast.policies.clock import clears
from holdfast.shapes import Bool, Float, Tensor
from holdfast.worlds.seen import choose

REPLAY_ALARM = 1e-4
"""Above this, replaying does not give what was lived: the memory is wrong somewhere."""
REPLAY_BOUNDS: dict[str, float | Spread] = {"float32": REPLAY_ALARM, "bfloat16": ROUNDED}
"""By what a policy computes in."""
CLEAR_ALARM = 1e-6
"""Above this, relative to what is said, something crossed a clear; on one machine it is exactly 0."""
ROWS = 8
"""How many segments are looked at: enough to see every kind of start, few enough to cost nothing."""


@torch.no_grad()
def look(policy: LSTMWrapper, segments: Segments, agents: int) -> dict[str, float]:
    """Measure replay and clear on the stored segments of so many agents, before any weight changes.

    Broken memory stops the run: it would go on, look plausible, and never learn to remember.
    """
    clear = clears(segments.steps, policy.clear_on)
    # Rows with starts inside come first; a start in the first step is nothing to cross.
    order = clear[:, 1:].sum(1).argsort(descending=True, stable=True)
    chosen = segments.rows(order[:ROWS])
    again = replay(policy, chosen)
    for key in ("values", "act_log_prob"):
        if not bool(torch.where(chosen.steps["valid"], again[key], 0.0).isfinite().all()):
            raise ContractError(
                f"What the policy says is not finite ({key}); look for NaN in weights and observations."
            )
    error = _replay_error(chosen.steps, again)
    found = {"memory/check_replay": float(error.max())}
    size, bound = _judged(policy, error[chosen.steps["valid"]])
    if not size <= bound:
        _stop("replay", _place(error, order, agents), size, bound)
    last, crossed = _last_clear(clear[order[:ROWS]])
    if bool(crossed.any()):
        leak = _leak(policy, chosen, again, last) * crossed[:, None]
        found["memory/check_clear"] = float(leak.max())
        if not found["memory/check_clear"] <= CLEAR_ALARM:
            _stop("clear", _place(leak, order, agents), found["memory/check_clear"], CLEAR_ALARM)
    return found


def replay_alarm(precision: str) -> float:
    """Say above which largest error of an update's first minibatch something is wrong."""
    return most(REPLAY_BOUNDS[precision])


def _judged(policy: LSTMWrapper, error: Float[Tensor, " steps"]) -> tuple[float, float]:
    """Hold errors against what the policy's precision allows: their size, and the bound."""
    bound = REPLAY_BOUNDS[policy.precision if isinstance(policy, PurePolicy) else "float32"]
    if isinstance(bound, Spread) and error.numel():
        return bound.judge(error)[1:]
    return float(error.max()) if error.numel() else 0.0, REPLAY_ALARM


def _replay_error(lived: TensorDictBase, again: TensorDictBase) -> Float[Tensor, "B T"]:
    ratio = (again["act_log_prob"] - lived["act_log_prob"]).exp() - 1
    values = (again["values"] - lived["values"]) / lived["values"].abs().clamp(min=1)
    return torch.where(lived["valid"], torch.maximum(ratio.abs(), values.abs()), 0.0)


def _last_clear(clear: Bool[Tensor, "B T"]) -> tuple[Tensor, Tensor]:
    """Find each row's last clear, and whether anything lies before it in the row."""
    step = torch.arange(clear.shape[1], device=clear.device)
    last = torch.where(clear, step, 0).amax(1)
    return last, last > 0


def _leak(policy: LSTMWrapper, segments: Segments, was: TensorDictBase, last: Tensor) -> Float[Tensor, "B T"]:
    """Exchange everything before each row's last clear for another row's, and see what moves after it."""
    other = torch.arange(len(segments), device=last.device).roll(1)
    steps = segments.steps.clone()
    step = torch.arange(steps.shape[1], device=last.device)
    before = step[None] < last[:, None]
    steps["env_obs"] = choose(before, steps["env_obs"][other], steps["env_obs"])
    entry, told = segments.entry[other], policy.actions.key
    now = replay(policy, Segments(steps, entry, segments.tail, segments.version))
    moved = torch.maximum((now["values"] - was["values"]).abs(), (now[told] - was[told]).abs().amax(-1))
    size = torch.maximum(was["values"].abs().max(), was[told].abs().max()).clamp(min=1)
    return torch.where(before | ~steps["valid"], 0.0, moved / size)


def _place(error: Float[Tensor, "B T"], order: Tensor, agents: int) -> str:
    """Name the place of the largest error; the segments of an agent lie behind each other."""
    T = error.shape[1]
    row, step = divmod(int(error.argmax()), T)
    agent, segment = divmod(int(order[row]), len(order) // agents)
    return f"agent {agent}, step {segment * T + step} of the rollout"


def _stop(law: str, place: str, size: float, bound: float) -> None:
    told = {
        "replay": "replaying what was stored does not give what was lived",
        "clear": "what was stored before an episode's start is felt after it",
    }
    raise ContractError(
        f"The memory is broken ({law}): {told[law]}: off by {size:.1e} at {place}, may be by {bound:.0e}. "
        "`holdfast check` on this policy tells what is wrong, or `holdfast check world:NAME`, if the world "
        "writes to what it told before; trainer.check=off trains all the same."
    )
