"""What was lived: segments with their entry states, collecting, minibatches, evaluation."""

from holdfast.experience.collect import Collector, as_batch, value_of
from holdfast.experience.evaluate import Evaluation, MemoryMode, evaluate
from holdfast.experience.minibatches import (
    annealed_beta,
    drawn,
    importance_weights,
    minibatches,
    priorities_of,
)
from holdfast.experience.segments import Lead, Segments
from holdfast.experience.stopwatch import Clock

__all__ = [
    "Clock",
    "Collector",
    "Evaluation",
    "Lead",
    "MemoryMode",
    "Segments",
    "annealed_beta",
    "as_batch",
    "drawn",
    "evaluate",
    "importance_weights",
    "minibatches",
    "priorities_of",
    "value_of",
]
