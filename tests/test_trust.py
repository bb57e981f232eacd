"""Code that a file names is not imported without trust: not from the Hub, and locally from installed packages only."""

import base64
import json
import os
import pickle
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import holdfast
from helpers.small_runs import LEAST, sign
from holdfast import trust
from holdfast.build import build_policy, build_world
from holdfast.checkpoint.format import TrainingSnapshot, policy_manifest, write_checkpoint
from holdfast.checkpoint.run_dir import create_run_dir
from holdfast.cli import main
from holdfast.config.run import Config, PolicyConfig, override, read_config
from holdfast.errors import ConfigError, TrustError
from holdfast.sweep.settings import new_settings, write_settings
from holdfast.trust import NameSource, names_from
from holdfast.worlds import closing_world, make_world
from holdfast.worlds.gym import GymWorld

PAYLOAD = {
    "name": "gym:subprocess:Popen",
    "agents": 1,
    "options": {"args": "touch PWNED", "shell": True},
}
SMALL = {"trainer": {"batch_size": 32, "minibatch_size": 32, "bptt_horizon": 8}}
EVIL = "from pathlib import Path\nPath('PWNED').touch()\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    Path("stranger.py").write_text(EVIL)
    Path("strange-r.py").write_text(EVIL)
    yield
    assert not Path("PWNED").exists()


