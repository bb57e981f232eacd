"""Segments: rows of stored steps, their minibatches, the TensorDict a policy reads, the values of next steps."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from holdfast import ranks, rng
from holdfast.errors import ContractError
from holdfast.policies import FunctionalPolicy, LSTMWrapper
from holdfast.policies.recurrent_policy import PolicyBatch
from holdfast.types import Bool, Float, Int, Tensor

POLICY_INPUTS = ("env_obs", "first", "valid", "trial")
"""Keys of a stored step that a policy reads."""
MIN_PRIORITY = 1e-6
"""Added to every priority, so that each segment can be sampled."""
MAX_MINIBATCHES_PER_EPOCH = 1 << 24


def policy_td(
    leaves: Mapping[str, Any] | TensorDictBase, *, start: int | None = None, draws: Tensor | None = None
) -> TensorDict:
    """Build the TensorDict a policy reads, for a step `[B]` or segments `[B,T]`.

    `leaves` are `env_obs`, `first` (or `dones`, `truncateds`), and where there are any `valid` and `trial`.
    `start` is the first agent of the slice whose live states are read; none: inside `policy.replay`.
    `draws` are the uniform numbers that actions are sampled with; none: actions are given.
    """
    batch = next(leaves[key] for key in ("first", "dones", "truncateds") if key in leaves).shape
    inputs: dict[str, Any] = dict(leaves.items())
    if start is not None:
        # On the host, which looks the slice up: a GPU tensor would make it wait in every step.
        inputs["training_env_id_start"] = torch.full(batch, start)
    if draws is not None:
        inputs["draws"] = draws
    return TensorDict(inputs, batch_size=batch)


def policy_inputs(steps: TensorDictBase) -> dict[str, Any]:
    """Return what a policy reads of stored steps."""
    return {key: steps[key] for key in POLICY_INPUTS}


def policy_batch(
    policy: LSTMWrapper, leaves: Mapping[str, Any], *, start: int | None = None, draws: Tensor | None = None
) -> PolicyBatch:
    """Build what a policy reads: a dictionary, or the TensorDict of `policy_td` for a `forward` written by hand."""
    if type(policy).forward is not FunctionalPolicy.forward:
        return policy_td(leaves, start=start, draws=draws)
    batch = dict(leaves)
    if start is not None:
        batch["training_env_id_start"] = start
    if draws is not None:
        batch["draws"] = draws
    return batch


@dataclass(frozen=True)
class BurnIn:
    """The last `k` steps before each row, and the state before those steps."""

    steps: TensorDict
    """`[B,k]`: policy inputs and actions."""
    entry_state: TensorDict
    """`[B]`: the state before `steps`."""

    def rows(self, index: Int[Tensor, " rows"]) -> "BurnIn":
        """Select rows."""
        return BurnIn(self.steps[index], self.entry_state[index])


@dataclass(frozen=True)
class Segments:
    """Rows of `T` consecutive steps of one agent, with all that replaying them needs.

    `steps[B,T]` holds `env_obs rewards dones truncateds first valid trial actions act_log_prob values
    last_values`. `rewards dones truncateds` of step t came with its observation and belong to action t-1;
    `last_values` is the value of a truncated episode's last observation. `values_now` and `ratio` are the
    values and probability ratios of the row's latest minibatch; `values` stay those of the rollout.
    """

    steps: TensorDict
    entry_state: TensorDict
    """`[B]`: the state before each row's first step, not yet cleared."""
    tail: TensorDict
    """`[B]`: rewards, flags, value and last value of the step after each row."""
    version: Int[Tensor, " B"]
    """The number of updates before the rollout of each row."""
    agents: int | None = None
    """Number of agents of a complete rollout, ordered agent by agent; none: a selection of rows."""
    burn_in: BurnIn | None = None
    """The steps before each row, for burn-in."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def num_valid(self) -> int:
        """Number of valid steps."""
        return int(self.steps["valid"].sum())

    @property
    def agent_shape(self) -> tuple[int, int]:
        """Number of agents, and of rows per agent."""
        if self.agents is None:
            raise ContractError("This is a selection of rows; only a complete rollout has rows by agent.")
        return self.agents, len(self) // self.agents

    @property
    def segments_per_agent(self) -> int:
        """Number of rows per agent."""
        return self.agent_shape[1]

    def rows(self, index: Int[Tensor, " rows"]) -> "Segments":
        """Select rows."""
        burn_in = None if self.burn_in is None else self.burn_in.rows(index)
        fields = (self.steps[index], self.entry_state[index], self.tail[index], self.version[index])
        return Segments(*fields, burn_in=burn_in)

    def map_rewards(self, function: Callable[[Tensor], Tensor]) -> "Segments":
        """Return the same segments with other rewards; all other tensors are shared."""
        steps, tail = self.steps.clone(recurse=False), self.tail.clone(recurse=False)
        steps["rewards"], tail["rewards"] = function(steps["rewards"]), function(tail["rewards"])
        return replace(self, steps=steps, tail=tail)

    def agent_of(self, row: int) -> int:
        """Return the agent of a row, by its number over all ranks."""
        return (ranks.rank() * len(self) + row) // self.segments_per_agent

    def describe(self, row: int, step: int) -> str:
        """Name the agent of a row and the step of the rollout."""
        segment = row % self.segments_per_agent
        return f"agent {self.agent_of(row)}, step {segment * self.steps.shape[1] + step} of the rollout"


def minibatches(segments: Segments, rows: int, *, seed: int, epoch: int) -> Iterator[Int[Tensor, " rows"]]:
    """Yield row indices over the rows of all ranks, `rows` at a time; `epoch` counts all epochs of the run."""
    device = segments.tail["rewards"].device
    order = rng.permutation(len(segments) * ranks.count(), seed, rng.STREAM_MINIBATCH, epoch, device)
    yield from order.split(rows)


def sample_minibatches(
    segments: Segments, priorities: Float[Tensor, " B"] | None, rows: int, count: int, *, seed: int, epoch: int
) -> Iterator[tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]]:
    """Yield `count` minibatches of `rows` row indices, with each row's probability to be drawn first.

    p[i] = (priority[i] + 1e-6) / sum_j (priority[j] + 1e-6); uniform without priorities. Rows are distinct
    within a minibatch; minibatches are independent. `epoch` counts all epochs of the run. Rows and priorities are those
    of all ranks.
    """
    total = len(segments) * ranks.count()
    if rows > total:
        raise ContractError(
            f"A minibatch of {rows} rows cannot be drawn from {total} without taking one twice; give "
            f"trainer.minibatch_size for at most {total} rows."
        )
    device = segments.tail["rewards"].device
    raised = torch.zeros(total, device=device) if priorities is None else priorities
    probabilities = (raised + MIN_PRIORITY) / (raised + MIN_PRIORITY).sum()
    all_rows = torch.arange(total, device=device)
    for number in range(count):
        clock = epoch * MAX_MINIBATCHES_PER_EPOCH + number
        uniform = rng.uniform(seed, rng.STREAM_MINIBATCH, all_rows, clock).double() + 2.0**-25
        # Gumbel top-k (Kool et al. 2019): sampling without replacement.
        index = (probabilities.log() - (-uniform.log()).log()).topk(rows).indices
        yield index, probabilities[index]


def own_part(
    index: Int[Tensor, " total"], weights: Float[Tensor, " total"] | None, rows: int
) -> tuple[Int[Tensor, " own"], Float[Tensor, " own"] | None]:
    """Select the rows of a minibatch that this rank has collected, counted from its first; `rows` are those it has."""
    if ranks.count() == 1:
        return index, weights
    index = index - ranks.rank() * rows
    is_own = (index >= 0) & (index < rows)
    return index[is_own], None if weights is None else weights[is_own]


def segment_priorities(
    advantages: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"], alpha: float
) -> Float[Tensor, " B"]:
    """Priority of each row: (sum |A|)^alpha over valid steps; 0 where the sum is not finite."""
    total = torch.where(valid, advantages.abs(), 0.0).sum(1)
    return torch.where(total.isfinite(), total, 0.0) ** alpha


def importance_weights(probabilities: Float[Tensor, " rows"], total: int, beta: float) -> Float[Tensor, " rows"]:
    """Importance-sampling weights of prioritized rows: (total p)^-beta."""
    return (total * probabilities) ** -beta


def annealed_beta(beta0: float, progress: float) -> float:
    """Anneal the importance-sampling exponent: beta0 + (1 - beta0) progress."""
    return beta0 + (1 - beta0) * progress


def reverse_scan(
    add: Float[Tensor, "B T"], keep: Float[Tensor, "B T"], end: Float[Tensor, " B"]
) -> Float[Tensor, "B T"]:
    """Solve y[t] = add[t] + keep[t] y[t+1] with y[T] = end, by doubling: log2(T) steps, no loop over T."""
    add, keep = torch.cat([add, end[:, None]], dim=1), torch.nn.functional.pad(keep, (0, 1))
    reach = 1
    while reach < add.shape[1]:
        ahead_add = torch.nn.functional.pad(add[:, reach:], (0, reach))
        ahead_keep = torch.nn.functional.pad(keep[:, reach:], (0, reach))
        # Selected, not multiplied: values behind keep = 0 may be NaN.
        add, keep = add + torch.where(keep == 0, 0.0, keep * ahead_add), keep * ahead_keep
        reach *= 2
    return add[:, :-1]


def shift_left(x: Tensor, tail: Tensor) -> Tensor:
    """Return x[t+1] at step t, and the tail at the last step."""
    return torch.cat([x[:, 1:], tail[:, None]], dim=1)


def next_values(
    values: Float[Tensor, "B T"],
    valid: Bool[Tensor, "B T"],
    next_ended: Bool[Tensor, "B T"],
    next_cut_value: Float[Tensor, "B T"],
    end_values: Float[Tensor, " B"],
) -> Float[Tensor, "B T"]:
    """Value of each step as the step before it bootstraps from it, skipping invalid steps.

    y[t] = V[t] if valid[t], else next_cut_value[t] if next_ended[t], else y[t+1]; y[T] = end_values
    """
    add = torch.where(valid, values, torch.where(next_ended, next_cut_value, 0.0))
    return reverse_scan(add, (~valid & ~next_ended).to(values.dtype), end_values)


def segment_end_values(
    values: Float[Tensor, "A L"], steps: TensorDictBase, after: TensorDictBase, horizon: int
) -> Float[Tensor, "A S"]:
    """Bootstrap value of each segment's last step.

    `steps[A,L]` are those of a rollout, in order; `after[A]` is the step after the last one.
    """
    ended = {key: shift_left(steps[key], after[key]) for key in ("dones", "truncateds")}
    last_values = shift_left(steps["last_values"], after["last_values"])
    bootstrap = next_values(
        values,
        steps["valid"],
        ended["dones"] | ended["truncateds"],
        torch.where(ended["dones"], 0.0, last_values),
        after["values"],
    )
    return torch.cat([bootstrap[:, horizon::horizon], after["values"][:, None]], dim=1)
