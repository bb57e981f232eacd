"""How a module's forward is called: which of its parameters are observations, state and episode starts."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from holdfast.errors import ContractError
from holdfast.types import Bool, Tensor

Role = Literal["x", "state", "first", "mask", "terminated", "truncated"]
STATE_WORDS = {
    "state",
    "states",
    "hidden",
    "hiddens",
    "hx",
    "hxs",
    "memory",
    "mem",
    "carry",
    "cache",
    "h",
    "rnn",
    "lstm",
    "core",
    "hstate",
    "recurrent",
}
MASK_WORDS = {"mask", "masks", "notdone", "notdones", "continue", "continues", "cont", "alive", "nonterminal", "keep"}
FIRST_WORDS = {
    "first",
    "firsts",
    "done",
    "dones",
    "init",
    "reset",
    "resets",
    "start",
    "starts",
    "begin",
    "begins",
    "terminal",
    "terminals",
}
FIRST_WORDS |= {"episode", "restart", "restarts", "new", "isfirst", "isinit"}
END_WORDS: dict[str, Role] = {"terminated": "terminated", "terminateds": "terminated"}
END_WORDS |= {"truncated": "truncated", "truncateds": "truncated"}
FLAGS = ("first", "mask", "terminated", "truncated")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a forward that the check fills in."""

    name: str
    role: Role
    by_keyword: bool


@dataclass(frozen=True)
class CallSignature:
    """The parameters of a forward, in order."""

    parameters: tuple[Parameter, ...]

    @staticmethod
    def of(forward: Callable[..., Any]) -> "CallSignature":
        """Recognize parameters by their names; else the first is `x`, the second the state, a required third starts."""
        roles = list[tuple[inspect.Parameter, Role | None]]()
        for parameter in inspect.signature(forward).parameters.values():
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                roles.append((parameter, _role(parameter.name)))
        for wanted in ("x", "state", "first"):
            if any(role == wanted or (wanted == "first" and role in FLAGS) for _, role in roles):
                continue
            for at, (parameter, role) in enumerate(roles):
                required = parameter.default is parameter.empty or wanted != "first"
                if role is None and required and (wanted != "first" or parameter.kind != parameter.KEYWORD_ONLY):
                    roles[at] = (parameter, wanted)
                    break
        chosen, skipped = list[Parameter](), False
        for parameter, role in roles:
            if role is None:
                skipped = True
                continue
            by_keyword = skipped or parameter.kind == parameter.KEYWORD_ONLY
            chosen.append(Parameter(parameter.name, role, by_keyword))
        return CallSignature(tuple(chosen))

    @property
    def sees_first(self) -> bool:
        """Whether it has a parameter for episode starts."""
        return any(parameter.role in FLAGS for parameter in self.parameters)

    @property
    def state_first(self) -> bool:
        """Whether the state comes before the observations, and so in the result."""
        roles = [parameter.role for parameter in self.parameters]
        return "state" in roles and roles.index("state") < roles.index("x")

    @property
    def flag_name(self) -> str:
        """The parameter that takes episode starts, and whether it is a mask."""
        return ", ".join(parameter.name for parameter in self.parameters if parameter.role in FLAGS)

    @property
    def knows_what_flags_mean(self) -> bool:
        """Whether the parameter's name says that true means a start."""
        return any(_role(parameter.name) in FLAGS[:1] + FLAGS[2:] for parameter in self.parameters)

    def arguments(self, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments, from values by role."""
        by_position = [values[each.role] for each in self.parameters if not each.by_keyword]
        return by_position, {each.name: values[each.role] for each in self.parameters if each.by_keyword}


def _role(name: str) -> Role | None:
    words = set(re.split(r"_+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().strip("_")))
    for word, role in END_WORDS.items():
        if word in words:
            return role
    if (words & MASK_WORDS and not words & FIRST_WORDS) or ("not" in words and words & FIRST_WORDS):
        return "mask"
    if words & STATE_WORDS and not words & (FIRST_WORDS - {"init"}):
        return "state"
    return "first" if words & FIRST_WORDS else None


NO_STATE = ", not (y, state)"
"""How the error of a module that returns no state ends."""


def split_result(result: Any, *, state_first: bool) -> tuple[Any, Any]:
    """Split what a module returned into outputs and state."""
    if isinstance(result, dict):
        keys = [key for key in result if isinstance(key, str) and _role(key) == "state"]
        if len(keys) == 1:
            return {key: leaf for key, leaf in result.items() if key != keys[0]}, result[keys[0]]
    if not isinstance(result, tuple | list) or len(result) < 2:
        raise ContractError(f"it returned {type(result).__name__}{NO_STATE}")
    outputs, state = (result[1:], result[0]) if state_first else (result[:-1], result[-1])
    return (outputs[0] if len(outputs) == 1 else tuple(outputs)), state


def flag_values(
    first: Bool[Tensor, "..."], terminated: Tensor, truncated: Tensor, dtype: torch.dtype, *, inverted: bool
) -> dict[str, Tensor]:
    """Return the values of all flag parameters, in the dtype the module wants."""
    flags = {"first": first, "mask": ~first, "terminated": terminated, "truncated": truncated}
    if inverted:
        flags = {**flags, "first": ~first, "mask": first}
    return {name: flag.to(dtype) for name, flag in flags.items()}
