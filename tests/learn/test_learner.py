"""Options of the update: accumulation, sampling, V-trace, refreshed advantages, KL stop, L2 to initial weights."""

import copy
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.one_update import learn_from, learner_for, replay_loss
from helpers.scripted_world import make_reader, random_script
from holdfast.config.trainer import PPOConfig, SamplingConfig
from holdfast.errors import ContractError
from holdfast.learn import ppo, replay
from holdfast.learn.advantage import Targets, refresh_bootstrap
from holdfast.learn.ppo import compute_targets, normalize_advantages
from holdfast.rollout import Collector
from holdfast.rollout.segments import (
    annealed_beta,
    importance_weights,
    sample_minibatches,
    segment_priorities,
)

A, T = 4, 5
PLAIN = PPOConfig(gamma=0.9, gae_lambda=0.8, ent_coef=0.01, max_grad_norm=1e9)


def collect_segments(policy, seed=0, gone=0.2):
    collector = Collector(random_script(A, 12, seed, 0.15, gone), policy, length=2 * T, horizon=T, seed=seed)
    segments = copy.deepcopy(collector.rollout(0))
    for part in (segments.steps, segments.tail):
        part["rewards"] = torch.sin(part["rewards"])
    return segments


def weights_of(policy):
    return torch.cat([weight.detach().flatten() for weight in policy.parameters()])


class Noting(torch.optim.SGD):
    """Notes the gradient of each step, and takes none."""

    def __init__(self, policy):
        super().__init__(policy.parameters(), lr=0.0)
        self.gradients = []

    def step(self, closure=None):
        grads = [weight.grad.flatten() for group in self.param_groups for weight in group["params"]]
        self.gradients.append(torch.cat(grads).clone())


def noted(monkeypatch, name):
    """Write down what a function of the update is called with."""
    honest, calls = getattr(ppo, name), []

    def noting(*words):
        calls.append(words)
        return honest(*words)

    monkeypatch.setattr(ppo, name, noting)
    return calls


def gradients_with(segments, ppo=PLAIN, **words):
    policy = make_reader().double()
    optimizer = Noting(policy)
    # A copy, since an update writes what it thinks into the buffer.
    segments = copy.deepcopy(segments)
    report = learn_from(policy, segments, ppo, optimizer=optimizer, **{"lr": 0.0, "rows": 8} | words)
    return optimizer.gradients, report


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.sampled_from([2, 4, 8]), st.sampled_from(["gae", "vtrace"]))
def test_gradient_accumulation_equals_full_minibatch(seed, pieces, advantage):
    # Nobody is everywhere: pieces have different numbers of steps.
    ppo = PLAIN.model_copy(update={"l2_init": 0.1, "l2_reg": 0.01, "advantage": advantage})
    segments = collect_segments(make_reader(seed=1).double(), seed=seed, gone=0.5)
    (full,), report = gradients_with(segments, ppo)
    (added,), same = gradients_with(segments, ppo, accumulate=pieces)
    torch.testing.assert_close(added, full, rtol=1e-9, atol=1e-12)
    assert same == pytest.approx(report, rel=1e-9, abs=1e-12)


def test_gradient_accumulation_is_one_optimizer_step():
    gradients, report = gradients_with(collect_segments(make_reader().double()), rows=4, accumulate=4, epochs=3)
    assert len(gradients) == 6
    assert report["charts/gradient_steps"] == 6
    assert report["charts/epochs"] == 3


def test_update_writes_values_and_ratios_to_the_buffer():
    policy = make_reader()
    segments = collect_segments(policy)
    stored = {key: segments.steps[key].clone() for key in ("values", "act_log_prob")}
    moved = make_reader(seed=1)
    with torch.no_grad():
        again = replay(moved, segments)
    learn_from(moved, segments, lr=0.0, rows=2)
    torch.testing.assert_close(segments.steps["values_now"], again["values"], rtol=1e-4, atol=1e-5)
    ratio = (again["act_log_prob"] - stored["act_log_prob"]).exp()
    torch.testing.assert_close(segments.steps["ratio"], ratio, rtol=1e-4, atol=1e-5)
    assert (segments.steps["ratio"] - 1).abs().max() > 1e-2
    # What was lived stays.
    assert all(torch.equal(segments.steps[key], before) for key, before in stored.items())


def test_refreshed_advantages_equal_those_of_new_values():
    policy = make_reader().double()
    segments = collect_segments(policy, gone=0.3)
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(segments.steps["values"].shape, generator=generator, dtype=torch.float64)
    segments.steps["values_now"] = values
    ends = segments.tail["values"].unflatten(0, (A, 2))[:, -1].clone()
    refresh_bootstrap(segments)
    targets = compute_targets(segments, PLAIN, "values_now")
    # Lived in one segment, with nothing to look past lambda 0, the same values give the same advantages.
    long = segments.steps.unflatten(0, (A, 2)).flatten(1, 2)
    short = PLAIN.model_copy(update={"gae_lambda": 0.0})
    tail = segments.tail.unflatten(0, (A, 2))[:, -1].clone()
    assert torch.equal(tail["values"], ends)
    joined = type(segments)(long, segments.entry_state[::2], tail, segments.version[::2], A)
    by_life = compute_targets(joined, short, "values_now").advantages.unflatten(1, (2, T)).flatten(0, 1)
    torch.testing.assert_close(compute_targets(segments, short, "values_now").advantages, by_life)
    assert not torch.equal(targets.advantages, compute_targets(segments, PLAIN).advantages)


