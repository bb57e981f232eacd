"""Trees and other actions from the world through collecting and evaluating to the update."""

from dataclasses import replace

import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn

from helpers.one_update import learn_from
from helpers.scripted_world import Reader, Scripted, random_script
from helpers.small_policy import make_small
from helpers.space_worlds import NamePlace, SayNumber, SayNumberInATree
from holdfast import make_policy
from holdfast.errors import ConfigError, ContractError
from holdfast.evaluation.evaluate import evaluate
from holdfast.learn import replay
from holdfast.monitor.replay_check import check_segments
from holdfast.policies import PolicyOutput, RecurrentPolicy
from holdfast.rollout import Collector, Segments
from holdfast.worlds import WorldSpec

WORLDS = [SayNumber, SayNumberInATree, NamePlace]


def build(kind, agents=6, **options):
    world = kind(agents)
    return world, make_policy("auto", world, seed=0, hidden_size=8, num_layers=1, **options)


class TreeOf:
    """Another world, shown as a tree."""

    def __init__(self, world):
        self.world, self.agents = world, world.agents
        number = spaces.Box(-torch.inf, torch.inf, (1,))
        inner = spaces.Dict({"number": number, "twice": number})
        self.spec = replace(world.spec, obs_shape=(), observation=spaces.Dict({"inner": inner}))

    def as_tree(self, obs):
        inner = TensorDict({"number": obs, "twice": 2 * obs}, batch_size=[self.agents])
        return TensorDict({"inner": inner}, batch_size=[self.agents])

    def convert(self, step):
        return replace(step, obs=self.as_tree(step.obs), last_obs=self.as_tree(step.last_obs))

    def reset(self):
        return self.convert(self.world.reset())

    def step(self, actions):
        return self.convert(self.world.step(actions))


class TreeReader(RecurrentPolicy):
    """Reads the number from the tree, after seeing that the tree holds together."""

    def __init__(self):
        super().__init__(5, 6, 2)
        self.outwards = nn.Linear(6, 4, bias=False)

    def encode(self, obs):
        number = obs["inner"]["number"]
        assert obs["inner", "twice"].equal(2 * number)
        return Reader.encode(self, number)

    def decode(self, features):
        return Reader.decode(self, features)


def test_dict_observation_equals_flat_tensor():
    torch.manual_seed(0)
    plain, reads = Reader(), TreeReader()
    reads.load_state_dict(plain.state_dict())
    rollouts = []
    for policy, wrap in ((plain, lambda world: world), (reads, TreeOf)):
        collector = Collector(wrap(random_script(5, 33, seed=1)), policy, length=16, horizon=8, seed=3)
        rollouts.append([collector.rollout(0), replay(policy, collector.rollout(1))])
    for one, other in zip(*rollouts, strict=True):
        one, other = (each.steps if isinstance(each, Segments) else each for each in (one, other))
        assert other["env_obs"]["inner"]["number"].equal(one["env_obs"])
        for key in set(one.keys()) - {"env_obs"}:
            assert one[key].equal(other[key]), key
    played = [
        evaluate(policy, world, episodes=10).returns
        for policy, world in ((plain, random_script(5, 200, 2)), (reads, TreeOf(random_script(5, 200, 2))))
    ]
    assert played[0].equal(played[1])


@pytest.mark.parametrize("kind", WORLDS)
def test_collecting_learning_and_playing_work_in_every_space(kind):
    world, policy = build(kind)
    collector = Collector(world, policy, length=12, horizon=6, seed=0)
    segments = collector.rollout(0)
    acted = segments.steps["actions"]
    assert acted.shape == (12, 6, *policy.actions.shape)
    assert acted.is_floating_point() == (kind is not NamePlace)
    assert policy.actions.key not in segments.steps
    looked = check_segments(policy, segments)
    assert looked["memory/check_replay"] <= 1e-5
    assert looked["memory/check_clear"] == 0
    before = [weight.clone() for weight in policy.parameters()]
    learned = learn_from(policy, segments)
    assert learned["memory/replay_error"] <= 1e-5
    moved = [not a.equal(b) for a, b in zip(before, policy.parameters(), strict=True)]
    assert all(moved)
    played = evaluate(policy, kind(4, seed=5), episodes=8)
    assert played.returns.isfinite().all()


