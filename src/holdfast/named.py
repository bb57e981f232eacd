"""Find what somebody wrote by its name: `package.module:Name`."""

import importlib
from typing import Any

from holdfast.errors import ConfigError, did_you_mean


def find_named(name: str, key: str) -> Any:
    """Import `package.module:Name`; an error speaks of the key it was given for."""
    module_name, _, thing = name.partition(":")
    if module_name.endswith(".py") or not all(map(str.isidentifier, [*module_name.split("."), thing])):
        plain = module_name.removesuffix(".py").replace("/", ".").strip(".")
        file = module_name.endswith(".py") or "/" in module_name
        hint = f", as {plain}:{thing}" if file and thing.isidentifier() else ""
        raise ConfigError(f"{key}{name}: write package.module:Class{hint}.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        own = error.name is not None and module_name.startswith(error.name)
        hint = "is it on the Python path?" if own else f"{module_name} imports it."
        raise ConfigError(f"{key}{name}: {error}; {hint}") from error
    except Exception as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"{key}{name}: {module_name} cannot be imported: {told}") from error
    if thing not in vars(module):
        there = [each for each in vars(module) if not each.startswith("_")]
        meant = did_you_mean(thing, there, "")
        raise ConfigError(f"{key}{name}: {module_name} has no class {thing}. {meant}".rstrip())
    return vars(module)[thing]
