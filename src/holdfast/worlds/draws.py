"""Counter-based randomness: every draw is a pure function of (seed, stream, agent, step).

Nothing is kept between draws, so runs repeat with any number of workers, resuming needs no
generator state, and every device draws the same numbers.
"""

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.shapes import Float, Int, Tensor

STREAM_WORLD = 1
STREAM_ACTION = 2
STREAM_MINIBATCH = 3
STREAM_PART = 4
STREAM_UNSEEN = 5
STREAM_SHUFFLE = 6
STREAM_RESUMED = 7
STREAM_PROBE = 9
STREAM_RESTARTED = 10

Words = TypeVar("Words", Tensor, NDArray[np.int64])

_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_WRAP = 1 << 64


def _as_signed(number: int) -> int:
    number %= _WRAP
    return number - _WRAP if number >= _WRAP >> 1 else number


def _shift_right(x: Words, places: int) -> Words:
    """Shift without copying the sign in: torch has only signed 64-bit integers."""
    return (x >> places) & ((1 << (64 - places)) - 1)


def _mix(x: Words) -> Words:
    """Steele, Lea and Flood's splitmix64 finaliser: each input bit flips half of the output bits."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def bits(
    seed: int, stream: int, agent: Int[Tensor, "..."], step: int | Int[Tensor, "..."]
) -> Int[Tensor, "..."]:
    """Draw 64 random bits for each agent, the same ones for the same (seed, stream, agent, step)."""
    who, what = agent.long() * _GOLDEN + _as_signed(seed), _as_signed(stream * _GOLDEN)
    when = _as_signed(step * _GOLDEN) if isinstance(step, int) else step.long() * _GOLDEN
    if agent.device.type != "cpu" or agent.dim() == 0:
        return _mix(_mix(_mix(who) + what) + when)
    # The same by numpy, which needs a quarter of the time to begin each of some forty operations.
    then = when if isinstance(when, int) else when.numpy()
    return torch.from_numpy(_mix(_mix(_mix(who.numpy()) + what) + then))


def uniform(
    seed: int, stream: int, agent: Int[Tensor, "..."], step: int | Int[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """Draw a float32 in [0, 1) for each agent."""
    return _shift_right(bits(seed, stream, agent, step), 40).float() * 2.0**-24


def below(
    limit: int, seed: int, stream: int, agent: Int[Tensor, "..."], step: int | Int[Tensor, "..."]
) -> Int[Tensor, "..."]:
    """Draw a whole number in [0, limit) for each agent."""
    return (_shift_right(bits(seed, stream, agent, step), 33) * limit) >> 31


def seed_of(seed: int, stream: int, number: int = 0) -> int:
    """Derive a seed from a seed: never negative, so that every generator takes it."""
    return int(below(1 << 31, seed, stream, torch.tensor(number), 0))


def permutation(size: int, seed: int, stream: int, step: int, device: torch.device) -> Tensor:
    """Draw an order of `size` things."""
    things = torch.arange(size, device=device)
    return torch.argsort(bits(seed, stream, things, step), stable=True)
