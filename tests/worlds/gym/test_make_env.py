"""Finding environments by name, and errors of missing, wrong or failing ones."""

import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from helpers.gym_envs import MODES, TERMINATED, TRUNCATED, Counting, Sampling, counting
from holdfast.errors import ConfigError, ContractError
from holdfast.registry import load_module
from holdfast.worlds.gym import GymWorld

SCRIPTS = [[(3, TRUNCATED)], [(2, TERMINATED)]]


def first_obs(world):
    return world.reset().obs.tolist()


@pytest.fixture
def registered():
    gymnasium.register("Shown-v0", entry_point=lambda n: Sampling(spaces.Discrete(n)))
    yield
    del gymnasium.registry["Shown-v0"]


class Doubled(gymnasium.ObservationWrapper):
    def observation(self, observation):
        return 2 * observation


class OneMore(gymnasium.ObservationWrapper):
    def observation(self, observation):
        return observation + 1


def make_counting(agent=0):
    return Counting(agent)


def test_env_by_name_equals_env_by_object():
    expected = first_obs(GymWorld(2, env=Counting, options={"agent": 4}))
    assert expected == [[4000, -1]] * 2
    for env in ("helpers.gym_envs:Counting", "test_make_env:make_counting", make_counting):
        assert first_obs(GymWorld(2, env=env, options={"agent": 4})) == expected


@pytest.mark.usefixtures("registered")
def test_registered_id_with_its_module():
    for env in ("Shown-v0", "helpers.gym_envs:Shown-v0"):
        world = GymWorld(2, env=env, options={"n": 9})
        assert (world.spec.observation, world.name) == (spaces.Discrete(9), f"gym:{env}")


def test_wrappers_are_applied_innermost_first():
    one, other = "test_make_env:Doubled", "test_make_env:OneMore"
    for wrappers, number in (((one, other), 1), ((other, one), 2), ((Doubled, OneMore), 1)):
        assert first_obs(GymWorld(1, env=Counting, wrappers=wrappers))[0][0] == number


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"env": "CartPole-v9"}, r"gym:CartPole-v9 is not registered; did you mean gym:CartPole-v1\?"),
        ({"env": "Zzzzzzzz"}, r"gym:Zzzzzzzz is not registered; write package:ID for an id"),
        (
            {"env": "no_such_thing:X-v0"},
            "No module named 'no_such_thing'; is it on the Python path",
        ),
        (
            {"env": "helpers.gym_envs:Count"},
            "helpers.gym_envs:Count is not registered; did you mean gym:helpers.gym_envs:(Counting|count)",
        ),
        ({"env": "helpers.gym_envs:X-v0"}, "helpers.gym_envs:X-v0 is not registered"),
        (
            {"env": "CartPole-v1", "options": {"gravitas": 1}},
            "gym:CartPole-v1 cannot be made: TypeError.*gravitas",
        ),
        ({"env": Counting, "options": {"x": 1}}, "gym:Counting cannot be made: TypeError"),
        ({"env": lambda: 3}, "makes 3; it must make a gymnasium.Env"),
        (
            {"env": Counting, "wrappers": ["helpers.gym_envs:Nope"]},
            "world.wrappers=helpers.gym_envs:Nope: .* has no class Nope",
        ),
        (
            {"env": "CartPole-v1", "wrappers": "TimeLimit(max_episode_steps=5)"},
            r"did you mean gymnasium.wrappers:TimeLimit\(max_episode_steps=5\)\?",
        ),
        (
            {"env": Counting, "wrappers": [lambda env: 1 / 0]},
            "cannot be wrapped in <lambda>: ZeroDivisionError",
        ),
        ({"env": Counting, "vector": "native"}, "has no native vector environment"),
        ({"env": "Pendulum-v1", "vector": "native"}, "gym:Pendulum-v1 has no native vector environment"),
        ({"env": "CartPole-v1", "vector": "native", "wrappers": [Doubled]}, "world.wrappers cannot be used"),
        ({"env": "CartPole-v1", "vector": "native", "options": {"x": 1}}, "gym:CartPole-v1 cannot be made"),
        (
            {"env": "CartPole-v1", "vector": "native", "autoreset": "same_step"},
            "declares autoreset mode next_step, not same_step",
        ),
        ({"env": "CartPole-v1", "agents": 0}, "world.agents=0"),
    ],
)
def test_config_errors_say_what_to_type(call, message):
    with pytest.raises(ConfigError, match=message):
        GymWorld(**{"agents": 2, **call})


@pytest.mark.usefixtures("annotations_asleep")
def test_invalid_choices_are_rejected():
    for key, word in (("vector", "threads"), ("autoreset", "later")):
        with pytest.raises(ConfigError, match=f"world.{key}={word}: give one of"):
            GymWorld(2, env="CartPole-v1", **{key: word})
    with pytest.raises(ConfigError, match="every agent needs its own environment"):
        GymWorld(2, env=Counting())


