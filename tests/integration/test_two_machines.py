"""Training on two machines: network namespaces of this host, joined by torchrun's rendezvous."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from uuid import uuid4

import psutil
import pytest

import holdfast
from helpers.rank_processes import on_ranks
from helpers.small_runs import TINY, apart

KEYS = {**TINY, "trainer.checkpoint_interval": 1, "trainer.total_timesteps": 1920, "trainer.eval_episodes": 2}
LIMIT_S = 300


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@contextmanager
def two_networks():
    """Make two network namespaces with a cable between them; yield names, devices and addresses."""
    tag = uuid4().hex[:6]
    machines = [(f"hf-{tag}-{n}", f"hf{tag}{n}", f"10.213.77.{n}") for n in (1, 2)]
    made = []
    try:
        for name, _, _ in machines:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", machines[0][1], "type", "veth", "peer", "name", machines[1][1])
        for name, device, address in machines:
            ip("link", "set", device, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", device, "up")
        yield machines
    finally:
        for name in made:
            ip("netns", "delete", name)


@pytest.fixture
def networks():
    if os.name != "posix" or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs Linux with iproute2 and util-linux")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    try:
        context = two_networks()
        machines = context.__enter__()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    yield machines
    context.__exit__(None, None, None)


def launch(machines, folder, *words):
    """Start torchrun on each machine, with a host name of its own; their outputs are files of `folder`."""
    processes = []
    for number, (network, device, address) in enumerate(machines):
        rendezvous = [
            *("--nnodes=2", "--nproc-per-node=1", f"--local-addr={address}", "--max-restarts=2", "--rdzv-id=job"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={machines[0][2]}:29400", f"--rdzv-conf=is_host={1 - number}"),
        ]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "-m", "holdfast", "train", *words]
        named = ["unshare", "--uts", "sh", "-c", f'hostname machine{number} && exec "$@"', "sh", *torchrun]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": "1"}
        command = ["ip", "netns", "exec", network, *named]
        with (folder / f"machine{number}.txt").open("wb") as output:
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    return processes


def rank_of(torchrun):
    """Return the rank process that torchrun has started."""
    return next(child for child in psutil.Process(torchrun.pid).children() if "holdfast" in child.cmdline())


def alone(folder):
    keys = {**KEYS, "runs_dir": str(folder), "run": "alone"}
    return holdfast.train("recall", keys, quiet=True).finished


@pytest.mark.slow
def test_two_machines_train_and_survive_a_killed_rank(networks, tmp_path):
    words = ["recall", *(f"{key}={value}" for key, value in KEYS.items()), "run=x", f"runs_dir={tmp_path}"]
    processes = launch(networks, tmp_path, *words)
    try:
        end = time.monotonic() + LIMIT_S
        while not (tmp_path / "x" / "checkpoints" / "000003").exists():
            assert time.monotonic() < end, "no checkpoint"
            assert [process.poll() for process in processes] == [None, None]
            time.sleep(0.02)
        rank_of(processes[1]).send_signal(signal.SIGKILL)
        end = time.monotonic() + LIMIT_S
        while None in [process.poll() for process in processes] and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=30)
    outputs = [(tmp_path / f"machine{number}.txt").read_text() for number in range(2)]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert "run " + str(tmp_path / "x") + " resumes after iteration" in outputs[0]
    assert "rank 0 of 2 has lost the others: all ranks on machine0 run" in outputs[0]
    assert "look for the error of a rank on machine1" in outputs[0]
    assert on_ranks(2, alone, tmp_path) == [True, True]
    assert apart(tmp_path / "x", tmp_path / "alone") == []