@pytest.mark.parametrize("kind", WORLDS)
def test_runs_repeat(kind):
    rollouts = []
    for _ in range(2):
        world, policy = build(kind)
        rollouts.append(Collector(world, policy, length=12, horizon=6, seed=4).rollout(0).steps)
    one, other = (steps.flatten_keys() for steps in rollouts)
    assert all(leaf.equal(other[key]) for key, leaf in one.items())
    assert len(one["actions"].flatten().unique()) > 1


def test_nan_in_invalid_observations():
    _, policy = build(SayNumberInATree)
    valid = torch.tensor([[True, True, False, True], [False, True, True, True]])
    number = torch.randn(2, 4, 1).masked_fill(~valid[..., None], torch.nan)
    obs = TensorDict({"number": number, "asked": torch.zeros(2, 4, dtype=torch.long)}, batch_size=[2, 4])
    first = torch.zeros(2, 4, dtype=torch.bool)
    thoughts, after = policy.unroll(obs, first, policy.lstm.cell.initial(2), valid)
    assert not any(leaf.isnan().any() for leaf in after.values())
    torch.where(valid, thoughts.values, 0.0).sum().backward()
    assert all(not weight.grad.isnan().any() for weight in policy.parameters() if weight.grad is not None)
    assert obs["number"].isnan().any()


def test_policy_for_other_actions_is_an_error():
    class Ten(Scripted):
        def __init__(self):
            super().__init__(3, 20)
            self.spec = WorldSpec((5,), (), action=spaces.Box(-1, 1, (2,)))

        def number(self, t):
            return torch.zeros(self.agents)

        def say(self):
            return replace(super().say(), obs=torch.zeros(self.agents, 5))

    with pytest.raises(ContractError, match=r"actions are Categorical.*the world's are Gaussian\(count=2\)"):
        Collector(Ten(), make_small(), length=4, horizon=4, seed=0).rollout(0)


class Blurts(RecurrentPolicy):
    """Forgets to say how many scores it gives."""

    def __init__(self):
        super().__init__(2, 4, 1)
        self.actions = make_policy("fast", SayNumber(1), hidden_size=4).actions
        self.outwards = nn.Linear(4, 4)

    def encode(self, obs):
        return obs

    def decode(self, features):
        out = self.outwards(features)
        return PolicyOutput(out[:, :3], out[:, 3])


def test_policy_with_too_many_logits_is_an_error():
    with pytest.raises(ContractError, match=r"gives 3 logits; Gaussian\(count=1\) takes 2"):
        Collector(SayNumber(3), Blurts(), length=4, horizon=4, seed=0).rollout(0)


def test_agent_experience_spec_in_every_space():
    for kind, action in ((SayNumberInATree, torch.float32), (NamePlace, torch.int64)):
        world, policy = build(kind)
        policy.bind(world.spec)
        spec = policy.get_agent_experience_spec()
        steps = Collector(world, policy, length=4, horizon=4, seed=0).rollout(0).steps
        for key in spec.keys(True, True):
            assert (spec[key].shape[1:], spec[key].dtype) == (steps[key].shape[2:], steps[key].dtype), key
        assert spec["actions"].dtype == action


@pytest.mark.parametrize(
    ("shown", "message"),
    [
        (
            lambda obs: obs["number"],
            r"World Liar, reset.*obs is obs, must be obs\['asked'\], obs\['number'\]",
        ),
        (
            lambda obs: obs.exclude("asked"),
            r"obs is obs\['number'\], must be obs\['asked'\], obs\['number'\]",
        ),
        (
            lambda obs: obs.apply(lambda leaf: leaf.float()),
            r"obs\['asked'\] is torch.float32, must be torch.int64",
        ),
    ],
)
def test_observation_outside_spec_is_refused(shown, message):
    class Liar(SayNumberInATree):
        def show(self, first, at_query):
            return shown(super().show(first, at_query))

    _, policy = build(SayNumberInATree)
    with pytest.raises(ContractError, match=message):
        Collector(Liar(3), policy, length=4, horizon=4, seed=0)


def test_policy_bound_to_another_space_is_refused():
    _, policy = build(SayNumber)
    policy.bind(SayNumber.spec)
    policy.bind(replace(SayNumber.spec, truncates="always"), learn=False)
    for key, space in (("action", spaces.Box(-1, 1, (2,))), ("observation", spaces.Box(-2, 2, (2,)))):
        with pytest.raises(ContractError, match=r"This policy (reads|takes) Box.*now has Box"):
            policy.bind(replace(SayNumber.spec, **{key: space}))
    with pytest.raises(ConfigError, match="_obs_: it reads tokens"):
        make_policy("component:fast", SayNumber(1))
