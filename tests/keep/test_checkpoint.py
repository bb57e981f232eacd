"""What is written is whole or not there; what is damaged is named, and nothing of it is executed."""

import importlib
import json
import os
import pickle
import random
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.build import build_policy, build_world, load_policy
from holdfast.cli import main
from holdfast.config import change
from holdfast.errors import ConfigError, HoldfastError
from holdfast.keep import DamagedError, Kept, Moment, RunFolder, checkpoint, made_with, open_checkpoint
from holdfast.keep.checkpoint import point, write_checkpoint
from holdfast.keep.packed import unpack
from holdfast.life import Life
from holdfast.recipes import find_recipe
from holdfast.resume import find_resumed
from holdfast.worlds import make_world
from kept import TINY, run

NAMES = ("config.json", "model.safetensors", "trainer_state.safetensors", "live_memories.safetensors")
CPU = torch.device("cpu")


def moment(iteration, value=1.0, score=None):
    weights = {"w": torch.full((3,), value)}
    return Moment(iteration, 10 * iteration, weights, {"value": value}, {}, None, score)


def write(folder, iteration, value=1.0, score=None):
    return write_checkpoint(folder, moment(iteration, value, score), {"config.json": b"{}"}, {"torch": "x"})


def value_of(path):
    return open_checkpoint(path).trainer()["value"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def copy(trained, tmp_path):
    shutil.copytree(trained.folder, tmp_path / "x", symlinks=True)
    return tmp_path / "x"


def test_a_checkpoint_tells_weights_trainer_state_memories_and_world_apart(trained):
    saved = open_checkpoint(trained.checkpoint)
    assert {file.name for file in saved.path.iterdir()} == {
        *NAMES,
        "world_state.safetensors",
        "checkpoint.json",
    }
    assert (saved.iteration, saved.global_step, saved.format) == (6, 384, 2)
    assert saved.made_with == {
        "torch": torch.__version__,
        "triton": "none",
        "kernels": {},
        "threads": 1,
        "device": "cpu",
        "machine": made_with(CPU)["machine"],
    }
    memories = saved.memories()["policy"]
    assert memories["slices"] == {0: 8}
    assert {name: list(leaf.shape) for name, leaf in memories["leaves"].items()} == {
        "h": [8, 1, 4],
        "c": [8, 1, 4],
    }
    assert torch.equal(memories["leaves"]["h"], trained.policy.store.live(0)["h"])
    assert set(saved.trainer()["learner"]["moments"]["Adam"]) == set(
        range(len(list(trained.policy.parameters())))
    )
    assert "_to_query" in str(saved.world())


def test_saved_weights_give_the_same_thoughts(trained):
    loaded, _ = load_policy(trained.folder, CPU)
    world = make_world("recall", agents=6)
    obs, first = world.reset().obs, torch.ones(6, dtype=torch.bool)
    state = loaded.lstm.cell.initial(6)
    with torch.no_grad():
        thoughts = [policy.unroll(obs, first, state)[0] for policy in (trained.policy, loaded)]
    assert torch.equal(thoughts[0].logits, thoughts[1].logits)
    assert torch.equal(thoughts[0].values, thoughts[1].values)


def test_live_memories_are_not_weights(trained):
    kept = load_file(trained.checkpoint / "model.safetensors")
    assert kept.keys() == trained.policy.state_dict().keys()
    assert not any(8 in leaf.shape[:1] and leaf.dim() == 3 for leaf in kept.values())


def test_every_file_carries_a_checksum(trained):
    told = json.loads((trained.checkpoint / "checkpoint.json").read_text())
    assert set(told["files"]) == {*NAMES, "world_state.safetensors"}
    assert all(len(listed["sha256"]) == 64 for listed in (*told["files"].values(), told))


class CrashError(Exception):
    """Somebody pulls the plug."""


def crash(*words, **options):
    raise CrashError


def half_a_file(file, data):
    file.write_bytes(data[: len(data) // 2])
    raise CrashError


@pytest.mark.parametrize(
    ("where", "what"),
    [
        (checkpoint, ("_write", half_a_file)),
        (checkpoint, ("_write", crash)),
        (checkpoint.os, ("fsync", crash)),
        (checkpoint.Path, ("rename", crash)),
        (checkpoint.Path, ("symlink_to", crash)),
        (checkpoint.Path, ("replace", crash)),
    ],
    ids=["half a file", "no file", "not on disk", "not renamed", "no pointer", "not moved"],
)
def test_a_save_that_is_interrupted_leaves_the_last_checkpoint_whole(tmp_path, monkeypatch, where, what):
    folder = RunFolder(tmp_path)
    write(folder.checkpoints, 1, 1.0)
    with monkeypatch.context() as broken:
        broken.setattr(where, *what)
        with pytest.raises(CrashError):
            write(folder.checkpoints, 2, 2.0)
    assert value_of(folder.checkpoints / "000001") == 1.0
    assert value_of(folder.checkpoints / "latest") == 1.0
    # What has a checkpoint's name is a whole one, even if nothing points to it yet.
    assert [value_of(path) for path in folder.numbered()] in ([1.0], [2.0, 1.0])
    # And the next save is none the worse for the rubbish left behind.
    write(folder.checkpoints, 3, 3.0)
    assert value_of(folder.checkpoints / "latest") == 3.0


def test_names_and_contents_are_on_the_disk_before_the_pointer_moves(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(
        checkpoint.os, "fsync", lambda number: done.append(os.readlink(f"/proc/self/fd/{number}"))
    )
    real = checkpoint.Path.rename
    monkeypatch.setattr(checkpoint.Path, "rename", lambda self, to: done.append("rename") or real(self, to))
    write(tmp_path, 1)
    part = str(tmp_path / ".000001.part")
    synced = done[: done.index("rename")]
    written = [f"{part}/{name}" for name in (*NAMES, "checkpoint.json")]
    assert [place.removesuffix(" (deleted)") for place in synced] == [*written, part]
    assert done[done.index("rename") + 1] == str(tmp_path)


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
def test_a_damaged_checkpoint_is_named_and_the_newest_whole_one_is_used(copy, monkeypatch, damage, name):
    monkeypatch.chdir(copy)
    damage(copy / "checkpoints" / "latest" / name)
    said = []
    assert RunFolder(copy).newest(said.append).path.name == "000004"
    assert len(said) == 1
    assert said[0].startswith("000006 is damaged and is not used: ")
    assert f"000006/{name} " in said[0]
    if damage in (pickled, zipped):
        assert "is a pickle, which can execute anything when it is loaded; it is not loaded" in said[0]
    assert not (copy / "executed").exists()
    policy, _ = load_policy(copy, CPU, said.append)
    assert all(weight.isfinite().all() for weight in policy.parameters())


def test_an_empty_folder_of_a_checkpoint_is_named(copy):
    (copy / "checkpoints" / "000009").mkdir()
    said = []
    assert RunFolder(copy).newest(said.append).path.name == "000006"
    assert said == [
        f"000009 is damaged and is not used: {copy}/checkpoints/000009/model.safetensors is missing."
    ]


def test_latest_pointing_nowhere_is_told(copy):
    pointer = copy / "checkpoints" / "latest"
    pointer.unlink()
    pointer.symlink_to("000077")
    said = []
    assert RunFolder(copy).newest(said.append).path.name == "000006"
    assert said == [f"{pointer} points to 000077, which is not there; looking for the newest."]


def test_without_any_whole_one_there_is_one_clear_error(copy, tmp_path):
    for path in RunFolder(copy).numbered():
        truncated(path / "model.safetensors")
    said = []
    with pytest.raises(
        DamagedError, match=r"has no whole checkpoint: .*000006/model.safetensors has .* bytes"
    ):
        RunFolder(copy).newest(said.append)
    assert len(said) == 3
    with pytest.raises(ConfigError, match="holds no checkpoint; has the run saved one"):
        RunFolder(tmp_path / "nobody").newest(said.append)


def test_a_newer_format_is_refused_with_what_to_do_and_not_put_aside(copy, capsys):
    sign(copy / "checkpoints" / "latest", format=3)
    assert main(["train", "--resume", str(copy)]) == 2
    told = f"{copy}/checkpoints/000006 has format 3, this version reads up to 2; install a newer holdfast."
    assert told in capsys.readouterr().err
    assert (copy / "checkpoints" / "000006").exists()


def test_what_cannot_be_read_here_is_not_called_damaged(copy, monkeypatch):
    def broken(*given):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoint.hashlib, "file_digest", broken)
    with pytest.raises(OSError, match="000006 cannot be read: Input/output error"):
        RunFolder(copy).newest(print)


def test_what_is_not_listed_is_not_looked_at(copy):
    path = copy / "checkpoints" / "000006"
    sign(path, files=dict.fromkeys(NAMES))
    (path / "agent.yaml").write_text("nonsense")
    saved = open_checkpoint(path)
    assert saved.world() is None
    load_policy(copy, CPU)


def test_a_run_copied_by_who_follows_links_goes_on(copy, tmp_path):
    shutil.copytree(copy, tmp_path / "copied", symlinks=False)
    assert not (tmp_path / "copied" / "checkpoints" / "latest").is_symlink()
    again = holdfast.train(None, {"trainer.total_timesteps": 512}, resume=tmp_path / "copied")
    assert again.checkpoint.name == "000008"
    assert (tmp_path / "copied" / "checkpoints" / "latest").resolve().name == "000008"


def test_pointers_name_what_they_are_to_name_whenever_a_run_was_killed(tmp_path):
    folder = RunFolder(tmp_path)
    kept = keeper(folder, keep=0)
    for iteration, score in enumerate([1.0, 2.0]):
        kept.saw(moment(iteration, score=score))
    kept.at_last()
    # Killed after the third was renamed, and before anything pointed to it.
    write(folder.checkpoints, 2, score=9.0)
    point(folder.checkpoints / "latest", "000001")
    folder.clean(folder.newest(print))
    assert (folder.checkpoints / "latest").resolve().name == "000002"
    assert (folder.checkpoints / "best").resolve().name == "000002"
    kept = keeper(folder, keep=1, since=folder.newest(print))
    for iteration in (3, 4, 5):
        kept.saw(moment(iteration, score=3.0))
    kept.at_last()
    assert names(folder) == ["000002", "000005", "best", "latest"]


@pytest.mark.parametrize("what", ["point", "shutil.rmtree"])
def test_what_goes_wrong_after_a_checkpoint_is_whole_does_not_count_as_lost(tmp_path, monkeypatch, what):
    folder, said = RunFolder(tmp_path), []
    kept = keeper(folder, alarm=said.append, keep=1)
    kept.saw(moment(1, 1.0))
    kept.saw(moment(2, 2.0))
    kept._settle()

    def broken(*given, **named):
        raise OSError(5, "Input/output error")

    place, _, name = f"{checkpoint.__name__}.{what}".rpartition(".")
    monkeypatch.setattr(importlib.import_module(place) if "shutil" not in place else shutil, name, broken)
    kept.saw(moment(3, 3.0))
    assert kept.at_last().startswith("what was learnt so far is saved: ")
    assert kept.lost is None
    assert kept.checkpoint.name == "000003"
    assert value_of(kept.checkpoint) == 3.0
    assert any("000003 is saved, but: " in line for line in said)


def test_what_cannot_be_written_down_is_told_and_the_run_goes_on(tmp_path):
    folder, said = RunFolder(tmp_path), []
    kept = keeper(folder, alarm=said.append)
    bad = replace(moment(2), world={"what": object()})
    for each in (moment(1), bad, moment(3)):
        kept.saw(each)
    assert kept.at_last().endswith("000003")
    assert [line for line in said if "A object cannot be saved" in line]
    assert [path.name for path in folder.numbered()] == ["000003", "000001"]


def test_the_format_before_still_loads_and_no_training_goes_on_from_it(copy, trained):
    for name in (*NAMES[2:], "world_state.safetensors", "checkpoint.json"):
        (copy / "checkpoints" / "000006" / name).unlink()
    policy, _ = load_policy(copy, CPU)
    weights = trained.policy.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in policy.state_dict().items())
    with pytest.raises(ConfigError, match=r"has weights alone, as earlier versions saved them"):
        find_resumed(copy, {})


def keeper(folder, **options):
    options = {"interval": 1, "keep": 2, "alarm": print, **options}
    return Kept(folder, {"config.json": b"{}"}, {}, **options)


def names(folder):
    return sorted(path.name for path in folder.checkpoints.iterdir())


def test_the_last_few_are_kept_and_the_best(tmp_path):
    folder = RunFolder(tmp_path)
    kept = keeper(folder)
    for iteration, score in enumerate([1.0, 5.0, 2.0, None, 5.0, 4.0]):
        kept.saw(moment(iteration, score=score))
    kept.at_last()
    assert names(folder) == ["000001", "000004", "000005", "best", "latest"]
    assert (folder.checkpoints / "best").resolve().name == "000001"
    assert (folder.checkpoints / "latest").resolve().name == "000005"


def test_the_best_before_an_interruption_stays_the_best(tmp_path):
    folder = RunFolder(tmp_path)
    kept = keeper(folder)
    for iteration, score in enumerate([3.0, 1.0]):
        kept.saw(moment(iteration, score=score))
    kept.at_last()
    kept = keeper(folder, since=open_checkpoint(folder.checkpoints / "latest"))
    for iteration, score in ((2, 2.0), (3, 1.0), (4, 2.5)):
        kept.saw(moment(iteration, score=score))
    kept.at_last()
    assert (folder.checkpoints / "best").resolve().name == "000000"
    assert names(folder) == ["000000", "000003", "000004", "best", "latest"]


def test_zero_keeps_all(tmp_path):
    kept = keeper(RunFolder(tmp_path), keep=0)
    for iteration in range(5):
        kept.saw(moment(iteration))
    kept.at_last()
    assert len(RunFolder(tmp_path).numbered()) == 5


def test_an_evaluation_that_is_the_best_so_far_is_saved_out_of_turn(tmp_path):
    folder = RunFolder(tmp_path)
    kept = keeper(folder, interval=10, keep=1)
    for iteration, score in ((1, 1.0), (2, 0.5), (3, 2.0), (4, 1.5)):
        kept.saw(moment(iteration, score=score), judged=True)
    kept.at_last()
    assert names(folder) == ["000003", "000004", "best", "latest"]
    assert (folder.checkpoints / "best").resolve().name == "000003"


def test_the_last_good_moment_is_saved_at_the_end_and_spoilt_ones_never(tmp_path):
    kept = keeper(RunFolder(tmp_path), interval=0)
    for iteration, value in ((1, 1.0), (2, 2.0), (3, float("nan"))):
        kept.saw(moment(iteration, value))
    assert kept.at_last() == (
        f"weights that are not finite are not saved; the last good ones are {tmp_path}/checkpoints/000002"
    )
    assert value_of(tmp_path / "checkpoints" / "latest") == 2.0


def test_a_checkpoint_that_cannot_be_written_is_told_and_tried_again(tmp_path, monkeypatch):
    folder, said = RunFolder(tmp_path), []
    kept = keeper(folder, alarm=said.append)
    kept.saw(moment(1, 1.0))
    with monkeypatch.context() as broken:

        def full(file, data):
            raise OSError(28, "No space left on device")

        kept.saw(moment(2, 2.0))
        kept.at_last()
        kept = keeper(folder, alarm=said.append, since=open_checkpoint(folder.checkpoints / "latest"))
        broken.setattr(checkpoint, "_write", full)
        kept.saw(moment(3, 3.0))
        kept.saw(moment(4, 4.0))
        assert kept.at_last().startswith("what was learnt could not be saved: Could not write ")
    assert kept.lost is not None
    assert said == [
        f"Could not write {folder.checkpoints}/00000{number}: No space left on device. Training goes on, and "
        "the next checkpoint is tried in its time."
        for number in (3, 4)
    ]
    assert names(folder) == ["000001", "000002", "latest"]
    assert value_of(folder.checkpoints / "latest") == 2.0


def sign(path, **told):
    """List the files as they are now, so that only their contents can be found wrong."""
    listed = json.loads((path / "checkpoint.json").read_text())
    listed.pop("sha256")
    listed |= told
    for name in listed["files"]:
        data = (path / name).read_bytes()
        listed["files"][name] = {"bytes": len(data), "sha256": checkpoint.hashlib.sha256(data).hexdigest()}
    (path / "checkpoint.json").write_bytes(checkpoint.signed(listed))


def mutated(data, chance):
    """Change bytes as a fuzzer does: flip, cut, repeat, insert, swap numbers in the header, pickle."""
    data, how = bytearray(data), chance.randrange(7)
    if how == 0:
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif how == 1:
        del data[chance.randrange(len(data)) :]
    elif how == 2:
        start = chance.randrange(len(data))
        data[start:start] = data[start : start + chance.randint(1, 64)]
    elif how == 3:
        start = chance.randrange(len(data))
        del data[start : start + chance.randint(1, 64)]
    elif how == 4:
        digits = [place for place, byte in enumerate(data[:20000]) if 48 <= byte <= 57]
        for place in chance.sample(digits, min(len(digits), chance.randint(1, 4))):
            data[place] = chance.choice(b"0123456789")
    elif how == 5:
        data = bytearray(chance.choice((pickle.dumps(Payload()), b"", b"null", b"[]", b"\0" * 99)))
    else:
        start = chance.randrange(len(data))
        data[start : start + 8] = chance.randbytes(8)
    return bytes(data)


def spoil(path, life, seed):
    """Mutate one file; say what came of going on from it, signed anew or not."""
    chance = random.Random(seed)
    name = chance.choice([*NAMES, "world_state.safetensors", "checkpoint.json"])
    before = {file: (path / file).read_bytes() for file in (name, "checkpoint.json")}
    data = mutated(before[name], chance)
    (path / name).write_bytes(data)
    signed = name != "checkpoint.json" and chance.random() < 0.7
    if signed:
        sign(path)
    try:
        saved = open_checkpoint(path)
        if name == "config.json":
            find_resumed(path.parents[1], {})
        life.restore(saved)
    except HoldfastError as error:
        return "refused" if "\n" not in str(error) else "told in several lines"
    finally:
        for file, bytes_before in before.items():
            (path / file).write_bytes(bytes_before)
    return "the same" if data == before[name] else "loaded" if signed else "missed"


def fuzz(folder, seeds):
    """Go on from mutated checkpoints; whatever is no clear error is raised here."""
    for path in RunFolder(folder).numbered()[1:]:
        shutil.rmtree(path)
    path = RunFolder(folder).numbered()[0]
    config = change(find_recipe("recall"), TINY)
    world = build_world(config, CPU, agents=8, seed=0)
    life = Life(config, world, build_policy(config, world, CPU))
    with torch.random.fork_rng():
        found = [spoil(path, life, seed) for seed in seeds]
        # After all of that, a whole one is as good as ever.
        life.restore(open_checkpoint(path))
    return {outcome: found.count(outcome) for outcome in set(found)}


@pytest.mark.usefixtures("annotations_asleep")
@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_files_give_clear_errors_and_execute_nothing(copy, monkeypatch, count):
    monkeypatch.chdir(copy)
    found = fuzz(copy, range(count))
    # What is not signed anew is found out by its checksum, always.
    assert not found.keys() & {"missed", "told in several lines"}
    assert found["refused"] > 0.5 * count
    assert not (copy / "executed").exists()


def test_a_tensor_of_another_shape_is_refused_with_its_name(copy):
    path = copy / "checkpoints" / "000006"
    trainer = unpack(path / "trainer_state.safetensors")
    trainer["collector"]["pending"]["reward"] = torch.zeros(9)
    (path / "trainer_state.safetensors").write_bytes(checkpoint.pack(trainer))
    sign(path)
    config = change(find_recipe("recall"), TINY)
    world = build_world(config, CPU, agents=8, seed=0)
    life = Life(config, world, build_policy(config, world, CPU))
    with pytest.raises(
        DamagedError,
        match=r"000006: What was saved does not fit: 'reward' is \[9\] torch.float32, must be \[8\]",
    ):
        life.restore(open_checkpoint(path))
