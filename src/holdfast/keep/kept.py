"""Checkpoints now and then, and at the end; weights that are no numbers never replace good ones."""

from collections import deque
from pathlib import Path

import torch

from holdfast.config import Config
from holdfast.experience.finite import are_finite
from holdfast.keep.folder import RunFolder
from holdfast.policies import LSTMWrapper
from holdfast.shapes import Tensor


class Kept:
    """What a run has saved, and its latest weights, should they become no numbers."""

    def __init__(self, folder: RunFolder, policy: LSTMWrapper, config: Config) -> None:
        self._folder, self._policy, self._config = folder, policy, config
        self._saved = -1
        # What spoils weights is met in the iteration after: the ones before are needed, too.
        self._latest: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=2)
        self.checkpoint: Path | None = None
        """The latest one; none: nothing good was there to save."""

    @torch.no_grad()
    def saw(self, iteration: int) -> None:
        """Keep the weights of a whole iteration in mind, and save them after every so many."""
        weights = {name: weight.clone() for name, weight in self._policy.state_dict().items()}
        self._latest.append((iteration, weights))
        interval = self._config.trainer.checkpoint_interval
        if interval and iteration % interval == 0 and are_finite(self._policy):
            self._save(iteration)

    def at_last(self, iteration: int) -> str:
        """Save what a run ends with, or the latest weights that are good; say what was done."""
        if are_finite(self._policy):
            if iteration != self._saved:
                self._save(iteration)
            return f"what was learnt so far is saved: {self.checkpoint}"
        while self._latest:
            iteration, weights = self._latest.pop()
            if all(bool(weight.isfinite().all()) for weight in weights.values()):
                self._policy.load_state_dict(weights)
                if iteration > self._saved:
                    self._save(iteration)
                break
        if self.checkpoint is None:
            return "weights that are not finite are not saved, and there were no good ones."
        return f"weights that are not finite are not saved; the last good ones are {self.checkpoint}"

    def _save(self, iteration: int) -> None:
        self.checkpoint = self._folder.save(self._policy, self._config, iteration)
        self._saved = iteration
