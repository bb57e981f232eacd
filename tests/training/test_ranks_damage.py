"""Damaged, renamed and locked runs, resumed on two ranks: all of them take the same checkpoint, or all end."""

import fcntl
import os
import shutil
import time

import pytest

import holdfast
from helpers.rank_processes import on_ranks
from helpers.small_runs import TINY, sign
from holdfast.errors import HoldfastError

pytestmark = pytest.mark.usefixtures("annotations_asleep")
KEYS = {"trainer.total_timesteps": 192, "trainer.checkpoint_interval": 1, "trainer.eval_episodes": 2}


def train(folder):
    return holdfast.train("recall", {**TINY, **KEYS, "runs_dir": str(folder), "run": "x"}, quiet=True).finished


def resume(folder):
    try:
        run = holdfast.train(resume=folder, config={"trainer.total_timesteps": 256}, quiet=True)
    except HoldfastError as error:
        return str(error)
    return {name: weight.tolist() for name, weight in run.policy.state_dict().items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(2, train, folder)
    return folder / "x"


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "x", symlinks=True)
    return tmp_path / "x"


def flip_last_bit(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_ranks_take_the_same_earlier_checkpoint(run):
    """The newest is damaged, and a copy has a number that it has not reached."""
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "000002", checkpoints / "000100")
    flip_last_bit(checkpoints / "000003" / "live_memories.safetensors")
    first, second = on_ranks(2, resume, run)
    assert first == second
    assert isinstance(first, dict)
    names = {path.name for path in checkpoints.iterdir()}
    assert {"000003", "000004", "000100.unused"} <= names


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_state_that_one_rank_cannot_restore_ends_all(run, rank):
    """Its checksum is right. Nothing in the folder changes."""
    from holdfast.checkpoint.serialization import pack, unpack

    file = run / "checkpoints" / "000003" / "trainer_state.safetensors"
    state = unpack(file)
    generators = state["rng"] if rank == 0 else state["rng"]["ranks"][0]
    generators["cpu"] = generators["cpu"][:-1]
    file.write_bytes(pack(state))
    sign(file.parent)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    errors = on_ranks(2, resume, run)
    assert "does not match this run" in errors[rank]
    assert f"rank {rank} (process " in errors[1 - rank]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_run_that_another_process_trains_is_refused_by_all_ranks(run):
    child = os.fork()
    if not child:
        with (run / ".lock").open("a") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            (run / "locked").touch()
            time.sleep(60)
        os._exit(0)
    deadline = time.monotonic() + 30
    while not (run / "locked").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        errors = on_ranks(2, resume, run)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert "is being trained by another process" in errors[0]
    assert "rank 0 of 2 has failed: " in errors[1]
