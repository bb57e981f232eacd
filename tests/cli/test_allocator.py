import os
import platform
import subprocess
import sys

import pytest

from holdfast.cli import train as verb
from holdfast.cli.allocator import keep_freed_memory

PROGRAM = """
import resource
import torch
from holdfast.cli.allocator import keep_freed_memory
if {keeps}:
    assert keep_freed_memory()
torch.ones(1 << 25)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(1 << 25)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keeps):
    """How many pages a process had to ask for, that needs 128 MiB twenty times over."""
    mine = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM.format(keeps=keeps)]
    return int(subprocess.run(command, env=mine, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that gives memory back")
def test_what_was_freed_is_used_again():
    # In a process of its own: a setting of the whole process.
    given_back, kept = faults(keeps=False), faults(keeps=True)
    # Another place may be needed once or twice, but not every time.
    assert 5 * kept < given_back


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_who_told_the_allocator_what_to_do_is_left_alone(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert not keep_freed_memory()


def test_elsewhere_nothing_is_asked_for(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr("ctypes.CDLL", None)
    assert not keep_freed_memory()


def test_a_run_keeps_its_memory_before_it_begins(monkeypatch):
    happened = []
    monkeypatch.setattr(verb, "keep_freed_memory", lambda: happened.append("kept"))

    def begin(*_, **__):
        happened.append("begun")
        raise KeyboardInterrupt

    monkeypatch.setattr(verb, "train", begin)
    with pytest.raises(KeyboardInterrupt):
        verb.run_train(["recall"])
    assert happened == ["kept", "begun"]
