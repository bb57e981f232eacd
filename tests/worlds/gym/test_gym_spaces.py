"""Conversion of observation and action spaces of Gymnasium environments."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from helpers.gym_envs import Sampling, seed_of
from helpers.play_world import live
from holdfast import make_policy
from holdfast.errors import ConfigError, ContractError
from holdfast.learn import replay
from holdfast.rollout import Collector
from holdfast.worlds.gym import GymWorld
from holdfast.worlds.gym.spaces import ActionConverter

BOX64 = spaces.Box(-1.0, np.array([1, 2, np.inf]), dtype=np.float64)
TREE = {"b": spaces.Discrete(3, start=2), "a": spaces.Tuple((spaces.Box(0, 1, (2,)), spaces.MultiBinary(2)))}
SHOWN = {
    "vector64": (BOX64, torch.float32),
    "scalar": (spaces.Box(-1, 1, ()), torch.float32),
    "half": (spaces.Box(-1, 1, (2,), np.float16), torch.float32),
    "image": (spaces.Box(0, 255, (5, 4, 3), np.uint8), torch.uint8),
    "ints": (spaces.Box(-7, 9, (2, 2), np.int32), torch.int32),
    "wide": (spaces.Box(0, 60_000, (2,), np.uint16), torch.int32),
    "widest": (spaces.Box(0, 2**64 - 1, (2,), np.uint64), torch.int64),
    "flags": (spaces.Box(0, 1, (2,), np.bool_), torch.bool),
    "choice": (spaces.Discrete(5, start=-2), torch.int64),
    "choices": (spaces.MultiDiscrete([2, 3], start=[4, -1]), torch.int64),
    "table": (spaces.MultiDiscrete([[2, 3], [4, 5]]), torch.int64),
    "bits": (spaces.MultiBinary([2, 3]), torch.int8),
}
TREES = {
    "dict": (spaces.Dict(TREE), {("b",): torch.int64, ("a", "0"): torch.float32, ("a", "1"): torch.int8}),
    "tuple": (
        spaces.Tuple((spaces.Discrete(2), spaces.Dict({"x": spaces.Box(0, 255, (3,), np.uint8)}))),
        {("0",): torch.int64, ("1", "x"): torch.uint8},
    ),
}


def leaf_of(obs, path):
    for key in path:
        obs = obs[int(key) if isinstance(obs, tuple) else key]
    return np.asarray(obs)


def env_observations(space, seed, calls):
    """Return the observations of an environment, and its final ones."""
    env = Sampling(space)
    observations, last = [env.reset(seed=seed)[0]], [None]
    for _ in range(calls):
        obs, _, _, truncated, _ = env.step(0)
        last.append(obs if truncated else None)
        observations.append(env.reset()[0] if truncated else obs)
    return observations, last


@pytest.mark.parametrize("mode", ["same_step", "disabled"])
@pytest.mark.parametrize("name", [*SHOWN, *TREES])
def test_observations_of_every_space_are_converted(name, mode):
    space, dtypes = SHOWN[name] if name in SHOWN else TREES[name]
    world = GymWorld(3, env=lambda: Sampling(_copy(space)), autoreset=mode, seed=2)
    steps = live(world, 7, lambda obs, first: torch.zeros(3, dtype=torch.long))
    for path, dtype in dtypes.items() if name in TREES else [((), dtypes)]:
        for agent in range(3):
            observations, last = env_observations(_copy(space), seed_of(2, agent), 7)
            for step, obs, before in zip(steps, observations, last, strict=True):
                _require_same(_leaf(step.obs, path)[agent], leaf_of(obs, path), dtype)
                assert (before is not None) == bool(step.truncated[agent])
                if before is not None:
                    _require_same(_leaf(step.last_obs, path)[agent], leaf_of(before, path), dtype)


def _copy(space):
    """Spaces own a generator, so every environment needs its own."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _copy(part) for key, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_copy(part) for part in space.spaces])
    if isinstance(space, spaces.Box):
        return spaces.Box(space.low, space.high, dtype=space.dtype)
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(space.n, start=space.start)
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(space.nvec, start=space.start)
    return spaces.MultiBinary(space.shape)


def _leaf(obs, path):
    return obs[path] if path else obs


def _require_same(tensor, array, dtype):
    assert tensor.dtype == dtype
    assert tuple(tensor.shape) == array.shape
    with np.errstate(over="ignore"):
        assert np.array_equal(tensor.numpy(), array.astype(tensor.numpy().dtype))


