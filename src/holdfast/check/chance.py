"""The randomness that a whole program shares: set for a while, put back, and watched."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def shared_chance(seed: int) -> Iterator[None]:
    """Seed torch's, NumPy's and Python's own generators for a while, then put back what was there."""
    numpy_was, python_was = np.random.get_state(), random.getstate()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_was)
            random.setstate(python_was)


def fingerprint() -> dict[str, bytes]:
    """Write down where torch's and NumPy's shared generators stand.

    Python's own is left out: others draw from it all the time, such as checkers of types.
    """
    numpy_now = np.random.get_state(legacy=False)["state"]
    place = int(numpy_now["pos"]).to_bytes(8, "little")
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy.random": np.asarray(numpy_now["key"]).tobytes() + place,
    }