@pytest.mark.parametrize("refresh", ["once", "epoch"])
def test_advantages_are_recomputed_each_epoch(refresh, monkeypatch):
    goals = noted(monkeypatch, "normalize_advantages")
    segments = collect_segments(make_reader())
    learn_from(make_reader(seed=1), segments, lr=0.0, rows=8, epochs=2, refresh=refresh)
    one, other = (goal.advantages.sort(0).values for goal, *_ in goals)
    assert torch.equal(one, other) == (refresh == "once")


@pytest.mark.parametrize("refresh", ["once", "epoch"])
def test_bootstrap_values_are_refreshed_each_epoch(refresh):
    segments = collect_segments(make_reader())
    before = segments.tail["values"].clone()
    learn_from(make_reader(seed=1), segments, lr=0.0, rows=8, epochs=2, refresh=refresh)
    assert torch.equal(segments.tail["values"], before) == (refresh == "once")


def test_vtrace_uses_current_probability_ratios():
    segments = collect_segments(make_reader())
    moved = make_reader(seed=1)
    ppo = PLAIN.model_copy(update={"advantage": "vtrace", "norm_adv": False})
    with torch.no_grad():
        ratio = (replay(moved, segments)["act_log_prob"] - segments.steps["act_log_prob"]).exp()
    expected = copy.deepcopy(segments)
    expected.steps["ratio"] = ratio
    goal = compute_targets(expected, ppo)
    assert not torch.allclose(goal.advantages, compute_targets(segments, PLAIN).advantages)
    _, report, _ = replay_loss(moved, segments, goal, ppo)
    metrics = learn_from(moved, segments, ppo, lr=0.0, rows=8)
    assert metrics["losses/policy_loss"] == pytest.approx(float(report["losses/policy_loss"]), rel=1e-4)
    assert metrics["losses/value_loss"] == pytest.approx(float(report["losses/value_loss"]), rel=1e-4)


def test_vtrace_reads_refreshed_values_where_advantages_are_refreshed(monkeypatch):
    calls = noted(monkeypatch, "compute_targets")
    ppo = PLAIN.model_copy(update={"advantage": "vtrace"})
    for refresh, expected in (("once", {"values"}), ("epoch", {"values_now"})):
        calls.clear()
        learn_from(make_reader(seed=1), collect_segments(make_reader()), ppo, rows=8, epochs=2, refresh=refresh)
        # The first are those of the whole buffer, before anything is thought anew.
        assert {"".join(which) or "values" for _, _, *which in calls[1:]} == expected


def test_target_kl_stops_the_update():
    segments = collect_segments(make_reader())
    calm = learn_from(make_reader(), copy.deepcopy(segments), PLAIN, lr=0.05, epochs=6)
    assert calm["charts/epochs"] == 6
    careful = PLAIN.model_copy(update={"target_kl": 0.01})
    stopped = learn_from(make_reader(), copy.deepcopy(segments), careful, lr=0.05, epochs=6)
    assert 1 <= stopped["charts/epochs"] < 6
    assert stopped["charts/gradient_steps"] == 2 * stopped["charts/epochs"]
    patient = PLAIN.model_copy(update={"target_kl": 1e9})
    assert learn_from(make_reader(), segments, patient, lr=0.05, epochs=6)["charts/epochs"] == 6


@pytest.mark.parametrize("method", ["uniform", "prioritized"])
def test_sampling_methods_and_importance_weights(method, monkeypatch):
    weighed = noted(monkeypatch, "normalize_advantages")
    segments, sampling = collect_segments(make_reader()), SamplingConfig(method=method, alpha=0.7, beta0=0.4)
    learner = learner_for(make_reader(), segments, PLAIN, rows=4, epochs=2, seed=9, sampling=sampling)
    report = learner.update(segments, progress=0.5)
    assert len(weighed) == 4
    priorities = None
    if method == "prioritized":
        assert report["charts/beta"] == annealed_beta(0.4, 0.5) == pytest.approx(0.7)
        priorities = segment_priorities(compute_targets(segments, PLAIN).advantages, segments.steps["valid"], 0.7)
    expected = [
        each for epoch in range(2) for each in sample_minibatches(segments, priorities, 4, 2, seed=9, epoch=epoch)
    ]
    for (_, rows, _, weights), (index, probability) in zip(weighed, expected, strict=True):
        assert torch.equal(rows.steps["env_obs"], segments.steps["env_obs"][index])
        if method == "uniform":
            assert weights is None
        else:
            assert torch.equal(weights, importance_weights(probability, len(segments), 0.7))


