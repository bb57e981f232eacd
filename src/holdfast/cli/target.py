"""What there is to check: a policy's name, somebody's module, a run's folder, or a world."""

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast.build import build_world, load_policy
from holdfast.check.subject import Subject
from holdfast.check.subjects.find import subject_of
from holdfast.check.visit import AGENTS
from holdfast.check.world import WorldToCheck
from holdfast.config import change, keys_of
from holdfast.errors import ConfigError, HoldfastError
from holdfast.named import find_named
from holdfast.policies import LSTMWrapper
from holdfast.recipes import DEFAULT, find_recipe
from holdfast.worlds import closing_world

NOT_YET = ("trainer",)
WORLD = "world:"


def find_target(target: str, obs: str | None = None) -> Subject:
    """Build the policy a target names as a subject of the check."""
    options: dict[str, Any] = {} if obs is None else {"obs": _shape(obs)}
    if (Path(target) / "config.json").exists():
        if obs is not None:
            raise ConfigError(f"--obs is for foreign policies; what the policy of {target} sees is known.")
        return _of_a_run(Path(target))
    if target.endswith((".yaml", ".yml")) and not target.startswith("component:"):
        target = f"component:{target}"
    kind = target.partition(":")[0]
    if kind in NOT_YET:
        raise ConfigError(
            f"{target}: this version checks policies, runs and worlds; it cannot check a {kind} yet."
        )
    if "/" in target and ":" not in target and not Path(target).exists():
        raise ConfigError(f"{target} does not exist; a run's folder is for example runs/NAME.")
    if Path(target).is_dir():
        raise ConfigError(f"{target} is a folder without config.json, so it is no run.")
    if ":" not in target or kind == "component":
        return subject_of(target, **options)
    found = find_named(target, "")
    if isinstance(found, type) and issubclass(found, LSTMWrapper):
        return subject_of(target, **options)
    # Seeded, so that a policy made anew is the same policy each time.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return subject_of(_made(found, target), **options)


def to_stderr(text: str) -> None:
    """Say something beside the results."""
    print(f"holdfast: {text}", file=sys.stderr)


def find_run(name: str) -> Path:
    """Find a run's folder, or say why there is none."""
    folder = Path(name)
    if not folder.exists():
        raise ConfigError(f"{name} does not exist; a run's folder is for example runs/NAME.")
    if folder.is_file():
        raise ConfigError(f"{name} is a file; give the folder it lies in, {folder.parent}.")
    if not (folder / "config.json").exists():
        raise ConfigError(f"{name} is a folder without config.json, so it is no run.")
    return folder


def find_world(target: str, keys: Mapping[str, str], steps: int | None = None) -> WorldToCheck:
    """Say how the world is made that a target and the keys of `holdfast train` name."""
    name = target.removeprefix(WORLD)
    if not name:
        raise ConfigError("Name the world to check, for example: holdfast check world:recall world.delay=4.")
    for key in keys:
        if key in ("world", "world.name"):
            raise ConfigError(f"{key}={keys[key]} names a world beside {target}; which one is meant?")
        if key in keys_of() and key != "seed" and not key.startswith("world."):
            raise ConfigError(f"{key}={keys[key]} says nothing of a world; give seed, or keys of world.")
    alone = _agents_alone(keys.get("world.agents", str(AGENTS)))
    config = change(find_recipe(DEFAULT), {"world": name, **alone, **keys})
    return WorldToCheck(
        lambda agents, seed: build_world(config, torch.device("cpu"), agents=agents, seed=seed),
        agents=config.world.agents if "world.agents" in keys else None,
        steps=steps,
        seed=config.seed,
    )


def _agents_alone(agents: str) -> dict[str, Any]:
    """Let a run fit any number of agents: here nobody trains."""
    sizes = {"trainer.bptt_horizon": 1, "trainer.minibatch_size": 1, "trainer.batch_size": agents}
    return {"world.agents": agents} | sizes


def _made(found: Any, target: str) -> Any:
    """Call a class or a function that makes the policy; take what already is one."""
    if isinstance(found, torch.nn.Module | Subject) or not callable(found):
        return found
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ConfigError(
            f"{target} cannot be made without arguments ({error}); write a function that makes it."
        ) from error
    try:
        return found()
    except HoldfastError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"{target} cannot be made: {told}") from error


def _shape(obs: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(size) for size in obs.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ConfigError(f"--obs {obs}: write the shape of an observation, for example 4 or 3,84,84.")
    return shape


def _of_a_run(folder: Path) -> Subject:
    """Take the policy of a run as it was saved last, in the world it was trained in."""
    cpu = torch.device("cpu")
    policy, config = load_policy(folder, cpu, to_stderr)
    with closing_world(build_world(config, cpu, agents=config.world.agents, seed=0)) as world:
        return subject_of(policy, world)
