"""`holdfast check`: measure the laws on a policy, a run or a world."""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from holdfast.build import build_world, load_policy
from holdfast.check.adapters import adapt
from holdfast.check.adapters.base import PolicyAdapter
from holdfast.check.adapters.sb3 import load_recurrent_ppo
from holdfast.check.laws import run_laws, run_world_laws
from holdfast.check.preflight import Conditions
from holdfast.check.trainers import TRAINERS
from holdfast.check.world_recording import AGENTS, WorldUnderTest
from holdfast.cli.arguments import Parser, add_trust_code, output_file, parse_overrides
from holdfast.cli.check_policy import find_policy
from holdfast.cli.check_trainer import ROLLOUT, TRAINER, Measure, find_rollout, find_trainer
from holdfast.config.run import all_keys, override
from holdfast.errors import ConfigError
from holdfast.recipes import DEFAULT, find_recipe
from holdfast.report.check_report import print_laws
from holdfast.trust import trusting
from holdfast.worlds import closing_world

WORLD = "world:"
PROGRESS_S = 10.0
"""Seconds between two lines of progress where there is no terminal."""


def find_target(
    target: str, obs: str | None = None, keys: Mapping[str, str] | None = None, *, clear: bool = True
) -> PolicyAdapter:
    """Return the adapter of the policy a target names; without `clear` its caller may clear the state."""
    options: dict[str, Any] = {} if obs is None else {"obs": _shape(obs)}
    options |= {} if clear else {"clear": False}
    path, cpu = Path(target), torch.device("cpu")
    if (path / "config.json").exists():
        if obs is not None:
            raise ConfigError(f"--obs is for policies of other libraries; {target} has its own world.")
        if keys:
            raise ConfigError(f"{next(iter(keys))}: {target} is a run, whose world and policy are its own.")
        policy, config = load_policy(path, cpu, to_stderr)
        with closing_world(build_world(config, cpu, agents=config.world.agents, seed=0)) as world:
            return adapt(policy, world)
    if target.endswith((".yaml", ".yml")) and not target.startswith("component:"):
        target = f"component:{target}"
    if target.endswith(".zip"):
        return adapt(load_recurrent_ppo(path), **options)
    if path.is_dir() or ("/" in target and ":" not in target):
        find_run(target)
    return find_policy(target, keys or {}, options)


def to_stderr(text: str) -> None:
    """Print a message to standard error."""
    print(f"holdfast: {text}", file=sys.stderr)


class PlainProgress:
    """Prints what is being measured to standard error, every ten seconds at most."""

    def __init__(self) -> None:
        self._next_line = time.monotonic() + PROGRESS_S

    def __call__(self, text: str) -> None:
        """Print a text, if ten seconds have passed since the last."""
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PROGRESS_S
            to_stderr(text)


def find_run(name: str) -> Path:
    """Return a run's folder, or raise an error that says why there is none."""
    folder = Path(name)
    if not folder.exists():
        raise ConfigError(f"{name} does not exist; a run's folder is for example runs/NAME.")
    if folder.is_file():
        raise ConfigError(f"{name} is a file; give the folder it is in, {folder.parent}.")
    if not (folder / "config.json").exists():
        raise ConfigError(f"{name} is a folder without config.json, so it is not a run.")
    return folder


def find_world(target: str, keys: Mapping[str, str], steps: int | None = None) -> WorldUnderTest:
    """Return the world that a target and the keys of `holdfast train` name."""
    name = target.removeprefix(WORLD)
    if not name:
        raise ConfigError("Name the world to check, for example: holdfast check world:recall world.delay=4.")
    for key in keys:
        if key in ("world", "world.name"):
            raise ConfigError(f"{key}={keys[key]} names a second world beside {target}; give one.")
        if key in all_keys() and key != "seed" and not key.startswith("world."):
            raise ConfigError(f"{key}={keys[key]} is not a key of a world; give seed, or keys of world.")
    agents = keys.get("world.agents", str(AGENTS))
    # Nothing is trained, so the sizes fit any number of agents.
    sizes = {"trainer.bptt_horizon": 1, "trainer.minibatch_size": 1, "trainer.batch_size": agents}
    config = override(find_recipe(DEFAULT), {"world": name, "world.agents": agents, **sizes, **keys})
    return WorldUnderTest(
        lambda agents, seed: build_world(config, torch.device("cpu"), agents=agents, seed=seed),
        agents=config.world.agents if "world.agents" in keys else None,
        steps=steps,
        seed=config.seed,
    )


