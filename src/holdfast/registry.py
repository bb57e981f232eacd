"""Registries of classes by name: built-in, registered at run time, or from entry points of other packages."""

import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, distributions, entry_points
from typing import Any, Generic, TypeVar, final

from holdfast.errors import ConfigError, HoldfastError, did_you_mean, error_text
from holdfast.install import install_command
from holdfast.trust import require_trust

Base = TypeVar("Base")


def import_object(name: str, key: str) -> Any:
    """Import `package.module:Name` after the trust check; `key` starts the error message."""
    require_trust(name, name.partition(":")[0])
    return load_object(name, key)


def import_named(name: str, module: str, key: str) -> Any:
    """Import the module of an environment or wrapper after the trust check."""
    require_trust(name, module)
    return load_module(name, module, key)


def load_object(name: str, key: str) -> Any:
    """Import `package.module:Name` without the trust check: for names in our own code."""
    module_name, _, attribute = name.partition(":")
    if module_name.endswith(".py") or not all(map(str.isidentifier, [*module_name.split("."), attribute])):
        dotted = module_name.removesuffix(".py").replace("/", ".").strip(".")
        is_file = module_name.endswith(".py") or "/" in module_name
        hint = f", as {dotted}:{attribute}" if is_file and attribute.isidentifier() else ""
        raise ConfigError(f"{key}{name}: write package.module:Class{hint}.")
    module = load_module(name, module_name, key)
    if attribute not in dir(module):
        public = [word for word in dir(module) if not word.startswith("_")]
        guess = did_you_mean(attribute, public, "")
        hint = guess.replace("did you mean ", f"; did you mean {module_name}:") if guess else "."
        raise ConfigError(f"{key}{name}: {module_name} has no class {attribute}{hint}")
    return getattr(module, attribute)


def load_module(name: str, module: str, key: str) -> Any:
    """Import a module without the trust check; errors name the config key."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        # An extra of the package's own name: "popgym<2; extra == 'popgym'".
        needs = [line.rstrip("'\"") for holdfast in distributions(name="holdfast") for line in holdfast.requires or ()]
        if package and any(line.startswith(package) and line.endswith(package) for line in needs):
            raise ConfigError(f"{key}{name}: {package} is not installed; {install_command(package)}.") from error
        missing_itself = error.name is not None and module.startswith(error.name)
        hint = "is it on the Python path?" if missing_itself else f"{module} imports it."
        raise ConfigError(f"{key}{name}: {error}; {hint}") from error
    except HoldfastError:
        raise
    except Exception as error:
        raise ConfigError(f"{key}{name}: {module} cannot be imported: {error_text(error)}") from error


@final
class Registry(Mapping[str, type[Base]], Generic[Base]):
    """Subclasses of `base` by name.

    `what` and `key` word the errors ("cell", "policy.memory="). A built-in class may be given lazily as
    "module:Name". Other packages add classes by an entry point of the group, whose name is what users type.
    """

    def __init__(
        self, what: str, key: str, entry_point_group: str, base: type[Base], builtin: Mapping[str, Any]
    ) -> None:
        self.what, self.key, self.group, self.base = what, key, entry_point_group, base
        self._entries: dict[str, Any] = dict(builtin)

    def __getitem__(self, name: str) -> type[Base]:
        if name not in self._entries:
            return self._load(self._entry_points()[name])
        if isinstance(self._entries[name], str):
            self._entries[name] = self._require_subclass(name, load_object(self._entries[name], self.key))
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._entries, *self._entry_points()]))

    def __len__(self) -> int:
        return len({*self._entries, *self._entry_points()})

    def __contains__(self, name: object) -> bool:
        # To list the entry points takes 10 ms, and none of them has a colon.
        return name in self._entries or (":" not in str(name) and name in self._entry_points())

    def register(self, name: str, kind: type[Base]) -> None:
        """Add a class under a name that is free."""
        if name in self and self[name] is not kind:
            raise ConfigError(f"There is a {self.what} called {name} already; choose another name.")
        self._entries[name] = self._require_subclass(name, kind)

    def find(self, name: str) -> type[Base]:
        """Return a class by its name, or import it by `package.module:Class`."""
        self.require(name)
        return self[name] if name in self else self._require_subclass(name, import_object(name, self.key))

    def require(self, name: str) -> None:
        """Raise for an unknown name; nothing is imported."""
        if name not in self and ":" not in name:
            names = sorted(self)
            hint = did_you_mean(name, names, f"choose from {', '.join(names)}.")
            raise ConfigError(
                f"There is no {self.what} {name!r}; {hint} For your own class, write package.module:Class."
            )

    def _load(self, point: EntryPoint) -> type[Base]:
        try:
            return self._require_subclass(point.name, point.load())
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{self.key}{point.name}: {point.value} cannot be loaded: {error}") from error

    def _entry_points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group)}

    def _require_subclass(self, name: str, obj: Any) -> type[Base]:
        if isinstance(obj, type) and issubclass(obj, self.base):
            return obj
        base = f"{self.base.__module__}.{self.base.__qualname__}"
        raise ConfigError(f"{self.key}{name}: {obj!r} is not a subclass of {base}.")
