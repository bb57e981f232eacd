"""Verdicts written by hand, for tests of whoever shows them."""

import torch

from holdfast.check.laws import LAWS
from holdfast.check.results import Law, Laws, Measurement, Pattern, Reach

AGENTS, STEPS, HORIZON = 3, 12, 4
STARTS = ((0, 6), (0,), (0, 3, 9))
"""When the episodes of each agent start."""
WRITE = "state = torch.where(first, initial, state) <before> the cell reads & in both."


def make_reach():
    """Everything is felt later in its episode, gradients in its segment too; nothing anywhere else."""
    clears = torch.zeros(AGENTS, STEPS, dtype=torch.bool)
    for agent, starts in enumerate(STARTS):
        clears[agent, list(starts)] = True
    lived = torch.zeros(STEPS, AGENTS, STEPS, dtype=torch.float64)
    gradient = torch.zeros(STEPS, AGENTS, STEPS)
    for agent, starts in enumerate(STARTS):
        for seen in range(STEPS):
            for felt in range(seen, min([*(start for start in starts if start > seen), STEPS])):
                lived[seen, agent, felt] = 0.1 * 0.5 ** (felt - seen)
                if seen // HORIZON == felt // HORIZON:
                    gradient[seen, agent, felt] = 0.01
    return Reach(lived, lived.clone(), gradient, clears, torch.ones_like(clears), HORIZON)


def make_laws(*broken, explained=True, notes=(), reach=None):
    """All nine laws, some of them broken in three of their four measurements."""
    found = []
    for name in LAWS:
        parts = [Measurement(f"{name} in general", 0.0, 0.0)]
        if name in broken:
            told = "agent 3, step 5, values moves by up to 1.5e-02, must be 0"
            parts += [
                Measurement(f"{name}, {how}", 0.015, 0.0, finding=told) for how in ("lived", "replayed")
            ]
            parts.append(
                Measurement(f"{name}, evaluated", float("nan"), 1e-9, finding="agent 1 is no number")
            )
        pattern = Pattern("memory is never cleared", WRITE) if name in broken and explained else None
        found.append(Law(name, parts, pattern))
    return Laws(found, notes=notes, reach=reach)
