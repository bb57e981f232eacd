"""Kickstarting: a student leans towards what a teacher would do, and ever less so."""

from holdfast.learn.losses import mean_over
from holdfast.policies import Actions
from holdfast.shapes import Bool, Float, Tensor


def teacher_action_loss(
    actions: Actions,
    teacher_told: Float[Tensor, "B T told"],
    told: Float[Tensor, "B T told"],
    valid: Bool[Tensor, "B T"],
) -> Float[Tensor, ""]:
    """Average how unlikely a teacher's actions are to the student: mean -E_teacher[log p_student]."""
    return mean_over(actions.cross_entropy(teacher_told, told), valid)


def teacher_value_loss(
    teacher_values: Float[Tensor, "B T"], values: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """Average how far values are from a teacher's: mean (v - v_teacher)^2."""
    return mean_over((values - teacher_values).square(), valid)


def anneal_teacher(step: int, steps: int, share: float) -> float:
    """Say how much a teacher still counts: 1, then over the last `share` of its steps down to 0.

    Each teacher has a number of its own; what one still counts changes no other.
    """
    if step >= steps:
        return 0.0
    left = 1 - step / steps
    return 1.0 if left >= share else left / share
