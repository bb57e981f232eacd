"""Which checkpoints are written, kept and removed, and failed writes."""

import contextlib
import importlib
import os
import resource
import shutil
import signal
import threading
from dataclasses import replace

import pytest
from test_format import snapshot, value_of, write

from holdfast.checkpoint import format, run_dir
from holdfast.checkpoint import manager as manager_module
from holdfast.checkpoint.format import open_checkpoint, set_symlink
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.run_dir import RunDir


def test_an_unserializable_snapshot_is_reported_and_training_continues(tmp_path):
    folder, log = RunDir(tmp_path), []
    manager = make_manager(folder, alarm=log.append)
    bad = replace(snapshot(2), world={"what": object()})
    for state in (snapshot(1), bad, snapshot(3)):
        manager.save_if_due(state)
    assert manager.save_final().endswith("000003")
    assert [line for line in log if "A object cannot be saved" in line]
    assert [path.name for path in folder.numbered()] == ["000003", "000001"]


def make_manager(folder, **options):
    options = {"interval": 1, "keep": 2, "alarm": print, **options}
    return CheckpointManager(folder, {"config.json": b"{}"}, {}, **options)


def names(folder):
    return sorted(path.name for path in folder.checkpoints.iterdir())


def test_symlinks_are_repaired_after_a_kill(tmp_path):
    folder = RunDir(tmp_path)
    manager = make_manager(folder, keep=0)
    for iteration, score in enumerate([1.0, 2.0]):
        manager.save_if_due(snapshot(iteration, score=score))
    manager.save_final()
    # Killed after the third was renamed and before the symlinks were set.
    write(folder.checkpoints, 2, score=9.0)
    set_symlink(folder.checkpoints / "latest", "000001")
    folder.quarantine_newer(folder.newest(print))
    assert (folder.checkpoints / "latest").resolve().name == "000002"
    assert (folder.checkpoints / "best").resolve().name == "000002"
    manager = make_manager(folder, keep=1, resumed_from=folder.newest(print))
    for iteration in (3, 4, 5):
        manager.save_if_due(snapshot(iteration, score=3.0))
    manager.save_final()
    assert names(folder) == ["000002", "000005", "best", "latest"]


def test_a_checkpoint_that_cannot_be_read_may_be_the_best_and_is_not_removed(tmp_path, monkeypatch):
    folder, log = RunDir(tmp_path), []
    for iteration, score in enumerate([9.0, 1.0, 2.0]):
        write(folder.checkpoints, iteration, score=score)

    def read(path):
        if path.name == "000000":
            raise OSError(f"{path} cannot be read: Input/output error.")
        return open_checkpoint(path)

    monkeypatch.setattr(run_dir, "open_checkpoint", read)
    newest = folder.newest(print)
    folder.quarantine_newer(newest)
    manager = make_manager(folder, keep=1, alarm=log.append, resumed_from=newest)
    manager.save_if_due(snapshot(3, score=3.0))
    manager.save_final()
    assert names(folder) == ["000000", "000003", "best", "latest"]
    best = folder.checkpoints / "000000"
    assert log == [f"000000 may be the best, but {best} cannot be read: Input/output error; it is not removed."]


@pytest.mark.parametrize("what", ["set_symlink", "shutil.rmtree"])
def test_errors_after_a_checkpoint_is_complete_are_warnings(tmp_path, monkeypatch, what):
    folder, log = RunDir(tmp_path), []
    manager = make_manager(folder, alarm=log.append, keep=1)
    manager.save_if_due(snapshot(1, 1.0))
    manager.save_if_due(snapshot(2, 2.0))
    manager._wait_for_writer("")

    def broken(*args, **kwargs):
        raise OSError(5, "Input/output error")

    module, _, name = f"{format.__name__}.{what}".rpartition(".")
    monkeypatch.setattr(importlib.import_module(module) if "shutil" not in module else shutil, name, broken)
    manager.save_if_due(snapshot(3, 3.0))
    assert manager.save_final().startswith("the last iteration is saved in ")
    assert manager.error is None
    assert manager.latest.name == "000003"
    assert value_of(manager.latest) == 3.0
    assert any("000003 is saved, but: " in line for line in log)


def test_keep_checkpoints_keeps_the_newest_and_the_best(tmp_path):
    folder = RunDir(tmp_path)
    manager = make_manager(folder)
    for iteration, score in enumerate([1.0, 5.0, 2.0, None, 5.0, 4.0]):
        manager.save_if_due(snapshot(iteration, score=score))
    manager.save_final()
    assert names(folder) == ["000001", "000004", "000005", "best", "latest"]
    assert (folder.checkpoints / "best").resolve().name == "000001"
    assert (folder.checkpoints / "latest").resolve().name == "000005"