@pytest.mark.parametrize("name", [*SHOWN, *TREES])
def test_policy_replays_observations_of_every_space(name):
    space = (SHOWN | TREES)[name][0]
    world = GymWorld(3, env=lambda: Sampling(_copy(space)), seed=2, previous_action=True)
    policy = make_policy("auto", world, seed=0, hidden_size=8, num_layers=1)
    segments = Collector(world, policy, length=8, horizon=4, seed=0).rollout(0)
    with torch.no_grad():
        again = replay(policy, segments)
    torch.testing.assert_close(again["act_log_prob"], segments.steps["act_log_prob"], atol=1e-5, rtol=0)
    spec = policy.get_agent_experience_spec()
    for key in spec.keys(True, True):
        recorded = segments.steps[key]
        assert (spec[key].shape[1:], spec[key].dtype) == (recorded.shape[2:], recorded.dtype), key


def test_spec_has_the_converted_spaces():
    huge = spaces.Box(-np.finfo(np.float64).max, np.finfo(np.float64).max, (3,), np.float64)
    spec = GymWorld(1, env=lambda: Sampling(huge)).spec
    assert spec.observation.dtype == np.float32
    assert np.isinf(spec.observation.low).all()
    assert (spec.obs_shape, spec.action_names) == ((3,), ("action_0", "action_1"))
    tree = GymWorld(1, env=lambda: Sampling(spaces.Tuple((BOX64, spaces.Discrete(2, start=5))))).spec
    assert isinstance(tree.observation, spaces.Tuple)
    assert (tree.obs_shape, tree.observation[1]) == ((), spaces.Discrete(2, start=5))


@pytest.mark.parametrize(
    ("space", "sizes", "actions", "expected"),
    [
        (spaces.Discrete(4, start=-1), 4, [0, 3], [-1, 2]),
        (spaces.MultiDiscrete([2, 3], start=[5, 0]), [2, 3], [[0, 2], [1, 1]], [[5, 2], [6, 1]]),
        (
            spaces.MultiDiscrete([[2, 3], [4, 5]]),
            [2, 3, 4, 5],
            [[0, 1, 2, 3], [1, 2, 3, 4]],
            [[[0, 1], [2, 3]], [[1, 2], [3, 4]]],
        ),
        (spaces.MultiBinary([1, 2]), [2, 2], [[0, 1], [1, 1]], [[[0, 1]], [[1, 1]]]),
        (spaces.Box(-1, 0.5, (1, 2)), 2, [[-9.0, 0.25], [0.6, -0.1]], [[[-1.0, 0.25]], [[0.5, -0.1]]]),
        (spaces.Box(-np.inf, np.inf, (1,), np.float64), 1, [[-9.0], [0.5]], [[-9.0], [0.5]]),
        (spaces.Box(-2, 2, ()), 1, [[-9.0], [0.5]], [-2.0, 0.5]),
    ],
)
def test_actions_of_every_space_are_converted(space, sizes, actions, expected):
    envs = []

    def make():
        envs.append(Sampling(spaces.Discrete(2), space))
        return envs[-1]

    world = GymWorld(2, env=make)
    spec = world.spec
    if isinstance(space, spaces.Discrete):
        assert (len(spec.action_names), spec.action) == (sizes, None)
    elif isinstance(space, spaces.Box):
        assert (spec.action.shape, spec.action.dtype) == ((sizes,), np.float32)
    else:
        assert spec.action == spaces.MultiDiscrete(sizes)
    world.reset()
    actions = torch.tensor(actions)
    world.step(actions)
    actions.zero_()
    for env, wanted in zip(envs, expected, strict=True):
        (action,) = env.actions_taken
        assert space.contains(np.asarray(action))
        assert np.asarray(action).dtype == space.dtype
        assert np.array_equal(action, np.asarray(wanted, space.dtype))
    policy = make_policy("auto", world, seed=0, hidden_size=8, num_layers=1)
    segments = Collector(world, policy, length=8, horizon=4, seed=0).rollout(0)
    assert segments.steps["actions"].shape[2:] == policy.actions.shape
    assert all(space.contains(np.asarray(action)) for env in envs for action in env.actions_taken)


