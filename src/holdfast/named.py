"""Find what somebody wrote by its name: `package.module:Name`."""

import importlib
from typing import Any

from holdfast.errors import ConfigError


def find_named(name: str, key: str) -> Any:
    """Import `package.module:Name`; an error speaks of the key it was given for."""
    module_name, _, thing = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), thing]):
        raise ConfigError(f"{key}{name}: write package.module:Class.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        own = error.name is not None and module_name.startswith(error.name)
        hint = "is it on the Python path?" if own else f"{module_name} imports it."
        raise ConfigError(f"{key}{name}: {error}; {hint}") from error
    if thing not in vars(module):
        raise ConfigError(f"{key}{name}: {module_name} has no class {thing}.")
    return vars(module)[thing]
