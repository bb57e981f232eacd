"""Which environment a name means, and what is said of one that is missing, wrong or breaks."""

import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from gym_envs import MODES, TERMINATED, TRUNCATED, Counting, Shows, counting
from holdfast.errors import ConfigError, ContractError
from holdfast.worlds.gym import GymWorld

SCRIPTS = [[(3, TRUNCATED)], [(2, TERMINATED)]]


def shown(world):
    return world.reset().obs.tolist()


@pytest.fixture
def registered():
    gymnasium.register("Shown-v0", entry_point=lambda n: Shows(spaces.Discrete(n)))
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


def test_names_and_what_they_name_are_the_same():
    told = shown(GymWorld(2, env=Counting, options={"agent": 4}))
    assert told == [[4000, -1]] * 2
    for env in ("gym_envs:Counting", "test_gym_errors:make_counting", make_counting):
        assert shown(GymWorld(2, env=env, options={"agent": 4})) == told


@pytest.mark.usefixtures("registered")
def test_an_id_may_come_with_its_module():
    for env in ("Shown-v0", "gym_envs:Shown-v0"):
        world = GymWorld(2, env=env, options={"n": 9})
        assert (world.spec.observation, world.name) == (spaces.Discrete(9), f"gym:{env}")


def test_wrappers_go_around_in_their_order():
    one, other = "test_gym_errors:Doubled", "test_gym_errors:OneMore"
    for wrappers, number in (((one, other), 1), ((other, one), 2), ((Doubled, OneMore), 1)):
        assert shown(GymWorld(1, env=Counting, wrappers=wrappers))[0][0] == number


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({"env": "CartPole-v9"}, r"gym:CartPole-v9 is not registered; did you mean CartPole-v1\?"),
        ({"env": "Zzzzzzzz"}, r"gym:Zzzzzzzz is not registered; an id that a package registers goes by"),
        (
            {"env": "no_such_thing:X-v0"},
            "No module named 'no_such_thing'; is no_such_thing on the Python path",
        ),
        (
            {"env": "gym_envs:Count"},
            "gym_envs:Count is not registered; did you mean gym_envs:(Counting|count)",
        ),
        ({"env": "gym_envs:X-v0"}, "gym_envs:X-v0 is not registered"),
        (
            {"env": "CartPole-v1", "options": {"gravitas": 1}},
            "gym:CartPole-v1 cannot be made: TypeError.*gravitas",
        ),
        ({"env": Counting, "options": {"x": 1}}, "gym:Counting cannot be made: TypeError"),
        ({"env": lambda: 3}, "3 was made; what is wanted is a gymnasium.Env"),
        (
            {"env": Counting, "wrappers": ["gym_envs:Nope"]},
            "world.wrappers=gym_envs:Nope: .* has no class Nope",
        ),
        (
            {"env": Counting, "wrappers": [lambda env: 1 / 0]},
            "cannot be wrapped in <lambda>: ZeroDivisionError",
        ),
        ({"env": Counting, "vector": "native"}, "has no vector environment of its own"),
        ({"env": "Pendulum-v1", "vector": "native"}, "gym:Pendulum-v1 has no vector environment of its own"),
        ({"env": "CartPole-v1", "vector": "native", "wrappers": [Doubled]}, "cannot be wrapped"),
        ({"env": "CartPole-v1", "vector": "native", "options": {"x": 1}}, "gym:CartPole-v1 cannot be made"),
        (
            {"env": "CartPole-v1", "vector": "native", "autoreset": "same_step"},
            "restarts by next_step, not by",
        ),
        ({"env": "CartPole-v1", "agents": 0}, "world.agents=0"),
    ],
)
def test_a_wrong_call_says_what_to_type(call, told):
    with pytest.raises(ConfigError, match=told):
        GymWorld(**{"agents": 2, **call})