def folder_of(config, graph=None):
    folder = Path("theirs")
    folder.mkdir(exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    files = {"model.safetensors": save({"weight": torch.zeros(4)}), "config.json": text.encode()}
    files |= {} if graph is None else {"agent.yaml": graph.encode()}
    for name, data in {**files, "checkpoint.json": policy_manifest(files)}.items():
        (folder / name).write_bytes(data)
    return folder


def part(world):
    return [{"world": world, "weight": 1.0}]


def loaders(folder):
    pytest.importorskip("huggingface_hub")
    yield lambda: holdfast.load(folder, trust_code=False)
    yield lambda: holdfast.load(f"hub:./{folder}")
    yield lambda: holdfast.Player.from_pretrained(folder)


CONFIGS = {
    "subprocess:Popen": {**SMALL, "world": PAYLOAD},
    "stranger:game": {**SMALL, "world": {"name": "mettagrid:stranger:game", "agents": 4}},
    "stranger:Env-v0": {**SMALL, "world": {"name": "gym:stranger:Env-v0", "agents": 4}},
    "stranger": {**SMALL, "world": {"name": "pettingzoo:stranger", "agents": 4}},
    "stranger:make": {**SMALL, "world": {"name": "pettingzoo:stranger:make", "agents": 4}},
    "stranger:World": {"world": {"name": "stranger:World"}},
    "stranger:Wrapper": {**SMALL, "world": {"name": "gym:CartPole-v1", "agents": 4, "wrappers": ["stranger:Wrapper"]}},
    "stranger:Inside": {
        **SMALL,
        "world": {"name": "gym:GymV26Environment-v0", "agents": 4, "options": {"id": "stranger:Inside"}},
    },
    "stranger:Part": {"world": {"name": "mixture", "parts": part({"name": "stranger:Part"})}},
    "stranger:Typed": {"world": {"name": "mixture", "parts": "recall + stranger:Typed"}},
    "stranger:Exam": {"trainer": {"eval_worlds": part({"name": "stranger:Exam"})}},
    "strange-r:Env-v0": {**SMALL, "world": {"name": "gym:strange-r:Env-v0", "agents": 4}},
    "stranger:Policy": {"policy": {"name": "stranger:Policy"}},
    "stranger:Cell": {"policy": {"memory": "stranger:Cell"}},
}
REFUSAL = "names code that would be imported and run: {}"


@pytest.mark.parametrize("name", CONFIGS)
def test_config_that_names_code_is_rejected_before_import(name):
    folder = folder_of(CONFIGS[name])
    for load in loaders(folder):
        with pytest.raises(ConfigError) as caught:
            load()
        assert REFUSAL.format(f"{name}, from ") in str(caught.value)
        assert "pass --trust-code; in Python, trust_code=True" in str(caught.value)


GRAPH = """
about: "read this: nothing here is imported"
components:
  _obs_: {component: "stranger:Eye", size: 8}
  _core_: {component: Memory, cell: lstm, sources: [_obs_]}
  _action_: {component: Actions, sources: [_core_]}
  _value_: {component: Values, sources: [_core_]}
"""


def test_graph_that_names_code_is_rejected():
    for load in loaders(folder_of({"policy": {"name": "component:x.yaml"}}, GRAPH)):
        with pytest.raises(ConfigError, match=r"imported and run: stranger:Eye, from "):
            load()


def test_graph_elsewhere_is_rejected_although_a_harmless_one_lies_beside_the_config():
    policy = holdfast.make_policy("component:example", make_world("recall"))
    run = create_run_dir(Config(run="x"), "x", "", policy)
    Path("other").mkdir()
    Path("other/evil.yaml").write_text(GRAPH)
    config = Config(policy=PolicyConfig(name="component:other/evil.yaml"))
    snapshot = TrainingSnapshot(1, 0, policy.state_dict(), {}, {}, None, None)
    write_checkpoint(run.checkpoints, snapshot, {"config.json": config.model_dump_json().encode()}, {})
    # The manifest does not list it, so it is not the graph that is built.
    (run.checkpoints / "000001" / "agent.yaml").write_text(policy.graph.text)
    for trust_code in (False, None):
        with pytest.raises(ConfigError, match=r"000001 names code .*: stranger:Eye"):
            holdfast.load(run.path, trust_code=trust_code)


def test_folder_in_the_working_directory_does_not_shadow_the_hub(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    folder_of({})
    for load in (lambda: holdfast.load("hub:theirs"), lambda: holdfast.Player.from_pretrained("theirs")):
        with pytest.raises(ConfigError, match=r"hub:theirs cannot be fetched: .*For the folder, write \./theirs\."):
            load()


def run_with(policy):
    """Train a run whose config then names another policy, as that of another author would."""
    folder = holdfast.train("recall", {**LEAST, "runs_dir": "."}).folder
    checkpoint = (folder / "checkpoints" / "latest").resolve()
    config = json.loads((checkpoint / "config.json").read_text())
    config["policy"]["name"] = policy
    (checkpoint / "config.json").write_text(json.dumps(config))
    sign(checkpoint)
    return folder


@pytest.mark.parametrize(
    "verb",
    [
        ["eval", "x"],
        ["check", "x"],
        ["export", "x", "--to", "torch"],
        ["train", "--resume", "x", "trainer.total_timesteps=64"],
        ["train", "recall", "run=y", "trainer.teachers=x"],
    ],
    ids=["eval", "check", "export", "resume", "teacher"],
)
def test_verbs_import_code_of_a_run_only_if_it_is_trusted(verb, capsys):
    run_with("not_mine:Policy")
    Path("not_mine.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    capsys.readouterr()
    assert main(verb) == 2
    error = capsys.readouterr().err
    assert REFUSAL.format("not_mine:Policy") in error
    assert f"from {Path.cwd()}/not_mine.py. If you trust its author, pass --trust-code" in error
    assert not Path("imported").exists()
    assert main([*verb, "--trust-code"]) == 2
    assert "not_mine has no class Policy" in capsys.readouterr().err
    assert Path("imported").exists()
    sys.modules.pop("not_mine")


def test_code_of_installed_packages_is_imported(capsys):
    run_with("holdfast.policies.fast:Fast")
    assert main(["eval", "x", "--episodes", "2", "--seeds", "1"]) == 0


def test_standard_library_is_not_an_installed_package():
    with pytest.raises(ConfigError, match=r"imported and run: subprocess:Popen"):
        holdfast.load(folder_of(CONFIGS["subprocess:Popen"]))


@pytest.mark.parametrize("name", ["strange-r:Env-v0", "stranger:Inside", "stranger:Wrapper"])
def test_local_config_that_names_code_of_the_working_directory_is_rejected(name):
    with pytest.raises(ConfigError, match=rf"imported and run: {name}, from "):
        holdfast.load(folder_of(CONFIGS[name]))


def test_tracker_of_a_resumed_run_is_not_imported():
    folder = holdfast.train("recall", {**LEAST, "runs_dir": "."}).folder
    checkpoint = (folder / "checkpoints" / "latest").resolve()
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "tracker": "stranger:Tracker"}))
    sign(checkpoint)
    with pytest.raises(ConfigError, match=r"imported and run: stranger:Tracker"):
        holdfast.train(None, {"trainer.total_timesteps": 64}, resume=folder)


