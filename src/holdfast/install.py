"""The commands that install packages and extras of Holdfast, in the way that Holdfast was installed."""

import json
import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse


def pip_install(packages: str) -> str:
    """Return what to type to install packages where Holdfast is: `pip` may be that of another environment."""
    python = Path(sys.executable)
    if Path(shutil.which("pip") or "").parent == python.parent:
        return f"pip install {packages}"
    python = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    return f"{shlex.quote(str(python))} -m pip install {packages}"


def install_command(extra: str) -> str:
    """Return what to type to install an extra: from an index, a folder (a clone), or a wheel."""
    try:
        origin = json.loads(distribution("holdfast").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    url = origin.get("url", "")
    if "dir_info" in origin:
        path = Path(unquote(urlparse(url).path))
        editable = "--editable " if origin["dir_info"].get("editable") else ""
        return pip_install(f"{editable}'{'.' if path == Path.cwd() else path}[{extra}]'")
    return pip_install(f"'holdfast[{extra}]{f' @ {url}' if url else ''}'")