def _shape(obs: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(size) for size in obs.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ConfigError(f"--obs {obs}: write the shape of an observation, for example 4 or 3,84,84.")
    return shape


def run_check(args: Sequence[str]) -> int:
    """Measure the laws, print them, and return 0 if all hold."""
    options = _parser().parse_intermixed_args(args)
    target, keys = _parse_target(options)
    if target.startswith(WORLD) and options.html is not None:
        raise ConfigError(f"{target}: pages show the reach of a memory, and a world has none; omit --html.")
    name = Path(target).resolve().name if Path(target).is_dir() else target
    default_page = f"check-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}.html"
    page = None if options.html is None else output_file(options.html or default_page, "--html")
    screen = Console(highlight=False, soft_wrap=True, emoji=False)
    with redirect_stdout(sys.stderr) if options.json else nullcontext(), trusting(options.trust_code):
        # Standard output has one JSON object, whatever a policy prints.
        target_object = _find_target_object(target, keys, options)
        conditions = Conditions(options.device or "cpu", options.precision, options.kernel)
        with screen.status("") as status:
            update = status.update if screen.is_terminal else PlainProgress()
            if isinstance(target_object, WorldUnderTest):
                laws = run_world_laws(target_object, update)
            elif isinstance(target_object, Callable):
                laws = target_object(update)
            else:
                laws = run_laws(target_object, update, conditions=conditions)
    if options.json:
        print(json.dumps(laws.as_json(), indent=2))
    else:
        print_laws(screen, laws)
    if page is not None:
        # Imported here, because matplotlib takes a while to import.
        from holdfast.report.check_page import check_page

        page.write_text(check_page(laws, f"The memory of {target}"), encoding="utf-8")
        print(f"page {page}", file=sys.stderr if options.json else sys.stdout)
    return 0 if laws.ok else 1


def _parser() -> Parser:
    parser = Parser(
        prog="holdfast check",
        usage="holdfast check TARGET [key=value ...] [options]",
        description="Measure the laws of memory on a policy, a trainer or a recorded rollout, or the laws of a world.",
    )
    target = (
        "a policy's name, component:NAME, a run's folder, package.module:Name of a class or policy, a RecurrentPPO's "
        "zip, or world:NAME, with keys of holdfast train: fast world=gym:CartPole-v1 policy.hidden_size=32; "
        "trainer:package.module:train of a function that trains on scripted environments, or trainer:NAME of a "
        f"library: {', '.join(TRAINERS)}; rollout:FILE, a recorded rollout"
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="TARGET", help=target)
    add("--policy", metavar="TARGET", help="same as TARGET")
    add("--world", metavar="NAME", help="same as world:NAME")
    add("--obs", metavar="SHAPE", help="observation shape of another library's policy: 4, or 3,84,84")
    add("--steps", type=int, metavar="N", help="steps to record of a world (default: as needed)")
    add("--device", metavar="cpu|cuda", help="device of a Holdfast policy (default: cpu)")
    add("--precision", metavar="float32|bfloat16", help="precision of its layers (default: the policy's own)")
    add("--kernel", metavar="auto|torch|triton", help="kernel of its LSTM or GRU (default: the policy's own)")
    add(
        "--no-clear", action="store_true", help="pass a policy that gets no episode starts: its caller clears the state"
    )
    add("--interface", metavar="KIND", help="environments a trainer gets: gym, sb3, rsl_rl, torchrl (default: gym)")
    add("--gamma", metavar="G", help="discount that a trainer uses (default: 0.99)")
    add("--lam", metavar="L", help="lambda of a trainer's GAE (default: 0.95)")
    add_trust_code(parser)
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add("--html", nargs="?", const="", metavar="FILE", help="write a page with plots too")
    return parser


def _parse_target(options: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """Return the one target, from the words or the options, and its keys."""
    named = [options.policy, options.world and f"{WORLD}{options.world.removeprefix(WORLD)}"]
    targets = [name for name in named if name]
    rest = list(options.words)
    if rest and ("=" not in rest[0] or not targets):
        targets = [rest.pop(0), *targets]
    if not targets:
        page = f"; {options.html} was taken for the page's name, put it first" if options.html else ""
        raise ConfigError(f"Name one thing to check, for example: holdfast check fast --html{page}.")
    second, keys = parse_overrides(rest) if len(targets) == 1 else (targets[1], {})
    if second is not None:
        raise ConfigError(f"Name one thing to check, not both {targets[0]} and {second}; see holdfast check --help.")
    return targets[0], keys


def _find_target_object(
    target: str, keys: dict[str, str], options: argparse.Namespace
) -> PolicyAdapter | WorldUnderTest | Measure:
    """Build the policy or world to check, or the measurement of a trainer or rollout; refuse options of others."""
    if target.startswith((TRAINER, ROLLOUT)):
        find = find_trainer if target.startswith(TRAINER) else find_rollout
        return find(target, keys, options)
    for word in ("interface", "gamma", "lam"):
        if getattr(options, word) is not None:
            raise ConfigError(f"--{word} is for trainers, for example: holdfast check trainer:my.module:train.")
    if not target.startswith(WORLD):
        if options.steps is not None:
            raise ConfigError("--steps is for worlds, for example: holdfast check world:recall world.delay=4.")
        return find_target(target, options.obs, _policy_keys(keys), clear=not options.no_clear)
    if options.no_clear:
        raise ConfigError("--no-clear is for policies, for example: holdfast check my.module:Policy --no-clear.")
    for word in ("device", "precision", "kernel"):
        if getattr(options, word) is not None:
            raise ConfigError(f"--{word} is for policies, for example: holdfast check fast --{word} ...")
    if options.obs is not None:
        raise ConfigError(f"--obs is for policies of other libraries; the spec of {target} has its own.")
    return find_world(target, keys, options.steps)


def _policy_keys(keys: dict[str, str]) -> dict[str, str]:
    """Refuse keys that do not decide how a policy is built."""
    for key in keys:
        section, _, name = key.partition(".")
        if section == "policy" and name in ("kernel", "precision"):
            raise ConfigError(f"{key} is not a key of this command; write --{name}, see holdfast check --help.")
        if section not in ("policy", "world", "memory", "seed"):
            raise ConfigError(
                f"{key} does not decide how a policy is built; give world, seed, or keys of world, policy."
            )
    return keys
