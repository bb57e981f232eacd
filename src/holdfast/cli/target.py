"""What there is to check: a policy's name, somebody's module, or a run's folder."""

import inspect
from pathlib import Path
from typing import Any

import torch

from holdfast.check.subject import Subject
from holdfast.check.subjects.find import subject_of
from holdfast.config import Config, change, read_config
from holdfast.errors import ConfigError, HoldfastError
from holdfast.keep import GRAPH, load_weights
from holdfast.named import find_named
from holdfast.policies import LSTMWrapper
from holdfast.train import build_policy, build_world

NOT_YET = ("world", "trainer")


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
        raise ConfigError(f"{target}: this version checks policies and runs; it cannot check a {kind} yet.")
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
    """Build the policy of a run as it was saved last, in the world it was trained in."""
    config = _read(folder / "config.json")
    world = build_world(config, torch.device("cpu"), agents=1, seed=0)
    # Eager: the check compiles a copy itself.
    keys: dict[str, Any] = {"policy.compile": False}
    if (folder / GRAPH).exists():
        keys["policy.name"] = f"component:{folder / GRAPH}"
    policy = build_policy(change(config, keys), world, torch.device("cpu"))
    weights = folder / "checkpoints" / "latest" / "model.safetensors"
    if not weights.exists():
        raise ConfigError(f"{folder} holds no {weights.relative_to(folder)}; has the run ended?")
    load_weights(policy, weights)
    return subject_of(policy, world)


def _read(file: Path) -> Config:
    try:
        return read_config(file.read_text())
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{file}: {error}") from None
