"""First-order recurrences without a loop over time: `h[t] = a[t] h[t-1] + b[t]`, by doubling."""

import torch

from holdfast.shapes import Float, Tensor


def scan(
    a_BTH: Float[Tensor, "B T H"], b_BTH: Float[Tensor, "B T H"], entry_BH: Float[Tensor, "B H"]
) -> Float[Tensor, "B T H"]:
    """Run the recurrence over T in log2(T) passes.

    After the pass over distance d, `a` and `b` at t stand for the last 2d steps at once:
    (a, b) after (a', b') is (a a', a b' + b). Where a is 0 nothing before t is left, exactly.
    """
    # The entry state comes in with the first step; what it adds is exactly 0 where that clears.
    b_BTH = torch.cat([a_BTH[:, :1] * entry_BH[:, None] + b_BTH[:, :1], b_BTH[:, 1:]], dim=1)
    distance, length = 1, a_BTH.shape[1]
    while distance < length:
        b_late = a_BTH[:, distance:] * b_BTH[:, :-distance] + b_BTH[:, distance:]
        a_late = a_BTH[:, distance:] * a_BTH[:, :-distance]
        b_BTH = torch.cat([b_BTH[:, :distance], b_late], dim=1)
        a_BTH = torch.cat([a_BTH[:, :distance], a_late], dim=1)
        distance *= 2
    return b_BTH
