"""A config in words: what the run is, what differs from the recipe, and values as one types them."""

import torch
from rich.table import Column, Table
from rich.text import Text
from torch import nn

from holdfast.config import Config, keys_of
from holdfast.trainer_knobs import Schedule, Teacher
from holdfast.which_world import Part


def title_of(config: Config, name: str, policy: nn.Module, device: torch.device) -> dict[str, str]:
    """Say what the run is, for the head of the dashboard."""
    size = sum(parameter.numel() for parameter in policy.parameters())
    return {
        "run": name,
        "world": f"{config.world.name}, {config.world.agents:,} agents",
        "policy": f"{config.policy.name}, {size:,} parameters",
        "device": str(device),
        "seed": f"seed {config.seed}",
    }


def difference(recipe: Config, config: Config) -> Table | None:
    """Tabulate which keys differ from the recipe, if any."""
    columns = [Column(name, overflow="fold") for name in ("key", "recipe", "this run")]
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for key in keys_of(config.world.name):
        # What a recipe's world does not know was not said by it.
        old = lookup(recipe, key) if key in keys_of(recipe.world.name) else "-"
        new = lookup(config, key)
        if old != new:
            table.add_row(key, Text(typed(old)), Text(typed(new)))
    return table if table.row_count else None


def typed(value: object) -> str:
    """Write a value as one types it."""
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple) and all(isinstance(part, Part) for part in value):
        return " + ".join(f"{part.label} weight={part.weight:g}" for part in value if isinstance(part, Part))
    if isinstance(value, tuple) and all(isinstance(part, Schedule | Teacher) for part in value):
        return " + ".join(map(str, value))
    return str(value)


def lookup(config: Config, key: str) -> object:
    """Read a dotted key."""
    found: object = config
    for part in key.split("."):
        found = getattr(found, part)
    return found
