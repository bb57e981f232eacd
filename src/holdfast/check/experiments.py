"""Small experiments on single steps: what a policy does beside remembering."""

import copy
import random

import numpy as np
import torch

from holdfast.check.case import HORIZON, STEPS, Case
from holdfast.check.script import Script
from holdfast.check.tree import leaves
from holdfast.shapes import Float, Tensor


def draws_numbers(case: Case, script: Script) -> bool:
    """Whether identical lives differ by dice alone: what is only kept outside of a state is none."""
    _, one, other = (case.steps(script, stop=3)[0] for _ in range(3))
    if one.equal(other):
        return False
    one, other = (_with_dice(0, case, script) for _ in range(2))
    if one.equal(other):
        return True
    # Whoever begins anew, as a copy does, and still differs, has dice of its own.
    one, other = (_with_dice(seed, copy.deepcopy(case), script) for seed in (0, 1))
    return not one.equal(other)


def _with_dice(seed: int, case: Case, script: Script) -> Float[Tensor, "A N K"]:
    """Live a few steps with all common dice set, and put them back."""
    kept, plain = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[] if case.device.type == "cpu" else [case.device]):
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            return case.steps(script, stop=3)[0]
    finally:
        np.random.set_state(kept)
        random.setstate(plain)


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
        _, state = case.subject.act(case.shown(script).at(0), case.subject.initial(script.agents))
    return any(leaf.requires_grad for leaf in leaves(state))
