"""The fork server: its workers end with it, and it ends with the trainer."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from test_pool import FAULTY, acts, gone, pool

from holdfast.errors import WorkerError
from holdfast.worlds.workers.shared_memory import open_memory
from holdfast.worlds.workers.spawn import ForkServer, fork_server


def test_one_fork_server_for_all_users():
    with fork_server() as server, fork_server() as again:
        assert again is server
        assert server.alive
    assert not server.alive


def test_child_reports_its_exit_code():
    with fork_server() as server:
        files = [open_memory() for _ in range(3)]
        child = server.spawn(files)
        # Its connection is an empty file: the worker reads its end, and exits.
        assert child.exit_code(20.0) == 0
        child.signal(signal.SIGKILL)
        child.close()
        for file in files:
            os.close(file)


def test_closed_fork_server_starts_no_workers():
    server = ForkServer()
    server.close()
    assert not server.alive
    with pytest.raises(WorkerError, match="fork server of the workers has died"):
        server.spawn([])


def test_workers_of_an_unguarded_script_end_when_it_is_killed(tmp_path):
    # Without `if __name__ == "__main__"`, which multiprocessing's forkserver needs.
    script = tmp_path / "script.py"
    script.write_text(
        "import time, torch; from holdfast.worlds.workers import WorkerPool\n"
        f"pool = WorkerPool({FAULTY!r}, 4, options={{'how': 'hold', 'when': 1}}, workers=2)\n"
        "pool.reset(); pool.send(pool.groups[0], torch.zeros(4, dtype=int))\n"
        "print(*pool.pids, flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    pids = [int(word) for word in child.stdout.readline().split()]
    assert len(pids) == 2
    child.kill()
    child.wait(timeout=120)
    child.stdout.close()
    # One hangs in a step that holds the GIL, the other waits for a request.
    for _ in range(600):
        if gone(pids):
            break
        time.sleep(0.1)
    assert gone(pids)


def test_workers_end_with_their_fork_server_and_the_next_pool_starts_another():
    with pool("recall", 4) as shared:
        shared.reset()
        pids = shared.pids
        psutil.Process(pids[0]).parent().kill()
        for _ in range(600):
            if gone(pids):
                break
            time.sleep(0.1)
        with pytest.raises(WorkerError, match=r"Worker 0 of 2 .* ended with its fork server"):
            shared.step(acts(shared, 0))
    assert gone(pids)
    with pool("recall", 4) as shared:
        assert shared.reset().first.all()
        assert shared.pids != pids
