"""Which parallel environment a name means, what is said of one that breaks, and how it goes on."""

import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from pettingzoo.utils import BaseParallelWrapper

from holdfast.errors import ConfigError, ContractError
from holdfast.worlds import make_world
from holdfast.worlds.going_on import go_on, state_of
from holdfast.worlds.pettingzoo import PettingZooWorld
from holdfast.worlds.watched import Watched
from zoo_envs import NAMES, TERMINATED, TRUNCATED, OneByOne, Visits

parallel_env = Visits
"""So this module is one that PettingZoo's names mean."""
ENDING = ({"ann": [(0, 2, TRUNCATED)], "bob": [(0, 4, TERMINATED)], "cy": [(1, 4, TRUNCATED)]},)


class Doubled(BaseParallelWrapper):
    """Shows everything twice as large."""

    def reset(self, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        return {name: 2 * each for name, each in obs.items()}, info

    def step(self, actions):
        obs, *rest = super().step(actions)
        return {name: 2 * each for name, each in obs.items()}, *rest


class Uneven(Visits):
    """Of whom one sees more, or does more."""

    def __init__(self, sees=3, takes=3):
        super().__init__()
        self.more = {"sees": sees, "takes": takes}

    def observation_space(self, agent):
        return spaces.Box(-1, 1, (self.more["sees"] if agent == "cy" else 3,))

    def action_space(self, agent):
        return spaces.Discrete(self.more["takes"] if agent == "bob" else 3)


class Called:
    """Is no environment, and must not be made."""

    def __init__(self, asked):
        raise AssertionError("it was called")


class Nobody(Visits):
    """In which nobody may be."""

    possible_agents = ()


class Silent(Visits):
    """Does not say what is seen."""

    def observation_space(self, agent):
        raise KeyError(agent)


def shown(world):
    return world.reset().obs[:, 0].tolist()


def act(world):
    return world.step(torch.zeros(world.agents, dtype=torch.long))


def test_names_and_what_they_name_are_the_same():
    for env in ("test_pettingzoo_errors", "zoo_envs:Visits", Visits, lambda: Visits()):
        assert shown(PettingZooWorld(3, env=env)) == [0, 1000, 2000]
    world = make_world("pettingzoo:zoo_envs:Visits", agents=3, wrappers=("test_pettingzoo_errors:Doubled",))
    assert (shown(world), world.name) == ([0, 2000, 4000], "pettingzoo:zoo_envs:Visits")
    world.step(torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            {"env": "zoo_envs"},
            "zoo_envs has no parallel_env; name the function or class .* pettingzoo:zoo_envs:N",
        ),
        ({"env": "no_such_zoo"}, "No module named 'no_such_zoo'; is no_such_zoo on the Python path"),
        ({"env": "zoo_envs:Visit"}, "zoo_envs has no class Visit. did you mean Visits"),
        ({"env": "zoo_envs:NAMES"}, "is no function or class that makes a parallel environment"),
        (
            {"env": OneByOne},
            "one acts after the other.*world.wrappers=pettingzoo.utils.conversions:aec_to_par",
        ),
        ({"env": lambda: 3}, "3 was made; what is wanted is a pettingzoo.ParallelEnv"),
        ({"env": Visits, "options": {"x": 1}}, "pettingzoo:Visits cannot be made: TypeError"),
        (
            {"env": Visits, "wrappers": [lambda env: 1 / 0]},
            "cannot be wrapped in <lambda>: ZeroDivisionError",
        ),
        ({"env": Nobody}, "its possible_agents are empty"),
        ({"env": Silent}, "pettingzoo:Silent does not say its spaces: KeyError: 'ann'"),
        (
            {"env": Uneven, "options": {"sees": 5}},
            r"the observations of ann are Box.*\(3,\).*, those of cy are Box.*\(5,\).*; all must be equal. "
            "If they differ in size, pad them: world.wrappers=supersuit:pad_observations_v0",
        ),
        (
            {"env": Uneven, "options": {"takes": 4}},
            r"the actions of ann are Discrete\(3\), those of bob are Discrete\(4\); .*supersuit:pad_action",
        ),
        ({"env": Visits, "keep": (7,)}, "world.keep=7: the numbers shown are 0 to 2"),
    ],
)
def test_a_wrong_call_says_what_to_type(call, told):
    with pytest.raises(ConfigError, match=told):
        PettingZooWorld(**{"agents": 3, **call})


