"""A restored world continues bit for bit as if it had not stopped."""

import random
import re
import warnings
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tensor_world import SHORT, TRUNCATING

from helpers.gym_envs import MODES, TERMINATED, TRUNCATED, Counting, Sampling
from helpers.recorded_graph import RecordedWorld, capture_on_cpu
from holdfast import rng
from holdfast.config.worlds import WORLD_CONFIGS
from holdfast.errors import ContractError
from holdfast.worlds import Step, WorldSpec, closing_world, make_world
from holdfast.worlds.checked_world import CheckedWorld, checked
from holdfast.worlds.gym import GymWorld, episode_log
from holdfast.worlds.mixture import Mixture
from holdfast.worlds.obs import flat_leaves
from holdfast.worlds.previous_inputs import WithPreviousInputs
from holdfast.worlds.save_restore import NOT_RESTORABLE, restore_world, resume_world, save_world
from holdfast.worlds.step import Restarted, Restorable
from holdfast.worlds.tensor_world import CudaGraphStep

FEW = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
PARTS = "recall delay=1 weight=2 + n_back length=6 + ragged"


def some_actions(world, steps, seed=0):
    dice = torch.Generator().manual_seed(seed)
    space = world.spec.action
    if isinstance(space, spaces.Box):
        return list(2 * torch.rand(steps, world.agents, *space.shape, generator=dice) - 1)
    if space is not None:
        return [
            torch.stack([torch.randint(int(n), (world.agents,), generator=dice) for n in space.nvec], 1)
            for _ in range(steps)
        ]
    return list(torch.randint(len(world.spec.action_names), (steps, world.agents), generator=dice))


def take_steps(world, actions):
    return [world.step(each) for each in actions]


def leaves(step):
    result = {}
    for field in fields(Step):
        result |= flat_leaves(getattr(step, field.name), field.name) if getattr(step, field.name) is not None else {}
    return result


def same_step(one, other):
    a, b = leaves(one), leaves(other)
    return a.keys() == b.keys() and all(a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]) for key in a)


def same_steps(one, other):
    return len(one) == len(other) and all(map(same_step, one, other))


def same_tree(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_tree(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_tree, one, other))
    if isinstance(one, torch.Tensor | np.ndarray):
        return one.dtype == other.dtype and bool((one == other).all())
    return type(one) is type(other) and one == other


def inside(world):
    return world.world if isinstance(world, CheckedWorld) else world


def interrupted(make, before, after, seed=0):
    """Step, save, step on; and the same from the state in another world: both step lists and Restarted."""
    one, other = make(), make()
    with closing_world(inside(one)), closing_world(inside(other)):
        actions = some_actions(one, before + after, seed)
        pending = one.reset()
        for action in actions[:before]:
            pending = one.step(action)
        state = save_world(one)
        state_copy, pending_copy = deepcopy(state), deepcopy(pending)
        full_run = take_steps(one, actions[before:])
        assert same_tree(state, state_copy), "the state changed when the world went on"
        step, restarted = resume_world(other, state_copy, pending_copy)
        rest = take_steps(other, actions[before:])
        assert same_tree(state, state_copy), "the state changed when another world went on from it"
    return [pending, *full_run], [step, *rest], restarted


def goes_on(make, before, after, seed=0):
    full_run, rest, restarted = interrupted(make, before, after, seed)
    return restarted is None and same_steps(full_run, rest)


@pytest.mark.parametrize("name", sorted(WORLD_CONFIGS))
@FEW
@given(st.integers(-9, 9), st.integers(0, 25), st.booleans())
def test_restore_builtin_worlds(name, seed, before, truncate):
    options = {**SHORT[name], **({"truncate": truncate} if name in TRUNCATING else {})}
    assert goes_on(lambda: make_world(name, agents=24, seed=seed, **options), before, 20, seed)
    assert goes_on(lambda: checked(make_world(name, agents=24, seed=seed, **options)), before, 20, seed)


@FEW
@given(st.integers(-9, 9), st.integers(0, 25))
def test_restore_mixture(seed, before):
    assert goes_on(lambda: checked(make_world("mixture", agents=24, seed=seed, parts=PARTS)), before, 20)


@pytest.mark.parametrize("name", sorted(WORLD_CONFIGS))
def test_restore_into_a_used_world(name):
    one, other = (make_world(name, agents=24, **SHORT[name]) for _ in range(2))
    actions = some_actions(one, 30)
    one.reset()
    take_steps(one, actions[:11])
    state = save_world(one)
    full_run = take_steps(one, actions[11:])
    other.reset()
    steps = take_steps(other, actions[::-1])
    copies = deepcopy(steps)
    assert restore_world(other, state) is None
    assert same_steps(take_steps(other, actions[11:]), full_run)
    assert same_steps(steps, copies)


