"""`holdfast check trainer:...` and `rollout:...`: find a trainer or a recorded rollout and measure its laws."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.check.results import Laws
from holdfast.check.rollout_file import check_rollout
from holdfast.check.trainer import check_trainer
from holdfast.check.trainer.run import GAMMA, LAMBDA
from holdfast.check.trainers import TRAINERS, check_peer
from holdfast.errors import ConfigError, did_you_mean
from holdfast.registry import import_object

TRAINER, ROLLOUT = "trainer:", "rollout:"
Measure = Callable[[Callable[[str], None]], Laws]
OTHERS = ("obs", "steps", "device", "precision", "kernel", "html")
"""Options that do not apply to trainers and rollouts."""


def find_trainer(target: str, keys: Mapping[str, str], options: argparse.Namespace) -> Measure:
    """Return the measurement of the trainer that a target names."""
    _refuse(OTHERS, "trainers, which get scripted environments", keys, options)
    gamma, lam = _fraction(options.gamma, "--gamma", GAMMA), _fraction(options.lam, "--lam", LAMBDA)
    name, interface = target.removeprefix(TRAINER), options.interface or ""
    if name in TRAINERS:
        if interface not in ("", TRAINERS[name].interface):
            raise ConfigError(f"{target} has its own interface, {TRAINERS[name].interface}; omit --interface.")
        return lambda update: check_peer(name, gamma, lam, update)
    if ":" not in name:
        hint = did_you_mean(name, TRAINERS, f"choose one of {', '.join(TRAINERS)}, or write trainer:my.module:train.")
        raise ConfigError(f"{target} is not known; {hint}")
    train = import_object(name, "")
    if not callable(train):
        raise ConfigError(f"{target} is no function; write def train(envs): ... in that module.")
    return lambda update: check_trainer(train, interface=interface, gamma=gamma, lam=lam, on_progress=update)


def find_rollout(target: str, keys: Mapping[str, str], options: argparse.Namespace) -> Measure:
    """Return the measurement of a recorded rollout."""
    _refuse((*OTHERS, "interface", "gamma", "lam"), "rollouts, whose numbers are in the file", keys, options)
    path = Path(target.removeprefix(ROLLOUT))
    if not path.is_file():
        raise ConfigError(f"{path} is no file; write rollout:FILE, a safetensors file of a recorded rollout.")
    return lambda update: check_rollout(path)


def _refuse(words: tuple[str, ...], what: str, keys: Mapping[str, str], options: argparse.Namespace) -> None:
    for word in words:
        if getattr(options, word) is not None:
            raise ConfigError(f"--{word} is not for {what}; omit it.")
    if keys:
        raise ConfigError(f"{next(iter(keys))} is not an option here; keys are for worlds and runs, omit it.")


def _fraction(text: str | None, option: str, default: float) -> float:
    try:
        number = default if text is None else float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise ConfigError(f"{option} {text}: write a number from 0 to 1, for example {default}.")
    return number
