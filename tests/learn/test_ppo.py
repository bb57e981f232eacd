import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from helpers.one_update import learn_from, replay_loss
from helpers.scripted_world import Reader, Scripted, make_reader, random_script
from helpers.small_policy import make_small
from holdfast.config.trainer import PPOConfig
from holdfast.learn import advantage, losses, replay
from holdfast.learn.ppo import compute_targets, normalize_advantages
from holdfast.report.metrics import METRICS
from holdfast.rollout import Collector, Segments
from holdfast.rollout.segments import minibatches

A, T = 4, 5
PLAIN = PPOConfig(gamma=0.9, gae_lambda=0.8, ent_coef=0.01)
CALM = PPOConfig(gamma=0.9, gae_lambda=0.8, ent_coef=0.0)
SHORT = PPOConfig(gamma=0.9, gae_lambda=0.0)


def collect_segments(policy, seed=0, ends=0.15, gone=0.2, dtype=torch.float32):
    """Segments of a scripted world with small rewards."""
    collector = Collector(random_script(A, 12, seed, ends, gone), policy, length=2 * T, horizon=T, seed=seed)
    segments = copy.deepcopy(collector.rollout(0))
    for part in (segments.steps, segments.tail):
        part["rewards"] = torch.sin(part["rewards"]).to(dtype)
    return segments


def run_update(policy, segments, ppo=PLAIN, **words):
    return learn_from(policy, segments, ppo, **{"epochs": 2} | words)


def weights_of(policy):
    return {name: weight.detach().clone() for name, weight in policy.named_parameters()}


def gradients_of(policy, segments, targets, ppo=PLAIN):
    policy.zero_grad()
    loss, _, _ = replay_loss(policy, segments, normalize_advantages(targets, segments, ppo, None), ppo)
    loss.backward()
    return {name: weight.grad.clone() for name, weight in policy.named_parameters()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_an_update_changes_every_weight_and_reports_described_numbers():
    policy = make_reader()
    segments, before = collect_segments(policy), weights_of(policy)
    report = run_update(policy, segments)
    assert not any(torch.equal(before[name], weight) for name, weight in policy.named_parameters())
    assert report.keys() <= METRICS.keys()
    assert {"losses/policy_loss", "losses/grad_norm", "memory/replay_error"} <= report.keys()
    assert all(type(number) in (int, float) and number == number for number in report.values())


def test_update_is_deterministic():
    one, other = make_reader(), make_reader()
    segments = collect_segments(one)
    assert run_update(one, segments) == run_update(other, segments)
    assert same(weights_of(one), weights_of(other))


def test_update_depends_on_minibatch_order():
    one, other = make_reader(), make_reader()
    segments = collect_segments(one)
    run_update(one, segments, seed=0)
    run_update(other, segments, seed=1)
    assert not same(weights_of(one), weights_of(other))


def numbered(rows):
    nothing = TensorDict({"rewards": torch.zeros(rows)}, batch_size=[rows])
    return Segments(nothing, nothing, nothing, torch.zeros(rows, dtype=torch.long))


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 2**40), st.integers(0, 10**6))
def test_every_row_is_used_exactly_once_an_epoch(total, rows, seed, epoch):
    order = list(minibatches(numbered(total), rows, seed=seed, epoch=epoch))
    assert sorted(torch.cat(order).tolist()) == list(range(total))
    assert all(len(index) == rows for index in order[:-1])


def test_every_epoch_of_a_run_has_its_own_order():
    orders = {tuple(torch.cat(list(minibatches(numbered(12), 4, seed=0, epoch=epoch))).tolist()) for epoch in range(50)}
    assert len(orders) == 50


class Witness(Reader):
    """Writes down the observations of every replay, by the minibatch."""

    def encode(self, obs):
        if torch.is_grad_enabled():
            self.observations.append(obs.flatten().tolist())
        return super().encode(obs)


