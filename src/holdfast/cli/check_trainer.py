"""`holdfast check trainer:...`: find a trainer and measure its laws."""

import argparse
from collections.abc import Callable, Mapping

from holdfast.check.results import Laws
from holdfast.check.trainer import check_trainer
from holdfast.check.trainer.run import GAMMA, LAMBDA
from holdfast.check.trainers import TRAINERS, peer_trainer
from holdfast.errors import ConfigError, did_you_mean
from holdfast.registry import import_object

TRAINER = "trainer:"
OTHERS = ("obs", "steps", "device", "precision", "kernel", "html")
"""Options that do not apply to trainers."""


def find_trainer(
    target: str, keys: Mapping[str, str], options: argparse.Namespace
) -> Callable[[Callable[[str], None]], Laws]:
    """Return the measurement of the trainer that a target names."""
    for word in OTHERS:
        if getattr(options, word) is not None:
            raise ConfigError(f"--{word} is not for trainers, which get scripted environments; omit it.")
    if keys:
        raise ConfigError(f"{next(iter(keys))} is not an option of a trainer; set it in its function.")
    gamma, lam = _fraction(options.gamma, "--gamma", GAMMA), _fraction(options.lam, "--lam", LAMBDA)
    name, interface = target.removeprefix(TRAINER), options.interface or ""
    if ":" in name:
        train = import_object(name, "")
        if not callable(train):
            raise ConfigError(f"{target} is no function; write def train(envs): ... in that module.")
    elif name in TRAINERS:
        if interface not in ("", TRAINERS[name].interface):
            raise ConfigError(f"{target} has its own interface, {TRAINERS[name].interface}; omit --interface.")
        train, interface = peer_trainer(name), TRAINERS[name].interface
    else:
        hint = did_you_mean(name, TRAINERS, f"choose one of {', '.join(TRAINERS)}, or write trainer:my.module:train.")
        raise ConfigError(f"{target} is not known; {hint}")
    return lambda update: check_trainer(train, interface=interface, gamma=gamma, lam=lam, on_progress=update)


def _fraction(text: str | None, option: str, default: float) -> float:
    try:
        number = default if text is None else float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise ConfigError(f"{option} {text}: write a number from 0 to 1, for example {default}.")
    return number
