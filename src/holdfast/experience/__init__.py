"""What was lived: segments with their entry states, collecting, minibatches, evaluation."""

from holdfast.experience.collect import Collector, as_batch, value_of
from holdfast.experience.evaluate import Evaluation, MemoryMode, evaluate
from holdfast.experience.minibatches import minibatches
from holdfast.experience.segments import Lead, Segments

__all__ = [
    "Collector",
    "Evaluation",
    "Lead",
    "MemoryMode",
    "Segments",
    "as_batch",
    "evaluate",
    "minibatches",
    "value_of",
]
