"""`holdfast eval`: evaluate a run's policy on held-out episodes, with memory intact or ablated."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from holdfast.build import find_checkpoint, load_policy_from, select_device
from holdfast.cli.arguments import Parser, add_trust_code, count, one_of, parse_overrides
from holdfast.cli.check import find_run, to_stderr
from holdfast.config.run import Config, override
from holdfast.errors import ConfigError
from holdfast.evaluation.evaluate import MEMORY_MODES, MemoryMode
from holdfast.evaluation.held_out import EvalResult, EvalSettings, evaluate_held_out, world_spec
from holdfast.play import Player
from holdfast.play.video import record_video, require_video
from holdfast.policies import LSTMWrapper
from holdfast.report.text import best_returns_line, margin_line, score_json, score_table
from holdfast.trust import trusting
from holdfast.worlds import WorldSpec

ALL = "all"
BOTH = "both"
ACTIONS = ("greedy", "sampled", BOTH)
EPISODES, SEEDS = 2000, 5
WIDTH = 120
"""Columns of a table that is not printed to a terminal."""


def run_eval(args: Sequence[str]) -> int:
    """Evaluate, and print the returns."""
    options = _parser().parse_intermixed_args(args)
    folder, overrides = split_overrides(options.args)
    names, settings, ways = options.memory or ["intact"], _eval_settings(options), _ways(options)
    modes: list[MemoryMode] = [mode for mode in MEMORY_MODES if mode in names or ALL in names]
    device = select_device(Config(device=options.device))
    video = None if options.video is None else require_video(options.video)
    # Output of policies and worlds goes to stderr: stdout is JSON only.
    with redirect_stdout(sys.stderr) if options.json else nullcontext(), trusting(options.trust_code):
        saved = find_checkpoint(find_run(folder), to_stderr)
        policy, config = load_policy_from(saved, device)
        config = override(config, overrides) if overrides else config
        spec = world_spec(config.world, device)
        if config.threads:
            torch.set_num_threads(config.threads)
        opponent = None if options.against is None else _load_opponent(options.against, config, spec, device)
        console = Console(stderr=True, emoji=False)
        if video is not None:
            strip = record_video(Player(policy, config), video, greedy=ways[0] == "greedy")
            console.print(f"video {video} · frames {strip}", markup=False, highlight=False, soft_wrap=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("evaluating", total=len(ways) * len(modes) * settings.seeds)
            on_part = partial(progress.advance, task)
            settings = replace(settings, max_steps=options.max_steps or config.trainer.eval_max_steps)
            log = partial(console.print, markup=False, highlight=False, soft_wrap=True)
            hooks = {"opponent": opponent, "on_part": on_part, "log": log}
            results = {
                way: evaluate_held_out(
                    config, policy, device, replace(settings, greedy=way == "greedy"), modes, **hooks
                )
                for way in ways
            }
    run = {
        "run": str(Path(folder)),
        "policy": "fast" if config.policy.name == "auto" else config.policy.name,
        "world": config.world.name,
        "world_changed": overrides,
        "steps_trained": saved.global_step,
        "checkpoint": str(saved.path),
        "seeds": settings.seeds,
    }
    if options.json:
        output = [
            _as_json(result, {**run, "greedy": way == "greedy"}, options.against)
            for way, of_modes in results.items()
            for result in of_modes
        ]
        print(json.dumps(output if len(output) > 1 else output[0], indent=2))
    else:
        _print_tables(results, run, spec, options.against)
    return 0


def _load_opponent(name: str, config: Config, spec: WorldSpec, device: torch.device) -> LSTMWrapper:
    """Load the policy to play against, in a world where agents share an environment."""
    if spec.agents_per_env < 2:
        raise ConfigError(
            f"--against {name}: {config.world.name} has one agent per environment; use a world with "
            "several, such as arena."
        )
    return load_policy_from(find_checkpoint(find_run(name), to_stderr), device)[0]


def _parser() -> Parser:
    parser = Parser(
        prog="holdfast eval",
        usage="holdfast eval runs/NAME [world.KEY=value ...] [options]",
        description="Evaluate a run's policy on held-out episodes.",
    )
    add = parser.add_argument
    add("args", nargs="*", metavar="runs/NAME", help="a run's folder; world.delay=16 changes its world")
    add("--episodes", type=count, metavar="N", help=f"total number of episodes, over all seeds ({EPISODES})")
    add("--seeds", type=count, metavar="N", help=f"number of held-out seeds ({SEEDS})")
    add(
        "--memory",
        action="append",
        type=one_of([*MEMORY_MODES, ALL]),
        metavar="MODE",
        help="intact; cleared: zeroed before every step; frozen: constant after an episode's first step; "
        "shuffled: permuted between agents at every step; or all. May be repeated (intact)",
    )
    add("--agents", type=count, metavar="N", help="number of parallel agents (up to 250)")
    add(
        "--actions",
        type=one_of(ACTIONS),
        metavar="HOW",
        help="greedy: the most likely actions; sampled: as in training; or both (greedy)",
    )
    add("--sampled", action="store_true", help="same as --actions sampled")
    add(
        "--against",
        metavar="runs/OTHER",
        help="opponent: its policy controls every second agent of each environment, then sides are swapped",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device (auto)")
    add(
        "--video",
        metavar="FILE.mp4",
        help="record an episode or more, and a strip of frames beside it, if the world renders",
    )
    add("--max-steps", type=count, metavar="N", help="steps after which an episode is cut (trainer.eval_max_steps)")
    add_trust_code(parser)
    add(
        "--json",
        action="store_true",
        help="print JSON: one object, or a list of several",
    )
    return parser


def _eval_settings(options: argparse.Namespace) -> EvalSettings:
    episodes = options.episodes or EPISODES
    if episodes < 2:
        raise ConfigError("--episodes 1: one episode gives no confidence interval; give 2 or more.")
    if options.seeds is not None and options.seeds > episodes:
        raise ConfigError(f"--seeds {options.seeds} is more than {episodes} episodes; try --seeds {episodes}.")
    return EvalSettings(
        episodes=episodes,
        seeds=options.seeds or min(SEEDS, episodes),
        agents=options.agents,
    )


def _ways(options: argparse.Namespace) -> tuple[str, ...]:
    """Return how actions are chosen: greedy, sampled or both."""
    name = options.actions or ("sampled" if options.sampled else "greedy")
    if options.sampled and name != "sampled":
        raise ConfigError(f"--sampled contradicts --actions {name}; keep one.")
    return ACTIONS[:2] if name == BOTH else (name,)


def split_overrides(args: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Split arguments into the run's folder and overrides of its world."""
    folders = [arg for arg in args if "=" not in arg or Path(arg).is_dir()]
    if len(folders) != 1:
        hint = f"not {' and '.join(folders)}" if folders else "for example: holdfast eval runs/NAME"
        raise ConfigError(f"Name one run to evaluate, {hint}; see holdfast eval --help.")
    _, overrides = parse_overrides([arg for arg in args if arg not in folders])
    for key, value in overrides.items():
        if key == "world.agents":
            raise ConfigError(f"{key}={value}: set the number of parallel agents with --agents {value}.")
        if not key.startswith("world.") or key == "world.name":
            raise ConfigError(f"{key}={value} cannot be changed here, only keys of the run's world: world.KEY.")
    return folders[0], overrides


