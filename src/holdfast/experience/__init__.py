"""What was lived: segments with their entry states, collecting, minibatches, evaluation."""

from holdfast.experience.collect import Collector, as_batch, value_of
from holdfast.experience.contest import Contest, compete
from holdfast.experience.evaluate import PATIENCE, Evaluation, evaluate
from holdfast.experience.minds import MEMORY_MODES, MemoryMode
from holdfast.experience.minibatches import (
    annealed_beta,
    drawn,
    importance_weights,
    minibatches,
    priorities_of,
)
from holdfast.experience.scores import Score, score
from holdfast.experience.segments import Lead, Segments
from holdfast.experience.stopwatch import Clock

__all__ = [
    "MEMORY_MODES",
    "PATIENCE",
    "Clock",
    "Collector",
    "Contest",
    "Evaluation",
    "Lead",
    "MemoryMode",
    "Score",
    "Segments",
    "annealed_beta",
    "as_batch",
    "compete",
    "drawn",
    "evaluate",
    "importance_weights",
    "minibatches",
    "priorities_of",
    "score",
    "value_of",
]
