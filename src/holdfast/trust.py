"""Trust: which modules a name may import, by where the name comes from.

A name that the user types is imported. A name in a file, such as the config of a saved run, is imported if its
module is part of an installed package or imported already. A name from the Hub is not imported. With
`trust_code=True` all are. The check stands where modules are imported by name, so no path leads around it.
"""

import importlib.util
import json
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from holdfast.errors import TrustError


@dataclass(frozen=True)
class NameSource:
    """Where names of modules come from, and whether its author is trusted."""

    origin: str | None = None
    """The folder whose files hold the names; None: the user typed them."""
    trust_code: bool | None = None
    """None: installed packages only; False: nothing."""
    imported: frozenset[str] = frozenset()
    """Modules that the trainer has imported, for its workers."""


TYPED = NameSource()
"""Names that the user typed."""
_source: ContextVar[NameSource] = ContextVar("name_source", default=TYPED)


def current_source() -> NameSource:
    """Return the source of names in this context."""
    return _source.get()


@contextmanager
def names_from(source: NameSource | Path) -> Iterator[None]:
    """Take names from a source; for a folder, trust it as far as `trusting` says."""
    token = _source.set(replace(_source.get(), origin=str(source)) if isinstance(source, Path) else source)
    try:
        yield
    finally:
        _source.reset(token)


@contextmanager
def trusting(trust_code: bool | None) -> Iterator[None]:
    """Set whether code that files name is imported."""
    with names_from(replace(_source.get(), trust_code=trust_code)):
        yield


def require_trust(name: str, module: str) -> None:
    """Raise if importing a module, as `name` asks for, would run code of a source that is not trusted."""
    source = _source.get()
    if source.origin is None or source.trust_code:
        return
    file = _file_of(module)
    if source.trust_code is None:
        # Where there is no such package, the error of the import says more.
        if _is_imported(module) or (_spec_of(module) is None and all(map(str.isidentifier, module.split(".")))):
            return
        if _is_installed(module, file, Path(source.origin)):
            return
    raise TrustError(
        f"{source.origin} names code that would be imported and run: {name}{f', from {file}' if file else ''}. "
        "If you trust its author, pass --trust-code; in Python, trust_code=True."
    )


def require_trust_to_call(name: str, obj: Any) -> None:
    """Raise if an untrusted file names a function: it would be called with the options of the file."""
    source = _source.get()
    if source.origin is not None and not source.trust_code and not isinstance(obj, type):
        raise TrustError(
            f"{source.origin} names a function that would be called: {name}. If you trust its author, pass "
            "--trust-code; in Python, trust_code=True."
        )


def require_trust_to_unpickle(file: Path) -> None:
    """Raise for a file whose pickles run code, unless its author is trusted; to type its name is not enough."""
    if not _source.get().trust_code:
        raise TrustError(
            f"{file} holds pickles, which run code when they are loaded. If you trust its author, pass --trust-code; "
            "in Python, trust_code=True."
        )


def require_trust_in(options: Any) -> None:
    """Check every `module:name` in the options of an environment, which may import it."""
    if _source.get().origin is None or _source.get().trust_code:
        return
    if isinstance(options, str):
        module, colon, _ = options.partition(":")
        if colon and (_file_of(module) is not None or _source.get().trust_code is False):
            require_trust(options, module)
    elif isinstance(options, Mapping | list | tuple):
        for option in options.values() if isinstance(options, Mapping) else options:
            require_trust_in(option)


def _spec_of(module: str) -> ModuleSpec | None:
    """Find the package of a module without importing anything; None: there is none."""
    try:
        return importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return None


def _file_of(module: str) -> Path | None:
    """Return the file or folder of a module's package; None: it has none, such as one built into Python."""
    spec = _spec_of(module)
    places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin or ""]
    return next((Path(place) for place in places if Path(place).is_absolute()), None)


def _is_imported(module: str) -> bool:
    """Return whether a module is imported already, and is not part of Python, which can do anything."""
    is_imported = module in sys.modules or module in _source.get().imported
    return is_imported and module.partition(".")[0] not in sys.stdlib_module_names


def _is_installed(module: str, file: Path | None, origin: Path) -> bool:
    """Return whether a module is part of an installed package; one that the source itself holds never is."""
    if file is None or file.resolve().is_relative_to(origin.resolve()):
        return False
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    folders += [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    if any(file.resolve().is_relative_to(Path(folder).resolve()) for folder in folders):
        return True
    spec = _spec_of(module)
    # A folder without __init__ in an editable project is no package that was installed.
    has_code = spec is not None and spec.origin is not None
    return has_code and any(file.resolve().is_relative_to(folder) for folder in _editable_folders())


def _editable_folders() -> Iterator[Path]:
    """List the folders that packages installed by `pip install --editable` are imported from, `src` of a project."""
    for distribution in distributions():
        text = distribution.read_text("direct_url.json")
        if not text or not json.loads(text).get("dir_info", {}).get("editable"):
            continue
        for file in distribution.files or ():
            if file.suffix == ".pth":
                lines = Path(str(distribution.locate_file(file))).read_text(encoding="utf-8").splitlines()
                yield from (Path(line).resolve() for line in lines if Path(line).is_dir())