def _as_json(result: EvalResult, run: dict[str, Any], against: str | None) -> dict[str, Any]:
    output = {
        "episodes": result.episodes,
        "episodes_cut": result.cut,
        **score_json(result.returns),
        "length_mean": result.length_mean,
    }
    output |= {"memory": result.memory, **run}
    if result.opponent is not None and result.margin is not None:
        output |= {"against": against, "against_episodes": result.opponent.episodes}
        output |= score_json(result.opponent.returns, "against_")
        output |= {"difference_mean": result.margin.mean, "difference_ci95": list(result.margin.mean_ci95)}
    return output


def _print_tables(
    results: dict[str, list[EvalResult]], run: dict[str, Any], spec: WorldSpec, against: str | None
) -> None:
    out = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH)
    steps = "an unknown number of" if run["steps_trained"] is None else f"{run['steps_trained']:,}"
    world = " ".join([run["world"], *(f"{key}={value}" for key, value in run["world_changed"].items())])
    versus = "" if against is None else f" · against {against}"
    out.print(f"{run['run']} · {run['policy']} after {steps} steps · {world}{versus}", soft_wrap=True)
    for way, of_modes in results.items():
        episodes = of_modes[0].episodes + (of_modes[0].opponent.episodes if of_modes[0].opponent else 0)
        out.print(f"{episodes:,} {way} episodes from {run['seeds']} seeds", soft_wrap=True)
        if against is None:
            out.print(score_table("memory", [(result.memory, result) for result in of_modes]))
        for result in of_modes:
            if result.opponent is not None and result.margin is not None:
                rows = [(f"this policy, memory {result.memory}", result), ("the opponent", result.opponent)]
                out.print(score_table("policy", rows))
                out.print(margin_line(result.margin))
    if best_returns_line(spec):
        out.print(best_returns_line(spec))
