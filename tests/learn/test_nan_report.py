"""The first non-finite tensor of a minibatch is named, with its step and agents."""

import copy
from functools import partial

import pytest
import torch

from helpers.one_update import learn_from
from helpers.scripted_world import make_reader, random_script
from holdfast.config.trainer import PPOConfig
from holdfast.learn.nan_report import NonFiniteReport
from holdfast.learn.ppo import compute_loss, compute_targets
from holdfast.learn.teachers import TeacherOutput
from holdfast.rollout import Collector
from holdfast.rollout.nan_checks import NonFiniteError

A, T = 4, 5
PPO = PPOConfig(gamma=0.9, gae_lambda=0.8, ent_coef=0.01)


def collect(policy, gone=0.0):
    """Collect two segments of each agent, with small rewards."""
    collector = Collector(random_script(A, 12, 0, gone=gone), policy, length=2 * T, horizon=T, seed=0)
    segments = copy.deepcopy(collector.rollout(0))
    for steps in (segments.steps, segments.tail):
        steps["rewards"] = torch.sin(steps["rewards"])
    return segments


def message_of(policy, segments, loss_function=None, index=None, targets=None, teacher_outputs=()):
    """Return the error of a report on some rows."""
    index = torch.arange(len(segments)) if index is None else torch.tensor(index)
    rows = segments.rows(index)
    targets = compute_targets(segments, PPO) if targets is None else targets
    loss_function = loss_function or partial(compute_loss, policy, ppo=PPO)
    teacher_outputs = [teacher.rows(index) for teacher in teacher_outputs]
    report = NonFiniteReport(policy, segments, index, rows, targets.rows(index), teacher_outputs, loss_function)
    with pytest.raises(NonFiniteError) as caught:
        report.raise_("here", batch_size=2)
    return str(caught.value)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_reward_raises_and_weights_stay(poison):
    policy = make_reader()
    segments = collect(policy)
    segments.steps["rewards"][0, 2] = poison
    before = copy.deepcopy(policy.state_dict())
    with pytest.raises(NonFiniteError) as caught:
        learn_from(policy, segments, PPO, epochs=2, rows=8)
    assert str(caught.value) == (
        "iteration 1, epoch 1, minibatch 1: rewards is not finite: agent 0, first agent 0, step 2 of the "
        "rollout; the weights are those before this minibatch."
    )
    assert all(torch.equal(before[name], weight) for name, weight in policy.state_dict().items())


def test_weights_are_named_before_what_they_cause():
    policy = make_reader()
    segments = collect(policy)
    segments.steps["rewards"][3, 2] = torch.nan
    with torch.no_grad():
        policy.outwards.weight[0, 1] = torch.inf
    message = message_of(policy, segments)
    assert message.startswith("here: weights are not finite: outwards.weight (1 of 24).")


def test_stored_steps_are_named_by_agent_and_step_of_the_rollout():
    policy = make_reader()
    segments = collect(policy)
    # Row 3 is the second segment of agent 1: its step 2 is step 7 of the rollout.
    segments.steps["env_obs"][3, 2] = torch.nan
    segments.steps["act_log_prob"][4, 0] = torch.nan
    assert message_of(policy, segments, index=[4, 3]) == (
        "here: env_obs is not finite: agent 1, first agent 1, step 7 of the rollout; "
        "the weights are those before this minibatch."
    )
    assert "act_log_prob is not finite: agent 2, first agent 2, step 0" in message_of(policy, segments, index=[4, 5])


def test_invalid_steps_are_not_reported():
    policy = make_reader()
    segments = collect(policy)
    targets = compute_targets(segments, PPO)
    segments.steps["valid"][0, 1] = False
    segments.steps["rewards"][0, 1] = torch.nan
    segments.steps["values"][5, 4] = torch.nan
    message = message_of(policy, segments, targets=targets)
    assert message.startswith("here: values is not finite: agent 2, first agent 2, step 9 of the rollout")


@pytest.mark.parametrize("name", ["advantages", "returns"])
def test_targets_are_named(name):
    policy = make_reader()
    segments = collect(policy)
    targets = compute_targets(segments, PPO)
    getattr(targets, name)[2, 1] = torch.inf
    message = message_of(policy, segments, targets=targets)
    assert message.startswith(f"here: {name} is not finite: agent 1, first agent 1, step 1 of the rollout;")


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("params", torch.nan, "params of teacher expert is not finite: agent 2, first agent 2, step 8 of the rollout"),
        ("values", torch.inf, "values of teacher expert is not finite: agent 2, first agent 2, step 8 of the rollout"),
        # Its square is not finite.
        ("values", 3e38, "not finite: losses/teacher_value@expert (1 of 1), the gradient of "),
    ],
)
def test_outputs_and_losses_of_teachers_are_named(name, number, message):
    policy = make_reader()
    segments = collect(policy)
    shape = segments.steps["values"].shape
    teacher = TeacherOutput("expert", torch.zeros(*shape, policy.actions.size), torch.zeros(shape), 1.0, 1.0)
    getattr(teacher, name)[5, 3] = number
    error_message = message_of(policy, segments, index=[2, 5, 0, 1], teacher_outputs=[teacher])
    assert error_message.startswith(f"here: {message}")
    assert "agent 2;" in error_message or "agent 2," in error_message
    assert "agents" not in error_message


def infinite_gradient(outputs, rows, targets, teacher_outputs):
    """Return a finite loss; its gradient is infinite for rows of agent 3."""
    zero = (outputs["values"] - outputs["values"].detach()).abs()
    mask = rows.steps["env_obs"][..., 0] >= 3000
    loss = zero[mask].sqrt().sum() + zero[~mask].sum()
    return loss, {"losses/value_loss": loss}


def test_gradients_are_named_with_the_agents_that_cause_them():
    policy = make_reader()
    message = message_of(policy, collect(policy), infinite_gradient)
    assert message.startswith("here: not finite: the gradient of ")
    assert message.endswith("; agent 3; the weights are those before this minibatch.")
    assert all(weight.grad is None for weight in policy.parameters())


def infinite_sum(outputs, rows, targets, teacher_outputs):
    """Return a loss that is not finite though all its terms and gradients are."""
    return outputs["values"].sum() + torch.inf, {"losses/value_loss": outputs["values"].sum()}


def test_infinite_sum_of_finite_terms_is_blamed_on_a_coefficient():
    policy = make_reader()
    assert message_of(policy, collect(policy), infinite_sum) == (
        "here: not finite: the loss, of finite terms: a coefficient is too large; no row of it alone; "
        "the weights are those before this minibatch."
    )


def test_update_names_a_coefficient_that_is_too_large():
    policy = make_reader()
    with pytest.raises(NonFiniteError, match=r"^iteration 1, epoch 1, minibatch 1: .* a coefficient is too large;"):
        learn_from(policy, collect(policy), PPO.model_copy(update={"vf_coef": 1e38}), rows=8)