def cart_poles(**options):
    return GymWorld(3, env="CartPole-v1", **{"seed": 4, **options})


@pytest.mark.parametrize("mode", MODES)
@FEW
@given(st.integers(-9, 9), st.integers(0, 60), st.sampled_from(["CartPole-v1", "Acrobot-v1", "Pendulum-v1"]))
def test_restore_gymnasium(mode, seed, before, env):
    options = {"max_episode_steps": 11}
    make = lambda: checked(GymWorld(2, env=env, seed=seed, autoreset=mode, options=options))  # noqa: E731
    assert goes_on(make, before, 40, seed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", [0, 9, 10, 11, 12, 30])
def test_restore_around_an_episode_end(mode, before):
    def make():
        return cart_poles(autoreset=mode, options={"max_episode_steps": 10})

    full_run, rest, restarted = interrupted(make, before, 25)
    assert restarted is None
    assert same_steps(full_run, rest)


def test_restore_clears_a_pending_reset():
    one, other = (cart_poles(autoreset="next_step", options={"max_episode_steps": 6}) for _ in range(2))
    actions = some_actions(one, 30)
    one.reset()
    take_steps(one, actions[:9])
    state = save_world(one)
    other.reset()
    assert not take_steps(other, actions[:6])[-1].valid.any()
    assert restore_world(other, state) is None
    assert same_steps(take_steps(one, actions[9:]), take_steps(other, actions[9:]))


@pytest.mark.parametrize("mode", MODES)
def test_restore_previous_inputs(mode):
    shown = {"previous_action": True, "previous_reward": True, "tell_first": True}
    shown |= {"autoreset": mode, "options": {"max_episode_steps": 6}}
    assert goes_on(lambda: checked(cart_poles(**shown)), 13, 9)


@pytest.mark.parametrize("env", ["RepeatPreviousEasy", "CountRecallEasy", "NoisyPositionOnlyCartPoleEasy"])
def test_restore_popgym(env):
    pytest.importorskip("popgym")
    for before in (7, 70):
        assert goes_on(lambda: make_world(f"popgym:{env}", agents=2, seed=1), before, 120)


class Own(gymnasium.Env):
    """Draws at every step, shows a Dict, and takes several numbers, which it changes."""

    observation_space = spaces.Dict(
        {
            "a": spaces.Box(-9, 9, (2,), np.float64),
            "b": spaces.Tuple([spaces.Discrete(9), spaces.MultiBinary(3)]),
        }
    )
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.age = self.np_random.normal(size=2), 0
        return self.show(), {}

    def step(self, action):
        self.at = np.clip(self.at + action + self.np_random.normal(size=2), -9, 9)
        action[:] = 1e9
        self.age += 1
        return self.show(), float(self.at.sum()), bool(self.np_random.random() < 0.1), self.age == 12, {}

    def show(self):
        bits = (self.at > 0).tolist()
        return {"a": self.at, "b": (self.age % 9, np.array([*bits, True], np.int8))}


@FEW
@given(st.sampled_from(MODES), st.integers(-9, 9), st.integers(0, 40))
def test_restore_with_dict_observations(mode, seed, before):
    assert goes_on(lambda: checked(GymWorld(3, env=Own, seed=seed, autoreset=mode)), before, 20, seed)


@pytest.mark.parametrize("before", [0, 3, 4])
def test_restore_multidiscrete_before_the_first_action(before):
    make = lambda: GymWorld(2, env=lambda: Sampling(spaces.Discrete(5), spaces.MultiDiscrete([3, 300])))  # noqa: E731
    full_run, rest, _ = interrupted(make, before, 0)
    assert len(full_run) == len(rest) == 1


class Hidden(Counting):
    """As agent 1, shows something that its generator knows nothing of."""

    def show(self, action):
        shown = super().show(action)
        if self.agent == 1:
            shown[1] = random.random()
        return shown


def hidden(kind=Hidden, script=((50, TERMINATED),)):
    agents = iter(range(3))
    return lambda: kind(next(agents), script)


def test_environment_with_hidden_rng_restarts_alone():
    full_run, rest, restarted = interrupted(lambda: checked(GymWorld(3, env=hidden())), 5, 4)
    assert restarted.mask.tolist() == [False, True, False]
    assert "differs: it depends on more than seed and actions (1 of 3 agents)" in restarted.reason
    step = rest[0]
    assert step.first.tolist() == [False, True, False]
    assert step.obs[1, 0] == 1000
    assert (step.reward[1], step.reward[0]) == (0, full_run[0].reward[0])
    assert torch.equal(step.obs[::2], full_run[0].obs[::2])
    for one, other in zip(full_run, rest, strict=True):
        assert torch.equal(one.obs[::2], other.obs[::2])
    assert [int(each.obs[1, 0]) for each in rest] == [1000, 1001, 1002, 1003, 1004]


class Paid(Counting):
    """Pays what its generator knows nothing of."""

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, random.random(), *rest


class Cued(gymnasium.Env):
    """Shows a cue that a generator of its own draws, then blanks; or pays it back and forth."""

    action_space = spaces.Discrete(2)
    dice = np.random.RandomState(5)

    def __init__(self, tell="array"):
        cue = spaces.Box(-1, 1, (1,), np.float32)
        trees = {
            "dict": spaces.Dict({"a": cue}),
            "tuple": spaces.Tuple([cue]),
            "number": spaces.Discrete(1000),
        }
        self.tell, self.observation_space = tell, trees.get(tell, cue)

    def show(self, cue):
        if self.tell == "number":
            return int(1000 * cue)
        obs = np.array([cue], np.float32)
        return {"dict": {"a": obs}, "tuple": (obs,)}.get(self.tell, obs)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self.show(0 if self.tell == "reward" else Cued.dice.random_sample()), {}

    def step(self, action):
        self.age += 1
        self.pays = Cued.dice.randint(1000) if self.age == 1 else -self.pays
        pays = self.pays if self.tell == "reward" and self.age < 3 else 0
        return self.show(0.0), float(pays), False, False, {}


@pytest.mark.parametrize("tell", ["array", "dict", "tuple", "number", "reward"])
def test_replay_detects_a_hidden_difference(tell):
    with closing_world(GymWorld(1, env=Cued, options={"tell": tell})) as world:
        world.reset()
        take_steps(world, some_actions(world, 6))
        restarted = restore_world(world, save_world(world))
        assert restarted.mask.all()
        assert "differs: it depends on more than seed and actions" in restarted.reason


class Fails(Counting):
    """Remembers over worlds how often it was stepped, and cannot be stepped a seventh time."""

    steps = 0

    def step(self, action):
        Fails.steps += 1
        assert Fails.steps != 8, "no more"
        return super().step(action)


class Shorter(Counting):
    """Its episodes are shorter when replayed."""

    lengths = iter(())

    def reset(self, *, seed=None, options=None):
        self.script = ((next(Shorter.lengths, 3), TRUNCATED),)
        return super().reset(seed=seed)


@pytest.mark.parametrize(("kind", "message"), [(Paid, "episode differs"), (Fails, "AssertionError: no more")])
def test_replay_detects_rewards_and_errors(kind, message):
    Fails.steps = 0
    world = GymWorld(1, env=kind, options={"script": ((50, TERMINATED),)})
    world.reset()
    take_steps(world, some_actions(world, 5))
    other = GymWorld(1, env=kind, options={"script": ((50, TERMINATED),)})
    restarted = restore_world(other, save_world(world))
    assert restarted.mask.all()
    assert message in restarted.reason


def test_replay_detects_an_earlier_end():
    Shorter.lengths = iter([50])
    world, other = (GymWorld(1, env=Shorter) for _ in range(2))
    world.reset()
    take_steps(world, some_actions(world, 5))
    assert "ends earlier" in restore_world(other, save_world(world)).reason


class Otherwise(Counting):
    """Its episodes end with another flag when replayed."""

    ends = iter(())

    def reset(self, *, seed=None, options=None):
        self.script = ((3, next(Otherwise.ends, TRUNCATED)),)
        return super().reset(seed=seed)


def test_replay_detects_another_kind_of_end():
    Otherwise.ends = iter([TERMINATED])
    world, other = (GymWorld(1, env=Otherwise, autoreset="next_step") for _ in range(2))
    world.reset()
    assert take_steps(world, some_actions(world, 3))[-1].terminated.all()
    assert "episode differs" in restore_world(other, save_world(world)).reason


def test_episode_log_is_bounded(monkeypatch):
    monkeypatch.setattr(episode_log, "MAX_LOGGED_ACTIONS", 300)
    make = lambda: GymWorld(2, env=Counting, options={"script": ((10**6, TERMINATED),)})  # noqa: E731
    assert goes_on(make, 300, 3)
    _, rest, restarted = interrupted(make, 301, 3)
    assert restarted.mask.all()
    assert "more than" in restarted.reason
    assert "(2 of 2 agents)" in restarted.reason
    world = make()
    world.reset()
    take_steps(world, some_actions(world, 2000))
    assert all(each["actions"] is None for each in save_world(world)["envs"])
    assert rest[0].first.all()


def test_restarted_agents_get_new_episodes(monkeypatch):
    monkeypatch.setattr(episode_log, "MAX_LOGGED_ACTIONS", 2)
    opened = [interrupted(cart_poles, before, 0)[1][0].obs for before in (0, 3, 4)]
    assert not torch.equal(opened[0], opened[1])
    assert not torch.equal(opened[1], opened[2])
    assert torch.equal(interrupted(cart_poles, 3, 0)[1][0].obs, opened[1])
    seeds = rng.randint(1 << 31, 4, rng.STREAM_WORLD, torch.arange(3), 3).tolist()
    alone = [gymnasium.make("CartPole-v1").reset(seed=seed)[0].tolist() for seed in seeds]
    assert opened[1].tolist() == alone


def test_restarted_agents_are_not_reset_twice(monkeypatch):
    monkeypatch.setattr(episode_log, "MAX_LOGGED_ACTIONS", 2)
    options = {"autoreset": "next_step", "options": {"max_episode_steps": 5}}
    full_run, rest, restarted = interrupted(lambda: checked(cart_poles(**options)), 5, 2)
    assert full_run[0].truncated.all()
    assert full_run[1].first.all()
    assert restarted.mask.all()
    assert rest[0].first.all()
    assert not rest[1].first.any()


def ready():
    poles = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)
    return GymWorld(3, env=poles)