def test_environments_that_are_not_each_other_are_refused():
    only = Visits()
    with pytest.raises(ConfigError, match="gave the same environment twice"):
        PettingZooWorld(6, env=lambda: only)
    kinds = iter([Visits(), Visits(takes=spaces.Discrete(7))])
    with pytest.raises(ConfigError, match="with other agents or spaces each time"):
        PettingZooWorld(6, env=lambda: next(kinds))


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(
        ConfigError, match=r"pettingzoo is not installed; pip install 'holdfast\[pettingzoo\]'"
    ):
        PettingZooWorld(3, env="zoo_envs:Visits")


class Breaks(Visits):
    """Does something wrong in its second step, in the second of two environments."""

    made = 0

    def __init__(self, wrong):
        super().__init__()
        self.wrong, self.number, Breaks.made = wrong, Breaks.made, Breaks.made + 1

    def step(self, actions):
        said = super().step(actions)
        return self.wrong(self, *said) if self.number == 1 and self.age == 2 else said


def falls(env, *said):
    raise RuntimeError("the floor\nis gone")


def vanishes(env, *said):
    env.agents = ["ann", "cy"]
    return said


def stays(env, obs, reward, terminated, *rest):
    return obs, reward, {**terminated, "bob": True}, *rest


def leaves_unseen(env, obs, reward, terminated, truncated, info):
    env.agents = ["ann", "cy"]
    return {name: obs[name] for name in env.agents}, reward, terminated, {**truncated, "bob": True}, info


def is_joined_by_a_stranger(env, *said):
    env.agents = [*env.agents, "zed"]
    return said


def without(place):
    def forgets(env, *said):
        told = list(said)
        told[place] = {name: each for name, each in told[place].items() if name != "bob"}
        return tuple(told)

    return forgets


def shows_less(env, obs, *rest):
    return {**obs, "bob": obs["bob"][:2]}, *rest


BOB = r"agent 4 \(bob of environment 1\)"


@pytest.mark.parametrize(
    ("wrong", "whose", "told"),
    [
        (falls, "environment 1", r"step\(\) failed with RuntimeError: the floor is gone"),
        (vanishes, BOB, "it is not in agents any more, but neither terminated nor"),
        (stays, BOB, r"its episode is over .* and it is still in agents; take it ou"),
        (leaves_unseen, BOB, "it was truncated, and what it saw last is not among"),
        (is_joined_by_a_stranger, "environment 1", "agents has 'zed', who is not in possible_agents"),
        (without(0), BOB, "it is told no observation"),
        (without(1), BOB, "it is told no reward"),
        (without(2), BOB, "it is told no terminated"),
        (shows_less, BOB, r"observation is \[2\] float32; its space is Box"),
        (lambda env, *said: said[:3], "environment 1", r"step\(\) failed with ValueError: not enough values"),
    ],
)
def test_an_environment_that_breaks_is_named_with_agent_and_step(monkeypatch, wrong, whose, told):
    monkeypatch.setattr(Breaks, "made", 0)
    world = PettingZooWorld(6, env=Breaks, options={"wrong": wrong})
    world.reset()
    act(world)
    with pytest.raises(ContractError, match=rf"^pettingzoo:Breaks, {whose}, step 2: {told}") as caught:
        act(world)
    assert "\n" not in str(caught.value)


def test_of_a_share_everybody_is_named_as_in_the_whole(monkeypatch):
    monkeypatch.setattr(Breaks, "made", 1)
    world = PettingZooWorld(3, env=Breaks, options={"wrong": vanishes})
    world.count_from(9)
    world.reset()
    act(world)
    with pytest.raises(
        ContractError, match=r"agent 10 \(bob of environment 3\), step 2: it is not in agents"
    ):
        act(world)


def test_who_was_terminated_need_not_be_shown_anything():
    def dies_unseen(env, obs, reward, terminated, *rest):
        env.agents = ["ann", "cy"]
        return {name: obs[name] for name in env.agents}, reward, {**terminated, "bob": True}, *rest

    Breaks.made = 1
    world = Watched(PettingZooWorld(3, env=Breaks, options={"wrong": dies_unseen}))
    world.reset()
    act(world)
    step = act(world)
    assert (step.terminated.tolist(), step.valid.tolist()) == ([False, True, False], [True, False, True])
    assert act(world).first.all()


def test_an_episode_that_nobody_is_in_is_told():
    world = PettingZooWorld(3, env=Visits, options={"script": ({},)})
    with pytest.raises(ContractError, match="environment 0, step 0: nobody is there when its episode begins"):
        world.reset()