@pytest.mark.parametrize(("epochs", "rows"), [(1, 8), (1, 2), (3, 4)])
def test_an_update_reads_every_step_once_an_epoch_and_whole_rows_at_a_time(epochs, rows):
    policy = Witness()
    policy.observations = []
    segments = collect_segments(policy)
    run_update(policy, segments, epochs=epochs, rows=rows)
    per_epoch = len(segments) // rows
    assert len(policy.observations) == epochs * per_epoch
    # What nobody acted on is read as zeros.
    there = segments.steps["valid"][..., None]
    steps = torch.where(there, segments.steps["env_obs"], 0.0).flatten(1).tolist()
    assert 0 < int(there.sum()) < there.numel()
    for epoch in range(epochs):
        minibatch = policy.observations[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert all(len(obs) == rows * T for obs in minibatch)
        read = [obs[start : start + T] for obs in minibatch for start in range(0, rows * T, T)]
        assert sorted(read) == sorted(steps)


def test_the_epochs_of_two_updates_have_different_orders():
    orders = []
    for version in (0, 1):
        policy = Witness()
        policy.observations = []
        segments = collect_segments(make_reader())
        run_update(policy, dataclasses.replace(segments, version=segments.version + version), epochs=2)
        orders += [policy.observations[:2], policy.observations[2:]]
    assert len({str(order) for order in orders}) == 4


def test_update_does_not_change_live_states():
    policy = make_reader()
    segments = collect_segments(policy)
    before = policy.store.snapshot()
    run_update(policy, segments)
    after = policy.store.snapshot()
    assert bool(before.tree["h"].any())
    assert after.slices == before.slices
    assert bool((after.tree == before.tree).all())


def test_update_does_not_change_stored_steps():
    policy = make_reader()
    segments = collect_segments(policy)
    before = copy.deepcopy(segments)
    run_update(policy, segments)
    for part in ("steps", "entry_state", "tail"):
        one, other = getattr(segments, part), getattr(before, part)
        assert set(one.keys()) == set(other.keys())
        if part == "steps":
            # What the update thinks by now; what was lived lies beside it.
            one, other = (td.exclude("values_now", "ratio") for td in (one, other))
        assert bool((one == other).all())


@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_replay_reproduces_the_rollout(seed):
    policy = make_reader().double()
    segments = collect_segments(policy, seed=seed)
    again = replay(policy, segments)
    valid = segments.steps["valid"]
    for key in ("values", "act_log_prob"):
        torch.testing.assert_close(again[key][valid], segments.steps[key][valid], rtol=1e-9, atol=1e-9)
    report = run_update(policy, segments)
    assert report["memory/replay_error"] < 1e-9
    assert report["memory/replay_value_error"] < 1e-9


def test_a_wrong_entry_state_shows_in_the_replay_error():
    policy = make_reader()
    segments = collect_segments(policy, gone=0.0, ends=0.05)
    forgotten = dataclasses.replace(segments, entry_state=segments.entry_state.apply(torch.zeros_like))
    assert run_update(make_reader(), segments, rows=8)["memory/replay_error"] < 1e-5
    report = run_update(make_reader(), forgotten, rows=8)
    assert report["memory/replay_error"] > 1e-3
    assert report["memory/replay_value_error"] > 1e-3


def test_the_replay_error_is_that_of_the_first_minibatch():
    # With a learning rate this large later minibatches are far away; the first one is not.
    policy = make_reader()
    segments = collect_segments(policy)
    report = run_update(policy, segments, CALM, lr=0.5)
    assert report["memory/replay_error"] < 1e-5
    assert report["losses/approx_kl"] > 1e-2


def test_targets_read_the_next_step_and_the_tail():
    policy = make_reader().double()
    segments = collect_segments(policy, seed=3)
    targets = compute_targets(segments, PLAIN)
    steps, tail = segments.steps, segments.tail
    for b in range(len(segments)):
        following = {
            key: torch.cat([steps[key][b, 1:], tail[key][b : b + 1]])
            for key in ("rewards", "dones", "truncateds", "last_values")
        }
        by_row = advantage.gae(
            steps["values"][b : b + 1],
            steps["valid"][b : b + 1],
            *(following[key][None] for key in ("rewards", "dones", "truncateds", "last_values")),
            tail["values"][b : b + 1],
            gamma=0.9,
            lam=0.8,
        )
        assert torch.equal(targets.advantages[b], by_row[0])
    assert torch.equal(targets.returns, targets.advantages + steps["values"])


def test_the_reward_of_an_action_is_the_one_that_came_with_the_next_step():
    policy = make_reader()
    segments = collect_segments(policy, gone=0.0, ends=0.0)
    nothing = compute_targets(segments, PPOConfig(gamma=0.0, gae_lambda=0.0)).advantages
    torch.testing.assert_close((nothing + segments.steps["values"])[:, :-1], segments.steps["rewards"][:, 1:])
    torch.testing.assert_close((nothing + segments.steps["values"])[:, -1], segments.tail["rewards"])


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("clip_value", [True, False])
def test_the_loss_is_made_of_its_three_terms(normalize, clip_value):
    ppo = PPOConfig(
        norm_adv=normalize,
        clip_vloss=clip_value,
        vf_coef=0.3,
        clip_coef=0.2,
        vf_clip_coef=0.05,
        ent_coef=0.07,
    )
    policy = make_reader().double()
    segments = collect_segments(policy, seed=5)
    targets = compute_targets(segments, PLAIN)
    moved = make_reader(seed=1).double()
    loss, report, _ = replay_loss(moved, segments, normalize_advantages(targets, segments, ppo, None), ppo)
    old, valid, again = segments.steps, segments.steps["valid"], replay(moved, segments)
    log_ratio = again["act_log_prob"] - old["act_log_prob"]
    weights = losses.masked_normalize(targets.advantages, valid) if normalize else targets.advantages
    policy_loss = losses.policy_loss(log_ratio, weights, valid, 0.2)
    value_loss = losses.value_loss(again["values"], old["values"], targets.returns, valid, 0.05 if clip_value else None)
    entropy = -(again["full_log_probs"].exp() * again["full_log_probs"]).sum(-1)[valid].mean()
    torch.testing.assert_close(loss, policy_loss + 0.3 * value_loss - 0.07 * entropy)
    torch.testing.assert_close(report["losses/entropy"], entropy.detach())
    assert not any(number.requires_grad for number in report.values())


def disturb(segments, targets):
    """Change all values at invalid steps except the clears: an episode may start there."""
    steps = segments.steps.clone()
    gone = ~steps["valid"]
    steps["env_obs"][gone] = 777.0
    steps["actions"][gone] = (steps["actions"][gone] + 1) % 3
    steps["values"][gone] = 55.0
    steps["act_log_prob"][gone] = -9.0
    advantages, returns = targets.advantages.clone(), targets.returns.clone()
    advantages[gone], returns[gone] = 1e3, -1e3
    return dataclasses.replace(segments, steps=steps), type(targets)(advantages, returns)


@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_invalid_steps_do_not_affect_the_gradient(seed):
    policy = make_reader()
    segments = collect_segments(policy, seed=seed, gone=0.4)
    targets = compute_targets(segments, PLAIN)
    moved = make_reader(seed=1)
    calm = gradients_of(moved, segments, targets)
    assert all(gradient.any() for gradient in calm.values())
    assert same(calm, gradients_of(moved, *disturb(segments, targets)))


def test_invalid_steps_do_not_affect_advantages():
    policy = make_reader()
    segments = collect_segments(policy, seed=2, gone=0.4)
    targets = compute_targets(segments, PLAIN)
    disturbed, _ = disturb(segments, targets)
    again = compute_targets(disturbed, PLAIN)
    assert torch.equal(again.advantages, targets.advantages)
    valid = segments.steps["valid"]
    assert torch.equal(again.returns[valid], targets.returns[valid])


def test_advantages_across_a_segment_edge_at_invalid_steps():
    # Nobody acts in step 5, which is the first of the second row; with lambda 0 a cut changes nothing else.
    there = torch.ones(A, 12, dtype=torch.bool)
    there[:, T] = False
    advantages = []
    for horizon in (T, 2 * T):
        collector = Collector(
            Scripted(A, 12, valid=there), make_reader().double(), length=2 * T, horizon=horizon, seed=0
        )
        targets = compute_targets(collector.rollout(0), SHORT)
        advantages.append(targets.advantages.reshape(A, 2 * T))
    torch.testing.assert_close(*advantages)


class Blinding(Scripted):
    """Five sensors, with NaN at invalid steps."""

    def __init__(self, *args, **flags):
        super().__init__(*args, **flags)
        self.spec = dataclasses.replace(self.spec, obs_shape=(5,))

    def say(self):
        base_step = super().say()
        obs = torch.sin(base_step.obs + torch.arange(5))
        blinded = torch.where(base_step.valid[:, None], obs, float("nan"))
        return dataclasses.replace(base_step, obs=blinded, last_obs=obs)


@pytest.mark.parametrize("step", [3, T, 2 * T - 1, 2 * T])
def test_nan_observation_of_invalid_agent_does_not_reach_the_gradient(step):
    there = torch.ones(A, 12, dtype=torch.bool)
    there[1, step] = False
    policy = make_small()
    collector = Collector(Blinding(A, 12, valid=there), policy, length=2 * T, horizon=T, seed=0)
    segments = collector.rollout(0)
    gradients = gradients_of(policy, segments, compute_targets(segments, PLAIN))
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients.values())


