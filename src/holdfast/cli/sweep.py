"""`holdfast sweep`: search the keys of a recipe with Optuna."""

import argparse
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from holdfast.cli.arguments import Parser, add_trust_code, count, parse_overrides
from holdfast.config.recipe_file import is_recipe_file
from holdfast.errors import ConfigError
from holdfast.recipes import recipe_for
from holdfast.sweep.settings import OBJECTIVES, PRUNERS, SWEEP, SweepSettings, new_settings, read_settings
from holdfast.trust import names_from, trusting

TRIALS = 50
USAGE = """holdfast sweep [RECIPE | FILE.yaml] --space KEY=RANGE [--space ...] [--trials N] [--seeds K]
                      [--workers N] [--storage URL] [key=value ...]
       holdfast sweep --resume FOLDER [--trials N] [--workers N] [--storage URL]"""
DESCRIPTION = """Train a recipe many times with other values of some keys, and write the best as a recipe file.

KEY=log:a..b   a number between a and b, drawn on a logarithmic scale
KEY=a..b       a number between a and b; an integer where the key is one
KEY=a,b,c      one of these values

Other keys are those of holdfast train, and the same in all trials; run=NAME names the sweep."""
EPILOG = """The folder runs/NAME holds the runs of all trials, study.db, best.yaml (for holdfast train) and sweep.html.
Ctrl-C stops a sweep, saved; --resume, or the same command again, continues it. A trial that dies is tried
again once."""


def run_sweep(args: Sequence[str]) -> int:
    """Run or continue a sweep, and print its best trial."""
    options, rest = _parser().parse_known_args(args)
    recipe, keys = parse_overrides(rest)
    # What a file names is not typed: that of a sweep, or a recipe.
    file = options.resume if options.resume else recipe if recipe is not None and is_recipe_file(recipe) else None
    with trusting(options.trust_code), nullcontext() if file is None else names_from(Path(file)):
        return _run_sweep(options, recipe, keys)


def _run_sweep(options: argparse.Namespace, recipe: str | None, keys: dict[str, str]) -> int:
    # Typos are answered before torch and Optuna are imported, which takes seconds.
    folder, study, storage, settings = (
        _resumed(options, recipe, keys) if options.resume else _new(options, recipe, keys)
    )
    from holdfast.sweep.run_sweep import SweepPlace, summary
    from holdfast.sweep.run_sweep import run_sweep as run

    place = SweepPlace(folder, study, storage)
    try:
        results = run(place, settings, workers=options.workers, log=_print)
    except KeyboardInterrupt:
        _print(f"stopped; continue with: holdfast sweep --resume {shlex.quote(str(folder))}")
        return 1
    for line in summary(place, results):
        _print(line)
    return 0 if any(result.state == "finished" for result in results) else 1


def _parser() -> Parser:
    parser = Parser(
        prog="holdfast sweep",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--space", action="append", default=[], metavar="KEY=RANGE", help="a key that varies; once for each")
    add("--trials", type=count, metavar="N", help=f"trials in all ({TRIALS})")
    add("--seeds", type=count, metavar="K", help="seeds of each trial, scored by the interquartile mean (1)")
    add("--workers", type=count, default=1, metavar="N", help="trials at once on this machine (1)")
    objectives = "what the sampler looks for: return, with pruning, or return,cost: both, without (return)"
    add("--objectives", choices=OBJECTIVES, help=objectives)
    pruner = "median: stop trials whose learning curve is below the median of the others; none (median)"
    add("--pruner", choices=PRUNERS, help=pruner)
    add("--storage", metavar="URL", help="a database for several machines, by its SQLAlchemy URL (study.db, SQLite)")
    add("--resume", metavar="FOLDER", help="continue the sweep of this folder")
    add_trust_code(parser)
    return parser


def _new(
    options: argparse.Namespace, recipe: str | None, keys: dict[str, str]
) -> tuple[Path, str, str | None, SweepSettings]:
    if "seeds" in keys:
        raise ConfigError(f"seeds={keys['seeds']} is of holdfast train; a sweep takes --seeds K, from seed=N on.")
    recipe = recipe or recipe_for(keys.get("world", keys.get("world.name")))
    settings = new_settings(
        recipe,
        keys,
        tuple(options.space),
        trials=options.trials or TRIALS,
        seeds=options.seeds or 1,
        objectives=options.objectives or "return",
        pruner=options.pruner or "median",
    )
    name = keys.get("run", f"sweep-{settings.recipe}")
    # A name is one word: this parses it.
    config = settings.named(keys)
    folder = Path(config.runs_dir) / name
    if folder.is_dir() and not (folder / SWEEP).exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} exists and is no sweep; name this one: run=NAME.")
    if (folder / SWEEP).exists():
        _require_same(folder, settings)
    return folder, name, options.storage, settings


def _require_same(folder: Path, settings: SweepSettings) -> None:
    difference = read_settings(folder)[0].difference(settings)
    if difference:
        raise ConfigError(
            f"{folder} holds another sweep: {difference}. Name this one run=NAME, or continue the other: holdfast "
            f"sweep --resume {shlex.quote(str(folder))}"
        )


def _resumed(
    options: argparse.Namespace, recipe: str | None, keys: dict[str, str]
) -> tuple[Path, str, str | None, SweepSettings]:
    fixed = [f"--{name}" for name in ("space", "seeds", "objectives", "pruner") if getattr(options, name)]
    extra = [*([recipe] if recipe else []), *(f"{key}={value}" for key, value in keys.items()), *fixed]
    if extra:
        raise ConfigError(f"--resume {options.resume} continues with its own settings; leave out {', '.join(extra)}.")
    folder = Path(options.resume)
    settings, study, saved = read_settings(folder)
    storage = options.storage or saved or None
    if storage is not None and "***" in storage:
        raise ConfigError(
            f"The storage has a password, which no file holds; add --storage {storage.replace('***', 'PASSWORD')}"
        )
    trials = options.trials or settings.trials
    if trials < settings.trials:
        raise ConfigError(f"--trials {trials}: {folder} has {settings.trials} trials; give more, or leave it out.")
    return folder, study, storage, replace(settings, trials=trials)


def _print(line: str) -> None:
    print(line, flush=True)
