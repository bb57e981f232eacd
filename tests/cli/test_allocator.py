import os
import platform
import subprocess
import sys

import pytest

from holdfast.cli import train as cli_train
from holdfast.cli.allocator import keep_freed_memory

PROGRAM = """
import resource
import torch
from holdfast.cli.allocator import keep_freed_memory
if {keeps}:
    assert keep_freed_memory()
for _ in range(10):
    torch.ones(1 << 25)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(1 << 25)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keeps):
    """Page faults of a process that allocates 128 MiB twenty times."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM.format(keeps=keeps)]
    return int(subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_reused():
    # In separate processes: the setting is global. A few allocations may need new pages, but not all.
    assert 2 * faults(keeps=True) < faults(keeps=False)


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_malloc_settings_in_the_environment_win(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert not keep_freed_memory()


def test_other_libcs_are_left_alone(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr("ctypes.CDLL", None)
    assert not keep_freed_memory()


def test_train_sets_the_allocator_before_training(monkeypatch):
    calls = []
    monkeypatch.setattr(cli_train, "keep_freed_memory", lambda: calls.append("allocator"))

    def start(*_, **__):
        calls.append("train")
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.training.train.train", start)
    with pytest.raises(KeyboardInterrupt):
        cli_train.run_train(["recall"])
    assert calls == ["allocator", "train"]
