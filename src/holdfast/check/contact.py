"""First contact: whether a policy can be tested at all, and what it says."""

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from holdfast.check.script import Moments, Script
from holdfast.check.subject import Answer
from holdfast.check.tree import State, copied, leaves, names_of
from holdfast.errors import ContractError, HoldfastError

if TYPE_CHECKING:
    from holdfast.check.case import Case

PLAIN = (torch.Tensor, int, float, bool, str, type(None))
"""What a state may hold."""
TRIED = 5
"""How many steps of a segment are tried: not the number of agents, so that mixed-up axes show."""


@torch.no_grad()
def first_contact(case: "Case", script: Script) -> list[str]:
    """Act one step and replay one segment; name the numbers that are said.

    Whatever is raised, not a number, of the wrong shape, kind or place is an error that says so.
    """
    subject, agents = case.subject, script.agents
    script = case.shown(script)
    with case.precisely():
        state = _try("make an initial state", script.at(0), lambda: subject.initial(agents))
        _require_plain(state)
        said, after = _two(
            _try("act one step", script.at(0), lambda: subject.act(script.at(0), copied(state)))
        )
        _require_answer("acting one step", said, script.at(0), case.device)
        _require_state(state, after)
        # Found here rather than in a law: which axis of each tensor counts the agents.
        _ = case.rows
        segment = script.moments(0, TRIED)
        again = _try("replay a segment", segment, lambda: subject.replay(segment, copied(state)))
        _require_answer("replaying a segment", again, segment, case.device)
        _try("say what a step is worth", script.at(0), lambda: subject.value(script.at(0), copied(state)))
        _try("live through rollouts and updates", script, lambda: subject.live(script))
    shapes = [
        {name: list(leaf.shape[dims:]) for name, leaf in each.items()}
        for each, dims in ((said, 1), (again, 2))
    ]
    if shapes[0] != shapes[1]:
        raise ContractError(
            f"Acting says {shapes[0]} for each agent and step, replaying {shapes[1]}; both must say the same "
            "things, in the same order."
        )
    return [name for name, leaf in said.items() for _ in range(leaf[0].numel())]


def _try(what: str, moments: Moments, call: Any) -> Any:
    try:
        return call()
    except HoldfastError:
        raise
    except Exception as error:
        seen = f"{moments.obs.dtype} {list(moments.obs.shape)}".replace("torch.", "")
        raise ContractError(
            f"The policy cannot {what}: {type(error).__name__}: {_line(error)} (it saw {seen})."
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _two(result: Any) -> tuple[Answer, State]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise ContractError(
            f"Acting one step must return (answer, state); it returned {type(result).__name__}."
        )
    return result


def _require_answer(doing: str, said: Answer, moments: Moments, device: torch.device) -> None:
    if not said:
        raise ContractError(f"The policy says nothing while {doing}.")
    for name, leaf in said.items():
        if leaf.shape[: len(moments.batch)] != moments.batch:
            raise ContractError(
                f"{name!r} is {list(leaf.shape)} while {doing}; it must begin with {list(moments.batch)}, "
                f"a row for each {'agent' if len(moments.batch) == 1 else 'agent and step'}."
            )
        if not leaf.is_floating_point():
            raise ContractError(f"{name!r} is {leaf.dtype} while {doing}; answers are fractions.")
        if leaf.device.type != device.type:
            where = "the CPU" if device.type == "cpu" else device
            raise ContractError(
                f"{name!r} is on {leaf.device} although the check moved the policy to {where}."
            )
        if not bool(leaf.isfinite().all()):
            where = (~leaf.isfinite()).nonzero()[0].tolist()
            place = ", ".join(
                f"{axis} {at}"
                for axis, at in zip(("agent", "step"), where[: len(moments.batch)], strict=False)
            )
            raise ContractError(f"{name!r} is not a finite number while {doing}, first for {place}.")


def _require_plain(before: State) -> None:
    strange = [leaf for leaf in pytree.tree_leaves(before) if not isinstance(leaf, PLAIN)]
    if strange:
        raise ContractError(
            f"The state holds a {type(strange[0]).__name__}, which nobody can copy row by row; make it of "
            "tensors in tuples, lists, dictionaries or named tuples."
        )


def _require_state(before: State, after: State) -> None:
    was, now = (
        {name: _told(leaf) for name, leaf in zip(names_of(s), leaves(s), strict=True)}
        for s in (before, after)
    )
    if was != now:
        name = next((name for name in {**was, **now} if was.get(name) != now.get(name)), "")
        raise ContractError(
            f"The state (its {name}) is {was.get(name, 'absent')} at first and {now.get(name, 'absent')} "
            "after a step; a state keeps its structure, shape and dtype."
        )
    for name, leaf in zip(names_of(after), leaves(after), strict=True):
        if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            raise ContractError(f"The state{'' if name == 'state' else name} is not finite after one step.")


def _told(leaf: torch.Tensor) -> str:
    return f"{leaf.dtype} {list(leaf.shape)}".replace("torch.", "")
