"""The package itself: imported when a world of it is made, since not everybody has it."""

import importlib
from typing import Any

from holdfast.errors import ConfigError

CONFIG = "mettagrid.config.mettagrid_config"
HANDLERS = "mettagrid.config.handler_config"
REWARDS = "mettagrid.config.reward_config"
SIMULATOR = "mettagrid.simulator.simulator"


def part(module: str) -> Any:
    """Import a module of mettagrid."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"world.name=mettagrid: {error}; pip install 'holdfast[mettagrid]' (Python 3.11 or 3.12)."
        ) from error


def ascii_map(rows: list[str], names: dict[str, str]) -> Any:
    """Draw a map: `#` is a wall, `.` nothing, `@` an agent; other letters are objects by their map names."""
    builder = part("mettagrid.map_builder.ascii").AsciiMapBuilder
    return builder.Config(map_data=[list(row) for row in rows], char_to_map_name=names)


def sees(side: int, tokens: int) -> Any:
    """Let agents see a window of so many rows and columns, and nothing that has no place in it."""
    made = part(CONFIG)
    told = made.GlobalObsConfig(episode_completion_pct=False, last_action=False, last_reward=False)
    return made.ObsConfig(width=side, height=side, num_tokens=tokens, global_obs=told)


def moves() -> Any:
    """Let agents stay or move, which is all one needs to use things."""
    made = part(CONFIG)
    return made.ActionsConfig(change_vibe=made.ChangeVibeActionConfig(enabled=False))
