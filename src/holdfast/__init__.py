"""Holdfast: reinforcement-learning agents that remember, and the proof that their memory is right."""

__version__ = "0.1.0"

from holdfast.check import check
from holdfast.errors import ConfigError, ContractError, HoldfastError
from holdfast.policies import Fast, LSTMWrapper, RecurrentPolicy, make_policy
from holdfast.train import Run, train
from holdfast.worlds import Step, World, make_world

__all__ = [
    "ConfigError",
    "ContractError",
    "Fast",
    "HoldfastError",
    "LSTMWrapper",
    "RecurrentPolicy",
    "Run",
    "Step",
    "World",
    "check",
    "make_policy",
    "make_world",
    "train",
]
