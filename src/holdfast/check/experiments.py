"""Small experiments on single steps: what a policy does beside remembering."""

import torch

from holdfast.check.case import HORIZON, STEPS, Case
from holdfast.check.script import Script
from holdfast.check.tree import leaves


def draws_numbers(case: Case, script: Script) -> bool:
    """Whether identical lives after identical lives differ: what is only kept outside of a state repeats."""
    _, one, other = (case.steps(script, stop=3)[0] for _ in range(3))
    return not one.equal(other)


def keeps_something(case: Case, script: Script) -> bool:
    """Whether steps from one and the same state differ by what was lived before."""
    _, states = case.steps(script)
    never, always = torch.zeros_like(script.first), torch.ones_like(script.first)
    said = []
    for other in (script.with_starts(never), script.with_starts(always), script.changed(always)):
        case.steps(other, stop=HORIZON)
        said.append(case.steps(script, start=STEPS - 3, state=states[STEPS - 3])[0])
    return not all(each.equal(said[0]) for each in said)


def mixes_rows(case: Case, script: Script) -> bool:
    """Whether a row's single step depends on what its neighbours see."""
    others = torch.ones_like(script.first)
    others[0] = False
    one, other = (case.steps(each, stop=1)[0][0] for each in (script, script.changed(others)))
    return not one.equal(other)


def is_deaf(case: Case, script: Script) -> bool:
    """Whether a step says the same whatever state it is given."""
    script = script.with_starts(torch.zeros_like(script.first))
    _, states = case.steps(script)
    one = case.steps(script, start=HORIZON, stop=HORIZON + 1, state=states[HORIZON])[0]
    return one.equal(case.steps(script, start=HORIZON, stop=HORIZON + 1)[0])


def hands_out_graphs(case: Case, script: Script) -> bool:
    """Whether the state after a step has a graph, where gradients are on."""
    with case.precisely(), torch.enable_grad():
        _, state = case.subject.act(script.to(case.dtype).at(0), case.subject.initial(script.agents))
    return any(leaf.requires_grad for leaf in leaves(state))
