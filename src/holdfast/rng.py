"""Counter-based random numbers; saving, forking and isolating global generators."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.cuda_graphs import constant, is_recording
from holdfast.kernel_support import refused_on
from holdfast.types import Float, Int, Tensor

STREAM_WORLD = 1
STREAM_ACTION = 2
STREAM_MINIBATCH = 3
STREAM_PART = 4
STREAM_HELD_OUT = 5
STREAM_SHUFFLE = 6
STREAM_RESUMED = 7
STREAM_PROBE = 9
STREAM_RESTARTED = 10
STREAM_RANK = 11
STREAM_OCTAVE = 12

Words = TypeVar("Words", Tensor, NDArray[np.int64])

_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_WRAP = 1 << 64


def _as_signed(number: int) -> int:
    number %= _WRAP
    return number - _WRAP if number >= _WRAP >> 1 else number


def _shift_right(x: Words, places: int) -> Words:
    """Logical shift: torch has only signed 64-bit integers."""
    return (x >> places) & ((1 << (64 - places)) - 1)


def _mix(x: Words) -> Words:
    """The finalizer of splitmix64 (Steele, Lea and Flood): each input bit flips half of the output bits."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def random_bits(
    seed: int, stream: int, agent: Int[Tensor, "..."], step: int | Int[Tensor, "..."]
) -> Int[Tensor, "..."]:
    """Draw 64 random bits per agent, a function of (seed, stream, agent, step)."""
    drawn = _by_kernel("bits", seed, stream, agent, step)
    if drawn is not None:
        return drawn
    stream_key = _as_signed(stream * _GOLDEN)
    counter = _as_signed(step * _GOLDEN) if isinstance(step, int) else step.long() * _GOLDEN
    if agent.device.type != "cpu" or agent.dim() == 0 or is_recording():
        # While a rollout is recorded, all but the counter is computed once.
        mixed = constant(
            agent, (seed, stream), lambda: _mix(_mix(agent.long() * _GOLDEN + _as_signed(seed)) + stream_key)
        )
        return _mix(mixed + counter)
    key = agent.long() * _GOLDEN + _as_signed(seed)
    # The same with NumPy, which has a quarter of the overhead for each of some forty operations.
    np_counter = counter if isinstance(counter, int) else counter.numpy()
    return torch.from_numpy(_mix(_mix(_mix(key.numpy()) + stream_key) + np_counter))


def uniform(seed: int, stream: int, agent: Int[Tensor, "..."], step: int | Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Draw a float32 in [0, 1) per agent."""
    drawn = _by_kernel("uniform", seed, stream, agent, step)
    if drawn is not None:
        return drawn
    return _shift_right(random_bits(seed, stream, agent, step), 40).float() * 2.0**-24


def randint(
    limit: int, seed: int, stream: int, agent: Int[Tensor, "..."], step: int | Int[Tensor, "..."]
) -> Int[Tensor, "..."]:
    """Draw an integer in [0, limit) per agent."""
    drawn = _by_kernel("randint", seed, stream, agent, step, limit)
    if drawn is not None:
        return drawn
    return (_shift_right(random_bits(seed, stream, agent, step), 33) * limit) >> 31


def _by_kernel(
    kind: str, seed: int, stream: int, agent: Int[Tensor, "..."], step: int | Int[Tensor, "..."], limit: int = 1
) -> Tensor | None:
    """Draw in one kernel instead of some twenty; None: it cannot run here, or not for these shapes."""
    if not agent.is_cuda or agent.dtype != torch.int64 or not agent.is_contiguous():
        return None
    if isinstance(step, Tensor) and step.dim() and (step.dim() > 1 or agent.dim() != 2 or agent.shape[1] != 1):
        return None
    step = step.contiguous() if isinstance(step, Tensor) else step
    if refused_on(agent.device) is not None:
        return None
    from holdfast import rng_kernel

    with torch.cuda.device(agent.device):
        return rng_kernel.draw(kind, agent, step, seed=_as_signed(seed), stream=stream, limit=limit)


def derive_seed(seed: int, stream: int, number: int = 0) -> int:
    """Derive a seed from a seed; not negative, so that every generator accepts it."""
    return int(randint(1 << 31, seed, stream, torch.tensor(number), 0))


def permutation(size: int, seed: int, stream: int, step: int, device: torch.device) -> Tensor:
    """Draw a permutation of `size` items."""
    items = torch.arange(size, device=device)
    return torch.argsort(random_bits(seed, stream, items, step), stable=True)


def generator_of(device: torch.device) -> Tensor:
    """Return the state of torch's global generator of a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_generator(state: Tensor, device: torch.device) -> None:
    """Restore the state of torch's global generator of a device."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Seed the global generators of torch, NumPy and Python, and restore them at the end."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)


Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


@contextmanager
def restored_generators(generators: Sequence[Generator], device: torch.device) -> Iterator[None]:
    """Restore these generators at the end, and the global ones of torch (CPU, and a device), NumPy and Python."""
    states = [_state_of(generator) for generator in generators]
    host, on_device = torch.get_rng_state(), generator_of(device)
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            _set_state(generator, state)
        torch.set_rng_state(host)
        set_generator(on_device, device)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def _state_of(generator: Generator) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def generator_state() -> dict[str, bytes]:
    """Return the states of the global generators of torch and NumPy.

    Python's is left out: libraries draw from it all the time, such as type checkers.
    """
    numpy_state = np.random.get_state(legacy=False)["state"]
    position = int(numpy_state["pos"]).to_bytes(8, "little")
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy.random": np.asarray(numpy_state["key"]).tobytes() + position,
    }