def test_functions_of_installed_packages_are_not_called():
    for name in ("gym:gymnasium:make", "mettagrid:gymnasium:make", "torch.hub:load"):
        config = {**SMALL, "world": {"name": name, "agents": 4, "options": {"id": "CartPole-v1"}}}
        if name.startswith("torch"):
            config["world"].pop("options")
        with pytest.raises(ConfigError, match=r"a function that would be called|a world is made as"):
            holdfast.load(folder_of(config))


def test_wrapper_that_is_no_wrapper_is_not_called():
    """`psutil:Popen(executable=FILE)` would run any program; the class before it makes the environment a text."""
    Path("program.sh").write_text("#!/bin/sh\ntouch PWNED\n")
    Path("program.sh").chmod(0o755)
    program = "psutil:Popen(executable='./program.sh')"
    for wrappers in (["numpy:str_", program], [program]):
        config = {**SMALL, "world": {"name": "gym:CartPole-v1", "agents": 1, "wrappers": wrappers}}
        with pytest.raises(ConfigError, match=r"is not a wrapper, which has reset\(\) and step\(\)"):
            holdfast.load(folder_of(config))


def test_packages_that_register_environments_need_trust_like_any_other():
    """A module of their name may lie in the folder one stands in."""
    Path("minigrid.py").write_text(EVIL)
    config = {**SMALL, "world": {"name": "gym:MiniGrid-Empty-5x5-v0", "agents": 1}}
    with pytest.raises(ConfigError, match="names code that would be imported and run"):
        holdfast.load(folder_of(config))


def test_function_as_a_wrapper_is_not_called():
    config = {**SMALL, "world": {"name": "gym:CartPole-v1", "agents": 1, "wrappers": ["rich:print"]}}
    with pytest.raises(ConfigError, match="names a function that would be called: rich:print"):
        holdfast.load(folder_of(config))


def test_module_inside_the_folder_is_not_an_installed_package(monkeypatch):
    folder = folder_of({"policy": {"name": "theirs.evil:Policy"}})
    (folder / "__init__.py").write_text("")
    (folder / "evil.py").write_text(EVIL)
    monkeypatch.setattr(trust, "_editable_folders", lambda: [Path.cwd()])
    with pytest.raises(ConfigError, match=r"imported and run: theirs.evil:Policy"):
        holdfast.load(folder)


def test_files_beside_an_editable_project_are_not_installed(monkeypatch, tmp_path):
    """Of a clone that is installed by `pip install --editable`, `src` is imported from, and not its other folders."""
    (tmp_path / "src").mkdir()
    (tmp_path / "mine.pth").write_text(f"{tmp_path / 'src'}\nimport nothing\n")

    class Editable:
        files = (Path("mine.pth"), Path("mine/RECORD"))

        def read_text(self, name):
            return json.dumps({"url": tmp_path.as_uri(), "dir_info": {"editable": True}})

        def locate_file(self, file):
            return tmp_path / file

    monkeypatch.setattr(trust, "distributions", lambda: [Editable()])
    assert list(trust._editable_folders()) == [(tmp_path / "src").resolve()]


