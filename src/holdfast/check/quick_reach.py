"""Reach in seconds: all observations that are changed one by one run as rows of one batch."""

from dataclasses import fields

import torch

from holdfast.check.adapters.base import PolicyAdapter
from holdfast.check.context import CheckContext, prepare
from holdfast.check.laws import one_thread
from holdfast.check.policy_copy import AGENTS, STEPS
from holdfast.check.results import Reach
from holdfast.check.script import Script
from holdfast.torch_versions import matmul_precision
from holdfast.types import Bool, Float, Tensor

MAX_NUMBERS = 20_000_000
"""Numbers of observations in one batch."""


def quick_reach(adapter: PolicyAdapter) -> Reach:
    """Measure the arrays behind carry, clear and cut: those of a check, in a fifth of the time.

    A check runs the policy once for each observation that it changes; here these runs are rows of one batch, where
    rounding may depend on the row. If anything is not zero where it must be, the check's own measurement decides.
    """
    with one_thread(), matmul_precision(tf32=False):
        context = prepare(adapter)
        batched = _information_reach(context)
        if any(bool(_is_wrong(context, change).any()) for change in batched.values()):
            return context.reach()
        # The cached property of the check, which takes it from here.
        vars(context)["information_reach"] = batched
        return context.reach()


def _is_wrong(context: CheckContext, change: Float[Tensor, "N A N K"]) -> Bool[Tensor, "N A N"]:
    """Return where outputs change that must not: before the observation, across a start, from an invalid step."""
    steps = torch.arange(STEPS)
    earlier = (steps[:, None] > steps)[:, None]
    invalid = ~context.script.valid[:, :STEPS].T[:, :, None]
    size = change.amax(-1)
    forbidden = earlier | context.separated_by_reset | invalid
    return ((size != 0) & forbidden) | ~size.isfinite()


def _information_reach(context: CheckContext) -> dict[str, Float[Tensor, "N A N K"]]:
    """Change all observations of one step, for every step, in as few batches as fit into memory."""
    script, changes = context.script, {"rollout": list[Tensor](), "replay": list[Tensor]()}
    together = max(1, MAX_NUMBERS // max(1, script.obs.numel()) - 1)
    for steps in torch.arange(STEPS).split(together):
        variants = [script]
        for step in steps.tolist():
            where = torch.zeros_like(script.first)
            where[:, step] = True
            variants.append(script.changed(where))
        outputs = context.exact.rollout_and_replay(_joined(variants))
        for name, parts in changes.items():
            runs = getattr(outputs, name).unflatten(0, (-1, AGENTS))
            parts.append((runs[1:] - runs[0]).abs())
    return {name: torch.cat(parts) for name, parts in changes.items()}


def _joined(scripts: list[Script]) -> Script:
    """Put the agents of several scripts into one."""
    return Script(**{f.name: torch.cat([getattr(script, f.name) for script in scripts]) for f in fields(Script)})
