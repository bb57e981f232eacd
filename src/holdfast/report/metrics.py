"""The metrics dictionary: every number a run reports, its unit, its meaning and what decides it."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["run", "time", "machine"]


@dataclass(frozen=True)
class Metric:
    """What a number means."""

    unit: str
    meaning: str
    healthy: str = ""
    kind: Kind = "run"
    """What decides it: `run`: the seed, bit for bit; `time`: a clock; `machine`: the machine it runs on."""


def described(name: str) -> Metric | None:
    """Find what a number means; `NAME@PART` is the same number of one of several."""
    return METRICS.get(name.partition("@")[0])


WHERE = {
    "": "Where the run stands",
    "time": "Where the time goes",
    "charts": "Episodes and learning",
    "losses": "Losses",
    "memory": "Memory",
    "gradients": "Gradients",
    "weights": "Weights",
    "machine": "Machine",
    "eval": "Evaluation",
}
"""The groups of names, in the order they are told."""

METRICS: dict[str, Metric] = {
    "global_step": Metric("steps", "agent steps lived so far; rows in which nobody acts are not counted"),
    "iteration": Metric("count", "rollouts and updates so far"),
    "seconds": Metric("s", "wall-clock time since the run began", kind="time"),
    "time/world": Metric("s", "in the world's steps, in the last iteration", kind="time"),
    "time/forward": Metric("s", "in the policy's acting", kind="time"),
    "time/copy": Metric("s", "in storing what was lived", kind="time"),
    "time/update": Metric("s", "in learning from it", kind="time"),
    "time/other": Metric("s", "in all the rest: checks, monitors, files, this report", kind="time"),
    "charts/SPS": Metric("steps/s", "agent steps a second over the last iteration", kind="time"),
    "charts/episodes": Metric("count", "episodes that ended in the last rollout"),
    "charts/episodic_return": Metric("reward", "mean return of the episodes that ended"),
    "charts/episodic_length": Metric("steps", "mean length of the episodes that ended"),
    "charts/learning_rate": Metric("", "the optimiser's step size"),
    "charts/scheduled": Metric("", "`@KEY`: the value that a schedule gives this key of the config now"),
    "charts/epochs": Metric("count", "epochs of the update really done; fewer than asked: the KL stop"),
    "charts/gradient_steps": Metric("count", "steps of the optimiser in the last update"),
    "charts/beta": Metric("", "exponent of the importance weights of prioritised sampling"),
    "losses/policy_loss": Metric("", "clipped policy loss, mean over minibatches"),
    "losses/value_loss": Metric("", "value loss, mean over minibatches"),
    "losses/entropy": Metric("nats", "mean entropy of the action distribution"),
    "losses/approx_kl": Metric("nats", "how far the policy moved within the update", "below 0.05"),
    "losses/clipfrac": Metric("share", "steps whose ratio left the clip range", "below 0.3"),
    "losses/grad_norm": Metric("", "length of the gradient before clipping", "above 0, below 1000"),
    "losses/explained_variance": Metric("", "1: values explain the returns; 0: not at all", "towards 1"),
    "losses/importance": Metric("", "mean ratio of the new to the old probability of an action", "near 1"),
    "losses/l2_init": Metric("", "squared distance of all weights from where they began"),
    "losses/l2_reg": Metric("", "squared length of all weights"),
    "losses/teacher_action": Metric(
        "nats", "`@TEACHER`: cross entropy from what the teacher does to what is done"
    ),
    "losses/teacher_value": Metric("", "`@TEACHER`: mean square difference of values from the teacher's"),
    "memory/replay_error": Metric(
        "", "largest |ratio - 1| of the first minibatch, before any weight changed", "below 1e-5"
    ),
    "memory/replay_value_error": Metric(
        "", "largest relative change of a value in that replay", "below 1e-5"
    ),
    "memory/check_replay": Metric(
        "", "largest change of a value or probability when stored segments are replayed", "below 1e-5"
    ),
    "memory/check_clear": Metric(
        "", "how much is felt after a start when all that was stored before it is exchanged", "exactly 0"
    ),
    "memory/drift": Metric(
        "",
        "how far stored entry states are from those the current weights make of the same steps, relative to "
        "their length, before the refresh",
    ),
    "memory/stale_kl": Metric(
        "nats",
        "KL between what the policy says from fresh and from stored states, same weights: how much of its "
        "change comes from stale state alone",
        "well below losses/approx_kl",
    ),
    "memory/resets": Metric("count", "times an agent's memory was cleared in the last rollout"),
    "memory/resets_due": Metric(
        "count", "starts that the world told, each of which owes one clear", "equal to memory/resets"
    ),
    "memory/state_norm": Metric("", "mean length of an agent's state"),
    "memory/state_norm_max": Metric("", "length of the longest state"),
    "memory/saturation": Metric("share", "units of the state near their bounds", "below 0.5"),
    "memory/age_mean": Metric("steps", "mean time since an agent's memory was cleared"),
    "memory/age_max": Metric("steps", "time since the memory was cleared that is oldest"),
    "memory/gradient_reach": Metric(
        "steps", "how far back the nearest 80 % of the gradient lies", "below trainer.bptt_horizon"
    ),
    "memory/buffer_bytes": Metric("bytes", "held by the segments of a rollout"),
    "memory/state_bytes": Metric("bytes", "held by the live states of all agents"),
    "memory/graph_bytes": Metric("bytes", "saved for the backward pass of a minibatch"),
    "gradients/norm": Metric(
        "", "`@MODULE`: length of the gradient of one part in the first minibatch, before clipping"
    ),
    "gradients/within": Metric("share", "`@N`: how much of the gradient reaches at most N steps back"),
    "weights/norm": Metric("", "`@LAYER`: length of a layer's weights"),
    "weights/largest_sv": Metric("", "`@LAYER`: its largest singular value"),
    "weights/mean_sv": Metric("", "`@LAYER`: the mean of its singular values"),
    "weights/sv_ratio": Metric("", "`@LAYER`: the largest over the smallest that is not 0 within rounding"),
    "weights/collapsed": Metric("share", "`@LAYER`: singular values that are next to nothing", "near 0"),
    "weights/effective_rank": Metric("", "`@LAYER`: the fewest singular values that make 99 % of their sum"),
    "weights/loglog_slope": Metric("", "`@LAYER`: slope of its singular values over their rank, both logs"),
    "weights/loglog_r2": Metric("", "`@LAYER`: how well that line fits; 1: exactly"),
    "machine/process_bytes": Metric("bytes", "memory of this process", kind="machine"),
    "machine/process_peak_bytes": Metric("bytes", "the most it ever was", kind="machine"),
    "machine/growth": Metric(
        "bytes/1e6 steps", "slope of it over the recent half of the run", "near 0", kind="machine"
    ),
    "machine/gpu_bytes": Metric("bytes", "memory of the GPU that tensors hold", kind="machine"),
    "machine/gpu_peak_bytes": Metric("bytes", "the most it ever was", kind="machine"),
    "eval/return_mean": Metric("reward", "mean greedy return of an evaluation, on the way or at the end"),
    "eval/return_mean_memory_cleared": Metric("reward", "the same with memory emptied before every step"),
}