@pytest.mark.parametrize("make", [lambda: cart_poles(vector="native"), ready])
def test_vector_env_instances_restart_with_another_seed(make):
    _, rest, restarted = interrupted(lambda: checked(make()), 30, 20)
    assert restarted.mask.all()
    assert "cannot save the state of its environments" in restarted.reason
    first = make().reset()
    assert rest[0].first.all()
    assert rest[0].valid.all()
    assert not torch.equal(rest[0].obs, first.obs)
    again = interrupted(lambda: checked(make()), 30, 20)[1]
    assert same_steps(rest, again)


class Bare:
    """A world that cannot say where it is: it counts, and agent 1 acts in every second row only."""

    def __init__(self, agents=2):
        self.agents, self.spec = agents, WorldSpec(obs_shape=(1,), action_names=("a", "b"), name="bare")

    def reset(self):
        self.clock = 0
        return self.tell(torch.ones(self.agents, dtype=torch.bool))

    def step(self, actions):
        self.clock += 1
        return self.tell(torch.zeros(self.agents, dtype=torch.bool))

    def tell(self, first):
        no = torch.zeros(self.agents, dtype=torch.bool)
        obs = torch.full((self.agents, 1), float(self.clock))
        return Step(obs, obs[:, 0].clone(), no, no, first, ~no, no)


