import copy
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from helpers.small_runs import LEAST
from holdfast import build
from holdfast.checkpoint.format import policy_manifest
from holdfast.cli import main
from holdfast.config.run import override
from holdfast.errors import ConfigError, ContractError, HoldfastError
from holdfast.play.saved_memory import weights_hash
from holdfast.policies.components.graph import BUILTIN
from holdfast.recipes import find_recipe
from holdfast.worlds import closing_world
from holdfast.worlds.builtin.symbols import Recall


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
    actual, expected = player.policy.state_dict(), policy.state_dict()
    return actual.keys() == expected.keys() and all(actual[name].equal(expected[name]) for name in actual)


def test_load_from_run_checkpoint_and_hub_folder(run, tmp_path):
    player = holdfast.load(str(run.folder))
    player.save_pretrained(tmp_path / "saved")
    players = [holdfast.load(run.checkpoint), holdfast.load(tmp_path / "saved")]
    players += [holdfast.Player.from_pretrained(tmp_path / "saved"), holdfast.load(f"hub:{tmp_path}/saved")]
    assert weights_equal(player, run.policy)
    assert all(weights_equal(loaded, run.policy) for loaded in players)
    assert {loaded.weights_hash for loaded in players} == {player.weights_hash} == {weights_hash(run.policy)}
    assert player.spec == run.spec
    assert repr(player) == f"Player(Fast in recall, weights {player.weights_hash[:12]}, on cpu)"


def test_session_equals_evaluation(run):
    world = holdfast.make_world("recall", agents=4, seed=5)
    session, step, returns = holdfast.load(run.folder).start(agents=4), world.reset(), []
    for _ in range(40):
        actions = session.act(step.obs.numpy(), step.first.numpy())
        assert actions.dtype == np.int64
        step = world.step(torch.from_numpy(actions))
        returns += step.reward[step.terminated].tolist()
    again = holdfast.make_world("recall", agents=4, seed=5)
    expected = holdfast.evaluate(run.policy, again, episodes=len(returns)).return_mean
    assert sum(returns) / len(returns) == pytest.approx(expected)


def test_restore_rejects_another_runs_memory(run, tmp_path):
    session = holdfast.load(run.folder).start(2)
    foreign = holdfast.load(trained(tmp_path, seed=1).folder).start(2)
    with pytest.raises(ContractError, match="only valid with the weights that made them"):
        session.restore(foreign.memory)


def test_player_copies_the_policy(run):
    trained_on = copy.deepcopy(run.policy)
    player = holdfast.Player(trained_on, holdfast.load(run.folder).config)
    with torch.no_grad():
        for weight in trained_on.parameters():
            weight.add_(1.0)
    assert weights_hash(player.policy) == player.weights_hash != weights_hash(trained_on)


def test_save_pretrained_files_and_model_card(run, tmp_path):
    holdfast.load(run.folder).save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["README.md", "checkpoint.json", "config.json", "model.safetensors"]
    card = (tmp_path / "README.md").read_text()
    assert "library_name: holdfast" in card
    assert "on the world `recall`" in card
    assert "`name_cue_0`" in card
    assert json.loads((tmp_path / "config.json").read_text())["runs_dir"] == "runs"
    assert str(run.folder.parent) not in (tmp_path / "config.json").read_text()


