from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.echo_memory import NOTHING, Keeper
from helpers.scripted_world import Scripted, make_reader, random_script
from holdfast import rng
from holdfast.errors import ContractError
from holdfast.evaluation.evaluate import MEMORY_MODES, EvalPolicy, evaluate
from holdfast.policies import make_policy
from holdfast.worlds import make_world

STEPS = 24


def remembered(world, memory, seed=0):
    """The state of every agent before each step."""
    policy, step = Keeper(), world.reset()
    mind = EvalPolicy(policy, world.spec, torch.arange(world.agents), memory=memory, seed=seed)
    for _ in range(STEPS - 1):
        step = world.step(mind.act(step))
    mind.act(step)
    return policy.noted


def by_hand(world, memory, rolls):
    """The same, as a person would do it: agent by agent."""
    agents, memories = range(world.agents), []
    state, began = [NOTHING] * world.agents, [False] * world.agents
    for t in range(STEPS):
        if memory == "cleared":
            state = [NOTHING] * world.agents
        if memory == "shuffled":
            state = [state[agent - rolls[t]] for agent in agents]
        first, valid = (world.tables[flag][:, t].tolist() for flag in ("first", "valid"))
        memories.append([NOTHING if first[agent] else state[agent] for agent in agents])
        for agent in agents:
            began[agent] = began[agent] and not first[agent]
            if valid[agent] and not (memory == "frozen" and began[agent]):
                state[agent] = 1000.0 * agent + t
            began[agent] = began[agent] or valid[agent]
    return memories


def rolls_of(agents, seed):
    agent = torch.zeros((), dtype=torch.long)
    return [1 + int(rng.randint(agents - 1, seed, rng.STREAM_SHUFFLE, agent, t)) for t in range(STEPS)]


@pytest.mark.parametrize("memory", MEMORY_MODES)
@settings(max_examples=20)
@given(agents=st.integers(2, 6), seed=st.integers(0, 10**6))
def test_memory_modes(memory, agents, seed):
    world = random_script(agents, STEPS, seed)
    assert remembered(world, memory, seed) == by_hand(world, memory, rolls_of(agents, seed))


def test_frozen_memory_stays_until_the_episode_ends():
    ends = (torch.arange(STEPS) % 5 == 0) & (torch.arange(STEPS) > 0)
    memories = remembered(Scripted(2, STEPS, terminated=ends.expand(2, STEPS)), "frozen")
    for t, (one, other) in enumerate(memories):
        began = t - t % 5
        assert (one, other) == ((NOTHING, NOTHING) if t == began else (began, 1000.0 + began))


def test_shuffled_memory_is_a_permutation():
    agents = 7
    world = Scripted(agents, STEPS)
    rolls = set()
    for t, memories in enumerate(remembered(world, "shuffled", seed=3)[1:], 1):
        whose = [int(number) // 1000 for number in memories]
        assert [int(number) % 1000 for number in memories] == [t - 1] * agents
        assert sorted(whose) == list(range(agents))
        (far,) = {(agent - owner) % agents for agent, owner in enumerate(whose)}
        assert far != 0
        rolls.add(far)
    assert rolls == {1, 2, 3, 4, 5, 6}
    assert remembered(world, "shuffled", seed=4) != remembered(world, "shuffled", seed=3)


def test_shuffled_memory_needs_two_agents():
    with pytest.raises(ContractError, match="needs 2 agents or more"):
        evaluate(make_reader(), Scripted(1, 50), episodes=1, memory="shuffled")


@pytest.mark.usefixtures("annotations_asleep")
def test_unknown_memory_mode_is_an_error():
    with pytest.raises(ContractError, match="'cleard' is not one of intact, cleared, frozen, shuffled"):
        evaluate(make_reader(), Scripted(2, 50), episodes=1, memory="cleard")


def lived_through(policy, world, memory):
    """What was thought of each action, step by step, in the same episodes."""
    mind, step, log_probs = (
        EvalPolicy(policy, world.spec, torch.arange(world.agents), memory=memory),
        world.reset(),
        [],
    )
    handle = mind._policy.register_forward_hook(lambda _, inputs, td: log_probs.append(td["full_log_probs"].clone()))
    with torch.no_grad():
        for _ in range(12):
            mind.act(step)
            step = world.step(torch.zeros(world.agents, dtype=torch.long))
    handle.remove()
    return log_probs


@pytest.mark.parametrize("cell", ["lstm", "gru", "minlstm", "none"])
def test_memory_ablation_of_every_cell(cell):
    world = make_world("recall", agents=20, delay=2, seed=1)
    policy = make_policy("fast", world, hidden_size=8, num_layers=2, memory=cell, seed=0)
    log_probs = {memory: lived_through(policy, world, memory) for memory in MEMORY_MODES}
    for one, other in combinations(MEMORY_MODES, 2):
        alike = all(torch.equal(left, right) for left, right in zip(log_probs[one], log_probs[other], strict=True))
        # Nobody can tamper with what is not there.
        assert alike == (cell == "none"), f"{one} and {other}"


def test_sampled_actions_equal_those_of_the_collector():
    policy, world = make_reader(), Scripted(4, STEPS)
    actions = {}
    for seed in (5, 6):
        step, state = world.reset(), policy.lstm.cell.initial(4)
        mind = EvalPolicy(policy, world.spec, torch.arange(4), greedy=False, seed=seed)
        actions[seed] = []
        for t in range(STEPS - 1):
            with torch.no_grad():
                thoughts, state = policy.unroll(step.obs, step.first, state, step.valid)
            uniform = rng.uniform(seed, rng.STREAM_ACTION, torch.arange(4), t)
            due = policy.actions.sample(policy.actions.parameters(thoughts.logits), uniform)
            with torch.no_grad():
                actions[seed].append(mind.act(step).tolist())
            assert actions[seed][-1] == due.tolist()
            step = world.step(due)
    assert actions[5] != actions[6]


def test_eval_policy_is_an_independent_copy():
    policy, world = Keeper(), Scripted(3, STEPS)
    policy.train()
    remembered_by_hand = policy.store.snapshot()
    mind = EvalPolicy(policy, world.spec, torch.arange(3))
    mind.act(world.reset())
    assert policy.training
    assert policy.store.slices == remembered_by_hand.slices == {}
    assert policy.binding.spec is None