def test_shared_or_unequal_envs_are_rejected():
    only = Counting()
    with pytest.raises(ConfigError, match="returned the same environment twice"):
        GymWorld(2, env=lambda: only)
    spaces_differ = iter([spaces.Discrete(2), spaces.Discrete(3)])
    with pytest.raises(ConfigError, match="cannot form a vector environment"):
        GymWorld(2, env=lambda: Sampling(next(spaces_differ)))


@pytest.mark.parametrize("key", ["env", "wrappers"])
def test_missing_package_names_its_extra(monkeypatch, key):
    for name in [name for name in sys.modules if name.split(".")[0] == "popgym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "popgym", None)
    named = {"env": "popgym:popgym-RepeatFirstEasy-v0"}
    if key == "wrappers":
        named = {"env": Counting, "wrappers": ["popgym.wrappers:Flatten"]}
    with pytest.raises(ConfigError, match=r"popgym is not installed; .*pip install .*\[popgym\]'"):
        GymWorld(2, **named)


@pytest.mark.parametrize(("package", "has_extra"), [("mettagrid", True), ("hub", False)])
def test_extra_is_named_for_the_package_it_installs(monkeypatch, package, has_extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as caught:
        load_module(f"{package}:Wrapper", package, "world.wrappers=")
    assert ("pip install" in str(caught.value)) == has_extra


class Breaks(Counting):
    """Fails as agent 1 in the first step of its second episode."""

    def __init__(self, agent, wrong):
        super().__init__(agent, SCRIPTS[agent])
        self.wrong = wrong

    def step(self, action):
        obs, *rest = super().step(action)
        if self.agent == 1 and self.episode == 1:
            obs, *rest = self.wrong(obs.copy(), *rest)
        return obs, *rest


def fall(*args):
    raise RuntimeError("the floor\nis gone")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (fall, r"step\(\) failed with RuntimeError: the floor is gone \(test_make_env.py:\d+\)\.$"),
        (lambda obs, *rest: (obs[:1], *rest), r"observation is \[1\] float32; its space is Box"),
        (lambda obs, *rest: (None, *rest), r"observation is \[\] object; its space is Box"),
        (lambda obs, *rest: (obs.astype(complex), *rest), "observation is .2. complex128; its space is Box"),
        (lambda obs, *rest: ([[1, 2], [3]], *rest), "observation has rows of several lengths"),
        (lambda obs, reward, *rest: (obs, None, *rest), r"step\(\) failed with TypeError: reward is None; it must be"),
        (lambda obs, *rest: (obs, 1.0), r"step\(\) failed with TypeError: it returned 2 values, not observation, rew"),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_env_errors_name_agent_and_step(mode, wrong, message):
    agents = iter(range(2))
    world = GymWorld(2, env=lambda: Breaks(next(agents), wrong), autoreset=mode)
    world.reset()
    calls = 3 if mode == "next_step" else 2
    for _ in range(calls):
        world.step(torch.zeros(2, dtype=torch.long))
    with pytest.raises(ContractError, match=rf"gym:<lambda>, agent 1, step {calls + 1}: {message}") as caught:
        world.step(torch.zeros(2, dtype=torch.long))
    assert caught.value.__cause__ is not None
    assert "\n" not in str(caught.value)


def test_a_reset_without_info_is_named():
    class Old(Counting):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=seed, options=options)[0]

    with pytest.raises(ContractError, match=r"TypeError: it returned one ndarray, not observation, info"):
        GymWorld(2, env=Old).reset()


def test_errors_in_reset_and_in_the_final_obs_name_the_agent():
    class Late(Counting):
        def reset(self, **how):
            return fall() if self.agent == 1 else super().reset(**how)

    agents = iter(range(2))
    world = GymWorld(2, env=lambda: Late(next(agents)))
    with pytest.raises(
        ContractError,
        match=r"agent 1, step 0: reset\(\) failed with RuntimeError: the floor is gone \(test_make_env.py:\d+\)",
    ):
        world.reset()
    agents = iter(range(2))
    ends = lambda obs, *rest: (obs[:1], 1.0, True, True, {})  # noqa: E731
    world = GymWorld(2, env=lambda: Breaks(next(agents), ends))
    world.reset()
    world.step(torch.zeros(2, dtype=torch.long))
    world.step(torch.zeros(2, dtype=torch.long))
    with pytest.raises(ContractError, match=r"agent 1, step 3: observation is \[1\] float32"):
        world.step(torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize(
    ("space", "obs", "message"),
    [
        (spaces.Discrete(3), 3, "observation is 3; its space is Discrete"),
        (spaces.Discrete(3), 0.5, r"observation is \[\] float64"),
        (spaces.Discrete(3), np.array([1]), r"observation is \[1\] int64"),
        (spaces.MultiDiscrete([2, 2], start=[1, 1]), np.array([0, 1]), r"observation is \[0, 1\]; its space"),
        (spaces.MultiBinary(2), np.array([0, 2]), r"observation is \[0, 2\]; its space"),
        (spaces.Dict({"x": spaces.Discrete(2)}), {"y": 1}, "observation is dict without 'x'"),
        (spaces.Dict({"x": spaces.Discrete(2)}), {"x": 2}, r"observation\['x'\] is 2; its space is Discrete"),
        (spaces.Tuple([spaces.Discrete(2)] * 2), (1,), "observation is tuple without 1"),
        (spaces.Tuple([spaces.Discrete(2)] * 2), 3, "observation is int without 0"),
    ],
)
def test_observations_outside_their_space_are_rejected(space, obs, message):
    class Lies(Sampling):
        agents = 0

        def __init__(self):
            super().__init__(space)
            self.agent, Lies.agents = Lies.agents, Lies.agents + 1

        def step(self, action):
            own_obs, *rest = super().step(action)
            return obs if self.agent == 2 else own_obs, *rest

    world = GymWorld(3, env=Lies)
    world.reset()
    with pytest.raises(ContractError, match=rf"gym:Lies, agent 2, step 1: {message}"):
        world.step(torch.zeros(3, dtype=torch.long))


class Forgetful(SyncVectorEnv):
    """Drops keys of the info at an end."""

    left_out = ("final_obs", "_final_obs")

    def step(self, actions):
        *rest, info = super().step(actions)
        return *rest, {key: value for key, value in info.items() if key not in self.left_out}


class Silent(Forgetful):
    """Declares no autoreset mode."""

    left_out = ()

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        del self.metadata["autoreset_mode"]


def vector_of(kind, mode):
    makes = [lambda make=make: make for make in (Sampling(spaces.Discrete(2)), Sampling(spaces.Discrete(2)))]
    return kind(makes, autoreset_mode=mode)


def test_missing_final_obs_is_an_error():
    world = GymWorld(2, env=vector_of(Forgetful, AutoresetMode.SAME_STEP))
    world.reset()
    for _ in range(2):
        world.step(torch.zeros(2, dtype=torch.long))
    message = r"agent 0, step 3: its episode ended .* info\['final_obs'\] has none"
    with pytest.raises(ContractError, match=message):
        world.step(torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize("mode", AutoresetMode)
def test_undeclared_autoreset_mode_must_be_configured(mode):
    word = dict(zip(AutoresetMode, ("next_step", "same_step", "disabled"), strict=True))[mode]
    with pytest.raises(ConfigError, match=r"does not declare its autoreset mode.*world.autoreset=same_step\|next_step"):
        GymWorld(2, env=vector_of(Silent, mode))
    world = GymWorld(2, env=vector_of(Silent, mode), autoreset=word)
    first = [world.reset().first] + [world.step(torch.zeros(2, dtype=torch.long)).first for _ in range(4)]
    late = mode is AutoresetMode.NEXT_STEP
    assert [bool(flags.all()) for flags in first] == [True, False, False, not late, late]


def test_reset_row_with_an_end_flag_is_an_error():
    """Same-step autoreset, configured as next-step."""
    makes = [lambda: Counting(0, [(1, TRUNCATED)])]
    env = Silent(makes, autoreset_mode=AutoresetMode.SAME_STEP)
    world = GymWorld(1, env=env, autoreset="next_step")
    world.reset()
    world.step(torch.zeros(1, dtype=torch.long))
    with pytest.raises(ContractError, match="agent 0, step 2: its reset observation comes with"):
        world.step(torch.zeros(1, dtype=torch.long))


def test_existing_vector_env_must_match_the_arguments():
    env = vector_of(SyncVectorEnv, AutoresetMode.SAME_STEP)
    with pytest.raises(ConfigError, match="has 2 environments; write agents=2, not 3"):
        GymWorld(3, env=env)
    with pytest.raises(ConfigError, match="apply options, wrappers and frame_stack where it is made"):
        GymWorld(2, env=env, options={"x": 1})


def test_batch_of_the_wrong_shape_is_an_error():
    class Narrow(SyncVectorEnv):
        def step(self, actions):
            obs, reward, *rest = super().step(actions)
            return (obs[:1], reward, *rest) if self.cut == "obs" else (obs, reward[:1], *rest)

    for cut, message in (
        ("obs", r"observation of 2 agents is \[1\] int64"),
        ("reward", r"reward is \[1\]; there are 2"),
    ):
        Narrow.cut = cut
        world = GymWorld(2, env=vector_of(Narrow, AutoresetMode.SAME_STEP))
        world.reset()
        with pytest.raises(ContractError, match=rf"step 1: {message}"):
            world.step(torch.zeros(2, dtype=torch.long))


def test_close_closes_every_env():
    made, make = [], counting([(3, TERMINATED)])
    world = GymWorld(3, env=lambda: made.append(make()) or made[-1])
    world.close()
    assert [env.closed for env in made] == [True] * 3