def test_save_pretrained_names_a_folder_that_cannot_be_written(run, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/x cannot be written: No space left on device\.$"):
        holdfast.load(run.folder).save_pretrained(tmp_path / "x")


def test_save_pretrained_includes_the_graph(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    graph = (BUILTIN / "fast.yaml").read_text().replace("hidden_size: 128", "hidden_size: 9")
    Path("custom.yaml").write_text(graph)
    keys = {"agent": "custom.yaml", "policy.hidden_size": "none"}
    run = trained("runs", **keys)
    holdfast.load(run.folder).save_pretrained("saved")
    Path("custom.yaml").unlink()
    player = holdfast.Player.from_pretrained("./saved")
    assert Path("saved/agent.yaml").read_text() == graph
    assert weights_equal(player, run.policy)


def test_push_to_hub(run, monkeypatch):
    uploads = {}

    class Api:
        def __init__(self, token=None):
            self.token = token

        def create_repo(self, repo_id, private, exist_ok):
            return type("Repo", (), {"repo_id": repo_id})

        def upload_folder(self, *, repo_id, folder_path, **_):
            uploads[repo_id] = sorted(os.listdir(folder_path))
            return f"commit of {repo_id}"

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    assert holdfast.load(run.folder).push_to_hub("me/policy") == "commit of me/policy"
    assert uploads == {"me/policy": ["README.md", "checkpoint.json", "config.json", "model.safetensors"]}


def test_from_pretrained_downloads_a_repository(run, tmp_path, monkeypatch):
    holdfast.load(run.folder).save_pretrained(tmp_path)
    requests = {}

    def download(name, **options):
        requests[name] = options
        return str(tmp_path)

    monkeypatch.setattr("holdfast.play.hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", lambda **_: tmp_path / "config.json")
    player = holdfast.Player.from_pretrained("me/policy", revision="v1")
    assert weights_equal(player, run.policy)
    assert requests["me/policy"]["revision"] == "v1"
    assert requests["me/policy"]["allow_patterns"] == [
        "model.safetensors",
        "config.json",
        "agent.yaml",
        "checkpoint.json",
    ]


def test_failed_download_raises_on_one_line():
    with pytest.raises(ConfigError, match="hub:me/nothing cannot be fetched") as caught:
        holdfast.load("hub:me/nothing")
    assert "\n" not in str(caught.value)


def test_missing_hub_package_names_the_extra(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "holdfast.play.hub", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[hub\]'"):
        holdfast.load(run.folder).save_pretrained(tmp_path)


def test_cli_does_not_import_hub_or_onnx():
    late = ["huggingface_hub", "onnx", "onnxruntime", "onnxscript"]
    code = f"import holdfast.cli, sys; print([name for name in {late} if name in sys.modules])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert process.stdout == "[]\n"


def test_load_of_a_user_policy_needs_its_module(tmp_path, monkeypatch):
    (tmp_path / "my_little_policy.py").write_text("from helpers.small_policy import Small as Custom\n")
    monkeypatch.syspath_prepend(tmp_path)
    keys = {"policy": "my_little_policy:Custom", "world": "gym:CartPole-v1"}
    run = holdfast.train(None, {**LEAST, **keys, "runs_dir": str(tmp_path / "runs")})
    holdfast.load(run.folder).save_pretrained(tmp_path / "saved")
    assert weights_equal(holdfast.load(tmp_path / "saved"), run.policy)
    monkeypatch.delitem(sys.modules, "my_little_policy")
    (tmp_path / "my_little_policy.py").unlink()
    for name in (run.folder, tmp_path / "saved"):
        with pytest.raises(ConfigError, match=r"policy=my_little_policy:Custom: No module named .* Python path"):
            holdfast.load(name)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "is not a folder; give runs/NAME, one of its checkpoints, hub:owner/name, sb3:model.zip or "),
        ({}, "has no config.json, so it is neither a run nor a checkpoint"),
        ({"model.safetensors": b"", "config.json": b"{}"}, "does not hold the weights of this policy"),
        ({"model.safetensors": b""}, "config.json"),
        ({"model.safetensors": b"", "config.json": b"\xff"}, "config.json"),
        ({"model.safetensors": b"", "config.json": b'{"world": {"name": "nowhere"}}'}, "not a config"),
    ],
)
def test_load_of_an_invalid_folder_raises_on_one_line(tmp_path, files, message):
    folder = tmp_path / "x"
    if files is not None:
        folder.mkdir()
        manifest = {"checkpoint.json": policy_manifest(files)} if files else {}
        for name, data in {**files, **manifest}.items():
            (folder / name).write_bytes(data)
    with pytest.raises(HoldfastError, match=message) as caught:
        holdfast.load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "checkpoint.json"])
