"""Callbacks: functions and objects that a run calls once in every iteration."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

from holdfast.errors import ConfigError, ContractError, located_error_text
from holdfast.policies import LSTMWrapper
from holdfast.report.metrics import CUSTOM
from holdfast.training.stop import StopRequest
from holdfast.training.trainer import Trainer


class TrainingIteration:
    """One complete iteration of a run, which callbacks read and act on: `def callback(iteration): ...`.

    What a callback logs, sets or requests is part of the checkpoint of this iteration.
    """

    def __init__(
        self,
        trainer: Trainer,
        metrics: dict[str, int | float],
        *,
        policy: LSTMWrapper,
        folder: Path,
        stop: StopRequest,
    ) -> None:
        self._trainer, self._metrics, self._stop = trainer, metrics, stop
        self.policy = policy
        """The policy that is being trained."""
        self.folder = folder
        """The run's folder."""

    @property
    def number(self) -> int:
        """Complete iterations, from 1 on."""
        return self._trainer.iteration

    @property
    def total(self) -> int:
        """Iterations of the run."""
        return self._trainer.iterations

    @property
    def metrics(self) -> Mapping[str, int | float]:
        """The metrics of this iteration, and what callbacks have logged so far; without those not measured in it."""
        return MappingProxyType(self._metrics)

    def log(self, name: str, value: int | float) -> None:
        """Add a number to the metrics of this iteration, as `custom/NAME`."""
        number = float(value)
        if not isfinite(number):
            raise ConfigError(f"{CUSTOM}{name} is {number}; log finite numbers, and leave out what was not measured.")
        self._metrics[f"{CUSTOM}{name}"] = number

    def value(self, key: str) -> float | None:
        """Return a number of the config in the next iteration: `iteration.value("trainer.ppo.ent_coef")`."""
        return self._trainer.value(key)

    def set(self, key: str, value: int | float) -> None:
        """Set a number of the config from the next iteration on, instead of its schedule; checkpoints hold it."""
        self._trainer.set(key, value)

    def stop(self) -> None:
        """End the run after this iteration, saved, as Ctrl-C does; the next callbacks are still called."""
        self._stop.requested = True


Callback = Callable[[TrainingIteration], object]


def require_callbacks(callbacks: Sequence[Any]) -> Sequence[Callback]:
    """Raise unless these are functions, or objects with `__call__`."""
    if not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks={callbacks!r} is not a list; write callbacks=[...].")
    for callback in callbacks:
        if not callable(callback):
            raise ConfigError(
                f"callbacks: {callback!r} cannot be called; give a function, or write __call__(iteration)."
            )
    return callbacks


def call(callbacks: Sequence[Callback], iteration: TrainingIteration) -> None:
    """Call all callbacks; an exception ends the run and says where it was raised."""
    for callback in callbacks:
        name = getattr(callback, "__name__", type(callback).__name__)
        try:
            callback(iteration)
        except Exception as error:
            text = f"callback {name}, iteration {iteration.number}: {located_error_text(error).rstrip('.')}."
            raise ContractError(text) from error
