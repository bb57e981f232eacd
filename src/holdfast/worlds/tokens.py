"""The token format; flat action tables."""

from dataclasses import dataclass

import torch

from holdfast.errors import ContractError
from holdfast.types import Bool, Int, Shaped, Tensor, UInt8

GLOBAL = 0xFE
PADDING = 0xFF
BLOCK = 16
SHORTEST = 64
"""`shorten` removes whole blocks, down to this many tokens."""


EXACT = 256
"""Up to this number bfloat16 has every whole number."""


def pack_location(row: int, column: int) -> int:
    """Pack a row and column of the window into the location byte."""
    if not (0 <= row <= 14 and 0 <= column <= 14):
        raise ContractError(f"row {row}, column {column} is outside 0..14 and has no location byte.")
    return row << 4 | column


def shorten(obs: UInt8[Tensor, "*rows M 3"]) -> UInt8[Tensor, "*rows M2 3"]:
    """Remove the padding at the end of all rows. The host reads the tokens: on a GPU it synchronizes.

    Sums of another length round differently, so an agent's outputs would depend on the observations of the
    rest of the batch. Measured: with whole blocks the sums are bit-equal, except for very short ones. So
    padding is removed in whole blocks, down to a shortest length.
    """
    M = obs.shape[-2]
    if M <= SHORTEST:
        return obs
    used = (obs[..., 0] != PADDING).flatten(0, -2).any(0)
    longest = max(SHORTEST, int((used * torch.arange(1, M + 1, device=obs.device)).max()))
    length = -(-longest // BLOCK) * BLOCK
    if length <= M:
        return obs[..., :length, :]
    return torch.nn.functional.pad(obs, (0, 0, 0, length - M), value=PADDING)


def empty(agents: int, tokens: int, device: torch.device | None = None) -> UInt8[Tensor, "A M 3"]:
    """Return observations without tokens."""
    return torch.full((agents, tokens, 3), PADDING, dtype=torch.uint8, device=device)


def pack(cells: Int[Tensor, "A N"], locations: Int[Tensor, " N"], most: int) -> UInt8[Tensor, "A {most} 3"]:
    """Convert cells to tokens: the first `most` nonzero cells, in order.

    A cell is 0 if it is empty, else `word(feature, value)`.
    """
    nonzero = cells != 0
    position = _count_along(nonzero)
    width = min(most, cells.shape[1])
    if width < cells.shape[1]:
        nonzero = nonzero & (position <= width)
    # Positions count from 1; slot 0 takes the empty cells and is dropped.
    slot = torch.mul(position, nonzero, out=torch.empty_like(position, dtype=torch.long))
    packed = cells.new_full((len(cells), 1 + width), -1).scatter_(1, slot, cells + locations)
    obs = empty(len(cells), most, cells.device)
    obs[:, :width] = packed.view(torch.uint8).unflatten(1, (1 + width, 4))[:, 1:, :3]
    return obs


def _count_along(mask: Bool[Tensor, "A N"]) -> Int[Tensor, "A N"]:
    """Number of true entries of a row up to each one."""
    if not mask.is_cuda or mask.shape[1] > EXACT:
        return mask.cumsum(1, dtype=torch.int32)
    # As a product of matrices a tenth of the time; bfloat16 has all whole numbers up to 256.
    upper = torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bfloat16, device=mask.device).triu()
    with torch.autocast("cuda", enabled=False):
        return (mask.bfloat16() @ upper).int()


def word(feature: int, value: int) -> int:
    """Return a token without location as a 32-bit number: bytes location, feature, value, 0."""
    return feature << 8 | value << 16


@dataclass(frozen=True)
class ActionTable:
    """Flat indices of actions with a type and an argument from 0 to `max_args` of the type.

    The flat index of (type, argument) is the number of actions of all types before it, plus the argument.
    Each flat action is named `TYPE_ARGUMENT`; policies know actions by these names.
    """

    types: tuple[str, ...]
    max_args: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check names and arguments."""
        if len(set(self.types)) < len(self.types):
            raise ContractError(f"The action types {', '.join(self.types)} are not all different.")
        if len(self.types) != len(self.max_args) or not self.types or min(self.max_args) < 0:
            raise ContractError(
                f"{len(self.types)} action types have max_args {list(self.max_args)}; give one per type, 0 or more."
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
        """Convert flat indices to types and arguments."""
        pairs, flat = torch.tensor(self.pairs, device=flat.device), flat.long()
        wrong = (flat < 0) | (flat >= len(pairs))
        if bool(wrong.any()):
            raise ContractError(f"{int(flat[wrong][0])} is not an action; valid are 0 to {len(pairs) - 1}.")
        return pairs[flat]

    def join(self, pairs: Shaped[Tensor, "*batch 2"]) -> Int[Tensor, "*batch"]:
        """Convert types and arguments to flat indices."""
        most = torch.tensor(self.max_args, device=pairs.device)
        kind, arg = pairs.long().unbind(-1)
        wrong = (kind < 0) | (kind >= len(self.types)) | (arg < 0)
        wrong |= arg > most[kind.clamp(0, len(self.types) - 1)]
        if bool(wrong.any()):
            bad = pairs[wrong][0].tolist()
            raise ContractError(f"(type {bad[0]}, argument {bad[1]}) is not an action of this table.")
        before = torch.cumsum(most + 1, 0) - (most + 1)
        return before[kind] + arg
