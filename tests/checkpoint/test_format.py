"""Checkpoints are complete or absent; damaged files are reported, and nothing in them is executed."""

import json
import os
import pickle
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from helpers.small_runs import TINY, run, sign
from holdfast.build import build_policy, build_world, load_policy
from holdfast.checkpoint import format
from holdfast.checkpoint.format import (
    FORMAT,
    TrainingSnapshot,
    environment,
    open_checkpoint,
    policy_manifest,
    write_checkpoint,
)
from holdfast.checkpoint.run_dir import RunDir
from holdfast.checkpoint.serialization import CorruptFileError, unpack
from holdfast.cli import main
from holdfast.config.run import override
from holdfast.errors import ConfigError, HoldfastError
from holdfast.recipes import find_recipe
from holdfast.training.resume import find_resume_point
from holdfast.training.trainer import Trainer
from holdfast.worlds import make_world

NAMES = ("config.json", "model.safetensors", "trainer_state.safetensors", "live_memories.safetensors")
CPU = torch.device("cpu")


def snapshot(iteration, value=1.0, score=None):
    weights = {"w": torch.full((3,), value)}
    return TrainingSnapshot(iteration, 10 * iteration, weights, {"value": value}, {}, None, score)


def write(folder, iteration, value=1.0, score=None):
    return write_checkpoint(folder, snapshot(iteration, value, score), {"config.json": b"{}"}, {"torch": "x"})


