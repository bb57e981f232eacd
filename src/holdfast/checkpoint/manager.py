"""Periodic and final checkpoints; non-finite weights are never saved."""

import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from holdfast.checkpoint.format import Checkpoint, TrainingSnapshot, set_symlink, write_checkpoint
from holdfast.checkpoint.run_dir import RunDir
from holdfast.memory.kernels import all_plans

SPARE_DESCRIPTORS = 16
"""Descriptors held for the final checkpoint, in case an environment has used up the others."""


class CheckpointManager:
    """Writes a run's checkpoints in a background thread, and removes old ones.

    Keeps snapshots of the last two iterations, so that an interrupted run is saved at its last complete one.
    """

    def __init__(
        self,
        folder: RunDir,
        policy_files: Mapping[str, bytes],
        environment: Mapping[str, Any],
        *,
        interval: int,
        keep: int,
        alarm: Callable[[str], object],
        resumed_from: Checkpoint | None = None,
    ) -> None:
        self._folder, self._policy_files, self._environment = folder, policy_files, dict(environment)
        self._interval, self._keep, self._alarm = interval, keep, alarm
        # Two: an update that makes weights non-finite is noticed one iteration later.
        self._snapshots: deque[TrainingSnapshot] = deque(maxlen=2)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Path] | None = None
        # The latest iteration that is saved or being saved, and the latest that is on disk.
        self._saved = self._on_disk = -1 if resumed_from is None else resumed_from.iteration
        best = folder.best()
        self._best = None if best is None else best[0]
        for path, reason in folder.unreadable.items():
            alarm(f"{path.name} may be the best, but {reason}; it is not removed.")
        self._warning, self._is_lost = "", False
        self.latest: Path | None = None if resumed_from is None else resumed_from.path
        """The latest checkpoint; None: there were no finite weights to save."""
        self._spares: list[int] = []
        self.error: OSError | None = None
        """Why the final checkpoint could not be written, if it could not."""

    def save_if_due(self, snapshot: TrainingSnapshot, *, evaluated: bool = False) -> None:
        """Remember the end of an iteration, and save it if one is due or if it is evaluated as the best."""
        # At most one iteration overlaps with writing, so little more than an interval can be lost.
        self._wait_for_writer()
        if not self._spares:
            self._spares = [os.open(os.devnull, os.O_RDONLY) for _ in range(SPARE_DESCRIPTORS)]
        if not self._folder.path.exists() and not self._is_lost:
            self._is_lost = True
            self._alarm(f"{self._folder.path} was deleted; its metrics are lost, checkpoints are written again.")
        self._snapshots.append(snapshot)
        due = self._interval > 0 and snapshot.iteration % self._interval == 0
        if (due or (evaluated and self._is_best(snapshot))) and snapshot.is_finite:
            self._saved = snapshot.iteration
            # Copied from the GPU here: during CUDA graph capture no other thread may call CUDA.
            self._pending = self._writer.submit(self._write, snapshot.to_cpu())

    def save_final(self) -> str:
        """Save the last complete iteration with finite weights, if not saved yet; return a message."""
        while self._spares:
            os.close(self._spares.pop())
        self._wait_for_writer()
        has_nan, verb = False, "the last iteration is saved in"
        for snapshot in reversed(self._snapshots):
            if snapshot.is_finite:
                # The last one may be gone: the run's folder may have been deleted.
                if snapshot.iteration > self._saved or self.latest is None or not self.latest.exists():
                    try:
                        self.latest, verb = self._write(snapshot), "saved"
                    except OSError as error:
                        self.error = error
                break
            has_nan = True
        self._writer.shutdown()
        if self.error is not None:
            previous = "" if self.latest is None else f" The last checkpoint is {self.latest}."
            return f"the final checkpoint could not be saved: {self.error}{previous}"
        if self.latest is None:
            return "no checkpoint is saved: no complete iteration has finite weights."
        if has_nan:
            return f"non-finite weights are not saved; the last finite ones are in {self.latest}"
        return f"{verb} {self.latest}"

    def _wait_for_writer(self) -> None:
        """Wait for the checkpoint being written; a failed one is tried again when the next is due."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            self.latest, self._on_disk = pending.result(), self._saved
        except OSError as error:
            self._saved = self._on_disk
            self._alarm(f"{error} Training continues; the next checkpoint is tried when due.")
        if self._warning:
            self._alarm(self._warning)
            self._warning = ""

    def _write(self, snapshot: TrainingSnapshot) -> Path:
        """Write a checkpoint; errors after it is complete are only warnings."""
        self._folder.sync()
        path = self._folder.checkpoints / f"{snapshot.iteration:06d}"
        try:
            environment = {**self._environment, "kernels": all_plans()}
            write_checkpoint(self._folder.checkpoints, snapshot, self._policy_files, environment)
            if self._is_best(snapshot):
                self._best = snapshot.score
                set_symlink(self._folder.checkpoints / "best", path.name)
            self._prune(path)
        except OSError as error:
            if not path.exists():
                raise
            self._warning = f"{path} is saved, but: {error}"
        return path

    def _is_best(self, snapshot: TrainingSnapshot) -> bool:
        score = snapshot.score
        return score is not None and math.isfinite(score) and (self._best is None or score > self._best)

    def _prune(self, written: Path) -> None:
        """Remove all but the newest few checkpoints, the best, unreadable ones, and the one just written."""
        if not self._keep:
            return
        exceptions = {(self._folder.checkpoints / "best").resolve(), *self._folder.unreadable, written}
        for path in self._folder.numbered()[self._keep :]:
            if exceptions.isdisjoint((path, path.resolve())):
                # Renamed first: a checkpoint's name means it is complete.
                shutil.rmtree(path.rename(path.with_name(f".{path.name}.part")))
