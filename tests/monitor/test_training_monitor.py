"""TrainingMonitor: what it measures in which iteration, and what it saves."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.monitored_policies import scripted
from helpers.small_policy import make_small
from holdfast.monitor.training_monitor import TrainingMonitor, is_due
from holdfast.rollout import Collector


def collect(interval="every:1"):
    policy, world = make_small(), scripted(agents=6)
    monitor = TrainingMonitor(policy, 6, interval, total_steps=1000)
    collector = Collector(world, policy, length=16, horizon=8, seed=0, audit=monitor.resets)
    with monitor.resets.track():
        segments = collector.rollout(0)
    return policy, monitor, segments


@given(n=st.integers(1, 50), iteration=st.integers(0, 500))
def test_check_interval(n, iteration):
    assert is_due(f"every:{n}", iteration) == (iteration % n == 0 or iteration < 2)
    assert is_due("first", iteration) == (iteration < 2)
    assert not is_due("off", iteration)


def test_gradients_are_measured_only_when_due():
    _, monitor, segments = collect("every:3")
    assert monitor.before_update(segments, iteration=2) is None
    assert "memory/gradient_reach" not in monitor.pop_metrics(segments, 192)
    assert monitor.before_update(segments, iteration=3) is monitor
    assert "memory/gradient_reach" in monitor.pop_metrics(segments, 288)
    assert "memory/gradient_reach" not in monitor.pop_metrics(segments, 384)


def test_resets_are_counted_once():
    _, monitor, segments = collect("off")
    assert monitor.pop_metrics(segments, 480)["memory/resets"] > 0
    assert monitor.pop_metrics(segments, 576)["memory/resets"] == 0
    assert monitor.memory_usage.alarm() == ""


def test_gradient_norms_are_popped_once():
    policy, monitor, segments = collect()
    for weight in policy.parameters():
        weight.grad = torch.ones_like(weight)
    monitor.on_gradients(policy)
    before = monitor.pop_metrics(segments, 672)
    names = {name for name in before if name.startswith("gradients/norm")}
    assert names
    assert not names & monitor.pop_metrics(segments, 768).keys()


def test_state_round_trip_keeps_reset_counts():
    _, monitor, segments = collect("off")
    state = monitor.state()
    _, other, _ = collect("off")
    other.pop_metrics(segments, 864)
    other.restore(state, global_step=96)
    assert other.pop_metrics(segments, 960)["memory/resets"] > 0


def test_metrics_can_be_popped_repeatedly_at_one_step():
    # An iteration without a valid step does not advance the clock.
    _, monitor, segments = collect("off")
    repeated = [monitor.pop_metrics(segments, 96) for _ in range(4)]
    assert not any("machine/growth" in metrics for metrics in repeated)
    later = [monitor.pop_metrics(segments, step) for step in (120, 144)]
    assert "machine/growth" in later[-1]
