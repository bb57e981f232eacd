"""The loss of a minibatch, put together from its terms."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDictBase

from holdfast.experience import Segments
from holdfast.learn import losses
from holdfast.learn.replay import replay
from holdfast.learn.targets import Targets
from holdfast.learn.teachers import Heard
from holdfast.learn.teaching import teacher_action_loss, teacher_value_loss
from holdfast.policies import LSTMWrapper
from holdfast.shapes import Float, Tensor
from holdfast.trainer_knobs import PPO


class Judged(NamedTuple):
    """What the policy now says of a minibatch, cut from its graph."""

    values: Float[Tensor, "B T"]
    ratio: Float[Tensor, "B T"]


def loss_of(
    policy: LSTMWrapper,
    segments: Segments,
    targets: Targets,
    ppo: PPO,
    *,
    anchors: Sequence[Tensor] = (),
    heard: Iterable[Heard] = (),
) -> tuple[Float[Tensor, ""], dict[str, Tensor], Judged]:
    """Compute the loss of rows whose advantages are ready to use, what to report of it, and what was said.

    policy_loss + vf_coef value_loss - ent_coef entropy + l2_reg |w|^2 + l2_init |w - w_0|^2 + teachers
    """
    old, new = segments.steps, replay(policy, segments)
    valid = old["valid"]
    log_ratio = new["act_log_prob"] - old["act_log_prob"]
    clip_value = ppo.vf_clip_coef if ppo.clip_vloss else None
    terms = {
        "losses/policy_loss": losses.policy_loss(log_ratio, targets.advantages, valid, ppo.clip_coef),
        "losses/value_loss": losses.value_loss(
            new["values"], old["values"], targets.returns, valid, clip_value
        ),
        "losses/entropy": losses.mean_over(new["entropy"], valid),
    }
    loss = terms["losses/policy_loss"] + ppo.vf_coef * terms["losses/value_loss"]
    loss = loss - ppo.ent_coef * terms["losses/entropy"]
    more = _distances(policy, ppo, anchors) | _lessons(policy, new, valid, heard)
    for name, (weight, term) in more.items():
        terms[name] = term
        loss = loss + weight * term
    with torch.no_grad():
        report = terms | _report(old, new, log_ratio, valid, ppo)
        # Copied where gradients are off: what is reported keeps no graph alive.
        judged = Judged(new["values"].clone(), log_ratio.exp())
        return loss, {name: number.clone() for name, number in report.items()}, judged


def _distances(policy: LSTMWrapper, ppo: PPO, anchors: Sequence[Tensor]) -> dict[str, tuple[float, Tensor]]:
    found = {}
    if ppo.l2_reg:
        found["losses/l2_reg"] = (ppo.l2_reg, losses.l2_distance(policy.parameters()))
    if ppo.l2_init:
        found["losses/l2_init"] = (ppo.l2_init, losses.l2_distance(policy.parameters(), anchors))
    return found


def _lessons(
    policy: LSTMWrapper, new: TensorDictBase, valid: Tensor, heard: Iterable[Heard]
) -> dict[str, tuple[float, Tensor]]:
    found = {}
    for lesson in heard:
        told = new[policy.actions.key]
        action = teacher_action_loss(policy.actions, lesson.told, told, valid)
        value = teacher_value_loss(lesson.values, new["values"], valid)
        found[f"losses/teacher_action@{lesson.name}"] = (lesson.action, action)
        found[f"losses/teacher_value@{lesson.name}"] = (lesson.value, value)
    return found


def _report(
    old: TensorDictBase, new: TensorDictBase, log_ratio: Tensor, valid: Tensor, ppo: PPO
) -> dict[str, Tensor]:
    surprise = torch.where(valid, log_ratio.exp() - 1, 0.0).abs().max()
    value_shift = (new["values"] - old["values"]) / old["values"].abs().clamp(min=1)
    return {
        "losses/approx_kl": losses.approximate_kl(log_ratio, valid),
        "losses/clipfrac": losses.clip_fraction(log_ratio, valid, ppo.clip_coef),
        "losses/importance": losses.mean_over(log_ratio.exp(), valid),
        "ratio_error": surprise,
        "value_error": torch.where(valid, value_shift, 0.0).abs().max(),
    }
