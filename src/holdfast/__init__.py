"""Holdfast: recurrent reinforcement-learning policies, and checks that their memory is right.

Public names and subpackages are imported when they are first used, so `import holdfast` is fast.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from holdfast.version import __version__

if TYPE_CHECKING:
    from holdfast.check import check, check_world
    from holdfast.errors import ConfigError, ContractError, HoldfastError
    from holdfast.evaluation.evaluate import Evaluation, Match, compete, evaluate
    from holdfast.play import Player, load
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
    from holdfast.training.train import RunResult, train
    from holdfast.worlds import Feature, Step, World, WorldSpec, make_world

__all__ = ["ComponentPolicy", "ConfigError", "ContractError", "Evaluation", "Example", "Fast", "Feature"]
__all__ += ["HoldfastError", "LSTMWrapper", "LatentAttnMed", "LatentAttnSmall", "LatentAttnTiny", "Match"]
__all__ += ["Player", "RecurrentPolicy", "RunResult", "Step", "World", "WorldSpec", "__version__", "check"]
__all__ += ["check_world", "compete", "evaluate", "load", "make_policy", "make_world", "train"]
_MODULES = {
    "check": ("check", "check_world"),
    "errors": ("ConfigError", "ContractError", "HoldfastError"),
    "evaluation.evaluate": ("Evaluation", "Match", "compete", "evaluate"),
    "play": ("Player", "load"),
    "training.train": ("RunResult", "train"),
    "worlds": ("Feature", "Step", "World", "WorldSpec", "make_world"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in __all__:
        value = getattr(import_module(f"holdfast.{_MODULE_OF.get(name, 'policies')}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and find_spec(f"holdfast.{name}") is not None:
        return import_module(f"holdfast.{name}")
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """Keeps `holdfast.check` the function: importing a submodule binds its name to the module."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
