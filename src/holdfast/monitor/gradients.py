"""Gradients: how large they are part by part, and how far back in a segment they reach."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from holdfast.errors import ContractError
from holdfast.experience import Segments
from holdfast.learn import replay
from holdfast.memory import Cell
from holdfast.monitor.cells import changing, same_randomness
from holdfast.policies import LSTMWrapper
from holdfast.policies.clock import clears
from holdfast.shapes import Float, Int, Tensor
from holdfast.worlds import draws

SHARE = 0.8
"""The share of the gradient that a reach is told for."""
EDGE = 0.75
"""Where so much of a segment is reached back over, its edge cuts off what is still felt."""
ROOM = 1.5
"""A shorter horizon is proposed with this much room: most steps of a segment have less behind them than its
last one."""


def norms_by_module(policy: nn.Module) -> dict[str, Float[Tensor, ""]]:
    """Measure the gradient of each part of a policy, as tensors: nobody waits for a number.

    To be asked after backward and before clipping. Parts are the policy's modules and parameters; of a
    dictionary of modules, such as a graph's components, its entries. Parts without a gradient are left out.
    """
    found, counted = {}, set[int]()
    for name, parameters in _parts(policy):
        grads = [each.grad for each in parameters if each.grad is not None and id(each) not in counted]
        counted |= {id(each) for each in parameters}
        if grads:
            with torch.no_grad():
                found[f"gradients/norm@{name}"] = nn.utils.get_total_norm(grads)
    return found


def _parts(policy: nn.Module) -> Iterator[tuple[str, list[nn.Parameter]]]:
    for name, child in policy.named_children():
        inside = child.items() if isinstance(child, nn.ModuleDict) else ()
        for entry, module in inside:
            yield f"{name}.{entry}", list(module.parameters())
        if not inside:
            yield name, list(child.parameters())
    for name, parameter in policy.named_parameters(recurse=False):
        yield name, [parameter]


def reach_back(policy: LSTMWrapper, segments: Segments, rows: int = 16) -> Float[Tensor, " T"]:
    """Measure how much gradient reaches back how many steps: entry `a` is that of `a` steps ago.

    It is the gradient of what is said at one step of a row (scores and value, weighed at random, always in
    the same way) with respect to what the memories read at each step before, in length, mean over some rows.
    The step is the one that looks back furthest to its episode's start, since from others gradient cannot
    reach far, and the rows are those that have the furthest. Replays as the update does; nothing is touched.
    """
    where, back = _furthest(policy, segments)
    chosen = back.argsort(descending=True, stable=True)[:rows]
    some, where = segments.rows(chosen), where[chosen]
    probes: dict[Cell, list[Tensor]] = {}

    def probed(cell: Cell, x: Tensor) -> Tensor:
        # Nothing is added; its gradient is that of x, and stops here instead of going on into the weights.
        probes.setdefault(cell, []).append(torch.zeros_like(x, requires_grad=True))
        return x + probes[cell][-1]

    with same_randomness(policy), torch.enable_grad(), changing(policy, probed):
        said = _said(policy, some, where)
    # All in one call: compiled parts let go of their graph after the first.
    every = [probe for each in probes.values() for probe in each]
    grads = iter(torch.autograd.grad(said, every, allow_unused=True, materialize_grads=True) if every else ())
    norms = torch.zeros_like(some.steps["values"])
    for each in probes.values():
        norms = norms + _in_time([next(grads) for _ in each], norms.shape[1])
    return _by_age(norms, where)


def _in_time(grads: Sequence[Tensor], T: int) -> Float[Tensor, "B T"]:
    """Lay the gradients of a cell's calls along time: each a segment's `[B,T,D]`, or a step's `[B,D]`."""
    steps = torch.cat([grad if grad.dim() == 3 else grad[:, None] for grad in grads], dim=1)
    if steps.shape[1] % T:
        raise ContractError(
            f"A memory read {steps.shape[1]} steps in a replay of {T}; it reads each step equally often."
        )
    return steps.norm(dim=-1).unflatten(1, (-1, T)).sum(1)


def _furthest(policy: LSTMWrapper, segments: Segments) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """Find the step of each row that looks back furthest (of equals the last), and how far: -1 for nobody."""
    valid, clear = segments.steps["valid"], clears(segments.steps, policy.clear_on)
    step = torch.arange(valid.shape[1], device=valid.device)
    start = torch.where(clear, step, 0).cummax(1).values
    back = torch.where(valid, step - start, -1)
    where = (back * valid.shape[1] + step).argmax(1)
    return where, back.gather(1, where[:, None])[:, 0]


def _said(policy: LSTMWrapper, segments: Segments, where: Int[Tensor, " B"]) -> Float[Tensor, ""]:
    """Weigh what is said at one step of every row by numbers between -1 and 1, the same in every call."""
    again = replay(policy, segments)
    row = torch.arange(len(where), device=where.device)
    said = torch.cat([again["values"][..., None], again[policy.actions.key]], dim=-1)[row, where]
    which = torch.arange(said.shape[-1], device=said.device)
    weight = 2 * draws.uniform(0, draws.STREAM_PROBE, which, 0).to(said.dtype) - 1
    return (said * weight).sum()


def _by_age(norms: Float[Tensor, "B T"], where: Int[Tensor, " B"]) -> Float[Tensor, " T"]:
    """Turn every row around, so that the step it looks from comes first, and take the mean over the rows."""
    age = torch.arange(norms.shape[1], device=norms.device)
    step = where[:, None] - age
    return torch.where(step >= 0, norms.gather(1, step.clamp(min=0)), 0.0).mean(0)


def reach(mass: Float[Tensor, " T"], share: float = SHARE) -> int:
    """Say within how many steps that share of the gradient lies; 0: there is none."""
    within = mass.double().cumsum(0)
    total = float(within[-1])
    return int((within < share * total).sum()) + 1 if math.isfinite(total) and total > 0 else 0


def reach_metrics(mass: Float[Tensor, " T"]) -> dict[str, int | float]:
    """Tell the reach, and the share of the gradient within 1, 2, 4, 8, ... steps."""
    mass = mass.cpu()
    found: dict[str, int | float] = {"memory/gradient_reach": reach(mass)}
    if found["memory/gradient_reach"]:
        within = mass.double().cumsum(0)
        for steps in (2**power for power in range(len(mass).bit_length())):
            found[f"gradients/within@{steps}"] = float(within[steps - 1] / within[-1])
    return found


def advice(steps: int, horizon: int) -> str:
    """Say in one line what a reach allows to be said of the horizon, if anything."""
    told = f"{SHARE:.0%} of the gradient lies within {steps} of {horizon} steps".replace("%", " %")
    shorter = 2 ** math.ceil(math.log2(ROOM * steps)) if steps else horizon
    if steps >= EDGE * horizon:
        return f"{told}, up to the segment's edge: a longer trainer.bptt_horizon may help."
    return f"{told}: a trainer.bptt_horizon of {shorter} would do." if shorter < horizon else ""
