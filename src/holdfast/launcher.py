"""What a launcher such as torchrun tells a process; read before torch is imported."""

import os

from holdfast.errors import ConfigError


def launched_ranks() -> int:
    """Return the number of ranks that a launcher such as torchrun has started this process for."""
    total = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    if not (total.isdecimal() and int(total) > 0):
        raise ConfigError(f"WORLD_SIZE={total} is no number of ranks; start the ranks with torchrun, or unset RANK.")
    return int(total)
