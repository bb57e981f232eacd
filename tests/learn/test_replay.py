"""Stale states after an update: measured, recomputed, or refreshed by burn-in."""

import copy
import sys

import pytest
import torch
from tensordict import TensorDict

from helpers.manual_policy import NewLSTMPolicy
from helpers.one_update import learner_for
from helpers.scripted_world import Scripted, make_reader, random_script
from holdfast import make_policy
from holdfast.learn import ppo, replay
from holdfast.learn.replay import _kl_sums, burn_in_rows, measure_staleness, recompute, state_after
from holdfast.rollout import Collector, Segments
from holdfast.worlds import make_world

A, T, S = 5, 6, 3
K = 4
ROWS = 5
ROLLOUTS = 3


def make_collector(policy=None, lead=K, seed=0, ends=0.04, gone=0.1, steps=80):
    policy = policy or make_reader()
    world = random_script(A, steps, seed, ends, gone)
    return policy, Collector(world, policy, length=S * T, horizon=T, seed=seed, burn_in=lead)


def small_rewards(segments):
    for part in (segments.steps, segments.tail):
        part["rewards"] = torch.sin(part["rewards"])
    return segments


def apart(one, other):
    return max(float((one[key] - other[key]).abs().max()) for key in one.keys())  # noqa: SIM118


def move(policy, size=0.1):
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for weight in policy.parameters():
            weight += size * torch.randn_like(weight)


def test_recomputed_states_equal_stored_ones_with_same_weights():
    policy, collector = make_collector(make_reader().double())
    for version in range(2):
        segments = collector.rollout(version)
        entry_state, after = recompute(policy, segments, batch_size=2)
        assert apart(entry_state.flatten(0, 1), segments.entry_state) <= 1e-12
        assert apart(after, policy.store.read(0, A)) <= 1e-12


def test_recompute_and_burn_in_change_no_live_states_or_gradients():
    policy, collector = make_collector()
    segments = collector.rollout(0)
    before = policy.store.snapshot()
    recompute(policy, segments, batch_size=2)
    burn_in_rows(policy, segments.rows(torch.tensor([3, 1])))
    measure_staleness(policy, segments, collector.next_step)
    after = policy.store.snapshot()
    assert after.slices == before.slices
    assert bool((after.tree == before.tree).all())
    assert policy.store.is_live
    assert all(weight.grad is None for weight in policy.parameters())


@pytest.mark.parametrize("k", [1, K, T])
def test_burn_in_state_equals_stored_one_with_same_weights(k):
    policy, collector = make_collector(make_reader().double(), lead=k)
    for version in range(2):
        segments = collector.rollout(version)
        rows = torch.arange(len(segments))
        # In the second rollout the rows that come first are led in by the first one.
        assert apart(burn_in_rows(policy, segments.rows(rows)).entry_state, segments.entry_state) <= 1e-12


def test_burn_in_steps_precede_the_row():
    _, collector = make_collector(gone=0.0)
    segments = collector.rollout(0)
    earlier = copy.deepcopy(segments)
    later = collector.rollout(1)
    for segments, before in ((earlier, None), (later, earlier)):
        obs = segments.steps["env_obs"].unflatten(0, (A, S))
        led = segments.burn_in.steps["env_obs"].unflatten(0, (A, S))
        assert torch.equal(led[:, 1:], obs[:, :-1, T - K :])
        if before is None:
            assert not segments.burn_in.steps["valid"].unflatten(0, (A, S))[:, 0].any()
        else:
            assert torch.equal(led[:, 0], before.steps["env_obs"].unflatten(0, (A, S))[:, -1, T - K :])


def test_drift_and_stale_kl_are_zero_until_weights_change():
    policy, collector = make_collector(make_reader().double())
    segments = collector.rollout(0)
    still = measure_staleness(policy, segments, collector.next_step)
    assert still["memory/drift"] <= 1e-12
    assert still["memory/stale_kl"] <= 1e-12
    move(policy)
    moved = measure_staleness(policy, segments, collector.next_step)
    assert moved["memory/drift"] > 1e-2
    assert moved["memory/stale_kl"] > 1e-5


