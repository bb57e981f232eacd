"""Whole runs with a stand-in for CUDA graphs: the same weights and metrics as without."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import holdfast
from helpers import recorded_ops
from holdfast.errors import ContractError

SIZES = {
    "world.agents": 8,
    "trainer.batch_size": 128,
    "trainer.minibatch_size": 32,
    "trainer.bptt_horizon": 8,
    "trainer.total_timesteps": 128 * 5,
    "trainer.eval_episodes": 4,
    "policy.hidden_size": 8,
    "trainer.monitor": "every:2",
    "report": "off",
}
OTHERWISE = ("time/", "seconds", "charts/SPS", "machine/", "memory/graph")


def run(tmp_path, name, keys, *, graphs, **options):
    config = SIZES | {"runs_dir": str(tmp_path), "run": name, "trainer.cuda_graphs": graphs} | keys
    if "policy" in options:
        del config["policy.hidden_size"]
    return holdfast.train("recall", config, quiet=True, **options)


@pytest.fixture
def replays(monkeypatch):
    """Record on the CPU, and count replays."""
    recorded_ops.use_on_cpu(monkeypatch)
    counts, record = [], recorded_ops.record

    def counting(call, device):
        replay, number = record(call, device), len(counts)
        counts.append(0)

        def count():
            counts[number] += 1
            replay()

        return count

    monkeypatch.setattr(recorded_ops.cuda_graphs, "record", counting)
    return counts


@pytest.mark.parametrize(
    "keys",
    [
        {"policy.normalize_value": True, "policy.normalize_obs": True, "trainer.normalize_reward": True},
        {"trainer.stale": "recompute", "trainer.refresh": "epoch", "trainer.update_epochs": 2},
        {"trainer.sampling.method": "prioritized", "trainer.accumulate": 2, "world.delay": "0..3"},
        {"trainer.optimizer.name": "muon", "schedule.trainer.optimizer.learning_rate": "constant"},
        {"trainer.stale": "burn_in", "trainer.burn_in": 4, "trainer.ppo.advantage": "vtrace"},
        {"trainer.ppo.target_kl": 1e-4, "world.truncate": True, "trainer.clip_range": 1.0},
    ],
    ids=["normalized", "recompute", "prioritized", "muon", "burn_in and vtrace", "target_kl"],
)
def test_recorded_run_equals_one_without_graphs(tmp_path, keys, replays):
    one, other = (run(tmp_path, str(graphs), keys, graphs=graphs) for graphs in (True, False))
    assert len(replays) >= 4
    assert min(replays) >= 1
    for key, weight in one.policy.state_dict().items():
        # The stand-in runs the memory step by step, which rounds otherwise; Adam makes that a step of any size.
        assert torch.allclose(weight.double(), other.policy.state_dict()[key].double(), atol=2e-2), key
    assert one.metrics.keys() == other.metrics.keys()
    for name, numbers in one.metrics.items():
        if not name.startswith(OTHERWISE):
            close = {"rtol": 0.05, "atol": 1e-3} if "drift" in name or "kl" in name else {"rtol": 1e-2, "atol": 1e-4}
            assert np.allclose(numbers, other.metrics[name], **close, equal_nan=True), name


def test_scheduled_numbers_reach_the_recorded_step(tmp_path, replays):
    """With a learning rate that falls to 0, the last updates change next to nothing."""
    weights = []

    def look(iteration):
        weights.append(torch.cat([weight.detach().flatten().clone() for weight in iteration.policy.parameters()]))

    keys = {"schedule.trainer.optimizer.learning_rate": "linear:0", "trainer.total_timesteps": 128 * 10}
    run(tmp_path, "x", keys, graphs=True, callbacks=[look])
    steps = [(after - before).abs().max() for before, after in pairwise(weights)]
    assert steps[-1] < 0.3 * steps[2]


def freeze(weight):
    weight.requires_grad_(False)


def move(weight):
    weight.data = weight.data * 0.5


@pytest.mark.parametrize("change", [freeze, move])
def test_weight_that_a_callback_freezes_or_moves_is_recorded_again(change, tmp_path, replays):
    before = []

    def callback(iteration):
        if iteration.number == 3:
            weight = next(iteration.policy.parameters())
            change(weight)
            before.append(weight.detach().clone())

    result = run(tmp_path, "x", {}, graphs=True, callbacks=[callback])
    assert torch.equal(next(result.policy.parameters()), *before) == (change is freeze)


def test_non_finite_gradients_are_named_after_the_replayed_update_is_undone(tmp_path, replays):
    weights = {}

    def spoil(iteration):
        if iteration.number == 3:
            iteration.set("trainer.ppo.vf_coef", 3e38)
            weights.update({key: weight.clone() for key, weight in iteration.policy.state_dict().items()})

    policy = holdfast.make_policy("fast", holdfast.make_world("recall", agents=8), hidden_size=8)
    with pytest.raises(ContractError, match="iteration 4, epoch 1, minibatch 1"):
        run(tmp_path, "x", {}, graphs=True, callbacks=[spoil], policy=policy)
    for key, weight in policy.state_dict().items():
        assert torch.equal(weight, weights[key]), key
