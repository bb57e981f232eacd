"""The laws of flow: where gradients and information may go, and where not."""

from typing import cast

import torch

from holdfast.check.bench import (
    AGENTS,
    BOUND,
    HORIZON,
    SHORT,
    STEPS,
    Bench,
    alive,
    close,
    nothing,
    pairs,
    random_state,
    segment_of,
)
from holdfast.check.probes import Flags, gradient_reach, live_by_hand
from holdfast.check.results import Measurement
from holdfast.policies import LSTMWrapper
from holdfast.shapes import Tensor

FELT_ACROSS = 8
"""Over how many steps across an edge information must be felt."""


def cut(bench: Bench) -> list[Measurement]:
    """No gradient crosses from one call to another, nor into the state a replay starts from."""
    parts = []
    for steps in (1, HORIZON):
        bench.proof.reset_memory()
        reach = gradient_reach(bench.proof, bench.unbroken, steps_a_call=steps)
        own = torch.eye(len(reach), dtype=torch.bool)
        parts.append(nothing(f"gradient across calls of {steps}", reach * ~own, "call", "earlier call"))
        least = float(reach[own].min())
        parts.append(alive(f"gradient within calls of {steps}", least, "no gradient arrives at all"))
    entry = random_state(bench.proof)
    leaves = [cast("Tensor", leaf).requires_grad_() for leaf in entry.values()]
    with torch.enable_grad(), bench.proof.replay(entry):
        told = bench.proof(segment_of(bench.unbroken))
        loss = told["values"].sum() + told["full_log_probs"].sum()
        pulls = torch.autograd.grad(loss, leaves, allow_unused=True)
    pulled = torch.tensor([0.0 if pull is None else float(pull.abs().max()) for pull in pulls])
    parts.append(nothing("gradient into a replay's entry state", pulled, "leaf"))
    return parts


def carry(bench: Bench) -> list[Measurement]:
    """What is seen before an edge is felt after it, lived and replayed, unless a clear lies between."""
    parts = []
    for name, reach in bench.reach.items():
        felt = reach.masked_fill(~bench.bound_to_feel, torch.inf)
        least, where = float("inf"), "nothing was bound to be felt"
        for edge in range(HORIZON, STEPS, HORIZON):
            for distance in range(1, FELT_ACROSS + 1):
                steps = range(max(0, edge - distance), min(edge, STEPS - distance))
                size, seen = min((float(felt[seen, :, seen + distance].min()), seen) for seen in steps)
                if size < least:
                    least = size
                    where = f"seen at step {seen}, not felt at {seen + distance}, across the edge at {edge}"
        parts.append(alive(f"information across edges, {name}", least, where))
    return parts


def clear(bench: Bench) -> list[Measurement]:
    """Nothing seen before a clear, or by nobody, is felt after it, whatever flag tells of the start."""
    parts, axes = [], ("seen at step", "agent", "felt at step")
    absent = ~bench.script.valid[:, :STEPS].T[:, :, None]
    for name, reach in bench.reach.items():
        parts.append(nothing(f"information across starts, {name}", reach * bench.parted, *axes))
        parts.append(nothing(f"information from where nobody acts, {name}", reach * absent, *axes))
        within = float((reach * bench.bound_to_feel).max())
        parts.append(alive(f"information within episodes, {name}", within, "nothing is felt at all"))
    if bench.proof.clear_on == "never":
        return parts
    kinds: tuple[Flags, ...] = ("first", "dones", "truncateds")
    for flags in kinds:
        for dtype, policy in bench.policies.items():
            parts += [_clear_by_hand(bench, policy, dtype, flags, steps) for steps in (1, HORIZON)]
    return parts


def _clear_by_hand(
    bench: Bench, policy: LSTMWrapper, dtype: torch.dtype, flags: Flags, steps: int
) -> Measurement:
    """Change everything before each agent's last clear; nothing from there on may move."""
    last = torch.stack([row[:STEPS].nonzero().max() for row in bench.clears])
    before = torch.arange(STEPS + 1)[None] < last[:, None]
    was = bench.by_hand(bench.script, steps, flags, policy)
    now = bench.by_hand(bench.script.changed(before), steps, flags, policy)
    moved = (now - was).abs().amax(-1) * ~before[:, :STEPS]
    what = f"information across starts told by {flags}, calls of {steps}, {SHORT[dtype]}"
    return nothing(what, moved, "agent", "step")


def isolate(bench: Bench) -> list[Measurement]:
    """An agent's outputs depend on its own history only."""
    others = torch.ones_like(bench.script.first)
    others[0] = False
    parts = []
    for dtype, policy in bench.policies.items():
        changed = bench.live(bench.script.changed(others), policy)
        for name, now, was in pairs(changed, bench.live(bench.script, policy)):
            what = f"batch mates changed, {name}, {SHORT[dtype]}"
            parts.append(nothing(what, (now - was)[:1], "agent", "step"))
    base = bench.live(bench.script)
    order = torch.arange(AGENTS).roll(2)
    parts += [
        nothing(f"rows permuted, {name}", now - was[order], "row", "step")
        for name, now, was in pairs(bench.live(bench.script.of(order)), base)
    ]
    whole, half = bench.by_hand(bench.script), AGENTS // 2
    bench.proof.reset_memory()
    with torch.no_grad():
        sliced = live_by_hand(bench.proof, bench.script, slices=((0, half), (half, AGENTS - half)))
    parts.append(close("served in two slices", sliced, whole, BOUND[torch.float64]))
    return parts
