"""The agent thinks: the template that minds the memory, encoders, heads, and the policies made of them."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from holdfast.errors import ConfigError, did_you_mean
from holdfast.named import find_named
from holdfast.policies.actions import Actions, actions_of
from holdfast.policies.component_policy import ComponentPolicy
from holdfast.policies.example import Example
from holdfast.policies.fast import Fast
from holdfast.policies.graph import find_graph
from holdfast.policies.latent_attn import LatentAttnMed, LatentAttnSmall, LatentAttnTiny
from holdfast.policies.template import PurePolicy, RecurrentPolicy, Thoughts
from holdfast.policies.wrapper import LSTMWrapper
from holdfast.worlds.step import World, WorldSpec

__all__ = [
    "POLICIES",
    "Actions",
    "ComponentPolicy",
    "Example",
    "Fast",
    "LSTMWrapper",
    "LatentAttnMed",
    "LatentAttnSmall",
    "LatentAttnTiny",
    "PurePolicy",
    "RecurrentPolicy",
    "Thoughts",
    "actions_of",
    "make_policy",
]

COMPONENT = "component:"
POLICIES: dict[str, type[RecurrentPolicy]] = {
    "fast": Fast,
    "latent_attn_tiny": LatentAttnTiny,
    "latent_attn_small": LatentAttnSmall,
    "latent_attn_med": LatentAttnMed,
    "example": Example,
}


def make_policy(
    name: str, world: World | WorldSpec, *, seed: int | None = None, **options: Any
) -> LSTMWrapper:
    """Build a policy for a world or its spec: by name, `package.module:Class`, or `auto` by what it sees.

    With a `seed` the initial weights depend on nothing else, and the global generator is left alone.
    """
    build = find_policy("fast" if name == "auto" else name)
    spec = world if isinstance(world, WorldSpec) else world.spec
    with nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        policy = _built(build, name, spec, options)
    policy.bind(spec)
    return policy


def _built(
    build: Callable[..., LSTMWrapper], name: str, spec: WorldSpec, options: dict[str, Any]
) -> LSTMWrapper:
    """Build a policy, and tell by name what its `__init__` does not take."""
    try:
        inspect.signature(build).bind(spec, **options)
    except TypeError as error:
        raise ConfigError(
            f"policy={name} cannot be made ({error}); write def __init__(self, spec, hidden_size=64, "
            "num_layers=1, **memory) and in it super().__init__(size, hidden_size, num_layers, **memory)."
        ) from None
    return build(spec, **options)


def find_policy(name: str) -> Callable[..., LSTMWrapper]:
    """Find a policy by its name, as a graph by `component:NAME`, or as a class by `package.module:Class`."""
    if name in POLICIES:
        return POLICIES[name]
    if name.startswith(COMPONENT):
        return partial(ComponentPolicy, graph=find_graph(name.removeprefix(COMPONENT)))
    if ":" not in name:
        meant = did_you_mean(name, [*POLICIES, "auto"], f"there is {', '.join(POLICIES)}.")
        raise ConfigError(
            f"There is no policy {name!r}; {meant} Your own class goes by package.module:Class."
        )
    found = find_named(name, "policy=")
    class_name = name.partition(":")[2]
    if not (isinstance(found, type) and issubclass(found, LSTMWrapper)):
        raise ConfigError(f"policy={name}: {class_name} is not a subclass of holdfast.LSTMWrapper.")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing and found is not RecurrentPolicy:
        raise ConfigError(f"policy={name}: {class_name} lacks {' and '.join(missing)}.")
    if missing or found.forward is LSTMWrapper.forward:
        raise ConfigError(f"policy={name}: {class_name} is a base to build on; give a class of your own.")
    return found
