"""Each trap, set in our own code, fails the measurement that the library passes without it."""

import pytest
import torch

from helpers.scripted_world import Scripted, make_reader
from holdfast.config.run import override
from holdfast.errors import ConfigError, ContractError
from holdfast.memory.episode_resets import reset_mask
from holdfast.policies.lstm_wrapper import slice_start
from holdfast.recipes import find_recipe
from holdfast.rollout import Collector
from traps import memory_traps
from traps.trap_catalogue import TRAPS
from traps.trap_page import size_on_the_page


def only_the_trap_fails(number):
    (trap,) = [each for each in TRAPS if each.number == number]
    assert trap.measure() <= trap.bound
    with trap.sprung():
        wrong = trap.measure()
    assert wrong > max(3 * trap.bound, 1e-3)
    assert wrong == pytest.approx(size_on_the_page(trap), rel=0.5), "make museum ARGS=traps"
    assert trap.measure() <= trap.bound, "the trap is gone when it is taken away"


def test_trap_01_memory_wiped_at_the_rollouts_start():
    only_the_trap_fails(1)


def test_trap_02_zero_start_in_training():
    only_the_trap_fails(2)
    with memory_traps.zero_start_in_training(), pytest.raises(ContractError, match=r"broken \(replay\)"):
        memory_traps.short_run(**{"trainer.check": "every:1"})


def test_trap_03_no_resets_in_training():
    only_the_trap_fails(3)
    with memory_traps.no_resets_in_training(), pytest.raises(ContractError, match=r"broken \(replay\)"):
        memory_traps.short_run(**{"trainer.check": "every:1"})


def test_trap_04_terminal_observation_leak():
    only_the_trap_fails(4)


def test_trap_05_evaluation_never_resets():
    only_the_trap_fails(5)


def test_trap_06_state_pickled_with_weights():
    only_the_trap_fails(6)


def test_trap_07_one_slot_per_slice():
    only_the_trap_fails(7)
    policy = make_reader()
    Collector(Scripted(4, 9), policy, length=4, horizon=4, seed=0)
    with pytest.raises(ContractError, match=r"no slice of 2 agents at agent 2; slices: 4 agents at 0"):
        policy(memory_traps.seen_at(0, start=2, length=2))


def test_trap_08_no_check_of_batch_or_device():
    only_the_trap_fails(8)


def test_trap_09_state_shared_across_agents_in_play():
    only_the_trap_fails(9)


def test_trap_10_rows_overwritten():
    only_the_trap_fails(10)
    sizes = {"world.agents": 8064, "trainer.batch_size": 524_288, "trainer.bptt_horizon": 64}
    with pytest.raises(ConfigError, match=r"batch_size=524288 is not a multiple of .*; try .*=516096"):
        override(find_recipe("recall"), sizes | {"trainer.minibatch_size": 64 * 64})


def test_trap_11_update_on_a_copy():
    only_the_trap_fails(11)


def test_trap_12_zero_grad_against_accumulation():
    only_the_trap_fails(12)


def test_trap_13_uint8_normalization():
    only_the_trap_fails(13)


def test_trap_14_index_formula():
    only_the_trap_fails(14)


def test_trap_15_swapped_axes_of_the_advantage():
    only_the_trap_fails(15)


def test_trap_16_evaluation_without_no_grad():
    only_the_trap_fails(16)


def test_trap_17_silent_default_key():
    only_the_trap_fails(17)
    with pytest.raises(ContractError, match="the agents whose memory to use are unknown"):
        slice_start(memory_traps.seen_at(0).exclude("training_env_id_start"))


def test_trap_18_both_flags_required_for_a_reset():
    only_the_trap_fails(18)
    batch = memory_traps.seen_at(0).exclude("first")
    with pytest.raises(ContractError, match="none of first, dones, truncateds"):
        reset_mask(batch, "episode")
    one, other = torch.arange(4) == 2, torch.arange(4) == 3
    for flags in ({"dones": one}, {"truncateds": one}, {"dones": one, "truncateds": other}):
        batch = memory_traps.seen_at(0, **flags).exclude("first")
        assert torch.equal(reset_mask(batch, "episode"), one | other if len(flags) == 2 else one)
