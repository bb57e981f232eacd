"""Record a replay: some agents of a run act for some hundred steps."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from holdfast.config.run import Config
from holdfast.errors import ConfigError
from holdfast.play import Player
from holdfast.play.play_loop import PlayLoop, Row, trim_tokens
from holdfast.policies import LSTMWrapper
from holdfast.report.frames import as_webp
from holdfast.report.replay import AXES, SUFFIX, Replay
from holdfast.worlds.env_source import source_of

MOST_UNITS = 400_000
"""Unit values of a replay: with more agents and steps, fewer units of each agent are stored."""
AT_END_S = 1.0
"""Seconds of recording at the end of a training."""
FRAME_BYTES = 600_000
"""Bytes of all frames: a report stays below 2 MB."""


def record_replay(
    player: Player,
    steps: int = 256,
    *,
    agents: int = 8,
    seed: int = 0,
    greedy: bool = False,
    run: str = "",
    steps_trained: int = 0,
    seconds: float = 60.0,
) -> Replay:
    """Let agents act on held-out episodes, and return what they saw, did and remembered.

    Actions are sampled, as in training, or the most likely ones. It ends early so many seconds after the first step.
    """
    if not 1 <= steps <= AXES["N"] or not 1 <= agents <= AXES["A"]:
        raise ConfigError(f"steps={steps} agents={agents}; give 1 to {AXES['N']:,} steps and 1 to {AXES['A']} agents.")
    until = 0.0
    with PlayLoop(player, agents, follow=agents, seed=seed, greedy=greedy) as loop:
        header, rows = loop.header(run, steps_trained), list[Row]()
        grids, places, frames = list[np.ndarray](), list[np.ndarray](), list[bytes]()
        while len(rows) < steps and (not rows or time.monotonic() < until):
            if loop.kinds:
                grid, place = loop.grid()
                grids.append(grid)
                places.append(place)
            frame = loop.frame()
            if frame is not None:
                frames.append(as_webp(frame))
            rows.append(loop.step())
            # The first step and frame take longer: they import and compile.
            until = until or time.monotonic() + seconds
    arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    arrays["units"] = _thin(arrays["units"])
    if "tokens" in arrays:
        arrays["tokens"] = trim_tokens(arrays["tokens"])
    if grids:
        arrays |= {"grid": grids[0], "places": np.stack(places), "changes": changes_of(grids)}
    if frames:
        every = -(-sum(map(len, frames)) // FRAME_BYTES)
        frames, arrays["frame_steps"] = frames[::every], np.arange(0, len(frames), every, dtype=np.int32)
    return Replay(header, arrays, tuple(frames))


def leave_replay(folder: Path, policy: LSTMWrapper, config: Config, steps_trained: int) -> Path | None:
    """Record a replay of a run that ends, for a second, into `replays/` in its folder; return the file.

    None: the environment is an object, and there is no second one to play in.
    """
    source = source_of(config.world)
    if source is not None and source.is_object:
        return None
    player, file = Player(policy, config), folder / "replays" / f"{steps_trained:012d}{SUFFIX}"
    replay = record_replay(player, run=folder.name, steps_trained=steps_trained, seconds=AT_END_S)
    return replay.save(file)


def changes_of(grids: list[np.ndarray]) -> np.ndarray:
    """Return (step, cell, kind) of every cell that differs from the step before."""
    return np.concatenate([np.zeros((0, 3), np.int32), *_changes(grids)])


def _changes(grids: list[np.ndarray]) -> Iterator[np.ndarray]:
    for step in range(1, len(grids)):
        cells = (grids[step] != grids[step - 1]).reshape(-1).nonzero()[0]
        yield np.stack([np.full_like(cells, step), cells, grids[step].reshape(-1)[cells]], axis=1).astype(np.int32)


def _thin(units: np.ndarray) -> np.ndarray:
    """Return evenly spaced units of each agent, as many as a replay stores."""
    steps, agents, count = units.shape
    selected = max(1, min(count, MOST_UNITS // (steps * agents))) if count else 0
    return units[:, :, np.arange(selected) * count // max(selected, 1)]
