"""Holdfast: reinforcement-learning agents that remember, and the proof that their memory is right."""

from holdfast import subjects
from holdfast.check import check, check_world
from holdfast.errors import ConfigError, ContractError, HoldfastError
from holdfast.policies import (
    ComponentPolicy,
    Example,
    Fast,
    LatentAttnMed,
    LatentAttnSmall,
    LatentAttnTiny,
    LSTMWrapper,
    RecurrentPolicy,
    make_policy,
)
from holdfast.train import Run, train
from holdfast.version import __version__
from holdfast.worlds import Step, World, make_world

__all__ = [
    "ComponentPolicy",
    "ConfigError",
    "ContractError",
    "Example",
    "Fast",
    "HoldfastError",
    "LSTMWrapper",
    "LatentAttnMed",
    "LatentAttnSmall",
    "LatentAttnTiny",
    "RecurrentPolicy",
    "Run",
    "Step",
    "World",
    "__version__",
    "check",
    "check_world",
    "make_policy",
    "make_world",
    "subjects",
    "train",
]