class Stateful(Bare):
    """The same, and it can."""

    def state(self):
        return {"clock": self.clock}

    def restore(self, state):
        self.clock = state["clock"]


def test_restore_user_world():
    assert isinstance(Stateful(), Restorable)
    assert goes_on(Stateful, 3, 4)
    assert goes_on(lambda: checked(Stateful()), 3, 4)
    for make in (Bare, lambda: checked(Bare()), lambda: inputs_of(Bare())):
        world = make()
        world.reset()
        assert save_world(world) is None
        _, rest, restarted = interrupted(make, 3, 4)
        assert (restarted.reason, restarted.mask.tolist()) == (NOT_RESTORABLE, [True, True])
        assert rest[0].first.all()
        assert not rest[0].reward.any()


def test_restore_world_of_the_guide():
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "write_a_world.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    names = {}
    for block in (each for each in blocks if "class Echo" in each or "class Lasting" in each):
        exec(block, names)
    assert goes_on(lambda: checked(names["Lasting"](5)), 6, 20)
    assert interrupted(lambda: checked(names["Echo"](5)), 6, 20)[2].mask.all()


def inputs_of(world):
    return WithPreviousInputs(world, previous_action=True, previous_reward=True, tell_first=True)


def mixture_of_stateful_and_bare():
    return Mixture([Stateful(), Bare(3)], ["stateful", "bare"], lambda number, clock: Bare(3))


def test_mixture_restarts_only_parts_without_state():
    full_run, rest, restarted = interrupted(lambda: checked(mixture_of_stateful_and_bare()), 5, 4)
    assert restarted.mask.tolist() == [False, False, True, True, True]
    assert restarted.reason == f"bare: {NOT_RESTORABLE}"
    assert rest[0].obs[:, 0].tolist() == [5, 5, 0, 0, 0]
    assert rest[0].reward.tolist() == [5, 5, 0, 0, 0]
    assert rest[0].first.tolist() == restarted.mask.tolist()
    assert [step.obs[0, 0] for step in rest] == [step.obs[0, 0] for step in full_run]


class Sown(Bare):
    """Cannot say where it is, and shows its seed; knows whether it was closed."""

    made: ClassVar[list["Sown"]] = []

    def __init__(self, agents, *, seed=0):
        super().__init__(agents)
        self.seed, self.closed = seed, False
        Sown.made.append(self)

    def tell(self, first):
        step = super().tell(first)
        return replace(step, obs=torch.full_like(step.obs, float(self.seed % 1000)))

    def close(self):
        self.closed = True


class Grown(Stateful):
    """Can say where it is, and takes a seed."""

    def __init__(self, agents, *, seed=0):
        super().__init__(agents)


