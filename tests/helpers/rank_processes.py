"""Run a function on several ranks: forked processes that have imported everything, with gloo between them."""

import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from pathlib import Path

import torch

from helpers.forked import _ends

SECONDS = 120
"""Ranks that take longer hang; on a busy machine they may wait for minutes."""


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def environment(rank, count, port):
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    return {**{name: str(number) for name, number in numbers.items()}, "MASTER_ADDR": "127.0.0.1"}


def start(count, function, *args, folder):
    """Start ranks that write what the function returns; return their process ids."""
    port, children = free_port(), []
    for rank in range(count):
        child = os.fork()
        if not child:
            code = 1
            try:
                # Several processes of several threads on few cores would wait for each other.
                torch.set_num_threads(1)
                os.environ.update(environment(rank, count, port))
                (folder / f"{rank}.pickle").write_bytes(pickle.dumps(function(*args)))
                code = 0
            except BaseException:
                (folder / f"{rank}.txt").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        children.append(child)
    return children


def finish(children, seconds=SECONDS):
    """Wait for the ranks to end; return their exit codes, negative for signals."""
    codes, deadline = [], time.monotonic() + seconds
    for child in children:
        if not _ends(child, max(0.0, deadline - time.monotonic())):
            os.kill(child, signal.SIGKILL)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return codes


def on_ranks(count, function, *args):
    """Call a function on every rank; return what each returns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codes = finish(start(count, function, *args, folder=folder))
        errors = [file.read_text() for file in sorted(folder.glob("*.txt"))]
        assert codes == [0] * count, "\n".join(errors)
        return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(count)]
