"""Minibatches: whole segments in a drawn order, each exactly once an epoch, or drawn by priority."""

from collections.abc import Iterator

import torch

from holdfast.errors import ContractError
from holdfast.experience.segments import Segments
from holdfast.shapes import Bool, Float, Int, Tensor
from holdfast.worlds import draws

LEAST = 1e-6
"""What is added to every priority, so that no segment is out of reach."""
MOST_OF_AN_EPOCH = 1 << 24


def minibatches(segments: Segments, rows: int, *, seed: int, epoch: int) -> Iterator[Int[Tensor, " rows"]]:
    """Yield row indices, `rows` at a time; `epoch` counts all epochs of the run."""
    device = segments.tail["rewards"].device
    order = draws.permutation(len(segments), seed, draws.STREAM_MINIBATCH, epoch, device)
    yield from order.split(rows)


def drawn(
    segments: Segments,
    priorities: Float[Tensor, " B"] | None,
    rows: int,
    count: int,
    *,
    seed: int,
    epoch: int,
) -> Iterator[tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]]:
    """Yield `count` minibatches of `rows` row indices, and how probable each was to be the first one drawn.

    p[i] = (priority[i] + 1e-6) / sum of these; without priorities all are alike. Inside a minibatch no row
    comes twice; minibatches know nothing of each other. `epoch` counts all epochs of the run.
    """
    if rows > len(segments):
        raise ContractError(
            f"A minibatch of {rows} rows cannot be drawn from {len(segments)} without taking one twice; give "
            f"trainer.minibatch_size for at most {len(segments)} rows."
        )
    device = segments.tail["rewards"].device
    raised = torch.zeros(len(segments), device=device) if priorities is None else priorities
    probabilities = (raised + LEAST) / (raised + LEAST).sum()
    every = torch.arange(len(segments), device=device)
    for number in range(count):
        clock = epoch * MOST_OF_AN_EPOCH + number
        uniform = draws.uniform(seed, draws.STREAM_MINIBATCH, every, clock).double() + 2.0**-25
        # The largest of log p + Gumbel noise, and the next largest (Kool et al. 2019).
        index = (probabilities.log() - (-uniform.log()).log()).topk(rows).indices
        yield index, probabilities[index]


def priorities_of(
    advantages: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"], alpha: float
) -> Float[Tensor, " B"]:
    """Say how much there is to learn from each row: (sum |A|)^alpha, over steps somebody acted in.

    With alpha 0 all are alike. A row whose sum is not finite has no priority.
    """
    total = torch.where(valid, advantages.abs(), 0.0).sum(1)
    return torch.where(total.isfinite(), total, 0.0) ** alpha


def importance_weights(
    probabilities: Float[Tensor, " rows"], total: int, beta: float
) -> Float[Tensor, " rows"]:
    """Weigh rows down that are drawn more often than by chance: (total p)^-beta."""
    return (total * probabilities) ** -beta


def annealed_beta(beta0: float, progress: float) -> float:
    """Let weighing become exact towards the end of a run: beta0 + (1 - beta0) progress."""
    return beta0 + (1 - beta0) * progress
