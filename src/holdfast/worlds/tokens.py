"""The token format: an observation is `[M,3]` uint8, one row a token (location, feature id, value).

Location packs the row in the high four bits and the column in the low four; `GLOBAL` marks a token
without a place, `PADDING` fills all three bytes of an empty row.
"""

import torch

from holdfast.errors import ContractError
from holdfast.shapes import Int, Tensor, UInt8

GLOBAL = 0xFE
PADDING = 0xFF
BLOCK = 16
SHORTEST = 64
"""Tokens are left out in blocks, and not below this many."""


def pack_location(row: int, column: int) -> int:
    """Pack a place of the window into the location byte."""
    if not (0 <= row <= 14 and 0 <= column <= 14):
        raise ContractError(f"row {row}, column {column} is outside 0..14 and has no location byte.")
    return row << 4 | column


def shorten(obs: UInt8[Tensor, "*rows M 3"]) -> UInt8[Tensor, "*rows M2 3"]:
    """Leave out the padding that all rows end in. The host looks at the tokens: on a GPU it waits for them.

    Sums of another length are rounded differently, and an agent would feel in its last bits how much its
    batch mates see. Measured: sums of whole blocks and of more zeros are bit-equal, but for very short
    ones. So padding goes in whole blocks, and not below a shortest length.
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
    """Make observations that hold no token at all."""
    return torch.full((agents, tokens, 3), PADDING, dtype=torch.uint8, device=device)


def pack(cells: Int[Tensor, "A N"], locations: Int[Tensor, " N"], most: int) -> UInt8[Tensor, "A {most} 3"]:
    """Turn cells into tokens, those that hold something packed to the front; beyond `most` they are left out.

    A cell is 0 where nothing is, else `word(feature, value)`. The order is that of the cells.
    """
    there = cells != 0
    place = there.cumsum(1, dtype=torch.int32)
    width = min(most, cells.shape[1])
    if width < cells.shape[1]:
        there = there & (place <= width)
    # Places count from 1; nobody reads what is laid at 0.
    slot = torch.mul(place, there, out=torch.empty_like(place, dtype=torch.long))
    room = cells.new_full((len(cells), 1 + width), -1).scatter_(1, slot, cells + locations)
    obs = empty(len(cells), most, cells.device)
    obs[:, :width] = room.view(torch.uint8).unflatten(1, (1 + width, 4))[:, 1:, :3]
    return obs


def word(feature: int, value: int) -> int:
    """Write a token without its place as one 32-bit number; its bytes are place, feature, value, nothing."""
    return feature << 8 | value << 16