def test_workers_of_a_resumed_run_import_only_trusted_wrappers():
    keys = {"world": "gym:CartPole-v1", "trainer.num_workers": 1, "trainer.async_factor": 1, "runs_dir": "."}
    folder = holdfast.train(None, {**LEAST, **keys}).folder
    checkpoint = (folder / "checkpoints" / "latest").resolve()
    config = json.loads((checkpoint / "config.json").read_text())
    config["world"]["wrappers"] = ["stranger:Wrapper"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    sign(checkpoint)
    with pytest.raises(ConfigError, match=r"imported and run: stranger:Wrapper"):
        holdfast.train(None, {"trainer.total_timesteps": 64}, resume=folder)


def test_trusted_config_calls_only_environments():
    with pytest.raises(ConfigError, match=r"Popen'> is not a subclass of gymnasium.Env"):
        holdfast.load(folder_of({**SMALL, "world": PAYLOAD}), trust_code=True)


def test_trusted_code_is_imported():
    Path("trusted_by_me.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    folder = folder_of({"policy": {"name": "trusted_by_me:Mine"}})
    pytest.importorskip("huggingface_hub")
    with pytest.raises(ConfigError, match="has no class Mine"):
        holdfast.Player.from_pretrained(folder, trust_code=True)
    assert Path("imported").exists()


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"world": "gym:CartPole-v1", "world.options": "{max_episode_steps: 9}"},
        {"world": "popgym:RepeatPreviousEasy"},
        {"world": "mettagrid:tmaze", "world.resources": "ore,gem"},
        {"world": "envpool:CartPole-v1", "world.vector": "async"},
        {"world": "mixture", "world.parts": "recall delay=4 + recall delay=8"},
        {"trainer.eval_worlds": "recall delay=16 + recall delay=32"},
        {"agent": "latent_attn_tiny"},
        {"policy": "fast", "policy.memory": "gru", "schedule.trainer.optimizer.learning_rate": "linear:0"},
    ],
)
def test_registered_names_are_not_code(keys):
    text = override(Config(), keys).model_dump_json()
    with names_from(NameSource("theirs", trust_code=False)):
        config = read_config(text)
        if not config.world.name.startswith("envpool"):
            with closing_world(build_world(config, torch.device("cpu"), agents=8, seed=0)) as world:
                build_policy(config, world, torch.device("cpu"))


@pytest.mark.parametrize(
    ("config", "graph", "message"),
    [
        ("{", None, "config.json: this is not a config of this version"),
        ("[]", None, "config.json: this is not a config of this version"),
        ("[" * 100_000, None, "config.json: this is not a config of this version"),
        ("{}", "{", "agent.yaml"),
        ("{}", "&a [*a]", "agent.yaml"),
    ],
)
def test_unreadable_config_or_graph_raises(config, graph, message):
    folder = folder_of(config, graph)
    for load in loaders(folder):
        with pytest.raises(ConfigError, match=message):
            load()


def test_fifo_instead_of_a_graph_raises():
    os.mkfifo("pipe.yaml")
    # A writer, so that opening it does not block.
    handle = os.open("pipe.yaml", os.O_RDWR | os.O_NONBLOCK)
    with pytest.raises(ConfigError, match=r"pipe.yaml is not a regular file"):
        holdfast.load(folder_of({"policy": {"name": "component:pipe.yaml"}}), trust_code=False)
    os.close(handle)


class Marks:
    """Neither an environment nor a world; its constructor leaves a file."""

    def __init__(self, agents=1, **options):
        Path("PWNED").touch()


def test_class_that_is_no_environment_is_not_called():
    for env in ("test_trust:Marks", Marks):
        with pytest.raises(ConfigError, match=r"Marks'> is not a subclass of gymnasium.Env"):
            GymWorld(1, env=env)
    with pytest.raises(ConfigError, match=r"Marks'>; a world has agents, spec, reset\(\) and step"):
        make_world("test_trust:Marks", agents=1)


def test_newest_checkpoint_of_a_run_is_checked():
    policy = holdfast.make_policy("fast", make_world("recall"))
    run = create_run_dir(Config(run="x"), "x", "", policy)
    snapshot = TrainingSnapshot(1, 0, policy.state_dict(), {}, {}, None, None)
    write_checkpoint(run.checkpoints, snapshot, {"config.json": json.dumps(CONFIGS["subprocess:Popen"]).encode()}, {})
    with pytest.raises(ConfigError, match=r"000001 names code .*: subprocess:Popen"):
        holdfast.load(run.path, trust_code=False)


KEYS = ["recall", *(f"{key}={value}" for key, value in LEAST.items() if key != "run")]
NAMES = ["policy=stranger:Policy", "world=stranger:World", "policy.memory=stranger:Cell"]


