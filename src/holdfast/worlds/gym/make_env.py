"""Find and build environments: an id, a class, a function or a vector environment becomes a `VectorEnv`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from holdfast.errors import ConfigError, MakeError, did_you_mean, error_text, located_error_text
from holdfast.registry import import_named, import_object
from holdfast.trust import require_trust_to_call
from holdfast.worlds.gym.episode_log import AgentEnv
from holdfast.worlds.gym.frame_stack import stack_frames
from holdfast.worlds.gym.packages import import_package_of, missing_package
from holdfast.worlds.gym.wrappers import NamedWrap, Wrap, import_wrappers, name_of


def find_env(
    env: str | Callable[..., Any], options: Mapping[str, Any], wrappers: Sequence[Wrap]
) -> tuple[str, Callable[[], gymnasium.Env[Any, Any]], EnvSpec | None]:
    """Find an environment by id, `module:ID` or `package.module:Class`, or take a callable that makes it.

    Return its name in errors, a function that makes one, and its registered spec; None for a class or function.
    """
    source = _resolve(env) if isinstance(env, str) else env
    spec = source if isinstance(source, EnvSpec) else None
    if spec is not None:
        # Without Gymnasium's checkers: the world checks order and spaces, and wrappers may need the bare env.
        bare = replace(spec, order_enforce=False, disable_env_checker=True)
        name, make = f"gym:{env}", partial(gymnasium.make, bare, **options)
    elif isinstance(source, type) and not issubclass(source, gymnasium.Env | gymnasium.vector.VectorEnv):
        # Checked before the call: any other class could do anything with the options.
        raise ConfigError(f"gym:{env}: {source!r} is not a subclass of gymnasium.Env.")
    elif callable(source) and not isinstance(source, gymnasium.Env):
        if isinstance(env, str):
            require_trust_to_call(env, source)
        name, make = f"gym:{name_of(env)}", partial(source, **options)
    else:
        raise ConfigError(
            f"gym:{env}: every agent needs its own environment; give an id, a class or a function, not an instance."
        )
    return name, partial(_make, name, make, import_wrappers(wrappers)), spec


def _make(name: str, make: Callable[[], Any], wrappers: Sequence[NamedWrap]) -> gymnasium.Env[Any, Any]:
    env = make_and_wrap(name, make, wrappers)
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"{name} makes {env!r}; it must make a gymnasium.Env.")
    return env


def make_and_wrap(name: str, make: Callable[[], Any], wrappers: Sequence[NamedWrap]) -> Any:
    """Make one environment and wrap it, innermost first."""
    failure = "cannot be made"
    try:
        env = make()
        for wrapper, wrap in wrappers:
            failure = f"cannot be wrapped in {wrapper}"
            env = wrap(env)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(f"{name} {failure}: {missing_package(error)}") from error
    except Exception as error:
        raise MakeError(f"{name} {failure}: {located_error_text(error)}.") from error
    return env


def _resolve(name: str) -> Any:
    """Return the EnvSpec, class or function of a name; a registered id comes first."""
    module, colon, attribute = name.rpartition(":")
    if not colon:
        return _registered(name, name, "")
    members = vars(import_named(name, module, "gym:"))
    if attribute in gymnasium.registry or attribute not in members:
        public = [key for key in members if not key.startswith("_")] if attribute.isidentifier() else []
        return _registered(attribute, name, f"{module}:", public)
    return import_object(name, "gym:")


def _registered(env_id: str, name: str, prefix: str, alternatives: Sequence[str] = ()) -> EnvSpec:
    try:
        if env_id not in gymnasium.registry:
            import_package_of(env_id, name)
        return gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        # Other namespaces have other environments: ALE/Pong-v5 is not near to Ant-v5.
        namespace = _namespace(env_id)
        near = [registered for registered in map(str, gymnasium.registry) if _namespace(registered) == namespace]
        guess = did_you_mean(env_id, [*near, *alternatives], "")
        hint = guess.replace("mean ", f"mean gym:{prefix}") + " Otherwise write" if guess else "write"
        raise ConfigError(
            f"gym:{name} is not registered; {hint} package:ID for an id that a package registers, "
            "package.module:Class for a class."
        ) from error


def _namespace(env_id: str) -> str:
    return env_id.rpartition("/")[0]


Vector = Literal["sync", "native"]
Autoreset = Literal["auto", "same_step", "next_step", "disabled"]
MODES = {"same_step": AutoresetMode.SAME_STEP, "next_step": AutoresetMode.NEXT_STEP, "disabled": AutoresetMode.DISABLED}


@dataclass(frozen=True)
class VectorEnvHandle:
    """A vector environment, its autoreset mode, and its agents' environments if they were made here."""

    name: str
    env: VectorEnv[Any, Any, Any]
    mode: AutoresetMode
    agent_envs: tuple[AgentEnv, ...] = ()
    """The environments, if they were made here; only these can be saved and restored."""