@pytest.mark.parametrize("space", [spaces.Text(3), spaces.Sequence(spaces.Discrete(2)), spaces.Graph(BOX64, None)])
def test_unsupported_spaces_are_rejected(space):
    with pytest.raises(ConfigError, match=rf"observation is {type(space).__name__}.*supported are Box"):
        GymWorld(2, env=lambda: Sampling(space))
    tree = spaces.Dict({"x": spaces.Tuple((space,))})
    with pytest.raises(ConfigError, match=rf"observation\['x'\]\['0'\] is {type(space).__name__}"):
        GymWorld(2, env=lambda: Sampling(tree))
    with pytest.raises(ConfigError, match=rf"action space is {type(space).__name__}.*supported are Discrete"):
        GymWorld(2, env=lambda: Sampling(BOX64, space))


def test_empty_and_integer_box_spaces_are_rejected():
    for takes in (
        spaces.Box(0, 9, (2,), np.int64),
        spaces.Box(0, 1, (0,)),
        spaces.Tuple((spaces.Discrete(2),)),
    ):
        with pytest.raises(ConfigError, match="supported are Discrete"):
            GymWorld(2, env=lambda takes=takes: Sampling(BOX64, takes))
    with pytest.raises(ConfigError, match="supported are Box"):
        GymWorld(2, env=lambda: Sampling(spaces.Dict({})))


def test_keep_selects_observation_indices():
    world = GymWorld(3, env="CartPole-v1", keep=(2, 0), seed=1)
    full_world = GymWorld(3, env="CartPole-v1", seed=1)
    assert np.array_equal(world.spec.observation.high, full_world.spec.observation.high[[2, 0]])
    act = lambda obs, first: torch.ones(3, dtype=torch.long)  # noqa: E731
    for selected, full in zip(live(world, 30, act), live(full_world, 30, act), strict=True):
        assert torch.equal(selected.obs, full.obs[:, [2, 0]])
        assert torch.equal(selected.last_obs, full.last_obs[:, [2, 0]])


def test_keep_rejects_invalid_indices():
    for keep in ([4], [-1]):
        with pytest.raises(ConfigError, match=rf"world.keep={keep[0]}: the indices are 0 to 3"):
            GymWorld(2, env="CartPole-v1", keep=keep)
    with pytest.raises(ConfigError, match="selects entries of a vector; the observation is Discrete"):
        GymWorld(2, env="Taxi-v4", keep=[0])


def test_invalid_actions_are_rejected():
    world = GymWorld(2, env="CartPole-v1")
    with pytest.raises(ContractError, match=r"Call reset\(\)"):
        world.step(torch.zeros(2, dtype=torch.long))
    world.reset()
    for wrong, message in (
        ([0, 2], "agent 1 took action 2; there are actions 0 to 1"),
        ([-1, 0], "agent 0 took action -1"),
        ([0.0, 1.0], "integers below 2"),
        ([0, 1, 1], "this world has 2 agents"),
    ):
        with pytest.raises(ContractError, match=message):
            world.step(torch.tensor(wrong))
    push = GymWorld(1, env="Pendulum-v1")
    push.reset()
    with pytest.raises(ContractError, match="must be finite"):
        push.step(torch.tensor([[torch.nan]]))
    assert gymnasium.spec("Pendulum-v1").max_episode_steps == 200
    pairs = GymWorld(1, env=lambda: Sampling(BOX64, spaces.MultiDiscrete([2, 3])))
    pairs.reset()
    with pytest.raises(ContractError, match=r"agent 0 took action \[2, 0\]"):
        pairs.step(torch.tensor([[2, 0]]))
    assert isinstance(GymWorld(1, env="Blackjack-v1").reset().obs, TensorDict)


@pytest.mark.parametrize(
    ("low", "high"), [(-0.1, 0.1), (0.3, np.inf), (-np.inf, 3.3), (-1, 1), (0.1, 0.7), (-0.3, -0.1)]
)
def test_bounds_of_actions_lie_in_a_box_of_doubles(low, high):
    # 0.1 in float32 is above 0.1 in float64: a player's action would be outside of the environment's space.
    space = spaces.Box(low, high, (2,), np.float64)
    bounds = ActionConverter(space, "gym:X").space
    for bound, exact in ((bounds.low, space.low), (bounds.high, space.high)):
        assert bound.dtype == np.float32
        assert space.contains(bound)
        np.testing.assert_allclose(bound, exact, rtol=1e-6)


def test_bounds_beyond_float32_are_none():
    bounds = ActionConverter(spaces.Box(0, 1e300, (1,), np.float64), "gym:X").space
    assert np.isinf(bounds.high).all()
    # There is no float32 between them.
    assert ActionConverter(spaces.Box(0.1, 0.1, (1,), np.float64), "gym:X").space.low == np.float32(0.1)
