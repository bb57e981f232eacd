import json
import os

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from holdfast.config import Config, change
from holdfast.errors import ConfigError
from holdfast.keep import RunFolder, create_folder, folder, load_weights
from holdfast.policies import make_policy
from holdfast.recipes import find_recipe
from holdfast.worlds import make_world
from scripted import make_reader

CONFIG = change(find_recipe("recall"), {"seed": 3, "world.delay": "2..9"})


class CrashError(Exception):
    """Somebody pulls the plug."""


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "run")


def small_policy(seed):
    return make_policy("fast", make_world("recall", agents=1), seed=seed, hidden_size=4, num_layers=1)


def holds(checkpoint, policy):
    """Whether a checkpoint is whole and has exactly this policy's weights."""
    kept = load_file(checkpoint / "model.safetensors")
    weights = policy.state_dict()
    assert Config.model_validate_json((checkpoint / "config.json").read_text()) == CONFIG
    return kept.keys() == weights.keys() and all(torch.equal(kept[key], weights[key]) for key in kept)


def test_a_checkpoint_holds_weights_and_config_and_latest_is_it(run):
    policy = small_policy(1)
    saved = run.save(policy, CONFIG, 7)
    assert saved == run.path / "checkpoints" / "000007"
    assert sorted(file.name for file in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert holds(saved, policy)
    assert (run.path / "checkpoints" / "latest").resolve() == saved.resolve()


def test_latest_moves_with_each_save_and_the_others_stay(run):
    one, other = small_policy(1), small_policy(2)
    first, second = run.save(one, CONFIG, 1), run.save(other, CONFIG, 2)
    assert holds(first, one)
    assert holds(second, other)
    assert holds(run.path / "checkpoints" / "latest", other)
    assert sorted(os.listdir(run.path / "checkpoints")) == ["000001", "000002", "latest"]


def test_an_iteration_saved_again_gets_a_folder_of_its_own(run):
    policies = [small_policy(seed) for seed in range(3)]
    saved = [run.save(policy, CONFIG, 1) for policy in policies]
    assert [checkpoint.name for checkpoint in saved] == ["000001", "000001-2", "000001-3"]
    assert all(holds(checkpoint, policy) for checkpoint, policy in zip(saved, policies, strict=True))
    assert (run.path / "checkpoints" / "latest").resolve() == saved[-1].resolve()


def test_a_run_folder_can_be_moved_with_its_latest(run, tmp_path):
    policy = small_policy(1)
    run.save(policy, CONFIG, 1)
    run.path.rename(tmp_path / "elsewhere")
    assert holds(tmp_path / "elsewhere" / "checkpoints" / "latest", policy)


def half_a_file(weights, path, metadata):
    path.write_bytes(b"half")
    raise CrashError


def crash(*words, **options):
    raise CrashError


@pytest.mark.parametrize(
    ("where", "what"),
    [
        (folder, ("save_file", half_a_file)),
        (folder, ("save_file", crash)),
        (folder.os, ("fsync", crash)),
        (folder.Path, ("write_text", crash)),
        (folder.Path, ("rename", crash)),
        (folder.Path, ("symlink_to", crash)),
        (folder.Path, ("replace", crash)),
    ],
    ids=[
        "half the weights",
        "no weights",
        "not on disk",
        "no config",
        "not renamed",
        "no pointer",
        "not moved",
    ],
)
@pytest.mark.parametrize("iteration", [1, 2], ids=["again", "next"])
def test_a_save_that_is_interrupted_leaves_the_last_checkpoint_whole(
    run, monkeypatch, where, what, iteration
):
    one, other = small_policy(1), small_policy(2)
    saved = run.save(one, CONFIG, 1)
    with monkeypatch.context() as broken:
        broken.setattr(where, *what)
        with pytest.raises(CrashError):
            run.save(other, CONFIG, iteration)
    assert holds(saved, one)
    assert holds(run.path / "checkpoints" / "latest", one)
    # What has a checkpoint's name is a whole one, even if nothing points to it yet.
    for named in (run.path / "checkpoints").glob("[0-9]*"):
        assert holds(named, one) or holds(named, other)
    # And the next save is none the worse for the rubbish left behind.
    run.save(other, CONFIG, iteration)
    assert holds(run.path / "checkpoints" / "latest", other)
    assert holds(saved, one)


def test_a_first_save_that_is_interrupted_leaves_no_latest(run, monkeypatch):
    monkeypatch.setattr(folder, "save_file", half_a_file)
    with pytest.raises(CrashError):
        run.save(small_policy(1), CONFIG, 1)
    assert not (run.path / "checkpoints" / "latest").exists()
    assert not list((run.path / "checkpoints").glob("[0-9]*"))


def test_saved_weights_give_the_same_thoughts(run):
    policy, fresh = small_policy(1), small_policy(2)
    world = make_world("recall", agents=6)
    obs, first = world.reset().obs, torch.ones(6, dtype=torch.bool)
    state = policy.lstm.cell.initial(6)
    with torch.no_grad():
        before, _ = policy.unroll(obs, first, state)
        assert not torch.equal(before.logits, fresh.unroll(obs, first, state)[0].logits)
        load_weights(fresh, run.save(policy, CONFIG, 1) / "model.safetensors")
        after, _ = fresh.unroll(obs, first, state)
    assert torch.equal(before.logits, after.logits)
    assert torch.equal(before.values, after.values)


def test_live_memories_are_not_weights(run):
    policy = small_policy(1)
    policy.store.open({0: 64})
    kept = load_file(run.save(policy, CONFIG, 1) / "model.safetensors")
    assert not any(64 in leaf.shape[:1] and leaf.dim() == 3 for leaf in kept.values())
    assert kept.keys() == small_policy(1).state_dict().keys()


def test_a_new_run_folder_says_what_was_asked(tmp_path):
    config = change(CONFIG, {"runs_dir": str(tmp_path / "deep" / "runs")})
    made = create_folder(config, "name", "holdfast train seed=3", small_policy(0))
    assert made.path == tmp_path / "deep" / "runs" / "name"
    assert Config.model_validate_json((made.path / "config.json").read_text()) == config
    assert json.loads((made.path / "config.json").read_text())["world"]["delay"] == [2, 9]
    lines = dict(line.split(": ", 1) for line in (made.path / "command.txt").read_text().splitlines())
    assert lines["command"] == "holdfast train seed=3"
    assert lines["torch"] == torch.__version__
    assert {"commit", "python", "holdfast", "tensordict", "numpy", "torch threads"} <= lines.keys()


def test_a_folder_outside_any_repository_is_told_as_such(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    made = create_folder(change(CONFIG, {"runs_dir": str(tmp_path)}), "name", "x", small_policy(0))
    assert "commit: not in a git repository\n" in (made.path / "command.txt").read_text()


def test_a_folder_that_exists_is_never_touched(tmp_path):
    config = change(CONFIG, {"runs_dir": str(tmp_path)})
    (tmp_path / "name").mkdir()
    (tmp_path / "name" / "mine").write_text("precious")
    (tmp_path / "name-2").write_text("a file")
    made = [create_folder(config, "name", "x", small_policy(0)).path.name for _ in range(3)]
    assert made == ["name-3", "name-4", "name-5"]
    assert os.listdir(tmp_path / "name") == ["mine"]
    assert (tmp_path / "name" / "mine").read_text() == "precious"
    assert (tmp_path / "name-2").read_text() == "a file"


def test_a_place_that_cannot_be_written_is_told_with_the_key_to_set(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    config = change(CONFIG, {"runs_dir": str(tmp_path / "file" / "runs")})
    with pytest.raises(
        ConfigError, match=r"Cannot write .*file/runs/name: Not a directory; set runs_dir=DIR"
    ):
        create_folder(config, "name", "x", small_policy(0))


def test_a_full_disk_is_told_and_what_was_saved_before_stays(tmp_path, monkeypatch):
    run, policy = RunFolder(tmp_path / "run"), make_reader()
    run.save(policy, find_recipe("recall"), 1)

    def full(*arguments):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(folder, "save_file", full)
    with pytest.raises(OSError, match=r"Could not write .*No space left"):
        run.save(policy, find_recipe("recall"), 2)
    assert (run.path / "checkpoints" / "latest").resolve().name == "000001"


def test_weights_that_cannot_be_read_are_told(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ConfigError, match="does not hold the weights of this policy"):
        load_weights(make_reader(), tmp_path / "model.safetensors")
