import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast import build
from holdfast.cli import main
from holdfast.config import change
from holdfast.errors import ConfigError, ContractError
from holdfast.keep.memories import fingerprint
from holdfast.policies.graph import OURS
from kept import LEAST


def trained(folder, **keys):
    return holdfast.train("recall", {**LEAST, "runs_dir": str(folder), **keys})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs"))


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def weights_equal(player, policy):
    mine, theirs = player.policy.state_dict(), policy.state_dict()
    return mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)


def test_a_run_a_checkpoint_and_a_folder_saved_for_the_hub_are_the_same_player(run, tmp_path):
    player = holdfast.load(str(run.folder))
    player.save_pretrained(tmp_path / "saved")
    others = [holdfast.load(run.checkpoint), holdfast.load(tmp_path / "saved")]
    others += [holdfast.Player.from_pretrained(tmp_path / "saved"), holdfast.load(f"hub:{tmp_path}/saved")]
    assert weights_equal(player, run.policy)
    assert all(weights_equal(each, run.policy) for each in others)
    assert {each.fingerprint for each in others} == {player.fingerprint} == {fingerprint(run.policy)}
    assert player.spec == run.spec
    assert repr(player) == f"Player(Fast in recall, weights {player.fingerprint[:12]}, on cpu)"


def test_a_player_plays_as_the_evaluation_does(run):
    world = holdfast.make_world("recall", agents=4, seed=5)
    playing, step, returns = holdfast.load(run.folder).start(agents=4), world.reset(), []
    for _ in range(40):
        actions = playing.act(step.obs.numpy(), step.first.numpy())
        assert actions.dtype == np.int64
        step = world.step(torch.from_numpy(actions))
        returns += step.reward[step.terminated].tolist()
    again = holdfast.make_world("recall", agents=4, seed=5)
    expected = holdfast.evaluate(run.policy, again, episodes=len(returns)).return_mean
    assert sum(returns) / len(returns) == pytest.approx(expected)


def test_memories_of_another_run_are_refused(run, tmp_path):
    mine = holdfast.load(run.folder).start(2)
    theirs = holdfast.load(trained(tmp_path, seed=1).folder).start(2)
    with pytest.raises(ContractError, match="Memories mean nothing to other weights"):
        mine.restore(theirs.memory)


def test_whoever_trains_on_does_not_change_a_player(run):
    trained_on = copy.deepcopy(run.policy)
    player = holdfast.Player(trained_on, holdfast.load(run.folder).config)
    with torch.no_grad():
        for weight in trained_on.parameters():
            weight.add_(1.0)
    assert fingerprint(player.policy) == player.fingerprint != fingerprint(trained_on)


def test_the_hubs_folder_holds_tensors_and_text_and_no_paths(run, tmp_path):
    holdfast.load(run.folder).save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["README.md", "config.json", "model.safetensors"]
    card = (tmp_path / "README.md").read_text()
    assert "library_name: holdfast" in card
    assert "in the world `recall`" in card
    assert "`name_cue_0`" in card
    assert json.loads((tmp_path / "config.json").read_text())["runs_dir"] == "runs"
    assert str(run.folder.parent) not in (tmp_path / "config.json").read_text()


def test_a_graph_goes_along(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    graph = (OURS / "fast.yaml").read_text().replace("hidden_size: 128", "hidden_size: 9")
    Path("mine.yaml").write_text(graph)
    keys = {"agent": "mine.yaml", "policy.hidden_size": "none"}
    run = trained("runs", **keys)
    holdfast.load(run.folder).save_pretrained("saved")
    Path("mine.yaml").unlink()
    player = holdfast.Player.from_pretrained("saved")
    assert Path("saved/agent.yaml").read_text() == graph
    assert weights_equal(player, run.policy)


def test_pushing_sends_the_same_files(run, monkeypatch):
    sent = {}

    class Api:
        def __init__(self, token=None):
            self.token = token

        def create_repo(self, repo_id, private, exist_ok):
            return type("Repo", (), {"repo_id": repo_id})

        def upload_folder(self, *, repo_id, folder_path, **_):
            sent[repo_id] = sorted(os.listdir(folder_path))
            return f"commit of {repo_id}"

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    assert holdfast.load(run.folder).push_to_hub("me/mine") == "commit of me/mine"
    assert sent == {"me/mine": ["README.md", "config.json", "model.safetensors"]}


def test_a_repository_is_brought_here_and_read_as_a_folder(run, tmp_path, monkeypatch):
    holdfast.load(run.folder).save_pretrained(tmp_path)
    asked = {}

    def download(name, **how):
        asked[name] = how
        return str(tmp_path)

    monkeypatch.setattr("holdfast.keep.hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", lambda **_: tmp_path / "config.json")
    player = holdfast.Player.from_pretrained("me/mine", revision="v1")
    assert weights_equal(player, run.policy)
    assert asked["me/mine"]["revision"] == "v1"
    assert asked["me/mine"]["allow_patterns"] == ["model.safetensors", "config.json", "agent.yaml"]


def test_a_repository_that_cannot_be_fetched_is_one_line():
    with pytest.raises(ConfigError, match="hub:me/nothing cannot be fetched") as caught:
        holdfast.load("hub:me/nothing")
    assert "\n" not in str(caught.value)


def test_without_the_hubs_package_the_extra_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "holdfast.keep.hub", None)
    with pytest.raises(ConfigError, match=r"pip install 'holdfast\[hub\]'"):
        holdfast.load(run.folder).save_pretrained(tmp_path)


