"""Holdfast: reinforcement-learning agents that remember, and the proof that their memory is right."""

from holdfast import subjects
from holdfast.check import check
from holdfast.errors import ConfigError, ContractError, HoldfastError
from holdfast.policies import Fast, LSTMWrapper, RecurrentPolicy, make_policy
from holdfast.train import Run, train
from holdfast.version import __version__
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
    "__version__",
    "check",
    "make_policy",
    "make_world",
    "subjects",
    "train",
]