def test_mixture_remakes_parts_without_state():
    def make():
        return checked(make_world("mixture", agents=4, seed=3, parts=f"{__name__}:Grown + {__name__}:Sown"))

    opened = []
    for before in (4, 5, 5):
        Sown.made.clear()
        full_run, rest, restarted = interrupted(make, before, 3)
        assert restarted.mask.tolist() == [False, False, True, True]
        assert "again" not in restarted.reason
        again = rng.derive_seed(3, rng.STREAM_RESUMED, before)
        assert [each.seed for each in Sown.made] == [
            *[rng.derive_seed(3, rng.STREAM_PART, 1)] * 2,
            rng.derive_seed(again, rng.STREAM_PART, 1),
        ]
        # The one whose place was taken was closed, and so were all in the end.
        assert all(each.closed for each in Sown.made)
        assert not torch.equal(rest[0].obs[2:], full_run[0].obs[2:])
        assert all(torch.equal(one.obs[:2], two.obs[:2]) for one, two in zip(full_run, rest, strict=True))
        assert all(torch.equal(step.obs[2:], rest[0].obs[2:]) for step in rest)
        opened.append(rest[0].obs[2:])
    assert not torch.equal(opened[0], opened[1])
    assert torch.equal(opened[1], opened[2])


def test_mixture_restores_its_clock():
    one, other = mixture_of_stateful_and_bare(), mixture_of_stateful_and_bare()
    one.reset()
    take_steps(one, some_actions(one, 4))
    restore_world(other, save_world(one))
    take_steps(other, some_actions(one, 2))
    assert save_world(other)["clock"] == 6
    other.reset()
    assert save_world(other)["clock"] == 0


class Ends(Stateful):
    """Restores no agent but names the row; before, agent 0 has just ended."""

    def tell(self, first):
        step = super().tell(first | torch.tensor([self.clock == 4, False]))
        over = torch.tensor([self.clock == 3, False])
        trial = torch.tensor([self.clock == 3, self.clock == 3])
        return replace(step, terminated=over, valid=~over, trial=trial)

    def restore(self, state):
        self.clock = 9
        who = torch.tensor([True, False])
        return Restarted(who, replace(super().tell(who), valid=torch.tensor([True, True])), "just so")


def test_resume_hides_the_old_episode_of_restarted_agents():
    full_run, rest, _ = interrupted(lambda: checked(Ends()), 3, 3)
    before, step = full_run[0], rest[0]
    assert (before.terminated.tolist(), before.valid.tolist()) == ([True, False], [False, True])
    assert step.terminated.tolist() == step.truncated.tolist() == [False, False]
    assert (step.first.tolist(), step.valid.tolist()) == ([True, False], [True, True])
    assert (step.trial.tolist(), step.reward.tolist()) == ([False, True], [0, 3])
    assert step.obs[:, 0].tolist() == [9, 3]


def test_checked_world_restores_its_checks():
    class Forgets(Stateful):
        """Does not set first at the next episode."""

        def tell(self, first):
            step = super().tell(first)
            over = torch.tensor([self.clock == 3, False])
            return replace(step, terminated=over, valid=~over)

    for before in (3, 2):
        one, other = checked(Forgets()), checked(Forgets())
        pending = one.reset()
        for action in some_actions(one, before):
            pending = one.step(action)
        resume_world(other, save_world(one), pending)
        with pytest.raises(ContractError, match="step 4: agent 0 acts after its episode ended"):
            take_steps(other, some_actions(one, 2))


class Gone(Stateful):
    """Puts agent 0 back into a row in which it does not act, and opens its episode in the next one."""

    unpaid = False

    def tell(self, first):
        step = super().tell(first)
        reward = torch.where(torch.tensor([self.clock == 4, False]) & self.unpaid, torch.nan, step.reward)
        return replace(step, reward=reward, first=first | torch.tensor([self.clock == 4, False]))

    def restore(self, state):
        super().restore(state)
        who = torch.tensor([True, False])
        return Restarted(who, replace(self.tell(who), valid=torch.tensor([self.unpaid, True])), "just so")


def test_checked_world_tracks_restarted_agents():
    # It has not acted in the episode that another one follows: no end is missing.
    assert interrupted_at(Gone, 3)[1].first.tolist() == [True, False]

    class Unpaid(Gone):
        unpaid = True

    with pytest.raises(ContractError, match="agent 0 got a reward that is not finite"):
        interrupted_at(Unpaid, 3)


def interrupted_at(kind, clock):
    """Go on from a state of which agent 0 had acted, or had not if it acts now, and take a step."""
    one, other = checked(kind()), checked(kind())
    pending = one.reset()
    for action in some_actions(one, clock):
        pending = one.step(action)
    state = changed(save_world(one), ["acts"], torch.tensor([not kind.unpaid, True]))
    step, _ = resume_world(other, state, pending)
    return step, other.step(some_actions(one, 1)[0])


