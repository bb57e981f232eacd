"""`holdfast eval`: play a run's policy in episodes it never saw, with its memory and without."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from holdfast.build import find_checkpoint, pick_device, policy_of
from holdfast.cli.keys import parse_words
from holdfast.cli.parser import Parser, count
from holdfast.cli.target import find_run, to_stderr
from holdfast.config import Config, change
from holdfast.errors import ConfigError, did_you_mean
from holdfast.experience import MEMORY_MODES, PATIENCE, MemoryMode
from holdfast.keep import Checkpoint
from holdfast.policies import LSTMWrapper
from holdfast.report.scores import bests, lead_line, score_json, score_table
from holdfast.unseen import Asked, Result, play_unseen, spec_of
from holdfast.worlds import WorldSpec

ALL = "all"
EPISODES, SEEDS = 2000, 5
WIDE = 120
"""Columns of a table that goes into a file."""


@dataclass(frozen=True)
class _Run:
    """The policy that is played, and in which world."""

    folder: Path
    saved: Checkpoint
    policy: LSTMWrapper
    config: Config
    keys: dict[str, str]
    """What differs from the world of the run."""
    spec: WorldSpec

    def as_json(self, asked: Asked) -> dict[str, Any]:
        name = self.config.policy.name
        return {
            "run": str(self.folder),
            "policy": "fast" if name == "auto" else name,
            "world": self.config.world.name,
            "world_changed": self.keys,
            "steps_trained": self.saved.global_step,
            "checkpoint": str(self.saved.path),
            "seeds": asked.seeds,
            "greedy": asked.greedy,
        }


def run_eval(words: Sequence[str]) -> int:
    """Play, and print what was returned."""
    given = _parser().parse_intermixed_args(words)
    folder, keys = _folder_and_keys(given.words)
    modes, asked = _modes(given.memory or ["intact"]), _asked(given)
    device = pick_device(Config(device=given.device))
    with redirect_stdout(sys.stderr) if given.json else nullcontext():
        # Whatever a policy or a world prints, what is said on standard output is JSON.
        saved = find_checkpoint(find_run(folder), to_stderr)
        policy, config = policy_of(saved, device)
        config = change(config, keys) if keys else config
        run = _Run(Path(folder), saved, policy, config, keys, spec_of(config.world, device))
        if config.threads:
            torch.set_num_threads(config.threads)
        other = None if given.against is None else _other(given.against, run, device)
        with _progress(len(modes) * asked.seeds) as saw:
            told = play_unseen(config, policy, device, asked, modes, against=other, saw=saw)
    if given.json:
        found = [_as_json(each, run, asked, given.against) for each in told]
        print(json.dumps(found if len(found) > 1 else found[0], indent=2))
    else:
        _show(told, run, asked, given.against)
    return 0


def _other(name: str, run: _Run, device: torch.device) -> LSTMWrapper:
    """Load the policy to play against, if there is a place to meet in."""
    if run.spec.crowd < 2:
        raise ConfigError(
            f"--against {name}: in {run.config.world.name} everybody is alone; play against others where "
            "several share a place, such as arena."
        )
    return policy_of(find_checkpoint(find_run(name), to_stderr), device)[0]


def _parser() -> Parser:
    parser = Parser(
        prog="holdfast eval",
        usage="holdfast eval runs/NAME [world.KEY=value ...] [options]",
        description="Play the policy of a run in episodes that its training never saw.",
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="runs/NAME", help="a run's folder; world.delay=16 changes its world")
    add("--episodes", type=count, metavar="N", help=f"episodes in all, over all seeds ({EPISODES})")
    add("--seeds", type=count, metavar="N", help=f"worlds of how many seeds ({SEEDS})")
    add(
        "--memory",
        action="append",
        metavar="MODE",
        help="intact; cleared: emptied before every step; frozen: as after an episode's first step; "
        "shuffled: somebody else's at every step; or all. May be given several times (intact)",
    )
    add("--agents", type=count, metavar="N", help="agents that play at once (up to 250)")
    add("--sampled", action="store_true", help="draw actions instead of taking the likeliest")
    add("--against", metavar="runs/OTHER", help="let this run's policy play every second agent of each crowd")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (auto)")
    add(
        "--patience",
        type=count,
        default=PATIENCE,
        metavar="N",
        help=f"steps within which an episode must end ({PATIENCE})",
    )
    add("--json", action="store_true", help="print JSON: one object, or a list if several modes are played")
    return parser


def _asked(given: argparse.Namespace) -> Asked:
    episodes = given.episodes or EPISODES
    if episodes < 2:
        raise ConfigError("--episodes 1: one episode says nothing of chance; give 2 or more.")
    if given.seeds is not None and given.seeds > episodes:
        raise ConfigError(f"--seeds {given.seeds} are more than {episodes} episodes; try --seeds {episodes}.")
    return Asked(
        episodes=episodes,
        seeds=given.seeds or min(SEEDS, episodes),
        agents=given.agents,
        greedy=not given.sampled,
        patience=given.patience,
    )


def _modes(given: Sequence[str]) -> list[MemoryMode]:
    """Read the modes of memory: each once, in the order of the table."""
    known = [*MEMORY_MODES, ALL]
    for word in given:
        if word not in known:
            meant = did_you_mean(word, known, f"there is {', '.join(known)}.")
            raise ConfigError(f"--memory {word}: there is no such mode; {meant}")
    return [mode for mode in MEMORY_MODES if mode in given or ALL in given]


def _folder_and_keys(words: Sequence[str]) -> tuple[str, dict[str, str]]:
    folders = [word for word in words if "=" not in word or Path(word).is_dir()]
    if len(folders) != 1:
        told = f"not {' and '.join(folders)}" if folders else "for example: holdfast eval runs/NAME"
        raise ConfigError(f"Name one run to evaluate, {told}; see holdfast eval --help.")
    _, keys = parse_words([word for word in words if word not in folders])
    for key, value in keys.items():
        if key == "world.agents":
            raise ConfigError(f"{key}={value}: how many play at once is said by --agents {value}.")
        if not key.startswith("world.") or key == "world.name":
            raise ConfigError(
                f"{key}={value} cannot be changed here; keys of the run's world can: world.KEY."
            )
    return folders[0], keys


@contextmanager
def _progress(parts: int) -> Iterator[Callable[[], None]]:
    """Show how much is played, to people only."""
    screen = Console(stderr=True, emoji=False)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("playing", total=parts)
        yield lambda: progress.advance(task)


def _as_json(told: Result, run: _Run, asked: Asked, against: str | None) -> dict[str, Any]:
    found = {"episodes": told.episodes, **score_json(told.returns), "length_mean": told.length_mean}
    found |= {"memory": told.memory, **run.as_json(asked)}
    if told.theirs is not None and told.lead is not None:
        found |= {"against": against, "against_episodes": told.theirs.episodes}
        found |= score_json(told.theirs.returns, "against_")
        found |= {"difference_mean": told.lead.mean, "difference_ci95": list(told.lead.mean_ci95)}
    return found


def _show(told: Sequence[Result], run: _Run, asked: Asked, against: str | None) -> None:
    """Print what was played, as tables a person reads."""
    width = None if sys.stdout.isatty() else WIDE
    out = Console(highlight=False, markup=False, emoji=False, width=width)
    about = run.as_json(asked)
    steps = "an unknown number of" if about["steps_trained"] is None else f"{about['steps_trained']:,}"
    world = " ".join([about["world"], *(f"{key}={value}" for key, value in run.keys.items())])
    played = told[0].episodes + (told[0].theirs.episodes if told[0].theirs else 0)
    how = "greedy" if asked.greedy else "sampled"
    other = "" if against is None else f" · against {against}"
    out.print(f"{run.folder} · {about['policy']} after {steps} steps · {world}{other}", soft_wrap=True)
    out.print(f"{played:,} {how} episodes from {asked.seeds} seeds", soft_wrap=True)
    if against is None:
        out.print(score_table("memory", [(each.memory, each) for each in told]))
    for each in told:
        if each.theirs is not None and each.lead is not None:
            sides = [(f"this one, memory {each.memory}", each), ("the other", each.theirs)]
            out.print(score_table("policy", sides))
            out.print(lead_line(each.lead))
    if bests(run.spec):
        out.print(bests(run.spec))
