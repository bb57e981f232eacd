"""Laws and reach with chosen values, for tests of reports."""

import torch

from holdfast.check.laws import LAWS
from holdfast.check.results import Law, Laws, Measurement, Pattern, Reach

AGENTS, STEPS, HORIZON = 3, 12, 4
STARTS = ((0, 6), (0,), (0, 3, 9))
"""The episode starts of each agent."""
WRITE = "state = torch.where(first, initial, state) <before> the cell reads & in both."


def make_reach():
    """A correct reach: outputs change later in the episode, gradients stay in the segment."""
    clears = torch.zeros(AGENTS, STEPS, dtype=torch.bool)
    for agent, starts in enumerate(STARTS):
        clears[agent, list(starts)] = True
    change = torch.zeros(STEPS, AGENTS, STEPS, dtype=torch.float64)
    gradient = torch.zeros(STEPS, AGENTS, STEPS)
    for agent, starts in enumerate(STARTS):
        for step in range(STEPS):
            for later in range(step, min([*(start for start in starts if start > step), STEPS])):
                change[step, agent, later] = 0.1 * 0.5 ** (later - step)
                if step // HORIZON == later // HORIZON:
                    gradient[step, agent, later] = 0.01
    return Reach(change, change.clone(), gradient, clears, torch.ones_like(clears), HORIZON)


def make_laws(*broken, explained=True, notes=(), reach=None):
    """All laws; each broken one fails three of its four measurements."""
    laws = []
    for name in LAWS:
        parts = [Measurement(f"{name} in general", 0.0, 0.0)]
        if name in broken:
            finding = "agent 3, step 5, values changes by up to 1.5e-02, must be 0"
            parts += [Measurement(f"{name}, {phase}", 0.015, 0.0, finding=finding) for phase in ("rollout", "replay")]
            parts.append(Measurement(f"{name}, evaluation", float("nan"), 1e-9, finding="agent 1 is NaN"))
        pattern = Pattern("state never reset", WRITE) if name in broken and explained else None
        laws.append(Law(name, parts, pattern))
    return Laws(laws, notes=notes, reach=reach)
