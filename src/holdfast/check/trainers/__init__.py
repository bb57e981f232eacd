"""Trainers of other libraries, each as one function `train(envs)` that obeys the contract of `check_trainer`."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from holdfast.check.results import Laws
from holdfast.check.trainer.run import GAMMA, LAMBDA, Train, check_trainer
from holdfast.errors import ConfigError


@dataclass(frozen=True)
class PeerTrainer:
    """How to run a library's trainer."""

    interface: str
    package: str
    """What pip installs; empty if nothing is needed."""
    description: str
    """What runs, for the page."""
    hands_over_final: bool = True
    """Whether its environments give final observations to the trainer."""


TRAINERS = {
    "sb3": PeerTrainer("sb3", "sb3-contrib", "`RecurrentPPO.learn` with `MlpLstmPolicy`"),
    "cleanrl": PeerTrainer("gym", "", "our single file in CleanRL's style: its recurrent PPO for Atari, on vectors"),
    "rsl_rl": PeerTrainer("rsl_rl", "rsl-rl-lib", "`PPO` with recurrent actor and critic, in the runner's loop", False),
    "skrl": PeerTrainer("gym", "skrl", "`PPO_RNN`; its LSTM models are ours, as skrl leaves them to users"),
    "rl_games": PeerTrainer("gym", "rl-games", "`Runner` with `a2c_discrete` (PPO) and an LSTM after the MLP", False),
    "torchrl": PeerTrainer(
        "torchrl", "torchrl", "its collector, primer, GAE and `ClipPPOLoss`, with an `LSTMModule` that both heads share"
    ),
    "tianshou": PeerTrainer("gym", "tianshou", "`PPO` with `Recurrent` networks, updated on stacks of 8 observations"),
    "sample_factory": PeerTrainer(
        "gym", "sample-factory", "its serial runner: synchronous APPO with an LSTM, `value_bootstrap` on", False
    ),
}


def check_peer(
    name: str, gamma: float = GAMMA, lam: float = LAMBDA, on_progress: Callable[[str], None] = lambda doing: None
) -> Laws:
    """Measure the laws on a library's trainer; an error if its package is not installed."""
    peer = TRAINERS[name]
    return check_trainer(
        _train_of(name),
        interface=peer.interface,
        gamma=gamma,
        lam=lam,
        hands_over_final=peer.hands_over_final,
        on_progress=on_progress,
    )


def _train_of(name: str) -> Train:
    try:
        return import_module(f"holdfast.check.trainers.{name}_trainer").train
    except ModuleNotFoundError as error:
        package = TRAINERS[name].package
        raise ConfigError(f"trainer:{name}: {error.name} is not installed; type: pip install {package}") from error