def test_the_best_checkpoint_survives_a_resume(tmp_path):
    folder = RunDir(tmp_path)
    manager = make_manager(folder)
    for iteration, score in enumerate([3.0, 1.0]):
        manager.save_if_due(snapshot(iteration, score=score))
    manager.save_final()
    manager = make_manager(folder, resumed_from=open_checkpoint(folder.checkpoints / "latest"))
    for iteration, score in ((2, 2.0), (3, 1.0), (4, 2.5)):
        manager.save_if_due(snapshot(iteration, score=score))
    manager.save_final()
    assert (folder.checkpoints / "best").resolve().name == "000000"
    assert names(folder) == ["000000", "000003", "000004", "best", "latest"]


def test_keep_zero_keeps_all_checkpoints(tmp_path):
    manager = make_manager(RunDir(tmp_path), keep=0)
    for iteration in range(5):
        manager.save_if_due(snapshot(iteration))
    manager.save_final()
    assert len(RunDir(tmp_path).numbered()) == 5


def test_the_best_evaluation_is_saved_between_intervals(tmp_path):
    folder = RunDir(tmp_path)
    manager = make_manager(folder, interval=10, keep=1)
    for iteration, score in ((1, 1.0), (2, 0.5), (3, 2.0), (4, 1.5)):
        manager.save_if_due(snapshot(iteration, score=score), evaluated=True)
    manager.save_final()
    assert names(folder) == ["000003", "000004", "best", "latest"]
    assert (folder.checkpoints / "best").resolve().name == "000003"


def test_non_finite_weights_are_never_saved(tmp_path):
    manager = make_manager(RunDir(tmp_path), interval=0)
    for iteration, value in ((1, 1.0), (2, 2.0), (3, float("nan"))):
        manager.save_if_due(snapshot(iteration, value))
    assert manager.save_final() == (
        f"non-finite weights are not saved; the last finite ones are in {tmp_path}/checkpoints/000002"
    )
    assert value_of(tmp_path / "checkpoints" / "latest") == 2.0


def test_a_failed_write_is_reported_and_tried_again(tmp_path, monkeypatch):
    folder, log = RunDir(tmp_path), []
    manager = make_manager(folder, alarm=log.append)
    manager.save_if_due(snapshot(1, 1.0))
    with monkeypatch.context() as broken:

        def full(paths):
            raise OSError(28, "No space left on device")

        manager.save_if_due(snapshot(2, 2.0))
        manager.save_final()
        manager = make_manager(folder, alarm=log.append, resumed_from=open_checkpoint(folder.checkpoints / "latest"))
        broken.setattr(format, "sync_together", full)
        manager.save_if_due(snapshot(3, 3.0))
        manager.save_if_due(snapshot(4, 4.0))
        assert manager.save_final().startswith("the final checkpoint could not be saved: Could not write ")
    assert manager.error is not None
    assert log == [
        f"Could not write {folder.checkpoints}/00000{number}: No space left on device; free some "
        "space on its disk. Training continues; the next checkpoint is tried when due."
        for number in (3, 4)
    ]
    assert names(folder) == ["000001", "000002", "latest"]
    assert value_of(folder.checkpoints / "latest") == 2.0


def test_a_checkpoint_just_written_is_not_pruned(tmp_path):
    folder = RunDir(tmp_path)
    write(folder.checkpoints, 3)
    # A copy under a higher number, as a user may make.
    shutil.copytree(folder.checkpoints / "000003", folder.checkpoints / "000100")
    manager = make_manager(folder, keep=1)
    for iteration in (4, 5):
        manager.save_if_due(snapshot(iteration))
    message = manager.save_final()
    assert message == f"the last iteration is saved in {tmp_path}/checkpoints/000005"
    assert open_checkpoint(manager.latest).iteration == 5


def test_save_final_saves_the_last_iteration_between_intervals(tmp_path):
    manager = make_manager(RunDir(tmp_path), interval=2)
    manager.save_if_due(snapshot(2))
    manager.save_if_due(snapshot(3))
    assert manager.save_final() == f"saved {tmp_path}/checkpoints/000003"


def test_before_the_first_iteration_it_says_that_nothing_is_trained(tmp_path):
    manager = make_manager(RunDir(tmp_path))
    manager.save_if_due(snapshot(0))
    assert manager.save_final() == f"no iteration is complete; the untrained policy is in {tmp_path}/checkpoints/000000"


