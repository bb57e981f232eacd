"""Minibatches: whole segments in a drawn order, each exactly once an epoch."""

from collections.abc import Iterator

from holdfast.experience.segments import Segments
from holdfast.shapes import Int, Tensor
from holdfast.worlds import draws


def minibatches(segments: Segments, rows: int, *, seed: int, epoch: int) -> Iterator[Int[Tensor, " rows"]]:
    """Yield row indices, `rows` at a time; `epoch` counts all epochs of the run."""
    device = segments.tail["rewards"].device
    order = draws.permutation(len(segments), seed, draws.STREAM_MINIBATCH, epoch, device)
    yield from order.split(rows)
