"""Hints at extras are right for every way to install Holdfast."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast import install
from holdfast.install import install_command, pip_install


@pytest.fixture(autouse=True)
def active_environment(monkeypatch):
    """`pip` is that of this environment."""
    monkeypatch.setattr(shutil, "which", lambda name: str(Path(sys.executable).with_name(name)))


FOLDER = {"url": "file:///home/me/my%20clone", "dir_info": {}}


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'holdfast[hub]'"),
        (FOLDER, "pip install '/home/me/my clone[hub]'"),
        (FOLDER | {"dir_info": {"editable": True}}, "pip install --editable '/home/me/my clone[hub]'"),
        (
            {"url": "file:///tmp/holdfast-1.whl", "archive_info": {}},
            "pip install 'holdfast[hub] @ file:///tmp/holdfast-1.whl'",
        ),
        ({"url": Path.cwd().as_uri(), "dir_info": {"editable": True}}, "pip install --editable '.[hub]'"),
    ],
    ids=["index", "folder", "editable", "wheel", "clone"],
)
def test_the_command_fits_the_installation(origin, command, monkeypatch):
    text = None if origin is None else json.dumps(origin)
    monkeypatch.setattr(install, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    assert install_command("hub") == command


def test_without_an_installation_the_index_is_named(monkeypatch):
    def missing(name):
        raise install.PackageNotFoundError

    monkeypatch.setattr(install, "distribution", missing)
    assert install_command("hub") == "pip install 'holdfast[hub]'"


@pytest.mark.parametrize("pip", ["/elsewhere/bin/pip", None])
def test_python_is_named_where_pip_is_that_of_another_environment(pip, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: pip)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    assert pip_install("minigrid") == ".venv/bin/python -m pip install minigrid"
    monkeypatch.setattr(sys, "executable", "/my home/bin/python")
    assert pip_install("minigrid") == "'/my home/bin/python' -m pip install minigrid"
