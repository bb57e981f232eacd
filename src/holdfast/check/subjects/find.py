"""Which kind of subject a policy is: found by what it is and has, never by its name."""

import sys
from collections.abc import Callable
from typing import Any

from tensordict.nn import TensorDictModuleBase
from torch import nn

from holdfast.check.subject import Subject
from holdfast.check.subjects.bare import Bare
from holdfast.check.subjects.cleanrl import CleanRL, CleanRLAgent
from holdfast.check.subjects.puffer import Puffer, PufferPolicy
from holdfast.check.subjects.sb3 import SB3
from holdfast.check.subjects.torchrl import TorchRL
from holdfast.check.subjects.wrapper import Wrapped
from holdfast.errors import ConfigError
from holdfast.policies import LSTMWrapper, make_policy
from holdfast.worlds import World, make_world


def subject_of(policy: Any, world: World | None = None, **options: Any) -> Subject:
    """Find out how a policy is called, and by which trainer; `options` go to the adapter that fits."""
    if isinstance(policy, Subject):
        if options:
            raise ConfigError(
                f"{type(policy).__name__} is a subject already; give it {', '.join(options)} when it is made."
            )
        return policy
    if isinstance(policy, str | LSTMWrapper):
        world = world or make_world("recall", agents=1)
        policy = make_policy(policy, world, seed=0) if isinstance(policy, str) else policy
        return _make(Wrapped, policy, {"spec": world.spec, **options})
    if not isinstance(policy, nn.Module):
        raise ConfigError(
            f"A policy to check is a torch module, a name or a subject; this is {type(policy).__name__}. "
            "If it is called in a way of its own, say how: holdfast.subjects.Callables(module, ...)."
        )
    if _is_sb3(policy):
        return _make(SB3, policy, options)
    if isinstance(policy, TensorDictModuleBase):
        return _make(TorchRL, policy, options)
    if isinstance(policy, CleanRLAgent):
        return _make(CleanRL, policy, options)
    return _make(Puffer if isinstance(policy, PufferPolicy) else Bare, policy, options)


def _is_sb3(policy: nn.Module) -> bool:
    # Whoever holds such a policy has imported its library; nobody else must.
    library = sys.modules.get("sb3_contrib.common.recurrent.policies")
    return library is not None and isinstance(policy, library.RecurrentActorCriticPolicy)


def _make(kind: Callable[..., Subject], policy: Any, options: dict[str, Any]) -> Subject:
    try:
        return kind(policy, **options)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        word = str(error).rpartition("argument ")[2]
        raise ConfigError(
            f"{type(policy).__name__} is checked as {kind.__name__}, which takes no {word}."
        ) from error