def value_of(path):
    return open_checkpoint(path).trainer()["value"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def copy(trained, tmp_path):
    shutil.copytree(trained.folder, tmp_path / "x", symlinks=True)
    return tmp_path / "x"


def test_checkpoint_files_hold_weights_trainer_state_memory_and_world(trained):
    saved = open_checkpoint(trained.checkpoint)
    assert {file.name for file in saved.path.iterdir()} == {
        *NAMES,
        "world_state.safetensors",
        "checkpoint.json",
    }
    assert (saved.iteration, saved.global_step) == (6, 384)
    assert saved.environment == {
        "torch": torch.__version__,
        "triton": "none",
        "kernels": {},
        "threads": 1,
        "device": "cpu",
        "machine": environment(CPU)["machine"],
    }
    memories = saved.memories()["policy"]
    assert memories["slices"] == {0: 8}
    assert {name: list(leaf.shape) for name, leaf in memories["leaves"].items()} == {
        "h": [8, 1, 4],
        "c": [8, 1, 4],
    }
    assert torch.equal(memories["leaves"]["h"], trained.policy.store.view(0)["h"])
    assert set(saved.trainer()["learner"]["moments"]["Adam"]) == set(range(len(list(trained.policy.parameters()))))
    assert "_to_query" in str(saved.world())


def test_loaded_weights_give_the_same_outputs(trained):
    loaded, _ = load_policy(trained.folder, CPU)
    world = make_world("recall", agents=6)
    obs, first = world.reset().obs, torch.ones(6, dtype=torch.bool)
    state = loaded.lstm.cell.initial(6)
    with torch.no_grad():
        outputs = [policy.unroll(obs, first, state)[0] for policy in (trained.policy, loaded)]
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    assert torch.equal(outputs[0].values, outputs[1].values)


def test_live_memory_is_not_saved_as_weights(trained):
    weights = load_file(trained.checkpoint / "model.safetensors")
    assert weights.keys() == trained.policy.state_dict().keys()
    assert not any(8 in leaf.shape[:1] and leaf.dim() == 3 for leaf in weights.values())


def test_manifest_has_a_checksum_for_every_file(trained):
    manifest = json.loads((trained.checkpoint / "checkpoint.json").read_text())
    assert set(manifest["files"]) == {*NAMES, "world_state.safetensors"}
    assert all(len(entry["sha256"]) == 64 for entry in (*manifest["files"].values(), manifest))


class CrashError(Exception):
    """The process dies."""


def crash(*args, **kwargs):
    raise CrashError


def half_a_file(file, data):
    with file.open("wb") as opened:
        opened.write(data[: len(data) // 2])
    raise CrashError


@pytest.mark.parametrize(
    ("where", "patch"),
    [
        (format.Path, ("write_bytes", half_a_file)),
        (format.Path, ("write_bytes", crash)),
        (format.os, ("fsync", crash)),
        (format.Path, ("rename", crash)),
        (format.Path, ("symlink_to", crash)),
        (format.Path, ("replace", crash)),
    ],
    ids=["half a file", "no file", "not on disk", "not renamed", "no pointer", "not moved"],
)
def test_an_interrupted_save_leaves_the_previous_checkpoint_valid(tmp_path, monkeypatch, where, patch):
    folder = RunDir(tmp_path)
    write(folder.checkpoints, 1, 1.0)
    with monkeypatch.context() as broken:
        broken.setattr(where, *patch)
        with pytest.raises(CrashError):
            write(folder.checkpoints, 2, 2.0)
    assert value_of(folder.checkpoints / "000001") == 1.0
    assert value_of(folder.checkpoints / "latest") == 1.0
    # A checkpoint's name means it is complete, even if no symlink points to it yet.
    assert [value_of(path) for path in folder.numbered()] in ([1.0], [2.0, 1.0])
    # The next save ignores leftovers.
    write(folder.checkpoints, 3, 3.0)
    assert value_of(folder.checkpoints / "latest") == 3.0


def test_files_and_folder_are_synced_before_the_symlink_moves(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(format.os, "fsync", lambda number: calls.append(os.readlink(f"/proc/self/fd/{number}")))
    real = format.Path.rename
    monkeypatch.setattr(format.Path, "rename", lambda self, to: calls.append("rename") or real(self, to))
    write(tmp_path, 1)
    partial = str(tmp_path / ".000001.part")
    synced = calls[: calls.index("rename")]
    written = [f"{partial}/{name}" for name in (*NAMES, "checkpoint.json")]
    assert sorted(path.removesuffix(" (deleted)") for path in synced) == sorted([*written, partial])
    assert calls[calls.index("rename") + 1 :] == [str(tmp_path)]


def truncated(file):
    file.write_bytes(file.read_bytes()[:-7])


def flipped(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def missing(file):
    file.unlink()


def emptied(file):
    file.write_bytes(b"")


class Payload:
    def __reduce__(self):
        return os.system, ("touch executed",)


def pickled(file):
    file.write_bytes(pickle.dumps(Payload()))


def zipped(file):
    torch.save({"w": Payload()}, file)


@pytest.mark.parametrize("damage", [truncated, flipped, missing, emptied, pickled, zipped])
@pytest.mark.parametrize("name", [*NAMES, "checkpoint.json", "world_state.safetensors"])
def test_a_damaged_checkpoint_is_reported_and_the_newest_valid_one_is_used(copy, monkeypatch, damage, name):
    monkeypatch.chdir(copy)
    damage(copy / "checkpoints" / "latest" / name)
    log = []
    assert RunDir(copy).newest(log.append).path.name == "000004"
    assert len(log) == 1
    assert log[0].startswith("000006 is damaged and is not used: ")
    assert f"000006/{name} " in log[0]
    if damage in (pickled, zipped):
        assert "is a pickle, which can execute code when loaded; it is not loaded" in log[0]
    assert not (copy / "executed").exists()
    policy, _ = load_policy(copy, CPU, log.append)
    assert all(weight.isfinite().all() for weight in policy.parameters())


def test_an_empty_checkpoint_folder_is_reported(copy):
    (copy / "checkpoints" / "000009").mkdir()
    log = []
    assert RunDir(copy).newest(log.append).path.name == "000006"
    assert log == [f"000009 is damaged and is not used: {copy}/checkpoints/000009/checkpoint.json is missing."]


def test_a_dangling_latest_symlink_is_reported(copy):
    pointer = copy / "checkpoints" / "latest"
    pointer.unlink()
    pointer.symlink_to("000077")
    log = []
    assert RunDir(copy).newest(log.append).path.name == "000006"
    assert log == [f"{pointer} points to 000077, which does not exist; using the newest."]


def test_no_valid_checkpoint_is_one_clear_error(copy, tmp_path):
    for path in RunDir(copy).numbered():
        truncated(path / "model.safetensors")
    log = []
    with pytest.raises(CorruptFileError, match=r"has no valid checkpoint: .*000006/model.safetensors has .* bytes"):
        RunDir(copy).newest(log.append)
    assert len(log) == 3
    with pytest.raises(ConfigError, match="holds no checkpoint; has the run saved one"):
        RunDir(tmp_path / "missing").newest(log.append)


@pytest.mark.parametrize(("version", "age"), [(FORMAT - 1, "an older"), (FORMAT + 1, "a newer")])
def test_an_unknown_format_is_refused_and_not_quarantined(copy, capsys, version, age):
    sign(copy / "checkpoints" / "latest", format=version)
    assert main(["train", "--resume", str(copy)]) == 2
    message = f"{copy}/checkpoints/000006 has format {version}, this version reads {FORMAT}; install {age} holdfast."
    assert message in capsys.readouterr().err
    assert (copy / "checkpoints" / "000006").exists()


def test_an_unreadable_checkpoint_is_not_called_damaged(copy, monkeypatch):
    def broken(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(format, "file_sha256", broken)
    log = []
    with pytest.raises(OSError, match="000006 cannot be read: Input/output error"):
        RunDir(copy).newest(log.append)
    assert log[0].startswith("000006 cannot be read and is not used: ")


def test_files_not_in_the_manifest_are_ignored(copy):
    path = copy / "checkpoints" / "000006"
    sign(path, files=dict.fromkeys(NAMES))
    (path / "agent.yaml").write_text("nonsense")
    saved = open_checkpoint(path)
    assert saved.world() is None
    load_policy(copy, CPU)


def test_a_run_copied_without_symlinks_resumes(copy, tmp_path):
    shutil.copytree(copy, tmp_path / "copied", symlinks=False)
    assert not (tmp_path / "copied" / "checkpoints" / "latest").is_symlink()
    resumed = holdfast.train(None, {"trainer.total_timesteps": 512}, resume=tmp_path / "copied")
    assert resumed.checkpoint.name == "000008"
    assert (tmp_path / "copied" / "checkpoints" / "latest").resolve().name == "000008"


def test_a_checkpoint_without_manifest_is_never_loaded(copy):
    path = copy / "checkpoints" / "000006"
    (path / "checkpoint.json").unlink()
    for _ in range(2):
        with pytest.raises(CorruptFileError, match=r"000006/checkpoint.json is missing"):
            load_policy(path, CPU)
        for name in (*NAMES[2:], "world_state.safetensors"):
            (path / name).unlink(missing_ok=True)
    log = []
    assert find_resume_point(copy, {}).checkpoint.path.name == "000004"
    assert RunDir(copy).newest(log.append).path.name == "000004"
    assert log == [f"000006 is damaged and is not used: {path}/checkpoint.json is missing."]


def mutate(data, generator):
    """Mutate bytes: flip, cut, repeat, insert, change digits of the header, pickle."""
    data, how = bytearray(data), generator.randrange(7)
    if how == 0:
        for _ in range(generator.randint(1, 8)):
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    elif how == 1:
        del data[generator.randrange(len(data)) :]
    elif how == 2:
        start = generator.randrange(len(data))
        data[start:start] = data[start : start + generator.randint(1, 64)]
    elif how == 3:
        start = generator.randrange(len(data))
        del data[start : start + generator.randint(1, 64)]
    elif how == 4:
        digits = [index for index, byte in enumerate(data[:20000]) if 48 <= byte <= 57]
        for index in generator.sample(digits, min(len(digits), generator.randint(1, 4))):
            data[index] = generator.choice(b"0123456789")
    elif how == 5:
        data = bytearray(generator.choice((pickle.dumps(Payload()), b"", b"null", b"[]", b"\0" * 99)))
    else:
        start = generator.randrange(len(data))
        data[start : start + 8] = generator.randbytes(8)
    return bytes(data)


def mutate_and_restore(path, trainer, seed):
    """Mutate one file, with or without a new checksum; return the outcome of restoring it."""
    generator = random.Random(seed)
    name = generator.choice([*NAMES, "world_state.safetensors", "checkpoint.json"])
    before = {file: (path / file).read_bytes() for file in (name, "checkpoint.json")}
    data = mutate(before[name], generator)
    (path / name).write_bytes(data)
    signed = name != "checkpoint.json" and generator.random() < 0.7
    if signed:
        sign(path)
    try:
        saved = open_checkpoint(path)
        if name == "config.json":
            find_resume_point(path.parents[1], {})
        trainer.restore(saved)
    except HoldfastError as error:
        return "refused" if "\n" not in str(error) else "several lines"
    finally:
        for file, data_before in before.items():
            (path / file).write_bytes(data_before)
    return "unchanged" if data == before[name] else "loaded" if signed else "undetected"


def fuzz(folder, seeds):
    """Restore mutated checkpoints; anything but a clear error is raised here."""
    for path in RunDir(folder).numbered()[1:]:
        shutil.rmtree(path)
    path = RunDir(folder).numbered()[0]
    config = override(find_recipe("recall"), TINY)
    world = build_world(config, CPU, agents=8, seed=0)
    trainer = Trainer(config, world, build_policy(config, world, CPU))
    with torch.random.fork_rng():
        outcomes = [mutate_and_restore(path, trainer, seed) for seed in seeds]
        # A valid checkpoint still restores.
        trainer.restore(open_checkpoint(path))
    return {outcome: outcomes.count(outcome) for outcome in set(outcomes)}


@pytest.mark.usefixtures("annotations_asleep")
@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_fuzzed_checkpoints_give_clear_errors_and_execute_nothing(copy, monkeypatch, count):
    monkeypatch.chdir(copy)
    outcomes = fuzz(copy, range(count))
    # Without a new checksum every mutation is detected.
    assert not outcomes.keys() & {"undetected", "several lines"}
    assert outcomes["refused"] > 0.5 * count
    assert not (copy / "executed").exists()


def test_a_tensor_of_another_shape_is_refused_by_name(copy):
    path = copy / "checkpoints" / "000006"
    state = unpack(path / "trainer_state.safetensors")
    state["collector"]["pending"]["reward"] = torch.zeros(9)
    (path / "trainer_state.safetensors").write_bytes(format.pack(state))
    sign(path)
    config = override(find_recipe("recall"), TINY)
    world = build_world(config, CPU, agents=8, seed=0)
    trainer = Trainer(config, world, build_policy(config, world, CPU))
    with pytest.raises(
        CorruptFileError,
        match=r"000006: Checkpoint does not match this run: 'reward' is \[9\] torch.float32, must be \[8\]",
    ):
        trainer.restore(open_checkpoint(path))


def test_a_policy_without_training_state_is_opened_on_request_only(tmp_path):
    files = {"config.json": b"{}", "model.safetensors": b"weights"}
    for name, data in {**files, "checkpoint.json": policy_manifest(files)}.items():
        (tmp_path / name).write_bytes(data)
    exported = open_checkpoint(tmp_path, policy_only=True)
    assert (exported.iteration, exported.global_step, exported.score) == (0, None, None)
    assert exported.files == set(files)
    with pytest.raises(CorruptFileError, match=r"does not list trainer_state\.safetensors as a file"):
        open_checkpoint(tmp_path)
    saved = write(tmp_path / "checkpoints", 7)
    assert open_checkpoint(saved, policy_only=True) == open_checkpoint(saved)
    assert open_checkpoint(saved).iteration == 7