def test_one_flipped_bit_in_a_saved_folder_is_found(run, tmp_path, name):
    holdfast.load(run.folder).save_pretrained(tmp_path)
    data = bytearray((tmp_path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(HoldfastError, match=f"{name} is damaged|{name} cannot be read"):
        holdfast.load(tmp_path)


def test_tied_weights_are_saved_by_each_name(run, tmp_path):
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


def test_unknown_download_option_raises(tmp_path):
    with pytest.raises(ConfigError, match="has no option revison=; choose from revision, cache_dir"):
        holdfast.Player.from_pretrained(tmp_path, revison="main")


@pytest.mark.parametrize(("device", "message"), [("gpu", "there is no such device"), ("cuda", "finds no GPU here")])
def test_missing_device_raises(run, monkeypatch, device, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        holdfast.load(run.folder, device)


def test_bfloat16_run_loads_in_bfloat16_and_exports_in_float32(tmp_path, capsys, annotations_asleep):
    keys = {"policy.precision": "bfloat16", "trainer.check": "every:1", "trainer.total_timesteps": 96}
    run = trained(tmp_path, **keys)
    player = holdfast.load(run.folder)
    assert (player.config.policy.precision, player.policy.precision) == ("bfloat16", "bfloat16")
    session, step = player.start(agents=4), holdfast.make_world("recall", agents=4).reset()
    result = session.step(step.obs, step.first)
    assert result.values.dtype == result.distribution.dtype == torch.float32
    assert {leaf.dtype for leaf in session.memory.leaves.values()} == {torch.float32}
    assert main(["export", str(run.folder), "--to", "torch"]) == 0
    assert "the run computes in bfloat16, the file in float32" in capsys.readouterr().out
    assert player.policy.precision == "bfloat16", "export does not change the player"


def test_run_with_triton_kernels_loads_on_the_cpu(run, monkeypatch):
    with_kernels = override(build.config_from(build.find_checkpoint(run.folder, print)), {"policy.kernel": "triton"})
    monkeypatch.setattr(build, "config_from", lambda checkpoint: with_kernels)
    assert holdfast.load(run.folder).policy.lstm.cell.kernel == "auto"


def with_config(folder, target, **keys):
    """Save a player with some keys of its config changed, and with right checksums."""
    holdfast.load(folder).save_pretrained(target)
    config = json.loads((target / "config.json").read_text())
    for key, value in keys.items():
        branch, name = key.split("__")
        config[branch][name] = value
    files = {"config.json": json.dumps(config).encode()}
    (target / "config.json").write_bytes(files["config.json"])
    files["model.safetensors"] = (target / "model.safetensors").read_bytes()
    (target / "checkpoint.json").write_bytes(policy_manifest(files))
    return target


@pytest.mark.parametrize(("key", "value"), [("policy__hidden_size", 10**9), ("policy__num_layers", 999)])
def test_sizes_that_the_weights_do_not_have_are_refused_before_they_are_built(run, tmp_path, monkeypatch, key, value):
    folder = with_config(run.folder, tmp_path / "saved", **{key: value})
    # Nothing is built.
    monkeypatch.setattr(build, "build_world", None)
    name = key.replace("__", ".")
    message = rf"config.json has {name}={value}, but the weights in model.safetensors have at most \d+; they do not"
    with pytest.raises(ConfigError, match=message):
        holdfast.load(folder)


def test_loading_builds_a_world_of_few_agents(run, tmp_path):
    sizes = {"trainer__bptt_horizon": 1, "trainer__minibatch_size": 2**40, "trainer__batch_size": 2**40}
    folder = with_config(run.folder, tmp_path / "saved", world__agents=2**40, **sizes)
    assert weights_equal(holdfast.load(folder), run.policy)


class OnlyFour(Recall):
    """A world of the user that takes no fewer agents than four."""

    def __init__(self, agents, **options):
        assert agents == 4
        super().__init__(agents, **options)


@pytest.mark.parametrize(
    ("keys", "agents"),
    [
        ({"world": "arena", "world.agents": 96}, 24),
        ({"world": "gym:CartPole-v1"}, 1),
        ({"world": "mixture", "world.parts": "recall + recall delay=3"}, 4),
        ({"world": f"{__name__}:OnlyFour"}, 4),
    ],
)
def test_few_agents_are_as_many_as_the_world_takes(keys, agents):
    config = override(find_recipe("recall"), LEAST | {"trainer.batch_size": 768, "trainer.minibatch_size": 96} | keys)
    with closing_world(build._build_small_world(config, torch.device("cpu"))) as world:
        assert world.agents == agents
