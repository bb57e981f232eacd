"""`holdfast train seeds=0..4`: train several seeds of one config."""

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from holdfast.cli.arguments import parse_overrides
from holdfast.config.run import Config, override
from holdfast.errors import ConfigError, TrustError
from holdfast.recipes import find_recipe, recipe_for
from holdfast.report import SEEDS
from holdfast.trust import names_from

if TYPE_CHECKING:
    from holdfast.sweep.seed_results import Results

PLACE = ("seeds", "run", "runs_dir")
"""Keys that are not those of a seed's run."""
WIDTH = 120
MOST = 10_000
"""Most seeds of a range."""


def train_many(recipe: str | None, keys: dict[str, str], group: Path | None, *, trust_code: bool) -> int:
    """Train the seeds of `seeds=`, or resume those of a folder."""
    options = ["--trust-code"] if trust_code else []
    if group is None:
        # Typos are answered before torch is imported, which takes seconds.
        seeds = _parse_seeds(keys["seeds"])
        config = _config(recipe, {key: value for key, value in keys.items() if key != "seeds"})
        if "seed" in keys:
            raise ConfigError(f"seed={keys['seed']} and seeds={keys['seeds']} name two; leave out one.")
        arguments = [f"{key}={value}" for key, value in keys.items() if key not in PLACE]
        from holdfast.sweep.seeds import new_plan

        group, plan = new_plan(config, [*([recipe] if recipe else []), *arguments], seeds)
        results: Results = {}
    else:
        if recipe is not None or any(key in keys for key in ("seed", *PLACE)):
            raise ConfigError(f"{group} resumes with its own recipe and seeds; leave out all but keys to change.")
        from holdfast.sweep.seed_results import read_plan

        plan, results = read_plan(group)
        with names_from(group):
            try:
                config = _config(*parse_overrides(plan.arguments), keys)
            except TrustError:
                raise
            except ConfigError as error:
                raise ConfigError(f"{group / SEEDS}: {error}") from None
        options = [*(f"{key}={value}" for key, value in keys.items()), f"--names-from={group}", *options]
    from holdfast.sweep.seeds import train_seeds

    out = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH)
    return 0 if train_seeds(group, plan, results, config, options=options, out=out) else 1


def _config(recipe: str | None, keys: Mapping[str, str], changes: Mapping[str, str] | None = None) -> Config:
    name = recipe or recipe_for(keys.get("world", keys.get("world.name")))
    return override(override(find_recipe(name), keys), changes or {})


def _parse_seeds(text: str) -> list[int]:
    """Parse 0..4 and 0,3,7."""
    seeds = list[int]()
    for part in text.split(","):
        low, dots, high = part.strip().partition("..")
        if not low.isdigit() or (dots and not high.isdigit()):
            raise ConfigError(f"seeds={text}: write integers from 0 on, such as seeds=0..4 or seeds=0,3,7.")
        if dots and int(high) < int(low):
            raise ConfigError(f"seeds={text}: {low} is above {high}; write the smaller one first.")
        if int(high or low) - int(low) >= MOST:
            raise ConfigError(f"seeds={text}: give at most {MOST:,} seeds.")
        seeds += range(int(low), int(high or low) + 1)
    (seed, times), *_ = Counter(seeds).most_common(1)
    if times > 1:
        raise ConfigError(f"seeds={text}: seed {seed} is there twice; keep one.")
    return seeds
