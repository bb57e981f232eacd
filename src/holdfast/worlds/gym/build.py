"""Many environments as one: built here, handed out by Gymnasium, or brought along; and how they restart."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from holdfast.errors import ConfigError
from holdfast.worlds.gym.find import Found, Wrap, find_env
from holdfast.worlds.gym.numbered import Numbered, said

Vector = Literal["sync", "native"]
Autoreset = Literal["auto", "same_step", "next_step", "disabled"]
MODES = {
    "same_step": AutoresetMode.SAME_STEP,
    "next_step": AutoresetMode.NEXT_STEP,
    "disabled": AutoresetMode.DISABLED,
}


@dataclass(frozen=True)
class Built:
    """A vector environment, how it restarts, and what is known of the environments in it."""

    name: str
    env: VectorEnv[Any, Any, Any]
    mode: AutoresetMode
    numbered: tuple[Numbered, ...] = ()
    """The environments, where they are made here."""
    ours: SyncVectorEnv | None = None
    """The vector environment if all in it are `Numbered`, which can be put back to where they were."""


def build(
    env: str | Callable[..., Any] | VectorEnv[Any, Any, Any],
    agents: int,
    *,
    vector: Vector,
    autoreset: Autoreset,
    options: Mapping[str, Any],
    wrappers: Sequence[Wrap],
) -> Built:
    """Build a vector environment of as many environments as there are agents, or take a ready one."""
    _require_one_of("vector", vector, ("sync", "native"))
    _require_one_of("autoreset", autoreset, ("auto", *MODES))
    if agents < 1:
        raise ConfigError(f"world.agents={agents}: there must be at least 1.")
    if isinstance(env, VectorEnv):
        return _ready(env, agents, autoreset, bool(options or wrappers))
    found = find_env(env, options, wrappers)
    if vector == "native":
        return _native(found, agents, autoreset, options, wrappers)
    mode = MODES.get(autoreset, AutoresetMode.SAME_STEP)
    return _sync(found, agents, mode)


def _sync(found: Found, agents: int, mode: AutoresetMode) -> Built:
    """Put environments that we make side by side, in this process."""
    envs = [found.make() for _ in range(agents)]
    if len({id(env) for env in envs}) < agents:
        raise ConfigError(
            f"{found.name} gave the same environment twice; every agent needs one of its own, so let the "
            "function make a new one each time."
        )
    try:
        numbered = tuple(Numbered(env, agent) for agent, env in enumerate(envs))
        # What is seen is copied anyway.
        env = SyncVectorEnv([lambda each=each: each for each in numbered], copy=False, autoreset_mode=mode)
    except Exception as error:
        raise ConfigError(f"{found.name}: its environments do not go together: {said(error)}") from error
    return Built(found.name, env, mode, numbered, ours=env)


def close_env(env: VectorEnv[Any, Any, Any]) -> None:
    """Close a vector environment; processes of it that are gone already do not stop the others' end."""
    inside = env.unwrapped
    if not isinstance(inside, AsyncVectorEnv) or inside.closed:
        env.close()
        return
    ways = zip(inside.parent_pipes, inside.processes, strict=True)
    # One that raised has ended by itself, and has no pipe any more.
    if any(pipe is not None and not process.is_alive() for pipe, process in ways):
        _end(inside)
        return
    try:
        env.close()
    except (ConnectionError, EOFError):
        # A process ended between the look and the word: a signal to the group reaches each in its own time.
        _end(inside)


def _end(env: AsyncVectorEnv) -> None:
    """End every process of a vector environment, without a word to any."""
    for process in env.processes:
        # They may have been told to bear other signals by who made them.
        process.kill()
        process.join()
    for pipe in env.parent_pipes:
        if pipe is not None:
            pipe.close()
    env.closed = True


def _native(
    found: Found, agents: int, autoreset: Autoreset, options: Mapping[str, Any], wrappers: Sequence[Wrap]
) -> Built:
    """Let Gymnasium make the vector environment that somebody wrote."""
    if found.spec is None or found.spec.vector_entry_point is None:
        raise ConfigError(
            f"{found.name} has no vector environment of its own; leave out world.vector=native."
        )
    if wrappers:
        raise ConfigError(
            f"{found.name}: world.wrappers do not go with world.vector=native: it cannot be wrapped."
        )
    mode = "vector_entry_point"
    try:
        env = gymnasium.make_vec(found.spec, num_envs=agents, vectorization_mode=mode, **options)
    except Exception as error:
        raise ConfigError(f"{found.name} cannot be made: {said(error)}") from error
    return Built(found.name, env, _mode_of(env, found.name, autoreset))


def _ready(env: VectorEnv[Any, Any, Any], agents: int, autoreset: Autoreset, more: bool) -> Built:
    """Take a vector environment as it is."""
    name = f"gym:{env}"
    if more:
        raise ConfigError(f"{name} is made already; give options and wrappers to what makes it.")
    if env.num_envs != agents:
        raise ConfigError(
            f"{name} has {env.num_envs} environments; write agents={env.num_envs}, not {agents}."
        )
    return Built(name, env, _mode_of(env, name, autoreset))


def _mode_of(env: VectorEnv[Any, Any, Any], name: str, autoreset: Autoreset) -> AutoresetMode:
    """Find out how a vector environment restarts: memory is right only if that is known."""
    told, meant = env.metadata.get("autoreset_mode"), MODES.get(autoreset)
    if told is None and meant is None:
        raise ConfigError(
            f"{name} does not say how it restarts: there is no metadata['autoreset_mode']. Read its "
            f"documents, and declare world.autoreset={'|'.join(MODES)}."
        )
    if told is None:
        assert meant is not None
        return meant
    mode = AutoresetMode(told)
    if meant not in (None, mode):
        own = next(word for word, each in MODES.items() if each is mode)
        raise ConfigError(
            f"{name} restarts by {own}, not by {autoreset}; write world.autoreset={own} or auto."
        )
    return mode


def _require_one_of(key: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise ConfigError(f"world.{key}={given}: give one of {', '.join(known)}.")
