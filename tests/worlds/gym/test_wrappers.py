"""Wrappers by name with arguments: what is called, errors, and trust."""

import gymnasium
import numpy as np
import pytest
import torch

from helpers.gym_envs import Counting
from holdfast.errors import ConfigError
from holdfast.trust import NameSource, names_from, trusting
from holdfast.worlds import make_world
from holdfast.worlds.gym import GymWorld
from holdfast.worlds.save_restore import restore_world, save_world


class Scaled(gymnasium.ObservationWrapper):
    def __init__(self, env, factor, *, offset=0):
        super().__init__(env)
        self.factor, self.offset = factor, offset

    def observation(self, observation):
        return self.factor * observation + self.offset


def scaled(env, factor):
    return Scaled(env, factor)


class Unsigned(gymnasium.Wrapper):
    """Its signature cannot be read."""

    __signature__ = "none"

    def __init__(self, env, factor):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("wrappers", "expected"),
    [
        (["test_wrappers:Scaled(3)"], 12_000),
        (["test_wrappers:Scaled(factor=3, offset=-2.0)"], 11_998),
        ("test_wrappers:scaled(2) + test_wrappers:Scaled(3, offset=1)", 24_001),
        ("test_wrappers:Scaled(3, offset=1),test_wrappers:scaled(2)", 24_002),
    ],
)
def test_wrappers_get_their_arguments(wrappers, expected):
    world = GymWorld(2, env=Counting, options={"agent": 4}, wrappers=wrappers)
    assert world.reset().obs[:, 0].tolist() == [expected] * 2


def test_time_limit_of_gymnasium():
    world = make_world("gym:CartPole-v1", 2, wrappers=("gymnasium.wrappers:TimeLimit(max_episode_steps=3)",))
    world.reset()
    steps = [world.step(torch.tensor([0, 1])) for _ in range(3)]
    assert [step.truncated.tolist() for step in steps] == [[False, False]] * 2 + [[True, True]]


class Sticky(Counting):
    """Draws from a generator of its own, which only a seed resets."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.own = np.random.default_rng(seed)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        _, *rest = super().step(action)
        return self.own.random(2).astype(np.float32), *rest


@pytest.mark.parametrize("wrappers", [(), ("holdfast.worlds.gym.seed_episodes:SeedEpisodes",)])
def test_seeded_episodes_of_envs_with_a_generator_of_their_own_resume(wrappers):
    world, resumed = (GymWorld(2, env=Sticky, wrappers=wrappers) for _ in range(2))
    world.reset()
    resumed.reset()
    actions = torch.zeros(2, dtype=torch.long)
    episodes = [world.step(actions).obs for _ in range(5)]
    assert not episodes[0].equal(episodes[3])
    assert (restore_world(resumed, save_world(world)) is None) == bool(wrappers)
    if wrappers:
        assert world.step(actions).obs.equal(resumed.step(actions).obs)


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        ("Scaled", r"missing a required argument: 'factor'; write test_wrappers:Scaled\(factor, \*, offset=0\)\.$"),
        ("Scaled(3, ofset=1)", r"'ofset'; did you mean offset\? Write test_wrappers:Scaled\(factor, \*, offset=0\)\.$"),
        ("Scaled(1, 2)", r"too many positional arguments; write test_wrappers:Scaled\(factor, \*, offset=0\)\.$"),
        ("Scaled(3", "'.' was never closed"),
        ("Scalde(3)", "has no class Scalde; did you mean .*:Scaled"),
        ("Unsigned(3)", "cannot be wrapped in test_wrappers:Unsigned.3.: ZeroDivisionError"),
    ],
)
def test_errors_name_the_wrapper_and_its_signature(wrapper, message):
    with pytest.raises(ConfigError, match=message) as caught:
        GymWorld(1, env=Counting, wrappers=[f"test_wrappers:{wrapper}"])
    assert f"test_wrappers:{wrapper.partition('(')[0]}" in str(caught.value)


def test_a_file_gives_no_arguments_to_functions(tmp_path):
    """`torch:save(env, FILE)` would overwrite any file."""
    target = tmp_path / "precious.txt"
    wrapper = f"torch:save({str(target)!r})"
    with names_from(tmp_path), pytest.raises(ConfigError, match="names a function that would be called: torch:save"):
        GymWorld(1, env="CartPole-v1", wrappers=[wrapper])
    assert not target.exists()
    with names_from(tmp_path):
        GymWorld(1, env="CartPole-v1", wrappers=["gymnasium.wrappers:TimeLimit(max_episode_steps=3)"])


def test_names_from_the_hub_are_not_imported(tmp_path):
    wrapper = "gymnasium.wrappers:TimeLimit(max_episode_steps=3)"
    with names_from(NameSource(str(tmp_path), False)), pytest.raises(ConfigError, match="names code that would be"):
        make_world("gym:CartPole-v1", 1, wrappers=(wrapper,))


def test_names_in_arguments_are_checked(tmp_path):
    (tmp_path / "stranger.py").write_text("raise SystemExit\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        with names_from(tmp_path), pytest.raises(ConfigError, match="names code that would be imported and run"):
            GymWorld(1, env="CartPole-v1", wrappers=["test_wrappers:Scaled(3, offset=['stranger:Class'])"])
        with trusting(True), names_from(tmp_path):
            GymWorld(1, env="CartPole-v1", wrappers=["test_wrappers:Scaled(3, offset=['stranger:Class'])"])