def test_importing_holdfast_imports_no_hub_and_no_onnx():
    late = ["huggingface_hub", "onnx", "onnxruntime", "onnxscript"]
    code = f"import holdfast.cli, sys; print([name for name in {late} if name in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"


def test_a_policy_of_ones_own_loads_where_its_module_can_be_imported(tmp_path, monkeypatch):
    (tmp_path / "my_little_policy.py").write_text("from small import Small as Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    keys = {"policy": "my_little_policy:Mine", "world": "gym:CartPole-v1"}
    run = holdfast.train(None, {**LEAST, **keys, "runs_dir": str(tmp_path / "runs")})
    holdfast.load(run.folder).save_pretrained(tmp_path / "saved")
    assert weights_equal(holdfast.load(tmp_path / "saved"), run.policy)
    monkeypatch.delitem(sys.modules, "my_little_policy")
    (tmp_path / "my_little_policy.py").unlink()
    for name in (run.folder, tmp_path / "saved"):
        with pytest.raises(
            ConfigError, match=r"policy=my_little_policy:Mine: No module named .* Python path"
        ):
            holdfast.load(name)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (None, "is no folder; give runs/NAME, one of its checkpoints, or hub:owner/name"),
        ({}, "has no config.json, so it is no run and no checkpoint"),
        ({"model.safetensors": b"", "config.json": b"{}"}, "does not hold the weights of this policy"),
        ({"model.safetensors": b""}, "config.json"),
        ({"model.safetensors": b"", "config.json": b"\xff"}, "config.json"),
        ({"model.safetensors": b"", "config.json": b'{"world": {"name": "nowhere"}}'}, "not a config"),
    ],
)
def test_what_is_no_player_is_one_line(tmp_path, files, told):
    folder = tmp_path / "x"
    if files is not None:
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
    with pytest.raises(ConfigError, match=told) as caught:
        holdfast.load(folder)
    assert "\n" not in str(caught.value)


def test_weights_that_are_tied_are_saved_each_by_its_name(run, tmp_path):
    policy = copy.deepcopy(run.policy)
    names = [name for name, _ in policy.named_parameters()]
    sizes = {tuple(weight.shape): name for name, weight in policy.named_parameters()}
    lasts = {name: sizes[tuple(policy.get_parameter(name).shape)] for name in names}
    one, other = next((name, last) for name, last in lasts.items() if name != last)
    owner, _, leaf = other.rpartition(".")
    setattr(policy.get_submodule(owner), leaf, policy.get_parameter(one))
    player = holdfast.Player(policy, holdfast.load(run.folder).config)
    player.save_pretrained(tmp_path)
    assert weights_equal(holdfast.load(tmp_path), policy)


def test_a_word_that_a_download_does_not_know_is_told(tmp_path):
    with pytest.raises(ConfigError, match="knows no revison=; what can be said is revision, cache_dir"):
        holdfast.Player.from_pretrained(tmp_path, revison="main")


@pytest.mark.parametrize(
    ("device", "told"), [("gpu", "there is no such device"), ("cuda", "finds no GPU here")]
)
def test_a_device_that_is_not_there_is_told(run, monkeypatch, device, told):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=told):
        holdfast.load(run.folder, device)


def test_a_run_in_bfloat16_is_played_as_it_was_trained_and_exported_in_float32(
    tmp_path, capsys, annotations_asleep
):
    keys = {"policy.precision": "bfloat16", "trainer.check": "every:1", "trainer.total_timesteps": 96}
    run = trained(tmp_path, **keys)
    player = holdfast.load(run.folder)
    assert (player.config.policy.precision, player.policy.precision) == ("bfloat16", "bfloat16")
    playing, step = player.start(agents=4), holdfast.make_world("recall", agents=4).reset()
    answer = playing.answer(step.obs, step.first)
    assert answer.values.dtype == answer.told.dtype == torch.float32
    assert {leaf.dtype for leaf in playing.memory.leaves.values()} == {torch.float32}
    assert main(["export", str(run.folder), "--to", "torch"]) == 0
    assert "the run computes in bfloat16, the file in float32" in capsys.readouterr().out
    assert player.policy.precision == "bfloat16", "whoever exports changes nobody"


def test_a_run_with_kernels_of_a_gpu_is_played_on_the_cpu(run, monkeypatch):
    with_kernels = change(
        build.config_of(build.find_checkpoint(run.folder, print)), {"policy.kernel": "triton"}
    )
    monkeypatch.setattr(build, "config_of", lambda saved: with_kernels)
    assert holdfast.load(run.folder).policy.lstm.cell.kernel == "auto"