def test_drift_is_the_mean_relative_distance_of_stored_and_fresh_states():
    # With so few agents the first one is looked at.
    policy, collector = make_collector(ends=0.0, gone=0.0)
    segments = collector.rollout(0)
    move(policy)
    entry_state, after = recompute(policy, segments, batch_size=A)
    stored = torch.cat([segments.entry_state.unflatten(0, (A, S))[:1, 1:], policy.store.read(0, A)[:1, None]], 1)
    now = torch.cat([entry_state[:1, 1:], after[:1, None]], 1)
    distances = []
    for k in range(S):
        one, other = (torch.cat([tree[key][0, k].flatten() for key in ("h", "c")]) for tree in (stored, now))
        distances.append(float((one - other).norm() / other.norm()))
    drift = measure_staleness(policy, segments, collector.next_step)["memory/drift"]
    assert drift == pytest.approx(sum(distances) / S, rel=1e-5)


def test_rows_of_one_segment_drift_too():
    policy = make_reader()
    collector = Collector(random_script(A, 40, 0, 0.0, 0.0), policy, length=T, horizon=T, seed=0)
    segments = collector.rollout(0)
    move(policy)
    metrics = measure_staleness(policy, segments, collector.next_step)
    assert metrics["memory/drift"] > 1e-2
    assert metrics["memory/stale_kl"] > 0


def test_policy_without_memory_has_no_drift():
    world = make_world("recall", agents=4, delay=3)
    policy = make_policy("fast", world, memory="none", hidden_size=8)
    collector = Collector(world, policy, length=8, horizon=4, seed=0)
    assert measure_staleness(policy, collector.rollout(0), collector.next_step) == {}


@pytest.mark.parametrize("mode", ["recompute", "burn_in"])
def test_stale_modes_with_manual_and_graph_policies(mode):
    recall, script = make_world("recall", agents=4, delay=(2, 5)), random_script(4, 40, 0, 0.1, 0.1)
    graph = make_policy("component:fast", recall, hidden_size=8)
    for world, policy in ((script, NewLSTMPolicy(script.spec)), (recall, graph)):
        collector = Collector(world, policy, length=8, horizon=4, seed=0, burn_in=2 * (mode == "burn_in"))
        segments = collector.rollout(0)
        learner = learner_for(policy, segments, epochs=2, stale=mode, burn_in=2)
        assert learner.update(segments)["memory/replay_error"] <= 1e-5
        assert learner.refresh(segments, collector)["memory/drift"] > 0
        assert learner.update(collector.rollout(1))["memory/replay_error"] <= 1e-5


@pytest.mark.parametrize("mode", ["keep", "recompute", "burn_in"])
def test_first_minibatch_has_no_replay_error(mode):
    policy, collector = make_collector(make_reader().double(), lead=K if mode == "burn_in" else 0, steps=120)
    learner = None
    for version in range(4):
        segments = small_rewards(collector.rollout(version))
        learner = learner or learner_for(policy, segments, rows=ROWS, epochs=3, stale=mode, burn_in=K)
        assert learner.update(segments)["memory/replay_error"] <= 1e-9
        learner.refresh(segments, collector)


def test_burn_in_warms_the_states_of_every_minibatch(monkeypatch):
    policy, collector = make_collector()
    collector.rollout(0)
    segments = small_rewards(collector.rollout(1))
    move(policy)
    warm, entries, backward = burn_in_rows(policy, segments).entry_state["h"], [], ppo.Learner._backward

    def record(self, rows, *args):
        entries.append(rows.entry_state["h"].clone())
        return backward(self, rows, *args)

    monkeypatch.setattr(ppo.Learner, "_backward", record)
    learner_for(policy, segments, lr=0.0, rows=ROWS, epochs=1, stale="burn_in", burn_in=K).update(segments)
    used = torch.cat(entries)
    assert apart({"h": used.flatten(1).sum(1).sort().values}, {"h": warm.flatten(1).sum(1).sort().values}) <= 1e-5
    assert apart({"h": warm}, {"h": segments.entry_state["h"]}) > 1e-2


