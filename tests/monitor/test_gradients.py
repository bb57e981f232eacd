"""Gradient norms and gradient reach, on cells whose reach is known."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from helpers import broken_policies as own
from helpers.monitored_policies import POLICIES, T, graph, scripted, stored
from helpers.small_policy import make_small
from holdfast import rng
from holdfast.errors import ContractError
from holdfast.learn import replay
from holdfast.memory.episode_resets import reset_mask
from holdfast.monitor.gradients import advice, norms_by_module, reach, reach_back, reach_metrics


class WithOwnParameter(own.Small):
    """Has a parameter that belongs to no part."""

    def __init__(self, **options):
        super().__init__(**options)
        self.scale = nn.Parameter(torch.ones(3))

    def decode(self, features):
        thoughts = super().decode(features)
        return thoughts._replace(logits=self.scale * thoughts.logits)


def with_gradients(policy):
    again = replay(policy, stored(policy))
    (again["act_log_prob"].mean() + again["values"].square().mean()).backward()
    return policy


def test_gradient_norms_by_module():
    policy = with_gradients(make_small(WithOwnParameter))
    norms = norms_by_module(policy)
    assert set(norms) == {f"gradients/norm@{name}" for name in ("lstm", "inwards", "outwards", "scale")}
    for name in ("lstm", "inwards", "outwards"):
        flat = torch.cat([each.grad.flatten() for each in getattr(policy, name).parameters()])
        torch.testing.assert_close(norms[f"gradients/norm@{name}"], flat.norm())
    torch.testing.assert_close(norms["gradients/norm@scale"], policy.scale.grad.norm())


def test_gradient_norms_of_graph_components():
    policy = with_gradients(graph())
    norms = norms_by_module(policy)
    parts = {name for name, part in policy.components.items() if list(part.parameters())}
    assert set(norms) == {"gradients/norm@lstm", *(f"gradients/norm@components.{name}" for name in parts)}


@pytest.mark.parametrize("kind", POLICIES)
def test_module_norms_add_up_to_the_total(kind):
    policy = with_gradients(POLICIES[kind]())
    total = torch.cat([each.grad.flatten() for each in policy.parameters() if each.grad is not None]).norm()
    parts = torch.stack(list(norms_by_module(policy).values()))
    torch.testing.assert_close(parts.norm(), total)


def test_shared_weight_counts_once():
    policy = make_small(WithOwnParameter)
    policy.twin = policy.inwards
    policy.alias = nn.Module()
    policy.alias.register_parameter("weight", policy.outwards.weight)
    norms = norms_by_module(with_gradients(policy))
    assert "gradients/norm@alias" not in norms
    assert "gradients/norm@twin" not in norms


def test_module_without_gradient_is_left_out():
    assert norms_by_module(make_small()) == {}


def by_hand(policy, segments, rows):
    """The same by a loop over rows: gradients of the outputs with the longest history, by input step."""
    steps, masses = segments.steps, []
    clear, valid = reset_mask(steps, policy.clear_on), steps["valid"]
    best = []
    for b in range(len(segments)):
        start, longest = 0, (-1, T - 1)
        for t in range(T):
            start = t if clear[b, t] else start
            longest = max(longest, (t - start, t)) if valid[b, t] else longest
        best.append((-longest[0], b, longest[1]))
    for _, b, t in sorted(best)[:rows]:
        x = policy.encode(steps["env_obs"][b]).detach()[None].requires_grad_()
        y, _ = policy.lstm.cell(x, segments.entry_state[b : b + 1], clear[b : b + 1], valid[b : b + 1])
        scores, value = policy.decode(y[0])
        outputs = torch.cat([value[t : t + 1], torch.log_softmax(scores[t], -1)])
        weight = 2 * rng.uniform(0, rng.STREAM_PROBE, torch.arange(4), 0) - 1
        (grad,) = torch.autograd.grad((outputs * weight).sum(), x)
        masses.append(torch.stack([grad[0, t - a].norm() if a <= t else torch.tensor(0.0) for a in range(T)]))
    return torch.stack(masses).mean(0)


@pytest.mark.parametrize("memory", ["lstm", "gru", "minlstm"])
@pytest.mark.parametrize(("rows", "clear_on"), [(1, "episode"), (5, "episode"), (99, "trial")])
def test_reach_back_matches_loop(memory, rows, clear_on):
    policy = make_small(memory=memory, clear_on=clear_on)
    segments = stored(policy)
    masses = reach_back(policy, segments, rows)
    assert masses.shape == (T,)
    torch.testing.assert_close(masses, by_hand(policy, segments, rows))
    assert masses[0] > 0


@pytest.mark.parametrize("kind", POLICIES)
def test_reach_back_stops_at_resets(kind):
    policy = POLICIES[kind]()
    segments = stored(policy)
    where = torch.arange(T)
    # One start in the third step of every row: from any step at most T - 3 are behind.
    segments.steps["first"][:] = where == 2
    segments.steps["valid"][:] = True
    mass = reach_back(policy, segments)
    assert (mass[: T - 2] > 0).all()
    assert (mass[T - 2 :] == 0).all()


def test_reach_back_without_memory():
    policy = make_small(memory="none")
    mass = reach_back(policy, stored(policy))
    assert mass[0] > 0
    assert (mass[1:] == 0).all()
    assert reach(mass) == 1


def test_reach_back_of_policy_that_detaches():
    policy = make_small(own.CutsInside)
    mass = reach_back(policy, stored(policy))
    assert mass[0] > 0
    assert (mass[1:] == 0).all()


class Rehearses(own.Small):
    """Lets its memory read every segment once for nothing."""

    def unroll(self, obs, first, state, valid=None):
        super().unroll(obs, first, state, valid)
        return super().unroll(obs, first, state, valid)


def test_reach_back_adds_all_inputs_of_a_step():
    once, twice = make_small(), make_small(Rehearses)
    segments = stored(once)
    torch.testing.assert_close(reach_back(twice, segments), reach_back(once, segments))


class ReadsTwice(own.Small):
    """Has its memory read the first half of a segment once more."""

    def unroll(self, obs, first, state, valid=None):
        if first.dim() == 2:
            super().unroll(obs[:, :3], first[:, :3], state)
        return super().unroll(obs, first, state, valid)


def test_a_memory_that_does_not_read_every_step_equally_often_is_refused():
    policy = make_small(ReadsTwice)
    with pytest.raises(ContractError, match=f"read {T + 3} steps in a replay of {T}"):
        reach_back(policy, stored(policy))


def gated(keep):
    """An LSTM that keeps this share of its cell each step, without other ties between steps."""
    policy = make_small(num_layers=1)
    cell, H = policy.lstm.cell, policy.hidden_size
    with torch.no_grad():
        weight_ih, weight_hh, bias_ih, bias_hh = cell.layer(0)
        weight_hh.zero_()
        weight_ih[H : 2 * H] = 0
        bias_hh.zero_()
        bias_ih[H : 2 * H] = {0.0: -1e4, 1.0: 1e4}.get(keep, math.log(keep / (1 - keep)) if 0 < keep < 1 else 0)
    return policy


def one_long_episode(policy):
    """Rows without episode starts and with equal observations."""
    segments = stored(policy, scripted(starts=0.0, absences=False))
    segments.steps["first"][:] = False
    segments.steps["env_obs"][:] = segments.steps["env_obs"][:, :1]
    return segments


def test_reach_back_with_closed_forget_gates_is_the_current_step_only():
    policy = gated(0.0)
    mass = reach_back(policy, one_long_episode(policy))
    assert mass[0] > 0
    assert (mass[1:] == 0).all()


@pytest.mark.parametrize("keep", [0.25, 0.5, 0.9, 1.0])
def test_reach_back_decays_by_the_forget_factor(keep):
    policy = gated(keep)
    mass = reach_back(policy, one_long_episode(policy))
    # The present is felt through the output gate too.
    torch.testing.assert_close(mass[2:] / mass[1:-1], torch.full((T - 2,), keep))
    assert (reach(mass) > T / 2) == (keep >= 0.9)


def test_reach_back_selects_rows_with_the_longest_history():
    policy = make_small()
    segments = stored(policy)
    segments.steps["valid"][:] = True
    segments.steps["first"][:] = True
    segments.steps["first"][7] = torch.arange(T) == 0
    assert (reach_back(policy, segments, rows=1) > 0).all()
    assert (reach_back(policy, segments, rows=2) > 0).all()


def test_reach_back_ignores_invalid_rows():
    policy = make_small()
    segments = stored(policy)
    segments.steps["valid"][:] = False
    assert (reach_back(policy, segments) == 0).all()


@pytest.mark.parametrize("kind", [*POLICIES, "drops out"])
def test_reach_back_has_no_side_effects(kind):
    policy = make_small(own.UsesDropout) if kind == "drops out" else POLICIES[kind]()
    segments = stored(policy)
    replay(policy, segments)["values"].sum().backward()
    grads = [None if each.grad is None else each.grad.clone() for each in policy.parameters()]
    live, steps = policy.store.snapshot(), segments.steps.clone()
    policy.lstm.eval()
    generator = torch.get_rng_state()
    with torch.no_grad():
        reach_back(policy, segments)
    assert torch.equal(torch.get_rng_state(), generator)
    assert policy.training
    assert not policy.lstm.training
    for each, grad in zip(policy.parameters(), grads, strict=True):
        assert each.grad is None if grad is None else torch.equal(each.grad, grad)
    assert (policy.store.snapshot().tree == live.tree).all()
    assert (segments.steps == steps).all()
    assert not policy.lstm.cell._forward_pre_hooks


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.floats(0.01, 1.0))
@example([1, 1], 0.5)
def test_a_reach_is_the_fewest_steps_that_hold_the_share(masses, share):
    steps, total = reach(torch.tensor(masses).double(), share), sum(masses)
    if total == 0:
        assert steps == 0
    else:
        assert sum(masses[:steps]) >= share * total > sum(masses[: steps - 1])
        assert 1 <= steps <= len(masses)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_reach_of_non_finite_gradient_is_zero(odd):
    mass = torch.tensor([1.0, odd])
    assert reach_metrics(mass) == {"memory/gradient_reach": 0}


def test_reach_metrics_within_powers_of_two():
    metrics = reach_metrics(torch.tensor([4.0, 2.0, 1.0, 1.0, 0.0, 0.0]))
    assert metrics == {
        "memory/gradient_reach": 3,
        "gradients/within@1": 0.5,
        "gradients/within@2": 0.75,
        "gradients/within@4": 1.0,
    }


@pytest.mark.parametrize(
    ("steps", "horizon", "expected"),
    [
        (19, 64, "80 % of the gradient lies within 19 of 64 steps: trainer.bptt_horizon=32 is enough."),
        (1, 64, "80 % of the gradient lies within 1 of 64 steps: trainer.bptt_horizon=2 is enough."),
        (21, 64, "80 % of the gradient lies within 21 of 64 steps: trainer.bptt_horizon=32 is enough."),
        (22, 64, ""),
        (47, 64, ""),
        (48, 64, "80 % of the gradient lies within 48 of 64 steps, up to the segment edge; try a longer "),
        (1, 1, "80 % of the gradient lies within 1 of 1 steps, up to the segment edge; try a longer "),
        (0, 64, ""),
    ],
)
def test_advice_is_one_line_or_none(steps, horizon, expected):
    message = advice(steps, horizon)
    assert message.startswith(expected)
    assert bool(message) == bool(expected)
    assert "\n" not in message
