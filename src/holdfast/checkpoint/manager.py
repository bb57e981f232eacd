"""Periodic and final checkpoints; non-finite weights are never saved."""

import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Thread
from typing import Any

from holdfast.checkpoint.format import Checkpoint, TrainingSnapshot, write_checkpoint
from holdfast.checkpoint.run_dir import RunDir
from holdfast.memory.kernels import all_plans

SPARE_DESCRIPTORS = 16
"""Descriptors held for the final checkpoint, in case an environment has used up the others."""
SLOW_S = 3.0
"""Seconds after which waiting for the disk is reported."""


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
        self._pending: Future[Path] | None = None
        self._on_disk = -1 if resumed_from is None else resumed_from.iteration
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

    def is_due(self, snapshot: TrainingSnapshot, *, evaluated: bool = False) -> bool:
        """Whether the end of an iteration is to be saved: regularly, or because it is evaluated as the best."""
        regular = self._interval > 0 and snapshot.iteration % self._interval == 0
        return regular or (evaluated and self._is_best(snapshot))

    def save_if_due(self, snapshot: TrainingSnapshot, *, evaluated: bool = False) -> None:
        """Remember the end of an iteration, and save it if one is due or if it is evaluated as the best."""
        # First: a second signal may interrupt the wait.
        self._snapshots.append(snapshot)
        # At most one iteration overlaps with writing, so little more than an interval can be lost.
        self._wait_and_report("training waits for it")
        if not self._spares:
            self._spares = [os.open(os.devnull, os.O_RDONLY) for _ in range(SPARE_DESCRIPTORS)]
        if not self._folder.path.exists() and not self._is_lost:
            self._is_lost = True
            self._alarm(f"{self._folder.path} was deleted; its metrics are lost, checkpoints are written again.")
        if self.is_due(snapshot, evaluated=evaluated) and snapshot.is_finite:
            self._start_writing(snapshot)

    def save_final(self) -> str:
        """Save the last complete iteration with finite weights, if not saved yet; return a message."""
        while self._spares:
            os.close(self._spares.pop())
        try:
            return self._save_final()
        except KeyboardInterrupt:
            self._alarm(f"stopped while saving.{self._last_checkpoint()}")
            raise

    def _save_final(self) -> str:
        self._wait_and_report("the run ends after that")
        has_nan, verb = False, "the last iteration is saved in"
        for snapshot in reversed(self._snapshots):
            if snapshot.is_finite:
                # The last one may be gone: the run's folder may have been deleted.
                if snapshot.iteration > self._on_disk or self.latest is None or not self.latest.exists():
                    verb = "saved"
                    self._start_writing(snapshot)
                    self.error = self._wait_for_writer("the run ends after that")
                break
            has_nan = True
        if self.error is not None:
            return f"the final checkpoint could not be saved: {self.error}{self._last_checkpoint()}"
        if self.latest is None:
            return "no checkpoint is saved: no complete iteration has finite weights."
        if has_nan:
            return f"non-finite weights are not saved; the last finite ones are in {self.latest}"
        if not self._on_disk:
            return f"no iteration is complete; the untrained policy is in {self.latest}"
        return f"{verb} {self.latest}"

    def _last_checkpoint(self) -> str:
        if self.latest is None or not self.latest.exists():
            return " There is no earlier checkpoint."
        return f" The last checkpoint is {self.latest}."

    def _start_writing(self, snapshot: TrainingSnapshot) -> None:
        """Write a checkpoint in another thread; the main thread stays open to signals."""
        # Copied from the GPU here: during CUDA graph capture no other thread may call CUDA.
        snapshot, pending = snapshot.to_cpu(), Future[Path]()

        def write() -> None:
            try:
                pending.set_result(self._write(snapshot))
            except BaseException as error:
                pending.set_exception(error)

        # Before the thread starts: a signal must not separate the two, or a second thread would write beside it.
        self._pending = pending
        # A daemon: the third signal ends the process although the disk does not answer.
        Thread(target=write, name="checkpoint", daemon=True).start()

    def _wait_and_report(self, consequence: str) -> None:
        """Wait for the checkpoint being written; a failed one is tried again when the next is due."""
        error = self._wait_for_writer(consequence)
        if error is not None:
            self._alarm(f"{error} Training continues; the next checkpoint is tried when due.")

    def _wait_for_writer(self, consequence: str) -> OSError | None:
        """Wait for the checkpoint being written; return the error if it could not be."""
        if self._pending is None:
            return None
        if not wait([self._pending], SLOW_S).done:
            self._alarm(f"the disk is slow: a checkpoint is still being written; {consequence}.")
        failure = None
        try:
            self.latest = self._pending.result()
            self._on_disk = int(self.latest.name)
        except OSError as error:
            failure = error
        self._pending = None
        if self._warning:
            self._alarm(self._warning)
            self._warning = ""
        return failure

    def _write(self, snapshot: TrainingSnapshot) -> Path:
        """Write a checkpoint; errors after it is complete are only warnings."""
        path = self._folder.checkpoints / f"{snapshot.iteration:06d}"
        environment, is_best = {**self._environment, "kernels": all_plans()}, self._is_best(snapshot)
        try:
            write_checkpoint(
                self._folder.checkpoints,
                snapshot,
                self._policy_files,
                environment,
                logs=self._folder.log_files(),
                pointers=("latest", "best") if is_best else ("latest",),
            )
            self._prune(path)
        except OSError as error:
            if not path.exists():
                raise
            self._warning = f"{path} is saved, but: {error}"
        if is_best:
            self._best = snapshot.score
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