def test_a_step_before_a_reset_is_told():
    world = PettingZooWorld(3, env=Visits)
    with pytest.raises(ContractError, match=r"Call reset\(\) before the first step"):
        act(world)
    with pytest.raises(ContractError, match=r"Call reset\(\) before state"):
        world.state()


def same_life(one, other, steps, seed):
    dice = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        actions = torch.randint(3, (one.agents,), generator=dice)
        a, b = one.step(actions), other.step(actions)
        for name in ("reward", "terminated", "truncated", "first", "valid", "last_obs", "obs"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 14), st.integers(0, 3), st.booleans())
def test_it_goes_on_from_anywhere(before, seed, boxed):
    takes = spaces.MultiDiscrete([3, 300], start=[0, 7]) if boxed else spaces.Discrete(300, start=9)
    dice = torch.Generator().manual_seed(seed)
    make = lambda: Watched(  # noqa: E731
        PettingZooWorld(6, env=Visits, options={"script": ENDING, "takes": takes}, seed=seed)
    )
    one, other, size = make(), make(), (6, 2) if boxed else (6,)
    pending = one.reset()
    for _ in range(before):
        pending = one.step(torch.randint(3, size, generator=dice))
    step, anew = go_on(other, state_of(one), pending)
    assert anew is None
    assert torch.equal(step.obs, pending.obs)
    for _ in range(9):
        actions = torch.randint(3, size, generator=dice)
        a, b = one.step(actions), other.step(actions)
        for name in ("reward", "terminated", "truncated", "first", "valid", "last_obs", "obs"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


class Hidden(Visits):
    """In the second environment, shows what no seed decides."""

    made = 0

    def __init__(self):
        super().__init__(ENDING)
        self.number, Hidden.made = Hidden.made % 2, Hidden.made + 1

    def show(self, name, action):
        seen = super().show(name, action)
        if self.number == 1:
            seen[1] = Hidden.made + np.random.default_rng().random()
        return seen


def test_an_environment_that_hides_its_randomness_begins_its_next_episode_alone():
    one, other = (Watched(PettingZooWorld(6, env=Hidden, seed=2)) for _ in range(2))
    one.reset()
    for _ in range(3):
        pending = act(one)
    state = state_of(one)
    step, anew = go_on(other, state, pending)
    assert anew.who.tolist() == [False] * 3 + [True] * 3
    assert "another one: more decides it than seed and actions (1 of 2 environments)" in anew.why
    # Cy comes a step later.
    assert (step.first.tolist(), step.valid.tolist()) == (
        [False] * 3 + [True] * 3,
        [False, True, True, True, True, False],
    )
    assert step.obs[3:5, 0].tolist() == [0, 1000]
    lucks = [float(pending.obs[4, 2]), float(step.obs[4, 2])]
    going = act(other)
    assert torch.equal(going.obs[:3], act(one).obs[:3])
    assert going.first.tolist() == [True, True, False, False, False, True]
    while not going.first[4]:
        going = act(other)
    # No episode is lived twice.
    assert len({*lucks, float(going.obs[4, 2])}) == 3


class Wanders(Visits):
    """Draws something that is not shown, more of it each time."""

    times = 0

    def step(self, actions):
        Wanders.times += 1
        self.np_random.random(Wanders.times)
        return super().step(actions)


def test_a_generator_that_is_elsewhere_is_seen():
    one, other = (PettingZooWorld(3, env=Wanders) for _ in range(2))
    one.reset()
    act(one)
    assert "lived again, its episode is another one" in other.restore(one.state()).why


def test_a_state_of_another_world_is_refused():
    world = PettingZooWorld(6, env=Visits)
    world.reset()
    state = world.state()
    for other in (PettingZooWorld(6, env=Visits, seed=1), PettingZooWorld(3, env=Visits)):
        with pytest.raises(ContractError, match="What was saved does not fit"):
            other.restore(state)
    for wrong in ({"envs": state["envs"][:1]}, {"envs": [{}, {}]}, {"clock": "x"}):
        with pytest.raises(ContractError, match="What was saved does not fit"):
            world.restore({**state, **wrong})


def test_a_real_one_goes_on():
    pytest.importorskip("mpe2")
    one, other = (make_world("pettingzoo:mpe2.simple_spread_v3", agents=6, seed=1) for _ in range(2))
    one.reset()
    for _ in range(30):
        act(one)
    assert other.restore(one.state()) is None
    same_life(one, other, 30, 0)


def test_everybody_in_possible_agents_has_a_row():
    assert PettingZooWorld(3, env=Visits).spec.crowd == len(NAMES)
