"""The terms of the PPO loss: functions of tensors, each over the steps somebody acted in."""

from collections.abc import Iterable

import torch
from torch import distributed

from holdfast.shapes import Bool, Float, Tensor


def mean_over(x: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Average over valid steps: sum(x v) / sum(v)."""
    return torch.where(valid, x, 0.0).sum() / valid.sum().clamp(min=1)


def normalize(x: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Shift and scale valid steps to mean 0 and deviation 1: (x - mean) / (std + 1e-8).

    Where several processes train, mean and deviation are those of the valid steps of all of them.
    """
    steps = _everywhere(valid.sum()).clamp(min=1)

    def mean(y: Tensor) -> Tensor:
        return _everywhere(torch.where(valid, y, 0.0).sum()) / steps

    centred = x - mean(x)
    return centred / (torch.sqrt(mean(centred.square())) + 1e-8)


def _everywhere(total: Tensor) -> Tensor:
    """Add up what each process has; alone, that is all there is."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(total)
    return total


def policy_loss(
    log_ratio: Float[Tensor, "B T"],
    advantage: Float[Tensor, "B T"],
    valid: Bool[Tensor, "B T"],
    clip: float,
) -> Float[Tensor, ""]:
    """Clip what moves too far: mean max(-A r, -A clip(r, 1 - eps, 1 + eps)), r = exp(log_ratio)."""
    ratio = log_ratio.exp()
    return mean_over(torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip)), valid)


def value_loss(
    value: Float[Tensor, "B T"],
    old_value: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    valid: Bool[Tensor, "B T"],
    clip: float | None,
) -> Float[Tensor, ""]:
    """1/2 mean (v - R)^2; with a clip 1/2 mean max((v - R)^2, (v_old + clip(v - v_old) - R)^2)."""
    error = (value - returns).square()
    if clip is not None:
        near = old_value + (value - old_value).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns).square())
    return 0.5 * mean_over(error, valid)


def approximate_kl(log_ratio: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"]) -> Float[Tensor, ""]:
    """How far the policy moved: mean(r - 1 - log r)."""
    return mean_over(log_ratio.exp() - 1 - log_ratio, valid)


def clip_fraction(
    log_ratio: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"], clip: float
) -> Float[Tensor, ""]:
    """Share of steps whose ratio left [1 - eps, 1 + eps]."""
    return mean_over(((log_ratio.exp() - 1).abs() > clip).to(log_ratio.dtype), valid)


def explained_variance(
    value: Float[Tensor, "B T"], returns: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """1 - var(R - v) / var(R): 1 is perfect, 0 no better than a constant, or nothing to explain."""

    def variance(x: Tensor) -> Tensor:
        return mean_over((x - mean_over(x, valid)).square(), valid)

    total = variance(returns)
    return torch.where(total > 1e-8, 1 - variance(returns - value) / total.clamp(min=1e-8), 0.0)


def l2_distance(
    weights: Iterable[Float[Tensor, "..."]], anchors: Iterable[Float[Tensor, "..."]] | None = None
) -> Float[Tensor, ""]:
    """Say how far weights are from their anchors: sum (w - a)^2, whose gradient is 2 (w - a).

    Without anchors they are zeros.
    """
    pairs = ((w, None) for w in weights) if anchors is None else zip(weights, anchors, strict=True)
    return torch.stack([(w if a is None else w - a).square().sum() for w, a in pairs]).sum()
