import copy
import sys
from dataclasses import replace

import pytest
import torch

from helpers.echo_memory import NOTHING, Keeper
from helpers.scripted_world import Reader, Scripted, make_reader
from holdfast.errors import ContractError
from holdfast.evaluation.evaluate import compete, evaluate
from holdfast.policies import Fast, make_policy
from holdfast.rollout import Collector
from holdfast.worlds import make_world


class Paying(Scripted):
    """Agent a's episodes last a + 1 steps, and pay by what was done: which action, and when."""

    def __init__(self, agents, truncate=False):
        steps = torch.arange(4000).expand(agents, 4000)
        ends = (steps > 0) & (steps % (torch.arange(agents)[:, None] + 1) == 0)
        super().__init__(agents, 4000, **{"truncated" if truncate else "terminated": ends})

    def step(self, actions):
        next_step = super().step(actions)
        return type(next_step)(**{**next_step.__dict__, "reward": (actions * 100 + self.t).float()})


class Numbered(Scripted):
    """Agent a's episodes last a + 1 steps and pay 1000 * agent + their number at their end."""

    def __init__(self, agents):
        steps = torch.arange(4000).expand(agents, 4000)
        self.length = torch.arange(agents) + 1
        ends = (steps > 0) & (steps % self.length[:, None] == 0)
        super().__init__(agents, 4000, terminated=ends)

    def step(self, actions):
        next_step = super().step(actions)
        paid = 1000 * torch.arange(self.agents) + self.t // self.length - 1
        return type(next_step)(**{**next_step.__dict__, "reward": torch.where(next_step.terminated, paid, 0).float()})


@torch.no_grad()
def by_hand(policy, world, share, cleared):
    """Greedy returns of all agents' first episodes, then of their second ones, computed with `unroll` alone."""
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
    return [agent_returns[episode] for episode in range(share) for agent_returns in returns]


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("memory", ["intact", "cleared"])
def test_evaluate_matches_manual_greedy_rollout(memory, truncate):
    policy, world = make_reader(), Paying(5, truncate)
    result = evaluate(policy, world, episodes=20, memory=memory)
    assert result.memory == memory
    assert result.returns.tolist() == by_hand(policy, world, 4, cleared=memory == "cleared")
    assert result.return_mean == pytest.approx(float(result.returns.double().mean()))


@pytest.mark.parametrize("clear_on", ["episode", "trial", "never"])
def test_cleared_memory_changes_returns(clear_on):
    policy, world = make_reader(clear_on=clear_on), Paying(5)
    intact = evaluate(policy, world, episodes=20)
    cleared = evaluate(policy, world, episodes=20, memory="cleared")
    assert not torch.equal(intact.returns, cleared.returns)
    assert cleared.returns.tolist() == by_hand(policy, world, 4, cleared=True)


def test_evaluate_counts_equally_many_episodes_per_agent():
    # The agents' episodes last 1 to 5 steps; the quick ones finish many more than are counted.
    returns = evaluate(make_reader(), Numbered(5), episodes=15).returns
    assert returns.tolist() == [1000 * agent + episode for episode in range(3) for agent in range(5)]


