"""Adapters of policies for the check; other packages add theirs by entry point."""

from typing import Any

from holdfast.check.adapters.base import PolicyAdapter
from holdfast.check.adapters.cleanrl import CleanRL
from holdfast.check.adapters.generic import Functions
from holdfast.check.adapters.holdfast import HoldfastPolicy
from holdfast.check.adapters.pufferlib import Puffer
from holdfast.check.adapters.raw_module import RawModule
from holdfast.check.adapters.rsl_rl import RslRl
from holdfast.check.adapters.sb3 import SB3
from holdfast.check.adapters.torchrl import TorchRL
from holdfast.errors import ConfigError
from holdfast.registry import Registry
from holdfast.worlds import World

__all__ = ["ADAPTERS", "SB3", "CleanRL", "Functions", "HoldfastPolicy", "PolicyAdapter", "Puffer"]
__all__ += ["RawModule", "RslRl", "TorchRL", "adapt"]

BUILTIN = {
    "functions": Functions,
    "raw_module": RawModule,
    "pufferlib": Puffer,
    "cleanrl": CleanRL,
    "torchrl": TorchRL,
    "rsl_rl": RslRl,
    "sb3": SB3,
    "holdfast": HoldfastPolicy,
}
ADAPTERS = Registry("check adapter", "entry point ", "holdfast.check_adapters", PolicyAdapter, BUILTIN)
"""From the most general to the most specific: `adapt` takes the last one that fits, entry points first."""


def adapt(policy: Any, world: World | None = None, **options: Any) -> PolicyAdapter:
    """Wrap a policy in the most specific adapter that fits it; `options` go to the adapter."""
    if not options.pop("clear", True):
        adapter = adapt(policy, world, **options)
        adapter.must_clear = False
        return adapter
    if isinstance(policy, PolicyAdapter):
        if options:
            raise ConfigError(f"{type(policy).__name__} is an adapter; pass {', '.join(options)} when you make it.")
        return policy
    adapter = next((adapter for adapter in reversed([*ADAPTERS.values()]) if adapter.fits(policy)), None)
    if adapter is None:
        raise ConfigError(
            f"A policy to check is a torch module, a name or a PolicyAdapter, not {type(policy).__name__}. "
            "For a policy with another interface use holdfast.check.adapters.Functions(module, ...)."
        )
    try:
        return adapter.make(policy, world, **options)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        name = str(error).rpartition("argument ")[2]
        raise ConfigError(f"{type(policy).__name__} is checked as {adapter.__name__}, which has no {name}.") from error
