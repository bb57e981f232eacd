"""Holdfast: reinforcement-learning agents that remember, and the proof that their memory is right."""

from holdfast import subjects
from holdfast.check import check, check_world
from holdfast.errors import ConfigError, ContractError, HoldfastError
from holdfast.experience import Contest, Evaluation, compete, evaluate
from holdfast.player import Player, load
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
from holdfast.worlds import Feature, Step, World, WorldSpec, make_world

__all__ = [
    "ComponentPolicy",
    "ConfigError",
    "Contest",
    "ContractError",
    "Evaluation",
    "Example",
    "Fast",
    "Feature",
    "HoldfastError",
    "LSTMWrapper",
    "LatentAttnMed",
    "LatentAttnSmall",
    "LatentAttnTiny",
    "Player",
    "RecurrentPolicy",
    "Run",
    "Step",
    "World",
    "WorldSpec",
    "__version__",
    "check",
    "check_world",
    "compete",
    "evaluate",
    "load",
    "make_policy",
    "make_world",
    "subjects",
    "train",
]
