"""Finding parallel environments by name, errors of failing ones, and resume."""

import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from pettingzoo.utils import BaseParallelWrapper

from helpers.pettingzoo_envs import NAMES, TERMINATED, TRUNCATED, OneByOne, Visits
from holdfast.errors import ConfigError, ContractError
from holdfast.worlds import make_world
from holdfast.worlds.checked_world import CheckedWorld
from holdfast.worlds.pettingzoo import PettingZooWorld
from holdfast.worlds.save_restore import resume_world, save_world

parallel_env = Visits
"""Makes this module a PettingZoo environment module."""
ENDING = ({"ann": [(0, 2, TRUNCATED)], "bob": [(0, 4, TERMINATED)], "cy": [(1, 4, TRUNCATED)]},)


class Doubled(BaseParallelWrapper):
    """Doubles all observations."""

    def reset(self, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        return {name: 2 * value for name, value in obs.items()}, info

    def step(self, actions):
        obs, *rest = super().step(actions)
        return {name: 2 * value for name, value in obs.items()}, *rest


class Uneven(Visits):
    """One agent has a larger space than the rest."""

    def __init__(self, obs_size=3, actions=3):
        super().__init__()
        self.obs_size, self.actions = obs_size, actions

    def observation_space(self, agent):
        return spaces.Box(-1, 1, (self.obs_size if agent == "cy" else 3,))

    def action_space(self, agent):
        return spaces.Discrete(self.actions if agent == "bob" else 3)


class Called:
    """Is no environment, and must not be called."""

    def __init__(self, option):
        raise AssertionError("it was called")


class Empty(Visits):
    """Has no possible agents."""

    possible_agents = ()


class Silent(Visits):
    """Has no observation space."""

    def observation_space(self, agent):
        raise KeyError(agent)


def first_obs(world):
    return world.reset().obs[:, 0].tolist()


def act(world):
    return world.step(torch.zeros(world.agents, dtype=torch.long))


def test_parallel_env_by_name_equals_env_by_object():
    for env in ("test_parallel_env", "helpers.pettingzoo_envs:Visits", Visits, lambda: Visits()):
        assert first_obs(PettingZooWorld(3, env=env)) == [0, 1000, 2000]
    world = make_world("pettingzoo:helpers.pettingzoo_envs:Visits", agents=3, wrappers=("test_parallel_env:Doubled",))
    assert (first_obs(world), world.name) == ([0, 2000, 4000], "pettingzoo:helpers.pettingzoo_envs:Visits")
    world.step(torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            {"env": "helpers.pettingzoo_envs"},
            "has no parallel_env; name the function or class .* pettingzoo:helpers.pettingzoo_envs:N",
        ),
        ({"env": "no_such_zoo"}, "No module named 'no_such_zoo'; is it on the Python path"),
        ({"env": "helpers.pettingzoo_envs:Visit"}, "pettingzoo_envs has no class Visit; did you mean .*:Visits"),
        (
            {"env": "helpers.pettingzoo_envs:NAMES"},
            "is not a function or class that makes a parallel environment",
        ),
        (
            {"env": OneByOne},
            "agents act in turns.*world.wrappers=pettingzoo.utils.conversions:aec_to_par",
        ),
        ({"env": lambda: 3}, "makes 3; it must make a pettingzoo.ParallelEnv"),
        ({"env": Visits, "options": {"x": 1}}, "pettingzoo:Visits cannot be made: TypeError"),
        (
            {"env": Visits, "wrappers": [lambda env: 1 / 0]},
            "cannot be wrapped in <lambda>: ZeroDivisionError",
        ),
        ({"env": Empty}, "its possible_agents are empty"),
        ({"env": Silent}, "pettingzoo:Silent does not give its spaces: KeyError: 'ann'"),
        (
            {"env": Uneven, "options": {"obs_size": 5}},
            r"the observation space of ann is Box.*\(3,\).*, that of cy is Box.*\(5,\).*; all must be equal. "
            "If they differ in size, pad them: world.wrappers=supersuit:pad_observations_v0",
        ),
        (
            {"env": Uneven, "options": {"actions": 4}},
            r"the action space of ann is Discrete\(3\), that of bob is Discrete\(4\); .*supersuit:pad_action",
        ),
        ({"env": Visits, "keep": (7,)}, "world.keep=7: the indices are 0 to 2"),
    ],
)
def test_config_errors_of_parallel_envs_say_what_to_type(call, message):
    with pytest.raises(ConfigError, match=message):
        PettingZooWorld(**{"agents": 3, **call})


