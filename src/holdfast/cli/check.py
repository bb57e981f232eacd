"""`holdfast check`: prove or disprove a policy's memory."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console
from rich.table import Table

from holdfast.check.laws import LAWS, measure
from holdfast.check.results import Law, Laws
from holdfast.config import Config, change, read_config
from holdfast.errors import ConfigError
from holdfast.keep import load_weights
from holdfast.policies import LSTMWrapper, make_policy
from holdfast.train import build_policy, build_world
from holdfast.worlds import World, make_world

NOT_YET = ("component", "world", "trainer")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see holdfast check --help.")


def run_check(words: Sequence[str]) -> int:
    """Measure the laws, print them, and return 0 if all hold."""
    parser = _Parser(prog="holdfast check", description="Measure the laws of memory on a policy, on the CPU.")
    parser.add_argument("target", nargs="?", help="a policy's name, package.module:Class, or a run's folder")
    parser.add_argument("--policy", metavar="TARGET", help="another way to say it")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    asked = parser.parse_args(words)
    target = asked.target or asked.policy
    if not target or (asked.target and asked.policy):
        raise ConfigError("Name one thing to check, for example: holdfast check fast.")
    torch.set_num_threads(1)
    policy, world = _find(target)
    console = Console(highlight=False, soft_wrap=True)
    found: list[Law] = []
    with console.status("") as status:
        laws = measure(policy, world)
        for name in LAWS:
            status.update(f"measuring {name} ({len(found) + 1} of {len(LAWS)})")
            found.append(next(laws))
    verdict = Laws(found)
    if asked.json:
        print(json.dumps(verdict.as_json(), indent=2))
    else:
        _print(console, verdict)
    return 0 if verdict.ok else 1


def _find(target: str) -> tuple[LSTMWrapper, World]:
    """Build the policy a target names, and the world it is for."""
    if (Path(target) / "config.json").exists():
        folder = Path(target)
        config = _read(folder / "config.json")
        world = build_world(config, torch.device("cpu"), agents=1, seed=0)
        # Eager: the check compiles a copy itself.
        policy = build_policy(change(config, {"policy.compile": False}), world, torch.device("cpu"))
        weights = folder / "checkpoints" / "latest" / "model.safetensors"
        if not weights.exists():
            raise ConfigError(f"{target} holds no {weights.relative_to(folder)}; has the run ended?")
        load_weights(policy, weights)
        return policy, world
    kind = target.partition(":")[0]
    if kind in NOT_YET:
        raise ConfigError(f"{target}: this version checks policies and runs; it cannot check a {kind} yet.")
    if "/" in target and not Path(target).exists():
        raise ConfigError(f"{target} does not exist; a run's folder is for example runs/NAME.")
    if Path(target).is_dir():
        raise ConfigError(f"{target} is a folder without config.json, so it is no run.")
    world = make_world("recall", agents=1)
    return make_policy(target, world, seed=0), world


def _read(file: Path) -> Config:
    try:
        return read_config(file.read_text())
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{file}: {error}") from None


def _print(console: Console, laws: Laws) -> None:
    table = Table("law", "measured", "bound", "", "what was measured", box=None, padding=(0, 2, 0, 0))
    for name, law in laws.items():
        sign = ">" if law.worst.sense == "more than" else "≤"
        mark = "[green]✓[/]" if law.ok else "[red]✗[/]"
        table.add_row(name, f"{law.measured:.1e}", f"{sign} {law.bound:.0e}", mark, law.worst.what)
    console.print(table)
    for name, law in laws.items():
        if not law.ok:
            console.print(f"\n{name}: {law.finding}", markup=False)
