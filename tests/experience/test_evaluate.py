import copy
from dataclasses import replace

import pytest
import torch

from holdfast.errors import ContractError
from holdfast.experience import Collector, evaluate
from holdfast.policies import Fast, make_policy
from holdfast.worlds import make_world
from scripted import Reader, Scripted, make_reader


class Paying(Scripted):
    """Agent a's episodes last a + 1 steps, and pay by what was done: which action, and when."""

    def __init__(self, agents, truncate=False):
        steps = torch.arange(4000).expand(agents, 4000)
        ends = (steps > 0) & (steps % (torch.arange(agents)[:, None] + 1) == 0)
        super().__init__(agents, 4000, **{"truncated" if truncate else "terminated": ends})

    def step(self, actions):
        told = super().step(actions)
        return type(told)(**{**told.__dict__, "reward": (actions * 100 + self.t).float()})


class Numbered(Scripted):
    """Agent a's episodes last a + 1 steps and pay 1000 * agent + their number at their end."""

    def __init__(self, agents):
        steps = torch.arange(4000).expand(agents, 4000)
        self.length = torch.arange(agents) + 1
        ends = (steps > 0) & (steps % self.length[:, None] == 0)
        super().__init__(agents, 4000, terminated=ends)

    def step(self, actions):
        told = super().step(actions)
        paid = 1000 * torch.arange(self.agents) + self.t // self.length - 1
        return type(told)(**{**told.__dict__, "reward": torch.where(told.terminated, paid, 0).float()})


@torch.no_grad()
def by_hand(policy, world, share, cleared):
    """Greedy returns of all agents' first episodes, then of their second ones, lived with `unroll` alone."""
    state, step = policy.lstm.cell.initial(world.agents), world.reset()
    returns, total = [[] for _ in range(world.agents)], torch.zeros(world.agents)
    while min(map(len, returns)) < share:
        first = torch.ones_like(step.first) if cleared else step.first
        thoughts, state = policy.unroll(step.obs, first, state, step.valid)
        step = world.step(thoughts.logits.argmax(-1))
        total += step.reward
        for agent in range(world.agents):
            if step.terminated[agent] or step.truncated[agent]:
                returns[agent].append(float(total[agent]))
                total[agent] = 0
    return [mine[episode] for episode in range(share) for mine in returns]


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("memory", ["intact", "cleared"])
def test_an_evaluation_is_the_greedy_life_lived_by_hand(memory, truncate):
    policy, world = make_reader(), Paying(5, truncate)
    found = evaluate(policy, world, episodes=20, memory=memory)
    assert found.memory == memory
    assert found.returns.tolist() == by_hand(policy, world, 4, cleared=memory == "cleared")
    assert found.return_mean == pytest.approx(float(found.returns.double().mean()))


@pytest.mark.parametrize("clear_on", ["episode", "trial", "never"])
def test_clearing_the_memory_makes_a_difference_whenever_it_is_emptied_otherwise(clear_on):
    policy, world = make_reader(clear_on=clear_on), Paying(5)
    intact = evaluate(policy, world, episodes=20)
    cleared = evaluate(policy, world, episodes=20, memory="cleared")
    assert not torch.equal(intact.returns, cleared.returns)
    assert cleared.returns.tolist() == by_hand(policy, world, 4, cleared=True)


def test_every_agent_counts_its_first_episodes_and_equally_many():
    # The agents' episodes last 1 to 5 steps; the quick ones finish many more than are counted.
    returns = evaluate(make_reader(), Numbered(5), episodes=15).returns
    assert returns.tolist() == [1000 * agent + episode for episode in range(3) for agent in range(5)]