def test_shared_or_unequal_parallel_envs_are_rejected():
    only = Visits()
    with pytest.raises(ConfigError, match="returned the same environment twice"):
        PettingZooWorld(6, env=lambda: only)
    kinds = iter([Visits(), Visits(act_space=spaces.Discrete(7))])
    with pytest.raises(ConfigError, match="with different agents or spaces"):
        PettingZooWorld(6, env=lambda: next(kinds))


def test_missing_pettingzoo_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(ConfigError, match=r"pettingzoo is not installed; .*pip install .*\[pettingzoo\]'"):
        PettingZooWorld(3, env="helpers.pettingzoo_envs:Visits")


class Breaks(Visits):
    """Fails in its second step, in the second of two environments."""

    made = 0

    def __init__(self, wrong):
        super().__init__()
        self.wrong, self.number, Breaks.made = wrong, Breaks.made, Breaks.made + 1

    def step(self, actions):
        outputs = super().step(actions)
        return self.wrong(self, *outputs) if self.number == 1 and self.age == 2 else outputs


def falls(env, *outputs):
    raise RuntimeError("the floor\nis gone")


def vanishes(env, *outputs):
    env.agents = ["ann", "cy"]
    return outputs


def stays(env, obs, reward, terminated, *rest):
    return obs, reward, {**terminated, "bob": True}, *rest


def leaves_unseen(env, obs, reward, terminated, truncated, info):
    env.agents = ["ann", "cy"]
    return {name: obs[name] for name in env.agents}, reward, terminated, {**truncated, "bob": True}, info


def adds_unknown_agent(env, *outputs):
    env.agents = [*env.agents, "zed"]
    return outputs


def without(index):
    def drop(env, *outputs):
        outputs = list(outputs)
        outputs[index] = {name: value for name, value in outputs[index].items() if name != "bob"}
        return tuple(outputs)

    return drop


def shows_less(env, obs, *rest):
    return {**obs, "bob": obs["bob"][:2]}, *rest


BOB = r"agent 4 \(bob of environment 1\)"


@pytest.mark.parametrize(
    ("wrong", "place", "message"),
    [
        (falls, "environment 1", r"step\(\) failed with RuntimeError: the floor is gone"),
        (vanishes, BOB, "it is not in agents any more, but neither terminated nor"),
        (stays, BOB, r"its episode is over .* and it is still in agents; remove it"),
        (leaves_unseen, BOB, "it was truncated, but has no final observation"),
        (adds_unknown_agent, "environment 1", "agents has 'zed', which is not in possible_agents"),
        (without(0), BOB, "it has no observation"),
        (without(1), BOB, "it has no reward"),
        (without(2), BOB, "it has no terminated"),
        (shows_less, BOB, r"observation is \[2\] float32; its space is Box"),
        (
            lambda env, *outputs: outputs[:3],
            "environment 1",
            r"step\(\) failed with ValueError: not enough values",
        ),
    ],
)
def test_parallel_env_errors_name_agent_and_step(monkeypatch, wrong, place, message):
    monkeypatch.setattr(Breaks, "made", 0)
    world = PettingZooWorld(6, env=Breaks, options={"wrong": wrong})
    world.reset()
    act(world)
    with pytest.raises(ContractError, match=rf"^pettingzoo:Breaks, {place}, step 2: {message}") as caught:
        act(world)
    assert "\n" not in str(caught.value)


def test_error_in_a_shard_names_the_global_agent(monkeypatch):
    monkeypatch.setattr(Breaks, "made", 1)
    world = PettingZooWorld(3, env=Breaks, options={"wrong": vanishes})
    world.set_agent_offset(9)
    world.reset()
    act(world)
    with pytest.raises(ContractError, match=r"agent 10 \(bob of environment 3\), step 2: it is not in agents"):
        act(world)


def test_terminated_agent_needs_no_final_obs():
    def dies_unseen(env, obs, reward, terminated, *rest):
        env.agents = ["ann", "cy"]
        return {name: obs[name] for name in env.agents}, reward, {**terminated, "bob": True}, *rest

    Breaks.made = 1
    world = CheckedWorld(PettingZooWorld(3, env=Breaks, options={"wrong": dies_unseen}))
    world.reset()
    act(world)
    step = act(world)
    assert (step.terminated.tolist(), step.valid.tolist()) == ([False, True, False], [True, False, True])
    assert act(world).first.all()


def test_episode_without_agents_is_an_error():
    world = PettingZooWorld(3, env=Visits, options={"script": ({},)})
    with pytest.raises(ContractError, match="environment 0, step 0: no agent is present at the episode start"):
        world.reset()


