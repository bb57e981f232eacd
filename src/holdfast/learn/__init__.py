"""Learning: advantages and losses as functions of tensors, segment replay, teachers, optimizers, PPO."""

from holdfast.learn.optimizers import trainer_config_at, weight_metrics
from holdfast.learn.ppo import Learner
from holdfast.learn.replay import replay
from holdfast.learn.teachers import Teacher

__all__ = ["Learner", "Teacher", "replay", "trainer_config_at", "weight_metrics"]
