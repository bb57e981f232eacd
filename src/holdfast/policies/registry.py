"""POLICIES: policies by name; make_policy builds one for a world."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from holdfast.errors import ConfigError
from holdfast.policies.components.component_policy import ComponentPolicy
from holdfast.policies.components.graph import find_graph
from holdfast.policies.example import Example
from holdfast.policies.fast import Fast
from holdfast.policies.latent_attn import LatentAttnMed, LatentAttnSmall, LatentAttnTiny
from holdfast.policies.lstm_wrapper import LSTMWrapper, normalize_by_hooks
from holdfast.policies.normalization import ObsNormalizer, RunningStats, normalized_spec
from holdfast.policies.recurrent_policy import FunctionalPolicy, RecurrentPolicy
from holdfast.registry import Registry
from holdfast.worlds.env_source import PYTHON, importable_name
from holdfast.worlds.step import World, WorldSpec

COMPONENT = "component:"
BUILTIN = {
    "fast": Fast,
    "latent_attn_tiny": LatentAttnTiny,
    "latent_attn_small": LatentAttnSmall,
    "latent_attn_med": LatentAttnMed,
    "example": Example,
}
POLICIES: Registry[LSTMWrapper] = Registry("policy", "policy=", "holdfast.policies", LSTMWrapper, BUILTIN)
"""Policies by name. Add yours by `register_policy("name", Class)`, or in another package by an entry
point of the group `holdfast.policies`."""
register_policy = POLICIES.register


PolicyLike = str | type[LSTMWrapper] | LSTMWrapper
"""A policy: its name, its class, or an object that is trained as it is."""


def policy_name(policy: PolicyLike) -> str:
    """Return the name of a policy in a config."""
    if isinstance(policy, LSTMWrapper):
        return f"{PYTHON}{type(policy).__name__}"
    if isinstance(policy, type) and issubclass(policy, LSTMWrapper):
        return importable_name(policy) or f"{PYTHON}{policy.__name__}"
    if isinstance(policy, str):
        return policy
    raise ConfigError(f"policy={policy!r} is {type(policy).__name__}; give a name, a RecurrentPolicy, or its class.")


def make_policy(
    name: str | type[LSTMWrapper],
    world: World | WorldSpec,
    *,
    seed: int | None = None,
    normalize_obs: bool = False,
    normalize_value: bool = False,
    **options: Any,
) -> LSTMWrapper:
    """Build a policy for a world or its spec, by name, `package.module:Class` or class; `auto` is `fast`.

    With a `seed` the initial weights depend on nothing else, and the global generator is not used. Statistics of
    observations (`normalize_obs`) and of returns (`normalize_value`) are part of the policy's weights.
    """
    build = find_policy("fast" if name == "auto" else name)
    spec = world if isinstance(world, WorldSpec) else getattr(world, "spec", None)
    if not isinstance(spec, WorldSpec):
        raise ConfigError(f"{world!r} is no world; write holdfast.make_policy(..., holdfast.make_world(env)).")
    signature = inspect.signature(build)
    if "encoder_init" in options and "encoder_init" not in signature.parameters:
        raise ConfigError(
            f"policy.encoder_init={options['encoder_init']} is for latent_attn_tiny, latent_attn_small and "
            f"latent_attn_med; leave it out for policy={name}."
        )
    policy_spec = normalized_spec(spec) if normalize_obs else spec
    try:
        signature.bind(policy_spec, **options)
    except TypeError as error:
        raise ConfigError(
            f"policy={name} cannot be made ({error}); write def __init__(self, spec, hidden_size=64, "
            "num_layers=1, **memory) and in it super().__init__(size, hidden_size, num_layers, **memory)."
        ) from None
    with nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        policy = build(policy_spec, **options)
    policy.bind(spec)
    if (normalize_obs or normalize_value) and not isinstance(policy, FunctionalPolicy):
        normalize_by_hooks(policy)
    policy.obs_norm = ObsNormalizer(spec.observation_space) if normalize_obs and not spec.features else None
    policy.value_norm = RunningStats() if normalize_value else None
    return policy


def find_policy(name: str | type[LSTMWrapper]) -> Callable[..., LSTMWrapper]:
    """Look up a policy by name, a graph by `component:NAME`, or a class by `package.module:Class`."""
    if isinstance(name, str) and name.startswith(COMPONENT):
        return partial(ComponentPolicy, graph=find_graph(name.removeprefix(COMPONENT)))
    if isinstance(name, str) and name.startswith(PYTHON):
        raise ConfigError(
            f"The policy {name} is an object of a Python program, which no file holds; pass it again: "
            "holdfast.train(policy=..., resume=RUN), holdfast.load(RUN, policy=...)."
        )
    policy, name = (POLICIES.find(name), name) if isinstance(name, str) else (name, policy_name(name))
    missing = sorted(getattr(policy, "__abstractmethods__", ()))
    if missing and policy is not RecurrentPolicy:
        raise ConfigError(f"policy={name}: {policy.__name__} lacks {' and '.join(missing)}.")
    if missing or policy.forward is LSTMWrapper.forward:
        raise ConfigError(f"policy={name}: {policy.__name__} is a base class; give a subclass of your own.")
    return policy
