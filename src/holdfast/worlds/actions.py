"""Actions that are a type and an argument, as one flat list: what a policy scores, and what a world wants."""

from dataclasses import dataclass

import torch

from holdfast.errors import ContractError
from holdfast.shapes import Int, Shaped, Tensor


@dataclass(frozen=True)
class ActionTable:
    """Types of actions, each with arguments 0 to its largest, numbered one after the other.

    The flat index of (type, argument) is how many actions the types before it have, plus the argument.
    Each flat action is named `TYPE_ARGUMENT`; policies know actions by these names.
    """

    types: tuple[str, ...]
    max_args: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse tables that do not fit together."""
        if len(set(self.types)) < len(self.types):
            raise ContractError(f"The types of actions {', '.join(self.types)} are not all different.")
        if len(self.types) != len(self.max_args) or not self.types or min(self.max_args) < 0:
            raise ContractError(
                f"{len(self.types)} types of actions have {len(self.max_args)} largest arguments "
                f"{list(self.max_args)}; give each type one that is 0 or more."
            )

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Every (type, argument) in the order of their flat indices."""
        return [(kind, arg) for kind, most in enumerate(self.max_args) for arg in range(most + 1)]

    @property
    def names(self) -> tuple[str, ...]:
        """The name of every flat action."""
        return tuple(f"{self.types[kind]}_{arg}" for kind, arg in self.pairs)

    def split(self, flat: Shaped[Tensor, "*batch"]) -> Int[Tensor, "*batch 2"]:
        """Turn flat indices into types and arguments; an index that is no action is refused."""
        pairs, flat = torch.tensor(self.pairs, device=flat.device), flat.long()
        wrong = (flat < 0) | (flat >= len(pairs))
        if bool(wrong.any()):
            raise ContractError(f"{int(flat[wrong][0])} is no action; there are 0 to {len(pairs) - 1}.")
        return pairs[flat]

    def join(self, pairs: Shaped[Tensor, "*batch 2"]) -> Int[Tensor, "*batch"]:
        """Turn types and arguments into flat indices; a pair that is no action is refused."""
        most = torch.tensor(self.max_args, device=pairs.device)
        kind, arg = pairs.long().unbind(-1)
        wrong = (kind < 0) | (kind >= len(self.types)) | (arg < 0)
        wrong |= arg > most[kind.clamp(0, len(self.types) - 1)]
        if bool(wrong.any()):
            bad = pairs[wrong][0].tolist()
            raise ContractError(f"(type {bad[0]}, argument {bad[1]}) is no action of this table.")
        before = torch.cumsum(most + 1, 0) - (most + 1)
        return before[kind] + arg
