"""The config of a run, from the arguments of `train`."""

from collections.abc import Mapping
from typing import Any

from holdfast.build import with_env
from holdfast.config.base import parse_int
from holdfast.config.run import Config, PolicyConfig, override
from holdfast.config.trainer import fit_batch_sizes
from holdfast.errors import ConfigError
from holdfast.policies import FunctionalPolicy, LSTMWrapper, PolicyLike, policy_name
from holdfast.recipes import find_recipe, recipe_for
from holdfast.worlds.env_source import EnvLike, EnvSource, find_source

WORLD, POLICY = ("world", "world.name"), ("policy", "policy.name", "py_agent", "agent")
"""Keys that name the world and the policy."""
SIZES = ("trainer.batch_size", "trainer.minibatch_size")


def config_of_new_run(
    recipe: str | None,
    config: Mapping[str, Any] | Config | None,
    env: EnvLike | None,
    policy: PolicyLike | None,
) -> tuple[Config, str]:
    """Return the config of a new run, and the name of its recipe; "": it has none."""
    source = None if env is None else find_source(env)
    keys = {} if isinstance(config, Config) else dict(config or {})
    world = source.name if isinstance(source, EnvSource) else source
    if isinstance(config, Config):
        if recipe is not None:
            raise ConfigError(f"config is a whole Config; leave out the recipe {recipe!r}, or pass the keys to change.")
        base, recipe = config, ""
    else:
        world_key = next((str(keys[key]) for key in WORLD if key in keys), None)
        recipe = recipe or recipe_for(world or world_key)
        base = find_recipe(recipe)
    keys |= _policy_keys(policy, keys)
    if world is not None:
        _require_absent(keys, WORLD, "env")
        keys |= {"world.name": world}
    if isinstance(source, EnvSource) and source.agents is not None:
        keys |= _sizes_for(source.agents, base, keys)
    # The source itself: a function has made its first environment.
    return with_env(override(base, keys), source), recipe


def _sizes_for(agents: int, base: Config, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of agents that an environment has, and batch sizes that fit, unless they are given."""
    trainer, sizes = base.trainer, {"world.agents": keys.get("world.agents", agents)}
    if any(key in keys for key in SIZES):
        return sizes
    horizon = parse_int(keys.get("trainer.bptt_horizon", trainer.bptt_horizon))
    return sizes | fit_batch_sizes(agents, horizon, trainer.batch_size, trainer.minibatch_size)


def _policy_keys(policy: PolicyLike | None, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that describe a policy; those of an object are what it is."""
    if policy is None:
        return {}
    _require_absent(keys, POLICY, "policy")
    name = policy_name(policy)
    if not isinstance(policy, LSTMWrapper):
        return {"policy.name": name}
    for key in keys:
        if key.startswith(("policy.", "memory.")):
            raise ConfigError(
                f"{key} is decided where the policy is made, which is an object: holdfast.make_policy(CLASS, world, "
                f"{key.rpartition('.')[2]}=...), or pass its class: policy={type(policy).__name__}."
            )
    if not any(weight.requires_grad for weight in policy.parameters()):
        raise ConfigError(f"No weight of {name} requires a gradient; type policy.requires_grad_().")
    defaults = {f"policy.{key}": field.default for key, field in PolicyConfig.model_fields.items()}
    return defaults | {
        "policy.name": name,
        "policy.normalize_obs": policy.obs_norm is not None,
        "policy.normalize_value": policy.value_norm is not None,
        "policy.precision": policy.precision if isinstance(policy, FunctionalPolicy) else "float32",
        "memory.clear_on": policy.clear_on,
    }


def _require_absent(keys: Mapping[str, Any], names: tuple[str, ...], argument: str) -> None:
    for key in names:
        if key in keys:
            raise ConfigError(f"{key}={keys[key]} and {argument}= name two; leave out one.")
