"""Bytes held are counted where they lie, and the alarm is raised by a leak and by nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

from holdfast.learn import loss_of, normalised, targets_of
from holdfast.monitor import Held, bytes_of, counting_graph
from holdfast.monitor.held import KEPT, MIB, Readings, process_bytes
from holdfast.trainer_knobs import PPO
from monitor.lives import POLICIES, stored
from small import make_small

TOTAL = 1_000_000


def test_bytes_of_trees_are_those_of_their_tensors_and_shared_ones_count_once():
    whole = torch.zeros(10, 4)
    tree = TensorDict({"a": whole, "b": {"c": torch.zeros(10, 3, dtype=torch.uint8)}}, batch_size=[10])
    assert bytes_of(tree) == 10 * 4 * 4 + 10 * 3
    views = TensorDict({"d": whole[:5], "e": torch.zeros(1, 2).expand(5, 2)}, batch_size=[5])
    assert bytes_of(tree, views) == 10 * 4 * 4 + 10 * 3 + 2 * 4
    assert bytes_of() == 0


def test_a_rollout_is_counted_whole():
    policy = make_small()
    segments = stored(policy)
    leaves = [leaf for part in (segments.steps, segments.entry, segments.tail) for leaf in part.values()]
    expected = sum(leaf.untyped_storage().nbytes() for leaf in leaves)
    assert bytes_of(segments.steps, segments.entry, segments.tail) == expected


def test_a_graph_is_what_is_kept_for_the_backward_without_the_weights():
    layer, x = nn.Linear(7, 5), torch.randn(11, 7, requires_grad=True)
    with counting_graph(layer) as graph:
        y = layer(x)
        loss = (y.tanh() * y).sum()
        y.exp()
    # The input; what goes into the product, one of which tanh keeps too; what nobody needs is gone.
    assert graph.bytes == 4 * (11 * 7 + 2 * 11 * 5)
    loss.backward()
    assert layer.weight.grad is not None


def test_where_nothing_is_differentiated_nothing_is_kept():
    with torch.no_grad(), counting_graph(make_small()) as graph:
        make_small().inwards(torch.zeros(3, 5))
    assert graph.bytes == 0


@pytest.mark.parametrize("kind", POLICIES)
def test_a_loss_is_counted_and_its_gradients_are_the_same(kind):
    policy, ppo = POLICIES[kind](), PPO(gamma=0.9, gae_lambda=0.9, ent_coef=0.01)
    segments = stored(policy)
    targets = targets_of(segments, ppo)
    grads, sizes = [], []
    for rows in (2, 12, 12):
        chosen = segments.rows(torch.arange(rows))
        some = normalised(targets.rows(torch.arange(rows)), chosen, ppo, None)
        policy.zero_grad()
        with counting_graph(policy) as graph:
            loss, _, _ = loss_of(policy, chosen, some, ppo)
        loss.backward()
        sizes.append(graph.bytes)
        grads.append([each.grad for each in policy.parameters() if each.grad is not None])
    loss, _, _ = loss_of(policy, segments.rows(torch.arange(12)), some, ppo)
    policy.zero_grad()
    loss.backward()
    plain = [each.grad for each in policy.parameters() if each.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(grads[-1], plain, strict=True))
    assert 0 < 2 * sizes[0] < sizes[1] == sizes[2]


def run(sizes, total=TOTAL, held=None, parts=None, name="process"):
    """Feed readings at equal distances over a run; return the metrics of each and the alarms."""
    left = iter(sizes)
    readers = (
        {"process": lambda: next(left)} if name == "process" else {"process": int, name: lambda: next(left)}
    )
    held = Held(total, readers=readers)
    found, alarms = [], []
    for k in range(len(sizes)):
        step = (k + 1) * total // len(sizes)
        counted = {"buffer": 10, "state": 5, "graph": 7} | {
            key: part[k] for key, part in (parts or {}).items()
        }
        found.append(held.take(**counted, global_step=step))
        alarms.append(held.alarm())
    return found, alarms


def test_what_was_counted_and_read_is_told():
    found, _ = run([100, 300, 200])
    assert found[0] == {
        "memory/buffer_bytes": 10,
        "memory/state_bytes": 5,
        "memory/graph_bytes": 7,
        "machine/process_bytes": 100,
        "machine/process_peak_bytes": 100,
    }
    assert [each["machine/process_bytes"] for each in found] == [100, 300, 200]
    assert [each["machine/process_peak_bytes"] for each in found] == [100, 300, 300]


def test_on_a_gpu_its_memory_is_told_too():
    found, _ = run([100, 300, 200], name="gpu")
    assert [each["machine/gpu_bytes"] for each in found] == [100, 300, 200]
    assert found[-1]["machine/gpu_peak_bytes"] == 300


@given(st.integers(-1000, 1000), st.integers(8, 60))
def test_growth_is_the_slope_of_the_recent_half_in_bytes_a_million_steps(slope, count):
    early = count // 2 - 1
    sizes = [10**9 + (0 if k < early else slope * (k - early)) for k in range(count)]
    found, _ = run(sizes, total=count * 1000)
    assert found[-1]["machine/growth"] == pytest.approx(slope * 1000, abs=1e-3)
    assert "machine/growth" not in found[0]


BASE = 500 * MIB


def noise(k):
    """Readings scatter; this does so by up to 10 MiB either way, the same each time."""
    return (k * 7919 % 21 - 10) * MIB


def test_a_leak_raises_the_alarm_once_and_says_how_much_and_what_to_look_for():
    _, alarms = run([BASE + k * 4 * MIB + noise(k) for k in range(100)])
    told = [alarm for alarm in alarms if alarm]
    assert len(told) == 1
    for word in (
        "process memory grows",
        "MiB at step 50,000",
        "MiB a million steps",
        "graph that is kept",
        "list",
    ):
        assert word in told[0]
    assert "buffer, states and graph did not grow" in told[0]
    assert "\n" not in told[0]
    assert not any(alarms[:10])


def test_the_alarm_says_which_of_our_own_grew_with_it():
    _, alarms = run(
        [BASE + k * 4 * MIB for k in range(100)], parts={"graph": [7 * (1 + k) for k in range(100)]}
    )
    assert any("graph grew too" in alarm for alarm in alarms)


def test_memory_of_the_gpu_that_grows_raises_it_too():
    _, alarms = run([BASE + k * 4 * MIB for k in range(100)], name="gpu")
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
    ],
)
def test_without_a_leak_there_is_no_alarm(sizes):
    _, alarms = run(sizes)
    assert not any(alarms)


def test_a_leak_that_begins_late_is_found():
    _, alarms = run([BASE + max(0, k - 100) * 5 * MIB + noise(k) for k in range(200)])
    assert any(alarms)


def test_watching_does_not_grow_itself():
    readings = Readings()
    for k in range(5 * KEPT):
        readings.add(k, k, warm=k > 20)
        assert len(readings._all) <= KEPT
    assert (readings.latest, readings.peak) == (5 * KEPT - 1, 5 * KEPT - 1)
    assert readings.growth() == pytest.approx(1e6)
    assert readings._base == (21, 21)


def test_a_process_is_read_and_a_true_leak_is_found():
    held, kept, alarms = Held(3000), [], []
    for step in range(100, 3001, 100):
        # Written to, so that the memory is really taken.
        kept.append(torch.ones(16 * MIB // 4))
        held.take(buffer=1, state=1, graph=1, global_step=step)
        alarms.append(held.alarm())
    assert sum(map(bool, alarms)) == 1
    assert process_bytes() > len(kept) * 16 * MIB


def test_tensors_that_are_let_go_raise_no_alarm():
    held, alarms = Held(3000), []
    for step in range(100, 3001, 100):
        torch.ones(16 * MIB // 4).sum()
        held.take(buffer=1, state=1, graph=1, global_step=step)
        alarms.append(held.alarm())
    assert not any(alarms)
