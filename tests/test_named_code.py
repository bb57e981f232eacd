"""A stranger's folder runs none of its code unless it is told to."""

import json
import os
from pathlib import Path

import pytest

import holdfast
from holdfast.config import Config, change
from holdfast.errors import ConfigError
from holdfast.keep.folder import create_folder
from holdfast.named_code import code_named_in
from holdfast.policies.graph import OURS
from holdfast.worlds import make_world
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
    yield
    assert not Path("PWNED").exists()


def folder_of(config, graph=None):
    folder = Path("theirs")
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if graph is not None:
        (folder / "agent.yaml").write_text(graph)
    return folder


def part(world):
    return [{"world": world, "weight": 1.0}]


def loaders(folder):
    pytest.importorskip("huggingface_hub")
    yield lambda: holdfast.load(folder, trust_code=False)
    yield lambda: holdfast.load(f"hub:{folder}")
    yield lambda: holdfast.Player.from_pretrained(folder)


NAMING = {
    "gym:subprocess:Popen": {"world": PAYLOAD},
    "mettagrid:stranger:game": {"world": {"name": "mettagrid:stranger:game"}},
    "gym:stranger:Env-v0": {"world": {"name": "gym:stranger:Env-v0"}},
    "pettingzoo:stranger": {"world": {"name": "pettingzoo:stranger"}},
    "pettingzoo:stranger:make": {"world": {"name": "pettingzoo:stranger:make"}},
    "stranger:World": {"world": {"name": "stranger:World"}},
    "stranger:Wrapper": {"world": {"name": "gym:CartPole-v1", "wrappers": ["stranger:Wrapper"]}},
    "stranger": {"world": {"name": "gym:CartPole-v1", "wrappers": "stranger"}},
    "stranger:Inside": {"world": {"name": "gym:GymV26Environment-v0", "options": {"id": "stranger:Inside"}}},
    "stranger:Part": {"world": {"name": "mixture", "parts": part({"name": "stranger:Part"})}},
    "recall + stranger:Typed": {"world": {"name": "mixture", "parts": "recall + stranger:Typed"}},
    "stranger:Exam": {"trainer": {"eval_worlds": part({"name": "stranger:Exam"})}},
    "stranger:Policy": {"policy": {"name": "stranger:Policy"}},
    "stranger:Cell": {"policy": {"memory": "stranger:Cell"}},
    "component:theirs/other.yaml": {"policy": {"name": "component:theirs/other.yaml"}},
}


@pytest.mark.parametrize("name", NAMING)
def test_a_config_that_names_code_is_refused_before_anything_of_it_is_imported(name):
    folder = folder_of(NAMING[name])
    assert code_named_in(folder) == [name]
    for load in loaders(folder):
        with pytest.raises(ConfigError) as caught:
            load()
        assert str(caught.value) == (
            f"theirs names code that would be imported and run: {name}. "
            "If you trust whoever wrote it, pass trust_code=True."
        )


def test_a_graph_that_names_code_is_refused_and_all_names_are_listed():
    graph = """
about: "read this: nothing here is imported"
components:
  _obs_: {component: "stranger:Eye", size: 8}
  _core_: {component: Memory, cell: "stranger:Cell", sources: [_obs_]}
"""
    folder = folder_of({"world": PAYLOAD, "policy": {"name": "component:x.yaml"}}, graph)
    for load in loaders(folder):
        with pytest.raises(ConfigError, match=r"run: gym:subprocess:Popen, stranger:Eye, stranger:Cell\. If"):
            load()


@pytest.mark.parametrize("trust_code", [None, True])
def test_even_a_trusted_config_calls_no_class_that_is_no_environment(trust_code):
    with pytest.raises(ConfigError, match=r"Popen'> is not a subclass of gymnasium.Env"):
        holdfast.load(folder_of({**SMALL, "world": PAYLOAD}), trust_code=trust_code)


def test_code_that_is_trusted_is_imported():
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
        {"world": "mixture", "world.parts": "recall delay=4 + n_back + gym:CartPole-v1"},
        {"trainer.eval_worlds": "recall delay=16 + recall delay=32"},
        {"agent": "latent_attn_tiny"},
        {"policy": "fast", "policy.memory": "gru", "schedule.trainer.optimizer.learning_rate": "linear:0"},
    ],
)
def test_what_comes_with_holdfast_and_its_extras_is_no_code_of_somebodys(keys):
    config = change(Config(), keys)
    folder = folder_of(config.model_dump_json())
    assert code_named_in(folder) == []
    folder_of(config.model_dump_json(), (OURS / "latent_attn_tiny.yaml").read_text())
    assert code_named_in(folder) == []


def test_a_graph_of_ones_own_beside_the_config_is_no_code():
    folder = folder_of({"policy": {"name": "component:mine.yaml"}}, (OURS / "fast.yaml").read_text())
    assert code_named_in(folder) == []


@pytest.mark.parametrize(
    ("config", "graph", "told"),
    [
        ("{", None, "config.json is not JSON that can be read"),
        ("[]", None, "config.json: this is not a config of this version"),
        ("[" * 100_000, None, "config.json is not JSON that can be read"),
        ('{"world": {}, "world": {"name": "recall"}}', None, "world is given twice"),
        ("{}", "{", "agent.yaml is not YAML that can be read"),
        ("{}", "&a [*a]", "agent.yaml"),
    ],
)
def test_what_cannot_be_read_is_one_error(config, graph, told):
    folder = folder_of(config, graph)
    for load in loaders(folder):
        with pytest.raises(ConfigError, match=told):
            load()


def test_a_pipe_instead_of_a_graph_is_told_and_not_waited_for():
    folder = folder_of({})
    os.mkfifo(folder / "agent.yaml")
    # A writer, so that whoever opens it reads something instead of waiting for ever.
    handle = os.open(folder / "agent.yaml", os.O_RDWR | os.O_NONBLOCK)
    with pytest.raises(ConfigError, match=r"agent.yaml is no file"):
        holdfast.load(folder, trust_code=False)
    os.close(handle)


class Marks:
    """No environment and no world; to make one leaves a mark."""

    def __init__(self, agents=1, **options):
        Path("PWNED").touch()


def test_a_class_that_is_no_environment_and_no_world_is_not_called():
    for env in ("test_named_code:Marks", Marks):
        with pytest.raises(ConfigError, match=r"Marks'> is not a subclass of gymnasium.Env"):
            GymWorld(1, env=env)
    with pytest.raises(ConfigError, match=r"Marks'>; a world has agents, spec, reset\(\) and step"):
        make_world("test_named_code:Marks", agents=1)


def test_of_a_run_the_config_of_its_newest_checkpoint_is_asked():
    run = create_folder(Config(run="x"), "x", "", holdfast.make_policy("fast", make_world("recall")))
    saved = run.checkpoints / "000001"
    saved.mkdir(parents=True)
    (saved / "model.safetensors").write_bytes(b"")
    (saved / "config.json").write_text(json.dumps({"world": PAYLOAD}))
    with pytest.raises(ConfigError, match=r"000001 names code .*: gym:subprocess:Popen\."):
        holdfast.load(run.path, trust_code=False)
