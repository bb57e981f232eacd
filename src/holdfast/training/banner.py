"""The first lines of a run: its name, its sizes, and what differs from its recipe."""

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from holdfast import ranks
from holdfast.checkpoint.run_dir import RunDir
from holdfast.config.run import Config
from holdfast.policies import PolicyLike
from holdfast.recipes import ELSEWHERE, find_recipe
from holdfast.report.console import RunConsole
from holdfast.report.text import WHERE, config_difference
from holdfast.worlds.env_source import EnvLike
from holdfast.worlds.gym.wrappers import name_of


def format_arguments(
    recipe: str | None,
    config: Mapping[str, Any] | Config | None,
    env: EnvLike | None,
    policy: PolicyLike | None,
    resume: str | Path | None,
) -> Iterator[str]:
    """Yield the arguments of a call as they are typed; objects as Python shows them."""
    if recipe is not None:
        yield repr(recipe)
    if config:
        keys = "Config(...)" if isinstance(config, Config) else repr(dict(config))
        yield keys if recipe is not None else f"config={keys}"
    for name, value in (("env", env), ("policy", policy)):
        if value is not None:
            yield f"{name}={value!r}" if isinstance(value, str) else f"{name}=<{name_of(value)}>"
    if resume is not None:
        yield f"resume={str(resume)!r}"


def name_of_run(config: Config) -> str:
    """Return the name of a new run: the given one, or world and time."""
    if config.run:
        return config.run
    world = re.sub(r"[^\w.+-]+", "-", config.world.name)
    return f"{world}-{datetime.now():%Y%m%d-%H%M%S}"


def print_banner(console: RunConsole, config: Config, folder: RunDir, recipe: str, warnings: Iterable[str]) -> None:
    """Print what is trained, and how it differs from its recipe."""
    if config.run and folder.path.name != config.run:
        console.print(f"{config.runs_dir}/{config.run} exists; this run is {folder.path.name}.")
    workers, num_ranks = config.trainer.num_workers, ranks.count()
    console.print(
        f"run {folder.path} · {config.world.name} · {config.world.agents} agent{'s' * (config.world.agents > 1)}"
        f"{f' on {num_ranks} ranks' if num_ranks > 1 else ''}"
        f"{f' in {workers} worker' + 's' * (workers > 1) if workers else ''}"
        f"{' each' if num_ranks > 1 and workers else ''} · "
        f"{config.iterations} iteration{'s' if config.iterations > 1 else ''} of "
        f"{config.trainer.batch_size:,} steps · seed {config.seed}{f' · recipe {recipe}' if recipe else ''}"
    )
    # `general` has no world of its own.
    ignored = (*WHERE, "world.name") if recipe == ELSEWHERE else WHERE
    difference = config_difference(find_recipe(recipe), config, ignored) if recipe else None
    if difference is not None:
        console.print(difference)
    for warning in filter(None, warnings):
        console.print(warning)
