"""Sizes that cannot fit into memory, refused before anything is allocated."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.config.run import Config
from holdfast.errors import ConfigError, ContractError

STEP_BYTES = 32
"""Least bytes of a stored step: reward, value, log-probability, action and flags, without the observation."""
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def check_sizes(config: Config, memory: int) -> None:
    """Refuse the first size that needs more than `memory` bytes; each need is a lower bound."""
    trainer, agents, hidden = config.trainer, config.world.agents, config.policy.hidden_size or 1
    needs = {
        f"policy.hidden_size={hidden}": 4 * hidden**2,
        f"world.agents={agents}": agents * (STEP_BYTES * trainer.bptt_horizon + 4 * hidden),
        f"trainer.batch_size={trainer.batch_size}": STEP_BYTES * trainer.batch_size,
    }
    for key, need in needs.items():
        if need > memory:
            raise ConfigError(
                f"{key} needs at least {format_bytes(need)} of memory, and there are {format_bytes(memory)}; give less."
            )


@contextmanager
def explaining_allocations(config: Config) -> Iterator[None]:
    """Raise a failed allocation as one line that names the keys to lower."""
    try:
        yield
    except (MemoryError, RuntimeError, ContractError) as error:
        amount = re.search(r"llocate (\d[\d.]* \w+)", str(error))
        if amount is None and not isinstance(error, MemoryError):
            raise
        keys = ("world.agents", "trainer.batch_size", "trainer.minibatch_size", "policy.hidden_size")
        trainer = config.trainer
        values = (config.world.agents, trainer.batch_size, trainer.minibatch_size, config.policy.hidden_size)
        sizes = ", ".join(f"{key}={value}" for key, value in zip(keys, values, strict=True) if value is not None)
        need = "" if amount is None else f" for {amount[1]} more"
        raise ConfigError(
            f"There is not enough memory{need}; lower one of {sizes} or the sizes of the world, "
            "or raise trainer.accumulate."
        ) from error


def format_bytes(count: int | float) -> str:
    """Format a number of bytes with a binary unit."""
    size, sign, units = abs(count), "-" if count < 0 else "", list(UNITS)
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    digits = 0 if size >= 10 or units[0] == "B" else 1
    return f"{sign}{size:.{digits}f} {units[0]}"