@pytest.mark.usefixtures("annotations_asleep")
def test_words_that_are_none_are_told():
    for key, word in (("vector", "threads"), ("autoreset", "later")):
        with pytest.raises(ConfigError, match=f"world.{key}={word}: give one of"):
            GymWorld(2, env="CartPole-v1", **{key: word})
    with pytest.raises(ConfigError, match="every agent needs an environment of its own"):
        GymWorld(2, env=Counting())


def test_one_environment_for_two_agents_is_refused():
    only = Counting()
    with pytest.raises(ConfigError, match="gave the same environment twice"):
        GymWorld(2, env=lambda: only)
    spaces_differ = iter([spaces.Discrete(2), spaces.Discrete(3)])
    with pytest.raises(ConfigError, match="do not go together"):
        GymWorld(2, env=lambda: Shows(next(spaces_differ)))


@pytest.mark.parametrize("key", ["env", "wrappers"])
def test_a_package_that_is_missing_names_its_extra(monkeypatch, key):
    for name in [each for each in sys.modules if each.split(".")[0] == "popgym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "popgym", None)
    named = {"env": "popgym:popgym-RepeatFirstEasy-v0"}
    if key == "wrappers":
        named = {"env": Counting, "wrappers": ["popgym.wrappers:Flatten"]}
    with pytest.raises(ConfigError, match=r"popgym is not installed; pip install 'holdfast\[popgym\]'"):
        GymWorld(2, **named)


class Breaks(Counting):
    """Does something wrong, as agent 1, in the fourth call (its second episode's first step)."""

    def __init__(self, agent, wrong):
        super().__init__(agent, SCRIPTS[agent])
        self.wrong = wrong

    def step(self, action):
        obs, *rest = super().step(action)
        if self.agent == 1 and self.episode == 1:
            obs, *rest = self.wrong(obs.copy(), *rest)
        return obs, *rest


def fall(*said):
    raise RuntimeError("the floor\nis gone")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (fall, r"step\(\) failed with RuntimeError: the floor is gone"),
        (lambda obs, *rest: (obs[:1], *rest), r"observation is \[1\] float32; its space is Box"),
        (lambda obs, *rest: (None, *rest), r"observation is \[\] object; its space is Box"),
        (lambda obs, *rest: (obs.astype(complex), *rest), "observation is .2. complex128; its space is Box"),
        (lambda obs, *rest: ([[1, 2], [3]], *rest), "observation has rows of several lengths"),
        (lambda obs, reward, *rest: (obs, None, *rest), r"step\(\) failed with TypeError: float"),
        (lambda obs, *rest: (obs, 1.0), r"step\(\) failed with ValueError: not enough values"),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_an_environment_that_breaks_is_named_with_agent_and_step(mode, wrong, told):
    agents = iter(range(2))
    world = GymWorld(2, env=lambda: Breaks(next(agents), wrong), autoreset=mode)
    world.reset()
    calls = 3 if mode == "next_step" else 2
    for _ in range(calls):
        world.step(torch.zeros(2, dtype=torch.long))
    with pytest.raises(ContractError, match=rf"gym:<lambda>, agent 1, step {calls + 1}: {told}") as caught:
        world.step(torch.zeros(2, dtype=torch.long))
    assert caught.value.__cause__ is not None
    assert "\n" not in str(caught.value)


def test_a_reset_that_breaks_is_named_and_so_is_a_last_observation():
    class Late(Counting):
        def reset(self, **how):
            return fall() if self.agent == 1 else super().reset(**how)

    agents = iter(range(2))
    world = GymWorld(2, env=lambda: Late(next(agents)))
    with pytest.raises(ContractError, match=r"agent 1, step 0: reset\(\) failed with RuntimeError"):
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
    ("space", "obs", "told"),
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
def test_what_is_shown_beside_its_space_is_told(space, obs, told):
    class Lies(Shows):
        agents = 0

        def __init__(self):
            super().__init__(space)
            self.agent, Lies.agents = Lies.agents, Lies.agents + 1

        def step(self, action):
            seen, *rest = super().step(action)
            return obs if self.agent == 2 else seen, *rest

    world = GymWorld(3, env=Lies)
    world.reset()
    with pytest.raises(ContractError, match=rf"gym:Lies, agent 2, step 1: {told}"):
        world.step(torch.zeros(3, dtype=torch.long))


class Forgetful(SyncVectorEnv):
    """Leaves something out of what it tells at an end."""

    left_out = ("final_obs", "_final_obs")

    def step(self, actions):
        *rest, info = super().step(actions)
        return *rest, {key: value for key, value in info.items() if key not in self.left_out}


class Silent(Forgetful):
    """Does not say how it restarts."""

    left_out = ()

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        del self.metadata["autoreset_mode"]


def vector_of(kind, mode):
    makes = [lambda make=make: make for make in (Shows(spaces.Discrete(2)), Shows(spaces.Discrete(2)))]
    return kind(makes, autoreset_mode=mode)


def test_an_end_without_its_last_observation_is_told():
    world = GymWorld(2, env=vector_of(Forgetful, AutoresetMode.SAME_STEP))
    world.reset()
    for _ in range(2):
        world.step(torch.zeros(2, dtype=torch.long))
    told = r"agent 0, step 3: its episode ended .* info\['final_obs'\] does not say what was last seen"
    with pytest.raises(ContractError, match=told):
        world.step(torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize("mode", AutoresetMode)
def test_who_does_not_say_how_it_restarts_must_be_declared(mode):
    word = dict(zip(AutoresetMode, ("next_step", "same_step", "disabled"), strict=True))[mode]
    with pytest.raises(
        ConfigError, match=r"does not say how it restarts.*world.autoreset=same_step\|next_step"
    ):
        GymWorld(2, env=vector_of(Silent, mode))
    world = GymWorld(2, env=vector_of(Silent, mode), autoreset=word)
    first = [world.reset().first] + [world.step(torch.zeros(2, dtype=torch.long)).first for _ in range(4)]
    late = mode is AutoresetMode.NEXT_STEP
    assert [bool(each.all()) for each in first] == [True, False, False, not late, late]


def test_a_restart_that_ends_at_once_is_told():
    """Declared wrong: what restarts in the same step, read as if it did in the next."""
    makes = [lambda: Counting(0, [(1, TRUNCATED)])]
    env = Silent(makes, autoreset_mode=AutoresetMode.SAME_STEP)
    world = GymWorld(1, env=env, autoreset="next_step")
    world.reset()
    world.step(torch.zeros(1, dtype=torch.long))
    with pytest.raises(
        ContractError, match="agent 0, step 2: it restarts, and its first observation comes with"
    ):
        world.step(torch.zeros(1, dtype=torch.long))


def test_a_ready_vector_environment_must_fit_the_call():
    env = vector_of(SyncVectorEnv, AutoresetMode.SAME_STEP)
    with pytest.raises(ConfigError, match="has 2 environments; write agents=2, not 3"):
        GymWorld(3, env=env)
    with pytest.raises(ConfigError, match="give options and wrappers to what makes it"):
        GymWorld(2, env=env, options={"x": 1})


def test_a_batch_of_the_wrong_shape_is_told():
    class Narrow(SyncVectorEnv):
        def step(self, actions):
            obs, reward, *rest = super().step(actions)
            return (obs[:1], reward, *rest) if self.cut == "obs" else (obs, reward[:1], *rest)

    for cut, told in (
        ("obs", r"observation of 2 agents is \[1\] int64"),
        ("reward", r"reward is \[1\]; there are 2"),
    ):
        Narrow.cut = cut
        world = GymWorld(2, env=vector_of(Narrow, AutoresetMode.SAME_STEP))
        world.reset()
        with pytest.raises(ContractError, match=rf"step 1: {told}"):
            world.step(torch.zeros(2, dtype=torch.long))


def test_closing_closes_every_environment():
    made, make = [], counting([(3, TERMINATED)])
    world = GymWorld(3, env=lambda: made.append(make()) or made[-1])
    world.close()
    assert [env.closed for env in made] == [True] * 3
