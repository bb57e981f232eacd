"""Environments of other packages: what is imported, and what to install."""

import importlib.util
import sys

import gymnasium
import pytest
import torch

from holdfast.config.worlds import GYM_PRESETS
from holdfast.errors import ConfigError
from holdfast.worlds import make_world
from holdfast.worlds.gym import GymWorld, packages
from holdfast.worlds.save_restore import restore_world, save_world

FAKE = """
import gymnasium

gymnasium.register("FakeGrid-Corridor-v0", entry_point="helpers.gym_envs:Counting")
"""


@pytest.fixture
def missing(monkeypatch):
    """Make a package look as if it were not installed."""

    def hide(module):
        monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None if name == module else 1)

    return hide


@pytest.mark.parametrize(
    ("env", "module", "message"),
    [
        ("ALE/Pong-v5", "ale_py", "ale_py is not installed; .*pip install ale-py opencv-python-headless"),
        ("PongNoFrameskip-v4", "ale_py", "ale_py is not installed; .*pip install ale-py opencv-python-headless"),
        ("MiniGrid-DoorKey-5x5-v0", "minigrid", "minigrid is not installed; .*pip install minigrid"),
        ("BabyAI-GoToLocal-v0", "minigrid", "minigrid is not installed; .*pip install minigrid"),
        ("MinAtar/Breakout-v1", "minatar", "minatar is not installed; .*pip install minatar"),
    ],
)
def test_missing_package_is_named_with_the_command_that_installs_it(missing, env, module, message):
    for name in [name for name in map(str, gymnasium.registry) if name == env]:
        pytest.skip(f"{name} is registered already: {module} is imported")
    missing(module)
    with pytest.raises(ConfigError, match=rf"^gym:{env}: {message}\.$"):
        GymWorld(1, env=env)


def test_package_that_registers_by_a_function_is_called(tmp_path, monkeypatch):
    lines = ["def register_envs():", *(f"    {line}" for line in FAKE.strip().splitlines())]
    (tmp_path / "fake_games.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(packages.PACKAGES, r"FakeGrid-", ("fake_games", "fake-games"))
    monkeypatch.setitem(packages.REGISTRARS, "fake_games", "fake_games:register_envs")
    try:
        assert make_world("gym:FakeGrid-Corridor-v0", 1).reset().obs.tolist() == [[0, -1]]
    finally:
        gymnasium.registry.pop("FakeGrid-Corridor-v0", None)


def test_package_of_an_id_is_imported(tmp_path, monkeypatch):
    (tmp_path / "fake_grid.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(packages.PACKAGES, r"FakeGrid-", ("fake_grid", "fake-grid"))
    monkeypatch.setitem(GYM_PRESETS, "FakeGrid-", {"frame_stack": 2, "wrappers": (), "options": {"agent": 4}})
    try:
        world = make_world("gym:FakeGrid-Corridor-v0", 2)
        # With its preset, unless wrappers are set.
        assert world.reset().obs.tolist() == [[4000, -1] * 2] * 2
        assert make_world("gym:FakeGrid-Corridor-v0", 1, wrappers=()).reset().obs.tolist() == [[0, -1]]
        with pytest.raises(
            ConfigError, match=r"FakeGrid-Corrider-v0 is not registered; did you mean gym:FakeGrid-Corr"
        ):
            make_world("gym:FakeGrid-Corrider-v0", 2)
    finally:
        gymnasium.registry.pop("FakeGrid-Corridor-v0", None)
        sys.modules.pop("fake_grid", None)


def test_ids_of_other_namespaces_are_not_offered():
    with pytest.raises(ConfigError, match=r"^gym:Other/Ant-v5 is not registered; write package:ID"):
        GymWorld(1, env="Other/Ant-v5")
    with pytest.raises(ConfigError, match=r"did you mean gym:CartPole-v1\?"):
        GymWorld(1, env="CartPol-v1")


def lacks(message):
    def make():
        raise gymnasium.error.DependencyNotInstalled(message)

    return make


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            'MuJoCo is not installed, run `pip install "gymnasium[mujoco]"`',
            "MuJoCo is not installed; .*pip install 'gymnasium.mujoco.'",
        ),
        (
            "Box2D is not installed, you can install it by run `pip install swig` followed by "
            '`pip install "gymnasium[box2d]"`',
            "Box2D is not installed; .*pip install 'gymnasium.box2d.'",
        ),
        (
            'opencv-python package not installed, run `pip install "gymnasium[other]"` to get dependencies for atari',
            "OpenCV is not installed; .*pip install opencv-python-headless",
        ),
        ("a licence is missing", "a licence is missing"),
    ],
)
def test_missing_dependency_of_an_environment_is_named(message, expected):
    with pytest.raises(ConfigError, match=f"^gym:make cannot be made: {expected}"):
        GymWorld(1, env=lacks(message))


@pytest.mark.parametrize(
    ("env", "module", "shape"),
    [
        ("ALE/Pong-v5", "ale_py", (4, 84, 84)),
        ("PongNoFrameskip-v4", "ale_py", (4, 84, 84)),
        ("MiniGrid-DoorKey-5x5-v0", "minigrid", (7, 7, 3)),
        ("BabyAI-GoToLocal-v0", "minigrid", (7, 7, 3)),
        ("HalfCheetah-v5", "mujoco", (17,)),
        ("LunarLander-v3", "Box2D", (8,)),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_installed_environments_step_and_resume_with_their_presets(env, module, shape, monkeypatch, tmp_path):
    # MuJoCo writes a log where it runs. Box2D crashes on import if its warnings are errors.
    monkeypatch.chdir(tmp_path)
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    world, resumed = (make_world(f"gym:{env}", 2, options={"max_episode_steps": 60}) for _ in range(2))
    resumed.reset()
    assert world.reset().obs.shape == (2, *shape)
    space = world.spec.action
    actions = torch.ones(2, dtype=torch.long) if space is None else torch.ones(2, *space.shape)
    for _ in range(75):
        world.step(actions)
    # In the second episode, which has no seed.
    assert restore_world(resumed, save_world(world)) is None
    assert world.step(actions).obs.equal(resumed.step(actions).obs)
