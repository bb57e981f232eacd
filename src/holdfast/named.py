"""Find what somebody wrote by its name: registered, from another package, or as `package.module:Name`."""

import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, final

from holdfast.errors import ConfigError, did_you_mean

Kind = TypeVar("Kind")


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


@final
class Registry(Mapping[str, type[Kind]], Generic[Kind]):
    """Classes of one kind by name: ours, those that were registered, and those of other packages.

    Other packages add theirs by an entry point of `group`, whose name is what people type.
    """

    def __init__(
        self, what: str, key: str, group: str, base: type[Kind], ours: Mapping[str, type[Kind]]
    ) -> None:
        self.what, self.key, self.group, self.base = what, key, group, base
        self._known = dict(ours)

    def __getitem__(self, name: str) -> type[Kind]:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def register(self, name: str, kind: type[Kind]) -> None:
        """Add a class under a name; one that is taken is refused."""
        if self._known.get(name, kind) is not kind:
            raise ConfigError(f"There is a {self.what} called {name} already; choose another name.")
        self._known[name] = self._fitting(name, kind)

    def find(self, name: str) -> type[Kind]:
        """Find a class by its name, or import it by `package.module:Class`."""
        if name in self._known:
            return self._known[name]
        if ":" in name:
            return self._fitting(name, find_named(name, self.key))
        theirs = {point.name: point for point in entry_points(group=self.group)}
        if name not in theirs:
            there = sorted({*self._known, *theirs})
            meant = did_you_mean(name, there, f"there is {', '.join(there)}.")
            raise ConfigError(
                f"There is no {self.what} {name!r}; {meant} Your own goes by package.module:Class."
            )
        try:
            return self._fitting(name, theirs[name].load())
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{self.key}{name}: {theirs[name].value} cannot be loaded: {error}") from error

    def _fitting(self, name: str, found: Any) -> type[Kind]:
        if isinstance(found, type) and issubclass(found, self.base):
            return found
        told = f"{self.base.__module__}.{self.base.__qualname__}"
        raise ConfigError(f"{self.key}{name}: {found!r} is not a subclass of {told}.")
