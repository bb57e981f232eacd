"""What is learnt: advantage and losses as functions of tensors, and the update."""

from holdfast.learn.update import loss_of, replay, targets_of, update

__all__ = ["loss_of", "replay", "targets_of", "update"]
