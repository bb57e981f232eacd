"""Checkpoints now and then, and at the end; weights that are no numbers never replace good ones."""

import math
import shutil
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from holdfast.keep.checkpoint import Checkpoint, Moment, point, write_checkpoint
from holdfast.keep.folder import RunFolder
from holdfast.memory.kernels import all_chosen


class Kept:
    """Writes a run's checkpoints beside the training, and knows which may go.

    Every moment is kept in mind until the one after the next: a run that is stopped or broken is saved as it
    was at its last whole iteration. `about` are the files that say how to build the policy.
    """

    def __init__(
        self,
        folder: RunFolder,
        about: Mapping[str, bytes],
        made_with: Mapping[str, Any],
        *,
        interval: int,
        keep: int,
        alarm: Callable[[str], object],
        since: Checkpoint | None = None,
    ) -> None:
        self._folder, self._about, self._made_with, self._alarm = folder, about, dict(made_with), alarm
        self._interval, self._keep = interval, keep
        # What spoils weights is met in the iteration after: the ones before are needed, too.
        self._latest: deque[Moment] = deque(maxlen=2)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future[Path] | None = None
        # The latest iteration that is saved or being saved, and the latest that is on the disk.
        self._saved = self._whole = -1 if since is None else since.iteration
        best = folder.best()
        self._best = None if best is None else best[0]
        self._trouble = ""
        self.checkpoint: Path | None = None if since is None else since.path
        """The latest one; none: nothing good was there to save."""
        self.lost: OSError | None = None
        """Why the end could not be saved; none: it was, or there was nothing to save."""

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written beside the training."""
        return self._under_way is not None and not self._under_way.done()

    def saw(self, moment: Moment, *, judged: bool = False) -> None:
        """Keep the end of an iteration in mind, and save it after every so many.

        One that was `judged` by an evaluation, and is the best so far, is saved too.
        """
        # Writing goes on beside one iteration, no longer: little more than an interval can be lost.
        self._settle()
        self._latest.append(moment)
        due = self._interval > 0 and moment.iteration % self._interval == 0
        if (due or (judged and self._is_best(moment))) and moment.is_finite:
            self._saved = moment.iteration
            # Copied from the GPU here: while a step is recorded there, no other thread may ask for anything.
            self._under_way = self._writer.submit(self._write, moment.on_host())

    def at_last(self) -> str:
        """Save the last whole iteration whose weights are numbers, if it is not yet; say what was done."""
        self._settle()
        spoilt = False
        for moment in reversed(self._latest):
            if moment.is_finite:
                if moment.iteration > self._saved:
                    self._save_last(moment)
                break
            spoilt = True
        self._writer.shutdown()
        if self.lost is not None:
            before = "" if self.checkpoint is None else f" The last one is {self.checkpoint}."
            return f"what was learnt could not be saved: {self.lost}{before}"
        if self.checkpoint is None:
            return "nothing is saved: there are no weights of a whole iteration that are numbers."
        if spoilt:
            return f"weights that are not finite are not saved; the last good ones are {self.checkpoint}"
        return f"what was learnt so far is saved: {self.checkpoint}"

    def _save_last(self, moment: Moment) -> None:
        try:
            self.checkpoint = self._write(moment)
        except OSError as error:
            self.lost = error

    def _settle(self) -> None:
        """Wait for what is being written; what could not be is tried again with the next one."""
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        try:
            self.checkpoint, self._whole = under_way.result(), self._saved
        except OSError as error:
            self._saved = self._whole
            self._alarm(f"{error} Training goes on, and the next checkpoint is tried in its time.")
        if self._trouble:
            self._alarm(self._trouble)
            self._trouble = ""

    def _write(self, moment: Moment) -> Path:
        """Write a checkpoint; one that is whole is written, whatever goes wrong afterwards."""
        self._folder.sync()
        written = self._folder.checkpoints / f"{moment.iteration:06d}"
        try:
            made = {**self._made_with, "kernels": all_chosen()}
            write_checkpoint(self._folder.checkpoints, moment, self._about, made)
            if self._is_best(moment):
                self._best = moment.score
                point(self._folder.checkpoints / "best", written.name)
            self._let_go()
        except OSError as error:
            if not written.exists():
                raise
            self._trouble = f"{written} is saved, but: {error}"
        return written

    def _is_best(self, moment: Moment) -> bool:
        score = moment.score
        return score is not None and math.isfinite(score) and (self._best is None or score > self._best)

    def _let_go(self) -> None:
        """Remove all but the newest few, and the best."""
        if not self._keep:
            return
        best = (self._folder.checkpoints / "best").resolve()
        for path in self._folder.numbered()[self._keep :]:
            if path.resolve() != best:
                # Hidden first: what has a checkpoint's name is whole.
                going = path.rename(path.with_name(f".{path.name}.part"))
                shutil.rmtree(going)
