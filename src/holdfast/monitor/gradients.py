"""Gradients: norm of each module, and how many steps back in a segment they reach."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from holdfast import rng
from holdfast.errors import ContractError
from holdfast.learn import replay
from holdfast.memory import Cell
from holdfast.memory.episode_resets import reset_mask
from holdfast.monitor.state_audit import replace_cell_input, same_randomness
from holdfast.policies import LSTMWrapper
from holdfast.rollout import Segments
from holdfast.types import Float, Int, Tensor

SHARE = 0.8
"""Share of the gradient within the reach."""
EDGE = 0.75
"""A reach over at least this share of a segment is cut off by its edge."""
ROOM = 1.5
"""Margin of a proposed horizon: most steps of a segment have fewer steps behind them than its last."""


def norms_by_module(policy: nn.Module) -> dict[str, Float[Tensor, ""]]:
    """Gradient norm of each module, as tensors, so that the host does not wait.

    Call after backward and before clipping. Modules are the policy's children and own parameters, and the
    entries of a ModuleDict, such as a graph's components. Modules without a gradient are left out.
    """
    norms, counted = {}, set[int]()
    for name, parameters in _modules(policy):
        grads = [w.grad for w in parameters if w.grad is not None and id(w) not in counted]
        counted |= {id(w) for w in parameters}
        if grads:
            with torch.no_grad():
                norms[f"gradients/norm@{name}"] = nn.utils.get_total_norm(grads)
    return norms


def _modules(policy: nn.Module) -> Iterator[tuple[str, list[nn.Parameter]]]:
    for name, child in policy.named_children():
        entries = child.items() if isinstance(child, nn.ModuleDict) else ()
        for entry, module in entries:
            yield f"{name}.{entry}", list(module.parameters())
        if not entries:
            yield name, list(child.parameters())
    for name, parameter in policy.named_parameters(recurse=False):
        yield name, [parameter]


def reach_back(policy: LSTMWrapper, segments: Segments, rows: int = 16) -> Float[Tensor, " T"]:
    """Gradient norm by age: entry `a` is that of the cell inputs `a` steps ago, mean over some rows.

    Differentiates the outputs of one step per row (logits and value, with fixed random weights) with respect
    to the cell inputs of all steps before it. The step is the one furthest from its episode start, and the
    rows are those where it is furthest: from other steps gradient cannot reach far. Replays as the update
    does; weights, states and random generators do not change.
    """
    where, back = _furthest(policy, segments)
    index = back.argsort(descending=True, stable=True)[:rows]
    sample, where = segments.rows(index), where[index]
    probes: dict[Cell, list[Tensor]] = {}

    def add_probe(cell: Cell, x: Tensor) -> Tensor:
        # Adding zeros: their gradient is that of x, and it stops here instead of reaching the weights.
        probes.setdefault(cell, []).append(torch.zeros_like(x, requires_grad=True))
        return x + probes[cell][-1]

    with same_randomness(policy), torch.enable_grad(), replace_cell_input(policy, add_probe):
        output = _weighted_output(policy, sample, where)
    # In one call: compiled modules free their graph after the first.
    inputs = [probe for calls in probes.values() for probe in calls]
    grads = torch.autograd.grad(output, inputs, allow_unused=True, materialize_grads=True) if inputs else ()
    grads, norms = iter(grads), torch.zeros_like(sample.steps["values"])
    for calls in probes.values():
        norms = norms + _norms_in_time([next(grads) for _ in calls], norms.shape[1])
    return _by_age(norms, where)


def _norms_in_time(grads: Sequence[Tensor], T: int) -> Float[Tensor, "B T"]:
    """Norm of the gradients of a cell's calls, each of a segment `[B,T,D]` or of a step `[B,D]`, by step."""
    steps = torch.cat([grad if grad.dim() == 3 else grad[:, None] for grad in grads], dim=1)
    if steps.shape[1] % T:
        raise ContractError(f"A memory read {steps.shape[1]} steps in a replay of {T}; it must read all equally often.")
    return steps.norm(dim=-1).unflatten(1, (-1, T)).sum(1)


def _furthest(policy: LSTMWrapper, segments: Segments) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """Find each row's valid step furthest from its episode start, and the distance; -1: no valid step."""
    valid, clear = segments.steps["valid"], reset_mask(segments.steps, policy.clear_on)
    step = torch.arange(valid.shape[1], device=valid.device)
    start = torch.where(clear, step, 0).cummax(1).values
    back = torch.where(valid, step - start, -1)
    where = (back * valid.shape[1] + step).argmax(1)
    return where, back.gather(1, where[:, None])[:, 0]


def _weighted_output(policy: LSTMWrapper, segments: Segments, where: Int[Tensor, " B"]) -> Float[Tensor, ""]:
    """Sum the outputs of one step of every row, with fixed random weights in [-1, 1]."""
    replayed = replay(policy, segments)
    row = torch.arange(len(where), device=where.device)
    outputs = torch.cat([replayed["values"][..., None], replayed[policy.actions.key]], dim=-1)[row, where]
    column = torch.arange(outputs.shape[-1], device=outputs.device)
    weight = 2 * rng.uniform(0, rng.STREAM_PROBE, column, 0).to(outputs.dtype) - 1
    return (outputs * weight).sum()


def _by_age(norms: Float[Tensor, "B T"], where: Int[Tensor, " B"]) -> Float[Tensor, " T"]:
    """Reorder each row by age, counted back from its step `where`, and average over rows."""
    age = torch.arange(norms.shape[1], device=norms.device)
    step = where[:, None] - age
    return torch.where(step >= 0, norms.gather(1, step.clamp(min=0)), 0.0).mean(0)


def reach(mass: Float[Tensor, " T"], share: float = SHARE) -> int:
    """Number of steps that hold that share of the gradient; 0: no gradient."""
    within = mass.double().cumsum(0)
    total = float(within[-1])
    return int((within < share * total).sum()) + 1 if math.isfinite(total) and total > 0 else 0


def reach_metrics(mass: Float[Tensor, " T"]) -> dict[str, int | float]:
    """Metrics: the reach, and the share of the gradient within 1, 2, 4, 8, ... steps."""
    mass = mass.cpu()
    metrics: dict[str, int | float] = {"memory/gradient_reach": reach(mass)}
    if metrics["memory/gradient_reach"]:
        within = mass.double().cumsum(0)
        for steps in (2**power for power in range(len(mass).bit_length())):
            metrics[f"gradients/within@{steps}"] = float(within[steps - 1] / within[-1])
    return metrics


def advice(steps: int, horizon: int) -> str:
    """Return one line of advice on `trainer.bptt_horizon` for a reach, or ""."""
    text = f"{SHARE:.0%} of the gradient lies within {steps} of {horizon} steps".replace("%", " %")
    shorter = 2 ** math.ceil(math.log2(ROOM * steps)) if steps else horizon
    if steps >= EDGE * horizon:
        return f"{text}, up to the segment edge; try a longer trainer.bptt_horizon."
    return f"{text}: trainer.bptt_horizon={shorter} is enough." if shorter < horizon else ""
