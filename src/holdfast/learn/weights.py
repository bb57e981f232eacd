"""What weights look like, and how large they may become."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from holdfast.shapes import Float, Tensor

COLLAPSED = 0.01
"""A singular value of no more than this share of the largest counts as collapsed."""
LEFT_OUT = 0.01
"""How much of the sum of singular values the effective rank may leave out."""


@torch.no_grad()
def initial_bounds(policy: nn.Module) -> dict[str, float]:
    """Say how large the largest entry of each weight matrix is, to be asked before training.

    A matrix of zeros says nothing about how large its entries should be, and has no bound.
    """
    largest = {name: float(weight.abs().max()) for name, weight in _matrices(policy)}
    return {name: bound for name, bound in largest.items() if bound > 0}


@torch.no_grad()
def clip_weights(policy: nn.Module, bounds: Mapping[str, float], clip_range: float) -> None:
    """Clamp each weight matrix to +- clip_range x its bound, in place; 0 is off, biases are left alone."""
    if clip_range == 0:
        return
    for name, bound in bounds.items():
        policy.get_parameter(name).clamp_(-clip_range * bound, clip_range * bound)


@torch.no_grad()
def weight_metrics(policy: nn.Module) -> dict[str, float]:
    """Describe each weight matrix by its singular values; a name ends in @ and the parameter's name.

    More than two axes are flattened to `[out, rest]`; a single output of a bilinear form is a matrix itself.
    """
    return {
        f"weights/{measure}@{name}": number
        for name, weight in _matrices(policy)
        for measure, number in describe(torch.linalg.svdvals(_flattened(weight).double())).items()
    }


def describe(values: Float[Tensor, " k"]) -> dict[str, float]:
    """Describe singular values, largest first; a matrix of zeros has rank 0 and is collapsed.

    norm: sqrt(sum s^2). sv_ratio: the largest over the smallest that is not 0 within rounding. collapsed: the
    share of at most 1 % of the largest. effective_rank: the fewest that make 99 % of the sum.
    loglog_slope, loglog_r2: the line through log s over log rank, and how much of log s it explains.
    """
    largest = values[0]
    if largest == 0:
        names = ("norm", "largest_sv", "mean_sv", "sv_ratio", "effective_rank", "loglog_slope", "loglog_r2")
        return dict.fromkeys(names, 0.0) | {"collapsed": 1.0}
    present = values[values > largest * len(values) * torch.finfo(torch.float32).eps]
    so_far = values.cumsum(0)
    slope, explained = _line(present.log())
    return {
        "norm": float(values.square().sum().sqrt()),
        "largest_sv": float(largest),
        "mean_sv": float(values.mean()),
        "sv_ratio": float(largest / present[-1]),
        "collapsed": float((values <= COLLAPSED * largest).double().mean()),
        "effective_rank": float((so_far < (1 - LEFT_OUT) * so_far[-1]).sum() + 1),
        "loglog_slope": slope,
        "loglog_r2": explained,
    }


def _line(log_values: Tensor) -> tuple[float, float]:
    """Fit a line over log rank by least squares: its slope, and the share it explains (0: all are equal)."""
    y = log_values - log_values.mean()
    total = float(y.square().sum())
    if total <= 1e-12 * len(y):
        return 0.0, 0.0
    x = torch.arange(1, len(y) + 1, dtype=y.dtype, device=y.device).log()
    x = x - x.mean()
    slope = (x * y).sum() / x.square().sum()
    return float(slope), 1 - float((y - slope * x).square().sum()) / total


def _matrices(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, weight) for name, weight in policy.named_parameters() if weight.dim() >= 2)


def _flattened(weight: Tensor) -> Tensor:
    single = weight.dim() == 3 and len(weight) == 1
    return weight[0] if single else weight.flatten(1)