def build_vector_env(
    env: str | Callable[..., Any] | VectorEnv[Any, Any, Any],
    agents: int,
    *,
    vector: Vector,
    autoreset: Autoreset,
    options: Mapping[str, Any],
    wrappers: Sequence[Wrap],
    frame_stack: int = 1,
    keep: Sequence[int] = (),
) -> VectorEnvHandle:
    """Build a vector environment with one environment per agent, or take an existing one.

    With `frame_stack`, the environments return stacks of the entries that `keep` lists.
    """
    for key, value, choices in (("vector", vector, ("sync", "native")), ("autoreset", autoreset, ("auto", *MODES))):
        if value not in choices:
            raise ConfigError(f"world.{key}={value}: give one of {', '.join(choices)}.")
    for key, number in (("agents", agents), ("frame_stack", frame_stack)):
        if number < 1:
            raise ConfigError(f"world.{key}={number}: there must be at least 1.")
    if isinstance(env, VectorEnv):
        name = f"gym:{env}"
        if options or wrappers or frame_stack > 1:
            raise ConfigError(f"{name} is an instance; apply options, wrappers and frame_stack where it is made.")
        if env.num_envs != agents:
            raise ConfigError(f"{name} has {env.num_envs} environments; write agents={env.num_envs}, not {agents}.")
        return VectorEnvHandle(name, env, _autoreset_mode(env, name, autoreset))
    name, make, spec = find_env(env, options, wrappers)
    if vector == "sync":
        if frame_stack > 1:
            unstacked = make
            make = lambda: stack_frames(unstacked(), frame_stack, name, keep)  # noqa: E731
        return _sync(name, make, agents, MODES.get(autoreset, AutoresetMode.SAME_STEP))
    for key, is_set in (("wrappers", bool(wrappers)), ("frame_stack", frame_stack > 1)):
        if is_set:
            raise ConfigError(f"{name}: world.{key} cannot be used with world.vector=native.")
    return _native(name, spec, agents, autoreset, options)


def _sync(name: str, make: Callable[[], gymnasium.Env[Any, Any]], agents: int, mode: AutoresetMode) -> VectorEnvHandle:
    envs = [make() for _ in range(agents)]
    if len({id(env) for env in envs}) < agents:
        raise ConfigError(f"{name} returned the same environment twice; make a new one in each call.")
    try:
        agent_envs = tuple(AgentEnv(env, agent) for agent, env in enumerate(envs))
        # Without a copy: ObsConverter copies observations.
        env = SyncVectorEnv([lambda env=env: env for env in agent_envs], copy=False, autoreset_mode=mode)
    except Exception as error:
        raise ConfigError(f"{name}: its environments cannot form a vector environment: {error_text(error)}") from error
    return VectorEnvHandle(name, env, mode, agent_envs)


def close_env(env: VectorEnv[Any, Any, Any]) -> None:
    """Close a vector environment, also if some of its worker processes have died."""
    inner = env.unwrapped
    if not isinstance(inner, AsyncVectorEnv) or inner.closed:
        env.close()
        return
    workers = zip(inner.parent_pipes, inner.processes, strict=True)
    # A worker that raised has exited and has no pipe.
    if any(pipe is not None and not process.is_alive() for pipe, process in workers):
        _kill_workers(inner)
        return
    try:
        env.close()
    except (ConnectionError, EOFError):
        # A worker died after the check above: a signal to the process group reaches each at its own time.
        _kill_workers(inner)


def _kill_workers(env: AsyncVectorEnv) -> None:
    for process in env.processes:
        # SIGKILL: the environment may ignore other signals.
        process.kill()
        process.join()
    for pipe in env.parent_pipes:
        if pipe is not None:
            pipe.close()
    env.closed = True


def _native(
    name: str, spec: EnvSpec | None, agents: int, autoreset: Autoreset, options: Mapping[str, Any]
) -> VectorEnvHandle:
    """Make the registered vector implementation of an environment."""
    if spec is None or spec.vector_entry_point is None:
        raise ConfigError(f"{name} has no native vector environment; leave out world.vector=native.")
    try:
        env = gymnasium.make_vec(spec, num_envs=agents, vectorization_mode="vector_entry_point", **options)
    except Exception as error:
        raise MakeError(f"{name} cannot be made: {located_error_text(error)}.") from error
    return VectorEnvHandle(name, env, _autoreset_mode(env, name, autoreset))


def _autoreset_mode(env: VectorEnv[Any, Any, Any], name: str, autoreset: Autoreset) -> AutoresetMode:
    """Return the autoreset mode; memory is cleared at the right step only if it is known."""
    declared, expected = env.metadata.get("autoreset_mode"), MODES.get(autoreset)
    if declared is None:
        if expected is None:
            raise ConfigError(
                f"{name} does not declare its autoreset mode: there is no metadata['autoreset_mode']. Look "
                f"it up in its documentation and set world.autoreset={'|'.join(MODES)}."
            )
        return expected
    mode = AutoresetMode(declared)
    if expected not in (None, mode):
        key = next(key for key, value in MODES.items() if value is mode)
        raise ConfigError(f"{name} declares autoreset mode {key}, not {autoreset}; set world.autoreset={key} or auto.")
    return mode