def test_recompute_runs_before_each_later_epoch_and_after_the_update(monkeypatch):
    calls = []
    original = recompute

    def counted(*words, **options):
        calls.append(None)
        return original(*words, **options)

    policy, collector = make_collector()
    segments = small_rewards(collector.rollout(0))
    learner = learner_for(policy, segments, rows=ROWS, epochs=3, stale="recompute")
    for module in (ppo, sys.modules["holdfast.learn.replay"]):
        monkeypatch.setattr(module, "recompute", counted)
    before = copy.deepcopy(segments.entry_state)
    learner.update(segments)
    assert len(calls) == 2
    assert apart(segments.entry_state, before) > 1e-4
    live = policy.store.snapshot().tree
    learner.refresh(segments, collector)
    # Once to measure, once for the live memories.
    assert len(calls) == 4
    _, after = original(policy, segments, batch_size=A)
    assert apart(policy.store.read(0, A), after) <= 1e-6
    assert apart(live, after) > 1e-4


def whole_episode_states(policy, rollouts):
    """The entry states of the last rollout, recomputed from all steps with current weights."""
    state = policy.lstm.cell.initial(A)
    for segments in rollouts:
        steps = segments.steps.unflatten(0, (A, S))
        entries = []
        for k in range(S):
            entries.append(state)
            state = state_after(policy, steps[:, k], state)
    return torch.stack(entries, dim=1).flatten(0, 1)


def trained(mode, weights=None):
    """Train for some rollouts with a large learning rate; or collect them with the weights of another training."""
    policy = make_reader(seed=2)
    # Episodes that never end: what was remembered long ago tells for ever.
    world = Scripted(A, 200, terminated=torch.zeros(A, 200, dtype=torch.bool))
    collector = Collector(world, policy, length=S * T, horizon=T, seed=0, burn_in=K if mode == "burn_in" else 0)
    learner, rollouts, moved = None, [], []
    for version in range(ROLLOUTS):
        segments = small_rewards(collector.rollout(version))
        rollouts.append(copy.deepcopy(segments))
        learner = learner or learner_for(policy, segments, rows=ROWS, epochs=4, stale=mode, burn_in=K)
        learner.update(segments)
        if weights is not None:
            policy.load_state_dict(weights[version])
        moved.append(copy.deepcopy(policy.state_dict()))
        if version < ROLLOUTS - 1:
            assert learner.refresh(segments, collector)["memory/drift"] > 1e-2
    return policy, rollouts, moved


def log_prob_error(policy, mode, rollouts):
    """How far log-probs of the last rollout are from those of the whole episode run with current weights."""
    segments = rollouts[-1]
    if mode == "recompute":
        segments.entry_state.update_(recompute(policy, segments, batch_size=A)[0].flatten(0, 1))
    rows = segments.rows(torch.arange(len(segments)))
    used = burn_in_rows(policy, rows) if mode == "burn_in" else rows
    truth = Segments(rows.steps, whole_episode_states(policy, rollouts), rows.tail, rows.version)
    with torch.no_grad():
        difference = replay(policy, used)["act_log_prob"] - replay(policy, truth)["act_log_prob"]
    return float(difference.abs().mean())


def test_fresh_states_are_closer_to_a_full_episode_replay():
    policy, rollouts, weights = trained("keep")
    errors = {"keep": log_prob_error(policy, "keep", rollouts)}
    for mode in ("recompute", "burn_in"):
        policy, rollouts, _ = trained(mode, weights)
        errors[mode] = log_prob_error(policy, mode, rollouts)
    assert errors["keep"] > 1e-2
    assert errors["recompute"] < errors["burn_in"] < 0.8 * errors["keep"], errors


def test_stale_kl_counts_valid_steps_only():
    policy = make_reader()
    fresh, stored = ({policy.actions.key: torch.randn(3, 3).log_softmax(-1)} for _ in range(2))
    kl = policy.actions.kl(*(each[policy.actions.key] for each in (fresh, stored)))
    fresh, stored = (TensorDict(each, batch_size=[3]) for each in (fresh, stored))
    kl_sums = _kl_sums(policy, fresh, stored, torch.tensor([True, False, True]))
    torch.testing.assert_close(kl_sums, torch.stack([kl[0] + kl[2], torch.tensor(2.0)]))
