"""The command that installs an extra of Holdfast, in the way that Holdfast was installed."""

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse


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
        return f"pip install {editable}'{'.' if path == Path.cwd() else path}[{extra}]'"
    return f"pip install 'holdfast[{extra}] @ {url}'" if url else f"pip install 'holdfast[{extra}]'"