def test_lengths_go_with_their_returns():
    result = evaluate(make_reader(), Numbered(5), episodes=12)
    assert result.lengths.tolist() == [int(number) // 1000 + 1 for number in result.returns]
    assert result.length_mean == sum(result.lengths.tolist()) / 12


def test_evaluate_counts_exactly_the_requested_episodes():
    for episodes in (1, 4, 5, 6, 11, 14):
        returns = evaluate(make_reader(), Numbered(5), episodes=episodes).returns
        assert len(returns) == len(set(returns.tolist())) == episodes
        counts = torch.bincount(returns.long() // 1000, minlength=5)
        assert int(counts.max() - counts.min()) <= 1


def test_an_episode_that_does_not_end_is_cut_and_its_agent_plays_no_further_one():
    ends = torch.zeros(3, 200, dtype=torch.bool)
    ends[[0, 2], 1:] = True
    # Agent 1 finishes one episode of 7 steps, and never a second.
    ends[1, 7] = True
    log = []
    world = Scripted(3, 200, terminated=ends)
    result = evaluate(make_reader(), world, episodes=9, max_steps=50, log=log.append)
    assert result.cut == 1
    assert sorted(result.lengths.tolist()) == [1] * 6 + [7, 50]
    assert log == [
        "1 episode did not end within 50 steps: each counts with its return until then, and its agent plays no "
        "further one, so that 8 of 9 are counted; trainer.eval_max_steps=N (holdfast eval --max-steps N) sets the "
        "limit."
    ]
    with pytest.warns(UserWarning, match="1 episode did not end within 50 steps"):
        evaluate(make_reader(), Scripted(3, 200, terminated=ends), episodes=6, max_steps=50)


def test_an_agent_that_has_finished_its_episodes_is_not_cut():
    ends = torch.zeros(2, 200, dtype=torch.bool)
    ends[0, 1], ends[1, 100] = True, True
    result = evaluate(make_reader(), Scripted(2, 200, terminated=ends), episodes=2, max_steps=100)
    assert (result.cut, result.lengths.tolist()) == (0, [1, 100])


def test_max_steps_is_per_episode():
    # Episodes of up to five steps, and ten of them each.
    assert len(evaluate(make_reader(), Numbered(5), episodes=50, max_steps=5).returns) == 50


def test_progress_is_logged(monkeypatch):
    log = []
    monkeypatch.setattr(sys.modules[evaluate.__module__], "PROGRESS_S", 0.0)
    evaluate(make_reader(), Numbered(5), episodes=10, log=log.append)
    assert log[0] == "evaluating: 1 of 10 episodes are played after 1 steps; one that does not end is cut at 100,000"
    assert log[-1].startswith("evaluating: 10 of 10 episodes are played after ")


def test_a_match_needs_episodes_that_end():
    world = make_world("arena", agents=24, length=100)
    policy = make_policy("auto", world, hidden_size=4)
    with pytest.raises(ContractError, match=r"Agent 0 finished no episode within 5 steps; a match needs .*eval_max_st"):
        compete(policy, policy, world, episodes=24, max_steps=5)


def test_evaluate_does_not_affect_training():
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


def test_evaluate_starts_with_initial_states():
    policy, world = make_reader(), Paying(4)
    one, other = (evaluate(policy, world, episodes=12).returns for _ in range(2))
    assert torch.equal(one, other)


def test_evaluate_greedy_needs_no_draws():
    policy, world = make_reader(), Paying(4)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    evaluate(policy, world, episodes=4)
    assert torch.equal(torch.get_rng_state(), before)


def test_cleared_memory_gives_chance_return_on_recall():
    world = make_world("recall", agents=50, delay=1, cues=2, seed=-1)
    policy = Fast(world.spec, hidden_size=8, num_layers=1)
    for memory in ("intact", "cleared"):
        returns = evaluate(policy, world, episodes=1000, memory=memory).returns
        assert set(returns.tolist()) <= {0.0, 1.0}
    # Without memory every policy names one fixed cue: 1/2, five deviations of 0.016 around it.
    assert abs(float(returns.mean()) - 0.5) < 0.08


def test_reward_without_an_action_is_not_counted_in_evaluation_or_training():
    there, ended = torch.ones(2, 8, dtype=torch.bool), torch.zeros(2, 8, dtype=torch.bool)
    there[:, 1:3], ended[:, 4:] = False, True
    # Rewards come with steps 1 to 4; those with 2 and 3 answer nobody.
    due = [1.0 + 4.0, 1001.0 + 1004.0]
    world = Scripted(2, 8, valid=there, terminated=ended)
    result = evaluate(make_reader(), world, episodes=2)
    assert result.returns.tolist() == due
    assert result.lengths.tolist() == [2, 2]
    collector = Collector(Scripted(2, 8, valid=there, terminated=ended), make_reader(), length=4, horizon=4, seed=0)
    collector.rollout(0)
    assert collector.episodes.pop() == {
        "charts/episodes": 2,
        "charts/episodic_return": sum(due) / 2,
        "charts/episodic_length": 2.0,
    }


def test_partial_round_is_spread_over_agents():
    world = make_world("mixture", agents=40, parts="constant length=2 + recall delay=0")
    policy = make_policy("fast", world, hidden_size=4, num_layers=1)
    for episodes in (40, 50, 61, 80):
        returns = evaluate(policy, world, episodes=episodes).returns
        assert len(returns) == episodes
        assert abs(float((returns == 2).sum()) - episodes / 2) <= 1


def test_select_episodes_groups_agents_of_an_environment():
    world = Numbered(12)
    world.spec = replace(world.spec, agents_per_env=3)
    for episodes in (3, 6, 12, 15, 18, 24):
        result = evaluate(make_reader(), world, episodes=episodes)
        assert result.together == 3
        assert result.per_agent.shape == (episodes // 3, 3)
        crowds = result.per_agent.long() // 1000 // 3
        assert bool((crowds == crowds[:, :1]).all())
        assert len(set(result.returns.tolist())) == episodes
    assert evaluate(make_reader(), world, episodes=14).together == 1


class Drawing(Reader):
    """Draws from the generator that a program shares, as policies written by hand may."""

    def encode(self, obs):
        return super().encode(obs) + torch.randn(len(obs), 5)


def test_evaluate_seeds_global_generators_and_restores_them():
    policy, world = Drawing(), Paying(4)
    before = torch.get_rng_state()
    one, again, other = (evaluate(policy, world, episodes=40, seed=seed).returns for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("episodes", [0, -3])
def test_evaluate_needs_one_episode(episodes):
    with pytest.raises(ContractError, match=f"episodes={episodes}: an evaluation needs at least one"):
        evaluate(make_reader(), Paying(2), episodes=episodes)


def test_evaluate_sums_low_precision_rewards():
    class Coarse(Scripted):
        def say(self):
            step = super().say()
            return replace(step, reward=torch.ones_like(step.reward, dtype=torch.bfloat16))

    steps = 601
    over = torch.zeros(2, steps, dtype=torch.bool)
    over[:, -1] = True
    result = evaluate(make_reader(), Coarse(2, steps, terminated=over), episodes=2)
    assert result.returns.tolist() == [600.0, 600.0]


LENGTH = 4


class Crowds(Scripted):
    """Environments of three agents; episodes last four steps, and their last reward is 100 * action + row."""

    def __init__(self, agents=6, crowd=3):
        steps = torch.arange(100)
        ends = ((steps % LENGTH == 0) & (steps > 0)).expand(agents, 100)
        super().__init__(agents, 100, terminated=ends)
        self.spec = replace(self.spec, agents_per_env=crowd)

    def step(self, actions):
        next_step = super().step(actions)
        paid = 100.0 * actions + torch.arange(self.agents)
        return replace(next_step, reward=torch.where(next_step.terminated, paid, 0.0))


def test_match_assigns_every_second_agent_and_swaps_sides():
    # Action 1 is ours, action 2 the opponent's; of each three the odd one is the first's.
    result = compete(Keeper(1), Keeper(2), Crowds(), episodes=24)
    first, swapped = ([100 + row for row in rows] for rows in ([0, 2, 3, 5], [1, 4]))
    assert [side.returns.tolist() for side in result.ours] == [2 * first, 2 * swapped]
    assert [side.returns.tolist() for side in result.opponent] == [
        2 * [201.0, 204.0],
        2 * [200.0, 202.0, 203.0, 205.0],
    ]
    assert [side.together for side in (*result.ours, *result.opponent)] == [2, 1, 1, 2]
    assert all(side.lengths.tolist() == [LENGTH] * len(side.returns) for side in (*result.ours, *result.opponent))


def test_match_margin_per_environment_and_round():
    result = compete(Keeper(1), Keeper(2), Crowds(), episodes=24)
    # Rows 0 and 2 with 100 more for ours against row 1; then the other way round.
    assert [lead.flatten().tolist() for lead in result.margins] == [[-100.0] * 4, [-100.0] * 4]


def test_match_plays_complete_rounds():
    for episodes, rounds in ((1, 1), (12, 1), (13, 2), (24, 2), (25, 3)):
        result = compete(Keeper(1), Keeper(2), Crowds(), episodes=episodes)
        assert sum(len(side.returns) for side in (*result.ours, *result.opponent)) == 12 * rounds


def test_match_policies_have_separate_states():
    ours, opponent = Keeper(1), Keeper(2)
    compete(ours, opponent, Crowds(), episodes=12)
    for policy, rows in ((ours, ([0, 2, 3, 5], [1, 4])), (opponent, ([1, 4], [0, 2, 3, 5]))):
        due = [[NOTHING if t == 0 else 1000.0 * row + t - 1 for row in side] for side in rows for t in range(LENGTH)]
        assert policy.noted == due


def test_match_ablates_only_our_memory():
    ours, opponent = Keeper(1), Keeper(2)
    result = compete(ours, opponent, Crowds(), episodes=12, memory="cleared")
    assert {number for noted in ours.noted for number in noted} == {NOTHING}
    assert {number for noted in opponent.noted for number in noted} > {NOTHING}
    assert {side.memory for side in result.ours} == {"cleared"}
    assert {side.memory for side in result.opponent} == {"intact"}


def test_match_against_itself_has_margin_zero():
    world = make_world("arena", agents=48, length=12, size=14, seed=2)
    policy = make_policy("fast", world, hidden_size=8, num_layers=1, seed=0)
    result = compete(policy, policy, world, episodes=96, greedy=False, seed=1)
    first, swapped = result.margins
    assert bool(first.any())
    assert torch.equal(first, -swapped)
    # Two copies of one policy live as one of them would, row by row.
    returns = evaluate(policy, world, episodes=48, greedy=False, seed=1).returns.unflatten(0, (-1, 2))
    assert result.ours[0].returns.tolist() == returns[:, 0].tolist()
    assert result.opponent[0].returns.tolist() == returns[:, 1].tolist()


def test_match_needs_several_agents_per_environment():
    with pytest.raises(ContractError, match=r"Scripted has one agent per environment.*as in arena\."):
        compete(make_reader(), make_reader(), Scripted(4, 20), episodes=4)
