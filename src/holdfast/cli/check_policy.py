"""A policy to check that a target names, with its world and its options: `my.module:Policy world=gym:… policy.x=…`."""

import ast
import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from holdfast.build import build_policy, build_world
from holdfast.check.adapters import adapt
from holdfast.check.adapters.base import PolicyAdapter
from holdfast.config.run import Config, override
from holdfast.errors import ConfigError, HoldfastError, error_text
from holdfast.policies import LSTMWrapper
from holdfast.recipes import DEFAULT, find_recipe
from holdfast.registry import import_object
from holdfast.rng import isolated_rng
from holdfast.worlds import World, closing_world

POLICY = "policy."
AGENTS = 8
CPU = torch.device("cpu")
NEEDED_BY = {"envs": "envs", "env": "envs", "observation_space": "observation_space", "action_space": "action_space"}


def find_policy(target: str, keys: Mapping[str, str], options: dict[str, Any]) -> PolicyAdapter:
    """Return the adapter of a policy in the world that the keys name; without keys, of a policy that needs none."""
    obj = import_object(target, "") if ":" in target and not target.startswith("component:") else None
    if obj is None or (isinstance(obj, type) and issubclass(obj, LSTMWrapper)):
        return _own_policy(target, keys, options)
    world_keys = {key: value for key, value in keys.items() if not key.startswith(POLICY)}
    config = _config({"world": "recall", **world_keys}) if world_keys else None
    arguments = {key.removeprefix(POLICY): _literal(value) for key, value in keys.items() if key.startswith(POLICY)}
    if config is None:
        return adapt(instantiate(obj, target, None, arguments), **options)
    with closing_world(build_world(config, CPU, agents=AGENTS, seed=config.seed)) as world:
        return adapt(instantiate(obj, target, world, arguments), world, **options)


def _own_policy(target: str, keys: Mapping[str, str], options: dict[str, Any]) -> PolicyAdapter:
    """Build a Holdfast policy as a training would."""
    if not keys:
        return adapt(target, **options)
    if "obs" in options:
        raise ConfigError(f"--obs is for policies of other libraries; the world of {target} has its own.")
    name = {"agent": target.removeprefix("component:")} if target.startswith("component:") else {"policy": target}
    config = _config({**name, **keys})
    with closing_world(build_world(config, CPU, agents=AGENTS, seed=config.seed)) as world:
        return adapt(build_policy(config, world, CPU), world, **options)


def _config(keys: Mapping[str, str]) -> Config:
    # Nothing is trained, so the sizes fit any number of agents.
    sizes = {"trainer.bptt_horizon": 1, "trainer.minibatch_size": 1, "trainer.batch_size": str(AGENTS)}
    return override(find_recipe(DEFAULT), {"world.agents": str(AGENTS), **sizes, **keys})


def _literal(value: str) -> Any:
    """Read a number, a list, true, false or none; else the text itself."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if value.lower() in words:
        return words[value.lower()]
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def instantiate(obj: Any, target: str, world: World | None, arguments: dict[str, Any]) -> Any:
    """Call a class or function that makes the policy, with spaces of the world; return a policy as it is."""
    if isinstance(obj, torch.nn.Module | PolicyAdapter) or not callable(obj):
        return obj
    parameters = inspect.signature(obj).parameters
    if world is not None:
        offered = _from_world(world)
        arguments = {name: offered[NEEDED_BY[name]] for name in parameters if name in NEEDED_BY} | arguments
    needs_envs = world is None and any(name in NEEDED_BY for name in parameters)
    hint = "name its world, world=gym:CartPole-v1" if needs_envs else "give its arguments, policy.NAME=VALUE"
    hint += ", or write a function without arguments that makes it."
    try:
        inspect.signature(obj).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{target} cannot be made ({error}); {hint}") from error
    try:
        # Seeded, so that the policy has the same weights each time.
        with isolated_rng(0):
            return obj(**arguments)
    except HoldfastError:
        raise
    except Exception as error:
        # A signature of `*args` says nothing; torch's own modules have it.
        advice = f"; {hint}" if isinstance(error, TypeError) else ""
        raise ConfigError(f"{target} cannot be made: {error_text(error)}{advice}") from error


def _from_world(world: World) -> dict[str, Any]:
    """Return what constructors take: spaces, and an object with them as a vector environment has them."""
    spec = world.spec
    observation = spec.observation_space
    action = spaces.Discrete(len(spec.action_names)) if spec.action is None else spec.action
    envs = SimpleNamespace(
        single_observation_space=observation,
        single_action_space=action,
        observation_space=observation,
        action_space=action,
        num_envs=AGENTS,
        num_agents=AGENTS,
        num_obs=int(np.prod(observation.shape or (1,))),
    )
    return {"envs": envs, "observation_space": observation, "action_space": action}
