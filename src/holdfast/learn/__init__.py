"""What is learnt: advantage and losses as functions of tensors, stale states, teachers, and the update."""

from holdfast.learn.objective import loss_of
from holdfast.learn.replay import replay
from holdfast.learn.schedules import knobs_at
from holdfast.learn.targets import Targets, normalised, targets_of
from holdfast.learn.teachers import Lesson, heard_by
from holdfast.learn.update import Learner
from holdfast.learn.weights import weight_metrics

__all__ = [
    "Learner",
    "Lesson",
    "Targets",
    "heard_by",
    "knobs_at",
    "loss_of",
    "normalised",
    "replay",
    "targets_of",
    "weight_metrics",
]