class Seldom(Stateful):
    """Agents act in every third row only."""

    def tell(self, first):
        step = super().tell(first)
        return replace(step, valid=first | (self.clock % 3 == 0))


def test_previous_inputs_persist_over_invalid_rows():
    class Again(Seldom):
        def restore(self, state):
            super().restore(state)
            all_agents = torch.ones(2, dtype=torch.bool)
            return Restarted(torch.tensor([True, False]), replace(self.tell(all_agents), valid=all_agents), "just so")

    full_run, rest, _ = interrupted(lambda: inputs_of(Again()), 4, 2)
    # Of all rows before, somebody acted in the one at 3, and got 4 for it.
    assert [step.obs["previous_reward"][1].item() for step in full_run] == [4, 4, 4]
    assert [step.obs["previous_reward"][1].item() for step in rest] == [4, 4, 4]
    assert [step.obs["previous_reward"][0].item() for step in rest] == [0, 5, 5]


def test_previous_inputs_of_restarted_agents_are_zero():
    class Again(Stateful):
        def restore(self, state):
            super().restore(state)
            who = torch.tensor([True, False])
            return Restarted(who, self.tell(who), "just so")

    full_run, rest, _ = interrupted(lambda: inputs_of(Again()), 4, 2)
    assert full_run[0].obs["previous_reward"][:, 0].tolist() == [4, 4]
    assert rest[0].obs["previous_reward"][:, 0].tolist() == [0, 4]
    assert rest[0].obs["previous_action"].sum(1).tolist() == [0, 1]
    assert rest[0].obs["first"][:, 0].tolist() == [1, 0]
    assert same_steps(full_run[1:], rest[1:])


def changed(state, path, value):
    """A copy of a state with one entry changed, or if the value is `...`, without it."""
    state = deepcopy(state)
    *way, last = path
    inside = state
    for key in way:
        inside = inside[key]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    return state


def recall(agents=4, **options):
    return checked(make_world("recall", agents=agents, **options))


def poles(agents=2, **options):
    return GymWorld(agents, env="CartPole-v1", previous_action=True, **options)


