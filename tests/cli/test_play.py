import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import holdfast
from helpers.small_runs import TINY
from holdfast.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    keys = {**TINY, "trainer.eval_episodes": 2, "runs_dir": str(tmp_path_factory.mktemp("runs")), "run": "x"}
    return holdfast.train("recall", keys, quiet=True).folder


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_play_serves_a_page_until_it_is_stopped(run, number):
    command = [str(Path(sys.executable).with_name("holdfast")), "play", str(run), "--no-open", "--agents", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", line).group()
        with urllib.request.urlopen(f"{url}state", timeout=20) as answer:
            assert b'"total": 0' in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(url[:-10] + "/", timeout=20)
        process.send_signal(number)
        out, error = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, error) == (0, "")
    assert out.endswith("stopped.\n")


def test_play_in_the_terminal(run, capsys, monkeypatch):
    lines = iter(["3\n", "clear\n", "agent 1\n", "\n", "quit\n"])
    monkeypatch.setattr("sys.stdin", type("Lines", (), {"readline": lambda self: next(lines)})())
    assert main(["play", str(run), "world.delay=3", "--terminal", "--agents", "2", "--sampled"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "step 4" in captured.out
    assert captured.out.startswith("fast in recall\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["runs/none"], "runs/none"),
        (["--port", "0"], "--port 0: give a number from 1 to 65535"),
        (["--port", "x"], "invalid int value"),
        (["--agents", "65"], "--agents 65: at most 64 can be shown"),
        (["--agents", "0"], "give an integer above 0"),
        (["--terminl"], "unrecognized arguments"),
        (["world.dely=3"], "did you mean world.delay?"),
    ],
)
def test_mistakes_are_one_line(run, args, message, capsys):
    assert main(["play", *([] if args[0].startswith("runs/") else [str(run)]), *args]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
