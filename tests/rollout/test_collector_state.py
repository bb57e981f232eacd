"""Burn-in steps, saved and restored collectors, worlds that restart, and the phases of a rollout."""

import copy

import pytest
import torch
from tensordict import TensorDict

from helpers.async_world import Turning
from helpers.scripted_world import make_reader, random_script
from holdfast.errors import ContractError
from holdfast.policies import make_policy
from holdfast.rollout import Collector
from holdfast.rollout.collector import _last_valid_value
from holdfast.rollout.statistics import PHASES
from holdfast.worlds import make_world
from holdfast.worlds.save_restore import save_world

A, T, S, K = 4, 5, 3, 2


def collector_for(world, burn_in=K):
    policy = make_policy("fast", world, seed=0, hidden_size=8, num_layers=1)
    return Collector(world, policy, length=S * T, horizon=T, seed=0, burn_in=burn_in)


def test_burn_in_steps_are_those_before_each_row():
    policy = make_reader()
    collector = Collector(random_script(A, 60, 0), policy, length=S * T, horizon=T, seed=0, burn_in=K)
    for rollout in range(2):
        burn_in = collector.rollout(rollout).burn_in
        assert burn_in.steps.shape == (A * S, K)
        assert len(burn_in.entry_state) == A * S
        for row, numbers in enumerate(burn_in.steps["env_obs"].squeeze(-1).tolist()):
            agent, segment = divmod(row, S)
            begin = (rollout * S + segment) * T
            if begin:
                assert numbers == [1000 * agent + begin - K + t for t in range(K)]
            else:
                assert not burn_in.steps["valid"][row].any()


def test_update_columns_start_with_rollout_values_and_ratio_one():
    segments = collector_for(make_world("recall", A)).rollout(0)
    assert torch.equal(segments.steps["values_now"], segments.steps["values"])
    assert torch.equal(segments.steps["ratio"], torch.ones(A * S, T))


def test_last_valid_value_by_hand():
    steps = {
        "valid": torch.tensor([[True, False, False], [False, True, True], [False, False, False]]),
        "values": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]),
    }
    assert _last_valid_value(TensorDict(steps, batch_size=[3, 3])).tolist() == [1.0, 6.0, 0.0]


@pytest.mark.parametrize("is_async", [False, True])
def test_rollout_times_known_phases(is_async):
    collector = collector_for(Turning("recall", A, seed=0) if is_async else make_world("recall", A))
    collector.rollout(0)
    assert set(collector.timer.pop()) == set(PHASES) - {"update", "rollout"}


def test_restored_collector_continues_bit_for_bit():
    one, other = (collector_for(make_world("recall", A, seed=1)) for _ in range(2))
    one.rollout(0)
    saved, world = copy.deepcopy((one.state(), save_world(one.world)))
    assert other.restore(saved, world, rollouts=1) is None
    other.policy.store.write(0, one.policy.store.read(0, A).clone())
    ours, restored = one.rollout(1), other.rollout(1)
    assert bool((ours.steps == restored.steps).all())
    assert bool((ours.tail == restored.tail).all())
    assert bool((ours.burn_in.steps == restored.burn_in.steps).all())
    assert bool((ours.burn_in.entry_state == restored.burn_in.entry_state).all())
    assert one.episodes.pop() == other.episodes.pop()


def test_agents_of_a_world_without_saved_state_restart_with_cleared_memory():
    one, other = (collector_for(make_world("recall", A, seed=1)) for _ in range(2))
    one.rollout(0)
    saved = copy.deepcopy(one.state())
    store = other.policy.store
    store.write(0, store.read(0, A).apply(torch.ones_like))
    restarted = other.restore(saved, None, rollouts=1)
    assert restarted.mask.all()
    assert other.next_step.first.all()
    assert bool((store.read(0, A) == 0).all())
    assert not other.next_burn_in.steps["valid"].any()
    assert bool((other.next_burn_in.entry_state == 0).all())
    assert not other.episodes.state()["running"].any()
    # Random numbers go on where they were.
    assert other.state()["clock"] == S * T


def test_collector_of_another_number_of_rollouts_is_refused():
    collector = collector_for(make_world("recall", A))
    collector.rollout(0)
    with pytest.raises(ContractError, match=r"^Its clock is at 15; 2 rollouts end at 30\.$"):
        collector.restore(collector.state(), None, rollouts=2)