def test_lengths_go_with_their_returns():
    found = evaluate(make_reader(), Numbered(5), episodes=12)
    assert found.lengths.tolist() == [int(number) // 1000 + 1 for number in found.returns]
    assert found.length_mean == sum(found.lengths.tolist()) / 12


def test_exactly_as_many_episodes_are_counted_as_were_asked_for():
    for episodes in (1, 4, 5, 6, 11, 14):
        returns = evaluate(make_reader(), Numbered(5), episodes=episodes).returns
        assert len(returns) == len(set(returns.tolist())) == episodes
        counts = torch.bincount(returns.long() // 1000, minlength=5)
        assert int(counts.max() - counts.min()) <= 1


def test_an_agent_that_never_finishes_is_told_when_patience_ends():
    ends = torch.zeros(3, 200, dtype=torch.bool)
    ends[[0, 2], 1:] = True
    with pytest.raises(ContractError, match="Agent 1 finished no episode within 50 steps; evaluation needs"):
        evaluate(make_reader(), Scripted(3, 200, terminated=ends), episodes=6, patience=50)


def test_patience_is_for_one_episode_and_not_for_all():
    # Episodes of up to five steps, and ten of them each.
    assert len(evaluate(make_reader(), Numbered(5), episodes=50, patience=5).returns) == 50


def test_an_evaluation_leaves_the_training_alone():
    policy, world = make_reader(), Paying(4)
    collector = Collector(world, policy, length=4, horizon=4, seed=0)
    collector.rollout(0)
    policy.train()
    memories = policy.store.snapshot()
    weights = copy.deepcopy(policy.state_dict())
    evaluate(policy, Paying(9), episodes=9)
    evaluate(policy, Paying(9), episodes=9, memory="cleared")
    after = policy.store.snapshot()
    assert after.slices == memories.slices == {0: 4}
    assert bool(memories.tree["h"].any())
    assert bool((after.tree == memories.tree).all())
    assert all(torch.equal(weights[key], leaf) for key, leaf in policy.state_dict().items())
    assert policy.training
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_an_evaluation_begins_with_empty_memories_each_time():
    policy, world = make_reader(), Paying(4)
    one, other = (evaluate(policy, world, episodes=12).returns for _ in range(2))
    assert torch.equal(one, other)


def test_an_evaluation_is_greedy_and_draws_nothing():
    policy, world = make_reader(), Paying(4)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    evaluate(policy, world, episodes=4)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_policy_that_knows_nothing_gets_chance_on_recall_with_and_without_memory():
    world = make_world("recall", agents=50, delay=1, cues=2, seed=-1)
    policy = Fast(world.spec, hidden_size=8, num_layers=1)
    for memory in ("intact", "cleared"):
        returns = evaluate(policy, world, episodes=1000, memory=memory).returns
        assert set(returns.tolist()) <= {0.0, 1.0}
    # Without memory every policy names one fixed cue: 1/2, five deviations of 0.016 around it.
    assert abs(float(returns.mean()) - 0.5) < 0.08


def test_a_reward_for_no_action_counts_neither_here_nor_in_training():
    there, ended = torch.ones(2, 8, dtype=torch.bool), torch.zeros(2, 8, dtype=torch.bool)
    there[:, 1:3], ended[:, 4:] = False, True
    # Rewards come with steps 1 to 4; those with 2 and 3 answer nobody.
    due = [1.0 + 4.0, 1001.0 + 1004.0]
    world = Scripted(2, 8, valid=there, terminated=ended)
    found = evaluate(make_reader(), world, episodes=2)
    assert found.returns.tolist() == due
    assert found.lengths.tolist() == [2, 2]
    collector = Collector(
        Scripted(2, 8, valid=there, terminated=ended), make_reader(), length=4, horizon=4, seed=0
    )
    collector.rollout(0)
    assert collector.episodes.take() == {
        "charts/episodes": 2,
        "charts/episodic_return": sum(due) / 2,
        "charts/episodic_length": 2.0,
    }


def test_episodes_that_are_left_over_are_spread_over_all():
    world = make_world("mixture", agents=40, parts="constant length=2 + recall delay=0")
    policy = make_policy("fast", world, hidden_size=4, num_layers=1)
    for episodes in (40, 50, 61, 80):
        returns = evaluate(policy, world, episodes=episodes).returns
        assert len(returns) == episodes
        assert abs(float((returns == 2).sum()) - episodes / 2) <= 1


def test_those_who_share_a_place_count_as_one_where_whole_crowds_are_asked_for():
    world = Numbered(12)
    world.spec = replace(world.spec, crowd=3)
    for episodes in (3, 6, 12, 15, 18, 24):
        found = evaluate(make_reader(), world, episodes=episodes)
        assert found.together == 3
        assert found.places.shape == (episodes // 3, 3)
        crowds = found.places.long() // 1000 // 3
        assert bool((crowds == crowds[:, :1]).all())
        assert len(set(found.returns.tolist())) == episodes
    assert evaluate(make_reader(), world, episodes=14).together == 1


class Drawing(Reader):
    """Draws from the generator that a program shares, as policies written by hand may."""

    def encode(self, obs):
        return super().encode(obs) + torch.randn(len(obs), 5)


def test_what_a_policy_draws_from_torch_is_the_evaluations_own_and_repeats():
    policy, world = Drawing(), Paying(4)
    before = torch.get_rng_state()
    one, again, other = (evaluate(policy, world, episodes=40, seed=seed).returns for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("episodes", [0, -3])
def test_no_episodes_are_no_evaluation(episodes):
    with pytest.raises(ContractError, match=f"episodes={episodes}: an evaluation needs one at least"):
        evaluate(make_reader(), Paying(2), episodes=episodes)


def test_rewards_of_little_precision_are_added_up_all_the_same():
    class Coarse(Scripted):
        def say(self):
            step = super().say()
            return replace(step, reward=torch.ones_like(step.reward, dtype=torch.bfloat16))

    steps = 601
    over = torch.zeros(2, steps, dtype=torch.bool)
    over[:, -1] = True
    found = evaluate(make_reader(), Coarse(2, steps, terminated=over), episodes=2)
    assert found.returns.tolist() == [600.0, 600.0]
