"""What a sweep is: recipe, keys, space, number of trials and seeds; written to sweep.json and to the study."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from holdfast.config.recipe_file import is_recipe_file
from holdfast.config.run import Config, expand_alias, override
from holdfast.errors import ConfigError, one_line, writing
from holdfast.recipes import find_recipe, recipe_and_keys
from holdfast.sweep.space import Dimension, parse_space

SWEEP = "sweep.json"
OBJECTIVES = {"return": ("maximize",), "return,cost": ("maximize", "minimize")}
"""What trials are chosen for, with the directions of Optuna."""
PRUNERS = ("median", "none")
MOST = 10_000
"""Most trials, and seeds of each."""


@dataclass(frozen=True)
class SweepSettings:
    """A sweep, in the words of the command line."""

    recipe: str
    keys: dict[str, str]
    """Keys that all trials share, without `run` and `runs_dir`."""
    space: tuple[str, ...]
    trials: int
    seeds: int = 1
    objectives: str = "return"
    pruner: str = "median"

    @property
    def config(self) -> Config:
        """The config of all trials, before the keys that vary."""
        return override(find_recipe(self.recipe), self.keys)

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """The keys that vary."""
        return parse_space(self.space, self.config)

    def named(self, keys: dict[str, str]) -> Config:
        """Return the config with name and folder of the sweep."""
        return override(self.config, {key: value for key, value in keys.items() if key in ("run", "runs_dir")})

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {**asdict(self), "space": list(self.space)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "SweepSettings":
        """Read settings; keys that another version has written are left out. A wrong value is a ValueError."""
        settings = {field.name: values[field.name] for field in fields(cls)}
        right = {
            "recipe": isinstance(settings["recipe"], str),
            "keys": isinstance(settings["keys"], dict) and _is_text(settings["keys"].values()),
            "space": isinstance(settings["space"], list) and _is_text(settings["space"]),
            "objectives": settings["objectives"] in tuple(OBJECTIVES),
            "pruner": settings["pruner"] in PRUNERS,
            **{name: type(settings[name]) is int and 0 < settings[name] <= MOST for name in ("trials", "seeds")},
        }
        for name, is_right in right.items():
            if not is_right:
                raise ValueError(f"{name} is {str(settings[name])[:100]!r}")
        return cls(**{**settings, "space": tuple(settings["space"])})

    def difference(self, other: "SweepSettings") -> str:
        """Return what differs from another sweep, besides the number of trials, as text."""
        pairs = zip(replace(self, trials=0).to_json().items(), replace(other, trials=0).to_json().values(), strict=True)
        return ", ".join(f"{name} {_text(old)} → {_text(new)}" for (name, old), new in pairs if old != new)


def new_settings(recipe: str, keys: dict[str, str], space: tuple[str, ...], **options: Any) -> SweepSettings:
    """Return settings whose recipe is a named one: the keys of a recipe file become keys."""
    expanded = _expanded(keys)
    if is_recipe_file(recipe):
        find_recipe(recipe)
        recipe, saved = recipe_and_keys(recipe)
        expanded = _expanded(saved) | expanded
    for name in ("trials", "seeds"):
        if options.get(name, 1) > MOST:
            raise ConfigError(f"--{name} {options[name]}: give at most {MOST:,}.")
    shared = {key: value for key, value in expanded.items() if key not in ("run", "runs_dir")}
    settings = SweepSettings(recipe, shared, space, **options)
    # The errors of config and space come now.
    _ = settings.dimensions
    return settings


def _expanded(keys: dict[str, str]) -> dict[str, str]:
    """Return the keys without aliases, so that those of a file and those that are typed are the same."""
    return dict(expand_alias(key, value) for key, value in keys.items())


def write_settings(folder: Path, settings: SweepSettings, study: str, storage: str) -> None:
    """Write sweep.json; `storage` has no password."""
    values = {"study": study, "storage": storage, **settings.to_json()}
    with writing(folder / SWEEP):
        part = folder / f".{SWEEP}.part"
        part.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        part.replace(folder / SWEEP)


def read_settings(folder: Path) -> tuple[SweepSettings, str, str]:
    """Read sweep.json: settings, the study's name, and its storage."""
    try:
        values = json.loads((folder / SWEEP).read_text(encoding="utf-8"))
        return SweepSettings.from_json(values), str(values["study"]), str(values["storage"])
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no sweep; give the folder of one, for example --resume runs/NAME.") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{folder / SWEEP} is damaged: {one_line(error)}; start a new sweep.") from None


def _is_text(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _text(value: object) -> str:
    return str(value) if isinstance(value, str | int) else json.dumps(value)