class Choices(gymnasium.Env):
    """Takes choices of any kind, and shows their sum."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)

    def __init__(self, space):
        self.action_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return np.array([np.asarray(action, np.float64).sum()]), 0.0, False, False, {}


def many(agents=2):
    return GymWorld(agents, env=lambda: Choices(spaces.Discrete(257)))


@pytest.mark.parametrize(
    ("space", "size"),
    [
        (spaces.Discrete(2), 1),
        (spaces.Discrete(256, start=-7), 1),
        (spaces.Discrete(257, start=300), 2),
        (spaces.MultiDiscrete([3, 300]), 4),
        (spaces.MultiDiscrete([[3, 4], [2, 256]], start=[[-5, 5], [9, 1000]]), 4),
        (spaces.MultiDiscrete([3, 200], dtype=np.uint8), 2),
        (spaces.MultiBinary(3), 3),
        (spaces.Box(-1, 1, (2,), np.float32), 8),
    ],
)
def test_episode_log_action_bytes(space, size):
    def make():
        return GymWorld(2, env=lambda: Choices(space))

    world = make()
    world.reset()
    take_steps(world, some_actions(world, 40))
    assert [len(each["actions"]) for each in save_world(world)["envs"]] == [40 * size] * 2
    assert goes_on(make, 40, 5)
    least = torch.zeros_like(some_actions(world, 1)[0])
    most = least + (least == 0) * (torch.as_tensor(most_of(world)) - 1)
    for action in (least, most):
        world.step(action)
    assert restore_world(world, save_world(world)) is None


def most_of(world):
    space = world.spec.action
    if isinstance(space, spaces.Box):
        return 2.0
    return len(world.spec.action_names) if space is None else space.nvec


def spoil(tree):
    """Write something else into everything in a state that can be written into."""
    if isinstance(tree, torch.Tensor | np.ndarray):
        tree[...] = 1
    for each in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        spoil(each)


@pytest.mark.parametrize("make", [recall, lambda: poles(autoreset="next_step"), lambda: inputs_of(Seldom())])
def test_state_is_a_copy(make):
    one, other = make(), make()
    assert same_step(one.reset(), other.reset())
    for action in some_actions(one, 40):
        spoil(save_world(one))
        assert same_step(one.step(action), other.step(action))


WRONG = [
    (recall, ["world"], ..., "there is no 'world'"),
    (recall, ["world"], 3, "'world' is int, must be dict"),
    (recall, ["world", "seed"], 1, "saved with seed=1, and this has seed=0"),
    (recall, ["world", "tensors", "_cue"], ..., "there is no '_cue'"),
    (recall, ["world", "tensors", "_more"], torch.zeros(4), "Recall has no '_more'"),
    (
        recall,
        ["world", "tensors", "_cue"],
        torch.zeros(5).long(),
        r"'_cue' is \[5\] torch.int64, must be \[4\]",
    ),
    (
        recall,
        ["world", "tensors", "_cue"],
        torch.zeros(4),
        "'_cue' is .* torch.float32, must be .* torch.int64",
    ),
    (recall, ["world", "tensors", "_cue"], [0] * 4, "'_cue' is list, must be Tensor"),
    (recall, ["over"], torch.zeros(4), "'over' is .* torch.float32, must be .* torch.bool"),
    (recall, ["steps"], True, "'steps' is bool, must be int"),
    (poles, ["action"], torch.zeros(2, 3), r"'action' is \[2, 3\]"),
    (poles, ["world", "clock"], "3", "'clock' is str, must be int"),
    (poles, ["world", "mode"], "NEXT_STEP", "saved with mode=NEXT_STEP, and this has mode=SAME_STEP"),
    (poles, ["world", "ended"], np.zeros(2, bool), "'ended' is ndarray, must be Tensor"),
    (poles, ["world", "envs"], ..., "there is no 'envs'"),
    (poles, ["world", "envs"], [], "a list of 2 environments"),
    (poles, ["world", "envs", 0, "digest"], ..., "there is no 'digest'"),
    (poles, ["world", "envs", 1, "over"], 1, "'over' of an environment is int"),
    (poles, ["world", "envs", 1, "seed"], True, "'seed' of an environment is bool"),
    (poles, ["world", "envs", 1], None, "it is NoneType, must be a dict"),
    (poles, ["world", "envs", 1, "actions"], np.zeros((2, 1), np.uint8), r"\[2, 1\] uint8, must be uint8"),
    (poles, ["world", "envs", 1, "actions"], np.zeros(8), r"\[8\] float64, must be uint8, 1 each"),
    (poles, ["world", "envs", 1, "actions"], np.zeros(100_001, np.uint8), "of 100,000 actions at most"),
    (many, ["envs", 1, "actions"], np.zeros(9, np.uint8), r"\[9\] uint8, must be uint8, 2 each"),
]


@pytest.mark.parametrize(("make", "path", "value", "message"), WRONG)
def test_mismatching_state_changes_nothing(make, path, value, message):
    world, other = make(), make()
    pending = other.reset()
    take_steps(other, some_actions(other, 3))
    world.reset()
    steps = take_steps(world, some_actions(world, 5))
    before = save_world(world)
    with pytest.raises(ContractError, match=f"^Checkpoint does not match this run: .*{message}"):
        resume_world(world, changed(save_world(other), path, value), pending)
    assert same_tree(save_world(world), before)
    assert steps


@pytest.mark.parametrize("make", [recall, poles, lambda agents=4: make_world("mixture", agents, parts=PARTS)])
def test_state_of_other_agents_is_rejected(make):
    world, other = make(), make(agents=6)
    other.reset()
    world.reset()
    with pytest.raises(ContractError, match="does not match this run"):
        restore_world(world, save_world(other))
    with pytest.raises(ContractError, match=r"in the pending step, .*\[6"):
        resume_world(world, save_world(world), other.reset())


def test_state_of_other_worlds_is_rejected():
    world, other = (make_world("mixture", 6, parts=parts) for parts in (PARTS, "recall + n_back"))
    other.reset()
    with pytest.raises(ContractError, match="it was saved of 2 worlds, and there are 3"):
        restore_world(world, save_world(other))


@pytest.mark.parametrize("path", [["before", "state"], ["before"], ["actions"], ["seed"], ["after", "state", "inc"]])
def test_damaged_episode_log_restarts_one_agent(path):
    value = {"actions": np.arange(16, dtype=np.uint8), "seed": -7}.get(path[-1], {"state": "x"})
    with closing_world(cart_poles()) as world:
        world.reset()
        take_steps(world, some_actions(world, 60))
        restarted = restore_world(world, changed(save_world(world), ["envs", 2, *path], value))
        assert restarted.mask.tolist() == [False, False, True]
        take_steps(world, some_actions(world, 3))


def few_bits():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8)


def test_state_must_be_plain():
    class Odd(Stateful):
        def state(self):
            return self.odd

    world = Odd()
    for odd, message in (
        ({"a": [1, {2}]}, r"bare: state\(\)\['a'\]\[1\] is set; a state is made of dicts"),
        ({"a": {3: 1}}, r"bare: state\(\)\['a'\] has the key 3"),
        ({"a": np.array([object()])}, r"\['a'\] is an array of object, which cannot be written"),
        ({"a": np.zeros(2, np.longdouble)}, r"\['a'\] is an array of .*, which cannot be written"),
        ({"a": np.zeros(2, ">i4")}, r"is an array of int32 in foreign byte order, which cannot"),
        ({"a": torch.eye(2).to_sparse()}, r"is a tensor of torch.float32, torch.sparse_coo, on cpu, which"),
        ({"a": torch.zeros(2, device="meta")}, r"torch.strided, on meta, which cannot be written"),
        ({"a": few_bits()}, r"is a tensor of torch.quint8, torch.strided, on cpu, which cannot"),
    ):
        world.odd = odd
        with pytest.raises(ContractError, match=message):
            save_world(world)
    world.odd = {"a": [1 << 200, 1.5, True, "x", None, torch.zeros(2), np.zeros(2)]}
    assert save_world(world) is world.odd


def test_restore_errors_of_user_worlds():
    class Breaks(Stateful):
        def restore(self, state):
            return self.answer()

    world = Breaks()
    step = world.reset()
    no_agents = torch.zeros(2, dtype=torch.bool)
    for answer, message in (
        (lambda: {}["x"], r"restore\(\) of bare failed with KeyError: 'x'"),
        (lambda: 3, r"bare: restore\(\) returns int, must be Restarted or None"),
        (
            lambda: Restarted(~no_agents, replace(step, obs=torch.zeros(3, 1)), ""),
            r"but obs is \[3, 1\], must be \[2, 1\]",
        ),
        (
            lambda: Restarted(torch.ones(3, dtype=torch.bool), step, ""),
            r"mask is \[3\] torch.bool, must be \[2\]",
        ),
    ):
        world.answer = answer
        with pytest.raises(ContractError, match=message):
            restore_world(world, {})
    world.answer = lambda: Restarted(no_agents, step, "nobody")
    assert restore_world(world, {}) is None
    world.state = lambda: 1 / 0
    with pytest.raises(ContractError, match=r"bare: state\(\) failed with ZeroDivisionError"):
        save_world(world)
    with pytest.raises(ContractError, match=r"it has a state, but bare has no state\(\) and restore"):
        restore_world(Bare(), {"clock": 1})


@pytest.mark.parametrize("make", [lambda: make_world("recall"), cart_poles, recall, poles, lambda: checked(Stateful())])
def test_state_before_reset_is_an_error(make):
    with pytest.raises(ContractError, match=r"[Cc]all reset\(\) before state|state\(\) failed"):
        save_world(make())


def test_recorded_violations_are_saved():
    """On a GPU violations are recorded first and raised later, also after a restore."""
    one, other = recall(), recall()
    one.reset()
    state = changed(save_world(one), ["violations"], torch.tensor([0, 0, 1, 0]))
    assert restore_world(other, changed(state, ["violation_steps"], torch.tensor([-1, -1, 7, -1]))) is None
    with pytest.raises(ContractError, match="step 7: agent 2 got a reward that is not finite"):
        other.raise_violations()
    assert isinstance(other, CheckedWorld)


def test_cuda_graph_restore_keeps_read_only_tensors_in_place():
    one, other = (make_world("recall", agents=4, seed=seed, delay=3) for seed in (1, 2))
    other.reset()
    recorded = CudaGraphStep.__new__(CudaGraphStep)
    recorded._state = {"_cue": torch.zeros(4).long()}
    views, cue = one._views, one._cue
    views.zero_()
    saved = {"_views": other._views.clone(), "_cue": other._cue.clone()}
    recorded.restore(one, saved)
    assert one._views is views
    assert one._cue is not cue
    assert torch.equal(views, other._views)
    assert torch.equal(one._cue, other._cue)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", sorted(WORLD_CONFIGS))
@pytest.mark.parametrize("recorded", [False, True])
def test_restore_with_and_without_cuda_graph(name, recorded, device, monkeypatch):
    """On the CPU the operations of the capture are recorded and run again."""
    one, other = (make_world(name, agents=48, device=device, **SHORT[name]) for _ in range(2))
    if device == "cpu":
        capture_on_cpu(monkeypatch)
        one, other = RecordedWorld(one), RecordedWorld(other)
    one, other = checked(one), checked(other)
    actions = [each.to(device) for each in some_actions(one, 40)]
    pending = one.reset()
    for action in actions[:17]:
        pending = one.step(action)
    state = save_world(one)
    full_run = take_steps(one, actions[17:])
    if recorded:
        other.reset()
        take_steps(other, actions[:5])
    cpu_state = {**state, "world": {**state["world"]}}
    cpu_state["world"]["tensors"] = {key: each.cpu() for key, each in state["world"]["tensors"].items()}
    cpu_state |= {key: each.cpu() for key, each in state.items() if isinstance(each, torch.Tensor)}
    _, restarted = resume_world(other, cpu_state, pending)
    assert restarted is None
    del state
    torch.cuda.empty_cache()
    assert same_steps(take_steps(other, actions[17:]), full_run)
