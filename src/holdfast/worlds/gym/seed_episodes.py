"""SeedEpisodes: a wrapper for environments with a random generator of their own."""

from typing import Any

import gymnasium

SEEDS = 1 << 31
"""Every environment accepts seeds below this."""


class SeedEpisodes(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Seed every episode; one without a seed gets it from `np_random`.

    An environment that draws from another generator, such as Atari's emulator for sticky actions, can then be resumed
    exactly: `np_random` is saved, and it decides the seed of the episode.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment with a seed."""
        seed = int(self.unwrapped.np_random.integers(SEEDS)) if seed is None else seed
        return self.env.reset(seed=seed, options=options)
