"""Bytes held per device, and an alarm for leaks only."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

from helpers.monitored_policies import POLICIES, stored
from helpers.one_update import replay_loss
from helpers.small_policy import make_small
from holdfast.config.trainer import PPOConfig
from holdfast.learn.ppo import compute_targets, normalize_advantages
from holdfast.monitor import training_monitor
from holdfast.monitor.training_monitor import (
    MAX_READINGS,
    MIB,
    MemoryUsage,
    Readings,
    bytes_of,
    counting_graph,
)

TOTAL = 1_000_000
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_bytes_of_counts_shared_storage_once():
    tensor = torch.zeros(10, 4)
    tree = TensorDict({"a": tensor, "b": {"c": torch.zeros(10, 3, dtype=torch.uint8)}}, batch_size=[10])
    assert bytes_of(tree) == 10 * 4 * 4 + 10 * 3
    views = TensorDict({"d": tensor[:5], "e": torch.zeros(1, 2).expand(5, 2)}, batch_size=[5])
    assert bytes_of(tree, views) == 10 * 4 * 4 + 10 * 3 + 2 * 4
    assert bytes_of() == 0


def test_bytes_of_a_rollout():
    policy = make_small()
    segments = stored(policy)
    leaves = [leaf for part in (segments.steps, segments.entry_state, segments.tail) for leaf in part.values()]
    expected = sum(leaf.untyped_storage().nbytes() for leaf in leaves)
    assert bytes_of(segments.steps, segments.entry_state, segments.tail) == expected


def test_counting_graph_excludes_weights():
    layer, x = nn.Linear(7, 5), torch.randn(11, 7, requires_grad=True)
    with counting_graph(layer) as graph:
        y = layer(x)
        loss = (y.tanh() * y).sum()
        y.exp()
    # The input; what goes into the product, one of which tanh keeps too; what nobody needs is gone.
    assert graph.bytes == 4 * (11 * 7 + 2 * 11 * 5)
    loss.backward()
    assert layer.weight.grad is not None


def test_counting_graph_without_gradients_is_zero():
    with torch.no_grad(), counting_graph(make_small()) as graph:
        make_small().inwards(torch.zeros(3, 5))
    assert graph.bytes == 0


@pytest.mark.parametrize("kind", POLICIES)
def test_counting_graph_does_not_change_gradients(kind):
    policy, ppo = POLICIES[kind](), PPOConfig(gamma=0.9, gae_lambda=0.9, ent_coef=0.01)
    segments = stored(policy)
    targets = compute_targets(segments, ppo)
    grads, sizes = [], []
    for rows in (2, 12, 12):
        chosen = segments.rows(torch.arange(rows))
        some = normalize_advantages(targets.rows(torch.arange(rows)), chosen, ppo, None)
        policy.zero_grad()
        with counting_graph(policy) as graph:
            loss, _, _ = replay_loss(policy, chosen, some, ppo)
        loss.backward()
        sizes.append(graph.bytes)
        grads.append([each.grad for each in policy.parameters() if each.grad is not None])
    loss, _, _ = replay_loss(policy, segments.rows(torch.arange(12)), some, ppo)
    policy.zero_grad()
    loss.backward()
    plain = [each.grad for each in policy.parameters() if each.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(grads[-1], plain, strict=True))
    assert 0 < 2 * sizes[0] < sizes[1] == sizes[2]


def run(sizes, total=TOTAL, parts=None, device=CPU):
    """Feed readings at equal distances over a run; return the metrics of each and the alarms.

    On a GPU they are those of its memory, and the process does not grow.
    """
    usage, left = MemoryUsage(total, device), iter(sizes)
    metrics, alarms = [], []
    with pytest.MonkeyPatch.context() as patched:
        if device == GPU:
            patched.setattr(training_monitor, "process_bytes", int)
            patched.setattr(torch.cuda, "memory_allocated", lambda _: next(left))
            patched.setattr(torch.cuda, "max_memory_allocated", lambda _: max(sizes))
        else:
            patched.setattr(training_monitor, "process_bytes", lambda: next(left))
        for k in range(len(sizes)):
            step = (k + 1) * total // len(sizes)
            counted = {"buffer": 10, "state": 5, "graph": 7} | {key: part[k] for key, part in (parts or {}).items()}
            metrics.append(usage.pop_metrics(**counted, global_step=step))
            alarms.append(usage.alarm())
    return metrics, alarms


def test_memory_usage_metrics():
    metrics, _ = run([100, 300, 200])
    assert metrics[0] == {
        "memory/buffer_bytes": 10,
        "memory/state_bytes": 5,
        "memory/graph_bytes": 7,
        "machine/process_bytes": 100,
        "machine/process_peak_bytes": 100,
    }
    assert [each["machine/process_bytes"] for each in metrics] == [100, 300, 200]
    assert [each["machine/process_peak_bytes"] for each in metrics] == [100, 300, 300]


def test_memory_usage_metrics_on_gpu():
    metrics, _ = run([100, 300, 200], device=GPU)
    assert [each["machine/gpu_bytes"] for each in metrics] == [100, 300, 200]
    assert metrics[-1]["machine/gpu_peak_bytes"] == 300


@given(st.integers(-1000, 1000), st.integers(8, 60))
def test_growth_is_the_slope_per_million_steps(slope, count):
    early = count // 2 - 1
    sizes = [10**9 + (0 if k < early else slope * (k - early)) for k in range(count)]
    metrics, _ = run(sizes, total=count * 1000)
    assert metrics[-1]["machine/growth"] == pytest.approx(slope * 1000, abs=1e-3)
    assert "machine/growth" not in metrics[0]


BASE = 500 * MIB


def noise(k):
    """Readings scatter; this does so by up to 10 MiB either way, the same each time."""
    return (k * 7919 % 21 - 10) * MIB


def test_leak_raises_one_alarm():
    _, alarms = run([BASE + k * 4 * MIB + noise(k) for k in range(100)])
    messages = [alarm for alarm in alarms if alarm]
    assert len(messages) == 1
    for word in (
        "process memory grows",
        "MiB at step 50,000",
        "MiB per million steps",
        "graph that is kept",
        "list",
    ):
        assert word in messages[0]
    assert "buffer, states and graph did not grow" in messages[0]
    assert "\n" not in messages[0]
    assert not any(alarms[:10])


def test_leak_alarm_names_growing_parts():
    _, alarms = run([BASE + k * 4 * MIB for k in range(100)], parts={"graph": [7 * (1 + k) for k in range(100)]})
    assert any("graph grew too" in alarm for alarm in alarms)


def test_gpu_leak_raises_alarm():
    _, alarms = run([BASE + k * 4 * MIB for k in range(100)], device=GPU)
    assert sum("gpu memory grows" in alarm for alarm in alarms) == 1


@pytest.mark.parametrize(
    "sizes",
    [
        [BASE + noise(k) for k in range(200)],
        # Everything is made once, before the run is warm.
        [BASE + min(k, 5) * 100 * MIB + noise(k) for k in range(200)],
        # Something is made late, and stays.
        [BASE + (k > 120) * 300 * MIB + noise(k) for k in range(200)],
        [BASE + (k > 60) * 300 * MIB for k in range(200)],
        # It comes and goes.
        [BASE + (k % 40 > 30) * 200 * MIB for k in range(200)],
        # It grows by less than matters: 30 MiB, or less than 2 % of a lot.
        [BASE + k * MIB * 30 // 200 for k in range(200)],
        [200 * BASE + k * 5 * MIB for k in range(200)],
        # It falls.
        [BASE + (200 - k) * 4 * MIB for k in range(200)],
        # It slows down and stands.
        [BASE + int(400 * MIB * (1 - 0.9**k)) for k in range(200)],
        # The recipe recall: the allocator's pools grow when some of the checkpoints are written, every 10 iterations.
        [size * MIB for size in [494] + [511] * 3 + [512] * 6 + [528] * 30 + [533] * 10 + [544] * 24],
        # The same recipe in a resumed process.
        [size * MIB for size in [487] * 6 + [522] * 10 + [548] * 40],
    ],
    ids=[
        "flat",
        "made early",
        "made late",
        "then flat",
        "comes and goes",
        "little",
        "little of much",
        "falls",
        "settles",
        "in steps",
        "resumed",
    ],
)
def test_no_alarm_without_leak(sizes):
    _, alarms = run(sizes)
    assert not any(alarms)


def test_late_leak_raises_alarm():
    _, alarms = run([BASE + max(0, k - 100) * 5 * MIB + noise(k) for k in range(200)])
    assert any(alarms)


def test_readings_are_bounded():
    readings = Readings()
    for k in range(5 * MAX_READINGS):
        readings.add(k, k, warm=k > 20)
        assert len(readings._all) <= MAX_READINGS
    assert (readings.latest, readings.peak) == (5 * MAX_READINGS - 1, 5 * MAX_READINGS - 1)
    assert readings.growth() == pytest.approx(1e6)
    assert readings._base == (21, 21)


LEAK = """
import torch
from holdfast.monitor.training_monitor import MemoryUsage

usage, kept, alarms = MemoryUsage(3000, torch.device("cpu")), [], []
for step in range(100, 3001, 100):
    # Written to, so that the memory is really taken.
    kept.append(torch.ones(4 * 2**20))
    usage.pop_metrics(buffer=1, state=1, graph=1, global_step=step)
    alarms.append(usage.alarm())
assert sum(map(bool, alarms)) == 1, alarms
"""


def test_real_leak_raises_alarm():
    # In a new process: this one may have freed memory to give out again.
    result = subprocess.run([sys.executable, "-c", LEAK], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_freed_tensors_raise_no_alarm():
    usage, alarms = MemoryUsage(3000, CPU), []
    for step in range(100, 3001, 100):
        torch.ones(16 * MIB // 4).sum()
        usage.pop_metrics(buffer=1, state=1, graph=1, global_step=step)
        alarms.append(usage.alarm())
    assert not any(alarms)
