"""The token format: an observation is `[M,3]` uint8, one row a token (location, feature id, value).

Location packs the row in the high four bits and the column in the low four; `GLOBAL` marks a token
without a place, `PADDING` fills all three bytes of an empty row.
"""

import torch

from holdfast.errors import ContractError
from holdfast.shapes import Tensor, UInt8

GLOBAL = 0xFE
PADDING = 0xFF


def pack_location(row: int, column: int) -> int:
    """Pack a place of the window into the location byte."""
    if not (0 <= row <= 14 and 0 <= column <= 14):
        raise ContractError(f"row {row}, column {column} is outside 0..14 and has no location byte.")
    return row << 4 | column


def empty(agents: int, tokens: int, device: torch.device) -> UInt8[Tensor, "A M 3"]:
    """Make observations that hold no token at all."""
    return torch.full((agents, tokens, 3), PADDING, dtype=torch.uint8, device=device)