def test_importance_weights_multiply_normalized_advantages():
    segments = collect_segments(make_reader())
    targets = compute_targets(segments, PLAIN)
    weights = torch.linspace(0.5, 2.0, len(segments))
    plain, heavy = (normalize_advantages(targets, segments, PLAIN, each) for each in (None, weights))
    torch.testing.assert_close(heavy.advantages, plain.advantages * weights[:, None])
    assert torch.equal(heavy.returns, plain.returns)


@pytest.mark.parametrize("key", ["l2_init", "l2_reg"])
def test_l2_reg_and_l2_init_gradients(key):
    segments = collect_segments(make_reader().double())
    ppo = PLAIN.model_copy(update={key: 0.3})
    policy = make_reader().double()
    learner = learner_for(policy, segments, ppo, rows=8)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 0.1
    goal = Targets(*(torch.zeros_like(segments.steps["values"]) for _ in range(2)))
    gradients = []
    for knobs in (ppo, PLAIN):
        policy.zero_grad()
        loss, report, _ = replay_loss(policy, segments, goal, knobs, initial_weights=learner.initial_weights)
        loss.backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in policy.parameters()]))
        if knobs is ppo:
            away = weights_of(policy) - (weights_of(make_reader().double()) if key == "l2_init" else 0)
            assert float(report[f"losses/{key}"]) == pytest.approx(float(away.square().sum()))
    torch.testing.assert_close(gradients[0] - gradients[1], 2 * 0.3 * away)


def test_weight_clipping_in_update():
    segments = collect_segments(make_reader())
    free, bound = make_reader(), make_reader()
    before = {name: float(weight.detach().abs().max()) for name, weight in free.named_parameters()}
    learn_from(free, copy.deepcopy(segments), PLAIN, lr=0.5, epochs=4)
    learn_from(bound, segments, PLAIN, lr=0.5, epochs=4, clip_range=1.5)
    names = [name for name, weight in free.named_parameters() if weight.dim() > 1]
    assert any(float(free.get_parameter(name).detach().abs().max()) > 1.5 * before[name] for name in names)
    for name in names:
        assert float(bound.get_parameter(name).detach().abs().max()) <= 1.5 * before[name] * (1 + 1e-6)


@pytest.mark.parametrize("name", ["adam", "adamw", "muon"])
def test_scheduled_options_reach_the_optimizer(name):
    if name == "muon" and torch.__version__ < "2.9":
        pytest.skip("Muon comes with torch 2.9")
    policy = make_reader()
    segments = collect_segments(policy)
    learner = learner_for(policy, segments, PLAIN, rows=4)
    knobs = learner.config.model_copy(update={"optimizer": learner.config.optimizer.model_copy(update={"name": name})})
    learner = type(learner)(policy, knobs, 0)
    still = knobs.model_copy(update={"optimizer": knobs.optimizer.model_copy(update={"learning_rate": 0.0})})
    before = weights_of(learner.policy)
    learner.update(segments, still)
    assert torch.equal(before, weights_of(learner.policy))
    learner.update(segments, knobs)
    assert not torch.equal(before, weights_of(learner.policy))


class Calls:
    """Hooks that list their calls."""

    def __init__(self):
        self.calls = []

    @contextmanager
    def around_forward(self):
        self.calls.append("forward")
        yield

    def on_gradients(self, policy):
        assert all(weight.grad is not None for weight in policy.parameters())
        self.calls.append(policy)


@pytest.mark.parametrize(("epochs", "accumulate"), [(1, 1), (2, 1), (2, 2)])
def test_hooks_are_called_in_the_first_minibatch_only(epochs, accumulate):
    policy, hooks = make_reader(), Calls()
    segments = collect_segments(policy)
    learner_for(policy, segments, PLAIN, rows=4, epochs=epochs, accumulate=accumulate).update(segments, hooks=hooks)
    assert hooks.calls == ["forward", policy]


def test_restored_learner_continues_bit_for_bit():
    ppo = PLAIN.model_copy(update={"l2_init": 0.1})
    segments = collect_segments(make_reader())
    one, other = (learner_for(make_reader(seed), segments, ppo, clip_range=1.5) for seed in (0, 1))
    one.update(copy.deepcopy(segments))
    other.policy.load_state_dict(one.policy.state_dict())
    other.restore(copy.deepcopy(one.state()))
    for learner in (one, other):
        learner.update(copy.deepcopy(segments))
    assert torch.equal(weights_of(one.policy), weights_of(other.policy))
    pairs = zip(one.initial_weights, make_reader().parameters(), strict=True)
    assert all(torch.equal(saved, weight) for saved, weight in pairs)
    assert one.weight_bounds == other.weight_bounds != {}


@pytest.mark.parametrize(
    ("key", "field", "message"),
    [
        ("moments", None, "'moments' is NoneType, must be dict"),
        ("initial_weights", {0: torch.zeros(3)}, r"0 is \[3\] torch.float32, must be"),
        ("weight_bounds", {}, "there is no 'lstm"),
    ],
)
def test_learner_state_that_does_not_fit_is_refused(key, field, message):
    segments = collect_segments(make_reader())
    learner = learner_for(make_reader(), segments)
    with pytest.raises(ContractError, match=message):
        learner.restore(learner.state() | {key: field})
