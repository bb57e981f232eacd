"""Holdfast: train recurrent reinforcement-learning policies, and check that their memory is right.

    run = holdfast.train(env="CartPole-v1")             # or an environment, a function that makes one, a recipe
    run.metrics["charts/episodic_return"]               # every metric as an array over iterations
    world = holdfast.make_world("CartPole-v1")          # agents=64 of them
    holdfast.evaluate(run.policy, world, episodes=100)  # greedy; memory="cleared" shows what memory is worth
    holdfast.check(run.policy, world).ok                # the ten laws of memory, on any recurrent policy
    holdfast.load(run.folder).start().act(obs, first)   # act in your own program
    holdfast.plots.learning_curve(run)                  # a matplotlib figure; run.report is a page of all of them

Besides the functions below there are:

    RecurrentPolicy                              write encode() and decode(), and pass your class or object: policy=
    LSTMWrapper, ComponentPolicy                 a forward() of your own; a graph in YAML
    Fast, LatentAttnTiny, LatentAttnSmall, LatentAttnMed, Example
    World, Step, WorldSpec, Feature              the contract of environments on tensors
    Collector, Learner, Trainer, Config          the parts of a training loop of your own
    RunResult, TrainingIteration                 what train() returns, and what it passes to callbacks
    Evaluation, Match, Player                    what evaluate(), compete() and load() return
    HoldfastError, ConfigError, ContractError    errors that say what to type

Names and subpackages are imported when they are first used, so `import holdfast` is fast.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from holdfast.version import __version__ as __version__

if TYPE_CHECKING:
    from holdfast.check import check, check_world
    from holdfast.config.run import Config as Config
    from holdfast.errors import ConfigError as ConfigError
    from holdfast.errors import ContractError as ContractError
    from holdfast.errors import HoldfastError as HoldfastError
    from holdfast.evaluation.evaluate import Evaluation as Evaluation
    from holdfast.evaluation.evaluate import Match as Match
    from holdfast.evaluation.evaluate import compete, evaluate
    from holdfast.learn.ppo import Learner as Learner
    from holdfast.play import Player as Player
    from holdfast.play import load
    from holdfast.policies import ComponentPolicy as ComponentPolicy
    from holdfast.policies import Example as Example
    from holdfast.policies import Fast as Fast
    from holdfast.policies import LatentAttnMed as LatentAttnMed
    from holdfast.policies import LatentAttnSmall as LatentAttnSmall
    from holdfast.policies import LatentAttnTiny as LatentAttnTiny
    from holdfast.policies import LSTMWrapper as LSTMWrapper
    from holdfast.policies import RecurrentPolicy as RecurrentPolicy
    from holdfast.policies import make_policy
    from holdfast.rollout.collector import Collector as Collector
    from holdfast.training.callbacks import TrainingIteration as TrainingIteration
    from holdfast.training.run_result import RunResult as RunResult
    from holdfast.training.train import train
    from holdfast.training.trainer import Trainer as Trainer
    from holdfast.worlds import Feature as Feature
    from holdfast.worlds import Step as Step
    from holdfast.worlds import World as World
    from holdfast.worlds import WorldSpec as WorldSpec
    from holdfast.worlds import make_world

# The functions alone: help() prints all that is listed here, and of one policy that is a thousand lines of torch.
__all__ = ["check", "check_world", "compete", "evaluate", "load", "make_policy", "make_world", "train"]
_POLICIES = ("Example", "Fast", "LSTMWrapper", "LatentAttnMed", "LatentAttnSmall", "LatentAttnTiny", "RecurrentPolicy")
_MODULES = {
    "check": ("check", "check_world"),
    "config.run": ("Config",),
    "errors": ("ConfigError", "ContractError", "HoldfastError"),
    "evaluation.evaluate": ("Evaluation", "Match", "compete", "evaluate"),
    "learn.ppo": ("Learner",),
    "play": ("Player", "load"),
    "policies": ("ComponentPolicy", *_POLICIES, "make_policy"),
    "rollout.collector": ("Collector",),
    "training.callbacks": ("TrainingIteration",),
    "training.run_result": ("RunResult",),
    "training.train": ("train",),
    "training.trainer": ("Trainer",),
    "worlds": ("Feature", "Step", "World", "WorldSpec", "make_world"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "plots":
        return import_module("holdfast.report.plots")
    if name in _MODULE_OF:
        value = getattr(import_module(f"holdfast.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and find_spec(f"holdfast.{name}") is not None:
        return import_module(f"holdfast.{name}")
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_MODULE_OF, "__version__"])


class _Package(ModuleType):
    """Keeps `holdfast.check` the function: importing a submodule binds its name to the module."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