def test_update_on_invalid_rows():
    policy = make_reader()
    segments = collect_segments(policy, gone=1.0)
    before = weights_of(policy)
    assert not segments.steps["valid"].any()
    report = run_update(policy, segments)
    assert report["losses/grad_norm"] == 0.0
    assert same(before, weights_of(policy))


def test_update_equals_manual_sgd_over_minibatches():
    policy, other = make_reader(), make_reader()
    segments = collect_segments(policy)
    ppo = PPOConfig(gamma=0.9, gae_lambda=0.8, max_grad_norm=1e9)
    sgd = torch.optim.SGD(policy.parameters(), lr=0.1)
    run_update(policy, segments, ppo, optimizer=sgd, lr=0.1, rows=2, seed=3)
    targets = compute_targets(segments, PLAIN)
    for epoch in range(2):
        for index in minibatches(segments, 2, seed=3, epoch=epoch):
            gradients = gradients_of(other, segments.rows(index), targets.rows(index), ppo)
            with torch.no_grad():
                for name, weight in other.named_parameters():
                    weight -= 0.1 * gradients[name]
    for name, weight in policy.named_parameters():
        torch.testing.assert_close(weight, dict(other.named_parameters())[name], rtol=1e-5, atol=1e-6)


def test_gradient_clipping():
    class Recorder(torch.optim.SGD):
        def step(self, closure=None):
            parameters = [p for group in self.param_groups for p in group["params"]]
            lengths.append(float(torch.stack([p.grad.norm() for p in parameters]).norm()))
            return super().step(closure)

    lengths = []
    policy = make_reader()
    segments = collect_segments(policy)
    ppo = PPOConfig(max_grad_norm=1e-3, ent_coef=0.0)
    recorder = Recorder(policy.parameters(), lr=0.1)
    report = run_update(policy, segments, ppo, optimizer=recorder, epochs=1)
    assert len(lengths) == 2
    assert lengths == pytest.approx([1e-3, 1e-3], rel=1e-3)
    assert report["losses/grad_norm"] > 2e-3


def test_gradients_are_zeroed_between_minibatches():
    # With a learning rate of nothing, the second epoch sees the same gradients as the first.
    lengths = []
    for epochs in (1, 2):
        policy = make_reader()
        segments = collect_segments(policy)
        report = run_update(policy, segments, CALM, lr=0.0, epochs=epochs, rows=8)
        lengths.append(report["losses/grad_norm"])
    assert lengths[0] == pytest.approx(lengths[1])


def test_learning_makes_good_actions_likelier():
    policy = make_reader()
    segments = collect_segments(policy, gone=0.0)
    targets = compute_targets(segments, PLAIN)
    with torch.no_grad():
        before = replay(policy, segments)["act_log_prob"]
    run_update(policy, segments, CALM, epochs=4, rows=8)
    with torch.no_grad():
        change = replay(policy, segments)["act_log_prob"] - before
    better = losses.masked_normalize(targets.advantages, segments.steps["valid"])
    assert float((better * change).mean()) > 0.01