def test_step_before_reset_is_an_error():
    world = PettingZooWorld(3, env=Visits)
    with pytest.raises(ContractError, match=r"Call reset\(\) before the first step"):
        act(world)
    with pytest.raises(ContractError, match=r"Call reset\(\) before state"):
        world.state()


def assert_same_steps(one, other, steps, seed):
    dice = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        actions = torch.randint(3, (one.agents,), generator=dice)
        a, b = one.step(actions), other.step(actions)
        for name in ("reward", "terminated", "truncated", "first", "valid", "last_obs", "obs"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 14), st.integers(0, 3), st.booleans())
def test_resume_at_any_step_replays_the_episode(before, seed, boxed):
    act_space = spaces.MultiDiscrete([3, 300], start=[0, 7]) if boxed else spaces.Discrete(300, start=9)
    dice = torch.Generator().manual_seed(seed)
    make = lambda: CheckedWorld(  # noqa: E731
        PettingZooWorld(6, env=Visits, options={"script": ENDING, "act_space": act_space}, seed=seed)
    )
    one, other, size = make(), make(), (6, 2) if boxed else (6,)
    pending = one.reset()
    for _ in range(before):
        pending = one.step(torch.randint(3, size, generator=dice))
    step, restarted = resume_world(other, save_world(one), pending)
    assert restarted is None
    assert torch.equal(step.obs, pending.obs)
    for _ in range(9):
        actions = torch.randint(3, size, generator=dice)
        a, b = one.step(actions), other.step(actions)
        for name in ("reward", "terminated", "truncated", "first", "valid", "last_obs", "obs"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


class Hidden(Visits):
    """Observations of the second environment depend on more than the seed."""

    made = 0

    def __init__(self):
        super().__init__(ENDING)
        self.number, Hidden.made = Hidden.made % 2, Hidden.made + 1

    def show(self, name, action):
        obs = super().show(name, action)
        if self.number == 1:
            obs[1] = Hidden.made + np.random.default_rng().random()
        return obs


def test_env_with_hidden_randomness_starts_its_next_episode_on_resume():
    one, other = (CheckedWorld(PettingZooWorld(6, env=Hidden, seed=2)) for _ in range(2))
    one.reset()
    for _ in range(3):
        pending = act(one)
    state = save_world(one)
    step, restarted = resume_world(other, state, pending)
    assert restarted.mask.tolist() == [False] * 3 + [True] * 3
    assert "differs: it depends on more than seed and actions (1 of 2 environments)" in restarted.reason
    # Cy joins a step later.
    assert (step.first.tolist(), step.valid.tolist()) == (
        [False] * 3 + [True] * 3,
        [False, True, True, True, True, False],
    )
    assert step.obs[3:5, 0].tolist() == [0, 1000]
    lucks = [float(pending.obs[4, 2]), float(step.obs[4, 2])]
    after = act(other)
    assert torch.equal(after.obs[:3], act(one).obs[:3])
    assert after.first.tolist() == [True, True, False, False, False, True]
    while not after.first[4]:
        after = act(other)
    # No episode is repeated.
    assert len({*lucks, float(after.obs[4, 2])}) == 3


class Wanders(Visits):
    """Draws hidden numbers, more each time."""

    times = 0

    def step(self, actions):
        Wanders.times += 1
        self.np_random.random(Wanders.times)
        return super().step(actions)


def test_different_generator_state_after_replay_is_detected():
    one, other = (PettingZooWorld(3, env=Wanders) for _ in range(2))
    one.reset()
    act(one)
    assert "the replayed episode differs" in other.restore(one.state()).reason


def test_state_of_another_world_is_rejected():
    world = PettingZooWorld(6, env=Visits)
    world.reset()
    state = world.state()
    for other in (PettingZooWorld(6, env=Visits, seed=1), PettingZooWorld(3, env=Visits)):
        with pytest.raises(ContractError, match="Checkpoint does not match this run"):
            other.restore(state)
    for wrong in ({"envs": state["envs"][:1]}, {"envs": [{}, {}]}, {"clock": "x"}):
        with pytest.raises(ContractError, match="Checkpoint does not match this run"):
            world.restore({**state, **wrong})


def test_mpe2_resumes():
    pytest.importorskip("mpe2")
    one, other = (make_world("pettingzoo:mpe2.simple_spread_v3", agents=6, seed=1) for _ in range(2))
    one.reset()
    for _ in range(30):
        act(one)
    assert other.restore(one.state()) is None
    assert_same_steps(one, other, 30, 0)


def test_agents_per_env_is_the_number_of_possible_agents():
    assert PettingZooWorld(3, env=Visits).spec.agents_per_env == len(NAMES)
