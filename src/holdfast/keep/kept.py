"""Checkpoints now and then, and at the end; weights that are no numbers never replace good ones."""

from pathlib import Path

from holdfast.config import Config
from holdfast.experience.finite import are_finite
from holdfast.keep.folder import RunFolder
from holdfast.policies import LSTMWrapper


class Kept:
    """What a run has saved."""

    def __init__(self, folder: RunFolder, policy: LSTMWrapper, config: Config) -> None:
        self._folder, self._policy, self._config = folder, policy, config
        self._iteration = -1
        self.checkpoint: Path | None = None
        """The latest one; none: nothing good was there to save."""

    def now_and_then(self, iteration: int) -> None:
        """Save after every so many iterations."""
        interval = self._config.trainer.checkpoint_interval
        if interval and iteration % interval == 0:
            self._save(iteration)

    def at_last(self, iteration: int) -> str:
        """Save what a run ends with, unless that is done or it is no good; say what was saved."""
        if iteration != self._iteration or self.checkpoint is None:
            if not are_finite(self._policy):
                good = (
                    "nothing was saved before" if self.checkpoint is None else f"{self.checkpoint} is whole"
                )
                return f"weights that are not finite are not saved; {good}."
            self._save(iteration)
        return f"what was learnt so far is saved: {self.checkpoint}"

    def _save(self, iteration: int) -> None:
        if are_finite(self._policy):
            self.checkpoint = self._folder.save(self._policy, self._config, iteration)
            self._iteration = iteration