def test_a_run_folder_deleted_during_training_is_reported_and_written_again(tmp_path):
    folder, log = RunDir(tmp_path / "x"), []
    folder.path.mkdir()
    manager = make_manager(folder, interval=3, alarm=log.append)
    manager.save_if_due(snapshot(1))
    folder.path.rmdir()
    manager.save_if_due(snapshot(2))
    manager.save_if_due(snapshot(3))
    manager.save_final()
    assert log == [f"{folder.path} was deleted; its metrics are lost, checkpoints are written again."]
    assert open_checkpoint(manager.latest).iteration == 3


def test_the_final_checkpoint_is_saved_although_all_descriptors_are_used(tmp_path):
    manager = make_manager(RunDir(tmp_path), interval=0)
    manager.save_if_due(snapshot(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, hard))
    leaked = []
    try:
        with contextlib.suppress(OSError):
            while True:
                leaked.append(os.open(os.devnull, os.O_RDONLY))
        message = manager.save_final()
    finally:
        for descriptor in leaked:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert message == f"saved {tmp_path}/checkpoints/000001"


class SlowDisk:
    """A disk whose syncs wait until `answer` is set; the first one calls `on_sync`."""

    def __init__(self, monkeypatch, on_sync=lambda: None):
        self.answer, self.writes, self.on_sync = threading.Event(), 0, on_sync
        monkeypatch.setattr(format, "sync_together", self.sync)

    def sync(self, paths):
        self.writes += 1
        self.on_sync()
        assert self.answer.wait(10)


def test_a_slow_disk_is_reported_and_the_last_iteration_is_written_once(tmp_path, monkeypatch):
    folder, log = RunDir(tmp_path), []
    disk = SlowDisk(monkeypatch)
    monkeypatch.setattr(manager_module, "SLOW_S", 0.01)

    def alarm(text):
        log.append(text)
        disk.answer.set()

    manager = make_manager(folder, alarm=alarm)
    manager.save_if_due(snapshot(1))
    assert manager.save_final() == f"the last iteration is saved in {tmp_path}/checkpoints/000001"
    assert log == ["the disk is slow: a checkpoint is still being written; the run ends after that."]
    assert disk.writes == 1


def test_a_signal_while_training_waits_for_the_disk_loses_no_complete_iteration(tmp_path, monkeypatch):
    folder = RunDir(tmp_path)
    disk = SlowDisk(monkeypatch)
    manager = make_manager(folder)
    manager.save_if_due(snapshot(0))

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(manager_module, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            manager.save_if_due(snapshot(1))
    disk.answer.set()
    assert manager.save_final() == f"saved {tmp_path}/checkpoints/000001"
    assert [open_checkpoint(path).iteration for path in folder.numbered()] == [1, 0]
    assert disk.writes == 2


def test_a_signal_that_interrupts_the_final_save_says_what_is_saved(tmp_path, monkeypatch):
    folder, log = RunDir(tmp_path), []
    manager = make_manager(folder, interval=0, alarm=log.append, keep=0)
    manager.save_if_due(snapshot(1))
    manager.save_final()
    disk = SlowDisk(monkeypatch, on_sync=lambda: os.kill(os.getpid(), signal.SIGINT))
    manager.save_if_due(snapshot(2))
    with pytest.raises(KeyboardInterrupt):
        manager.save_final()
    assert log == [f"stopped while saving. The last checkpoint is {tmp_path}/checkpoints/000001."]
    assert value_of(folder.checkpoints / "latest") == 1.0
    disk.answer.set()
    # The thread ends with the process; here it must not disturb other tests.
    manager._pending.result(10)


def test_a_checkpoint_waits_for_the_disk_twice(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    together = threading.Barrier(7)
    paths = []

    def fsync(handle):
        path = os.readlink(f"/proc/self/fd/{handle}")
        if path != str(tmp_path / "checkpoints"):
            # Opens when all seven wait.
            together.wait(10)
        paths.append(path)

    monkeypatch.setattr(format.os, "fsync", fsync)
    manager = make_manager(RunDir(tmp_path))
    manager.save_if_due(snapshot(1, score=1.0))
    manager.save_final()
    assert manager.error is None
    names = ["config.json", "model.safetensors", "trainer_state.safetensors", "live_memories.safetensors"]
    partial = tmp_path / "checkpoints" / ".000001.part"
    files = [tmp_path / "metrics.jsonl", partial, *(partial / name for name in [*names, "checkpoint.json"])]
    assert sorted(paths[:7]) == sorted(map(str, files))
    assert paths[7:] == [str(tmp_path / "checkpoints")]


def test_a_resumed_run_starts_with_its_checkpoint_as_the_latest(tmp_path):
    folder = RunDir(tmp_path)
    path = write(folder.checkpoints, 4)
    manager = make_manager(folder, resumed_from=open_checkpoint(path))
    assert manager.latest == path
    assert manager.save_final() == f"the last iteration is saved in {path}"