def refused(words, capsys):
    """The error of a command that is refused, or the text of the part of it that is."""
    assert main(words) != 0
    # In a table the text is wrapped.
    output = " ".join("".join(capsys.readouterr()).split())
    assert "names code that would be imported and run: stranger:" in output
    return output


@pytest.mark.parametrize("name", NAMES)
def test_recipe_file_that_names_code_is_rejected(name, capsys):
    key, _, value = name.partition("=")
    Path("theirs.yaml").write_text(f"{key}: {value}\n")
    for words in (["train", "theirs.yaml"], ["sweep", "theirs.yaml", "--space", "trainer.ppo.gamma=0.8,0.9"]):
        if words[0] == "train" or not name.startswith("policy"):
            assert "holdfast: theirs.yaml names code" in refused(words, capsys)
    with pytest.raises(TrustError, match=r"theirs\.yaml names code"):
        holdfast.train("theirs.yaml")


def test_recipe_file_that_names_a_graph_with_code_is_rejected(capsys):
    Path("graph.yaml").write_text(GRAPH)
    Path("theirs.yaml").write_text("agent: graph.yaml\n")
    assert "stranger:Eye" in refused(["train", "theirs.yaml"], capsys)


def test_recipe_file_is_imported_if_it_is_trusted():
    Path("trusted_recipe_code.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    Path("mine.yaml").write_text("policy: trusted_recipe_code:Mine\n")
    with pytest.raises(ConfigError, match="has no class Mine"):
        holdfast.train("mine.yaml", {"runs_dir": "."}, trust_code=True)
    assert Path("imported").exists()


@pytest.mark.parametrize("name", NAMES[:2])
def test_seeds_of_another_author_import_nothing(name, monkeypatch, capsys):
    """Also not in the processes of the seeds."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(holdfast.__file__).parents[1]}:{Path.cwd()}")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    Path("theirs").mkdir()
    plan = {"arguments": [*KEYS, name], "seeds": [0], "unit": "cpu_seconds", "results": {}}
    Path("theirs/seeds.json").write_text(json.dumps(plan))
    refused(["train", "--resume", "theirs"], capsys)


SWEEP_KEYS = dict(pair.split("=") for pair in KEYS[1:])


@pytest.mark.parametrize("name", [pytest.param(NAMES[0], marks=pytest.mark.slow), NAMES[1]])
def test_sweep_of_another_author_imports_nothing(name, monkeypatch, capsys):
    pytest.importorskip("optuna")
    monkeypatch.setenv("PYTHONPATH", f"{Path(holdfast.__file__).parents[1]}:{Path.cwd()}")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    from holdfast.sweep.trials import SETTINGS, TrialStore

    key, _, value = name.partition("=")
    Path("theirs").mkdir()
    settings = new_settings("recall", SWEEP_KEYS, ("trainer.ppo.gamma=0.8,0.9",), trials=1)
    store = TrialStore("sqlite:///theirs/study.db", "theirs")
    store.create(settings)
    store.open()
    settings = replace(settings, keys={**settings.keys, key: value})
    store.study.set_user_attr(SETTINGS, settings.to_json())
    write_settings(Path("theirs"), settings, "theirs", "")
    refused(["sweep", "--resume", "theirs"], capsys)


@pytest.mark.parametrize("name", ["model.zip", "./model.zip", "folder/model.zip"])
def test_zip_of_sb3_is_not_unpickled_by_check(name, capsys):
    """A bare name looks like a module that does not exist."""
    Path("folder").mkdir()
    with zipfile.ZipFile(name, "w") as archive:
        entry = base64.b64encode(pickle.dumps(Touches())).decode()
        archive.writestr("data", json.dumps({"policy_class": {":type:": "x", ":serialized:": entry}}))
        archive.writestr("policy.pth", b"")
    assert main(["check", name]) == 2
    assert "holds pickles, which run code when they are loaded" in capsys.readouterr().err


class Touches:
    """What its pickle runs leaves a file."""

    def __reduce__(self):
        return Path.touch, (Path("PWNED"),)
