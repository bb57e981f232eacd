"""Trainers of other libraries, each as one function `train(envs)` that obeys the contract of `check_trainer`."""

from dataclasses import dataclass
from importlib import import_module

from holdfast.check.trainer.run import Train
from holdfast.errors import ConfigError


@dataclass(frozen=True)
class PeerTrainer:
    """How to run a library's trainer."""

    interface: str
    package: str
    """What pip installs; empty if nothing is needed."""
    description: str
    """What runs, for the page."""


TRAINERS = {
    "sb3": PeerTrainer("sb3", "sb3-contrib", "`RecurrentPPO.learn` with `MlpLstmPolicy`"),
    "cleanrl": PeerTrainer("gym", "", "our single file in CleanRL's style: its recurrent PPO for Atari, on vectors"),
    "rsl_rl": PeerTrainer("rsl_rl", "rsl-rl-lib", "`PPO` with recurrent actor and critic, in the runner's loop"),
    "skrl": PeerTrainer("gym", "skrl", "`PPO_RNN`; its LSTM models are ours, as skrl leaves them to users"),
}


def peer_trainer(name: str) -> Train:
    """Return the function that runs a library's trainer; an error if its package is not installed."""
    try:
        return import_module(f"holdfast.check.trainers.{name}_trainer").train
    except ModuleNotFoundError as error:
        package = TRAINERS[name].package
        raise ConfigError(f"trainer:{name}: {error.name} is not installed; type: pip install {package}") from error
