"""What an update optimizes: the targets of a rollout, and the loss of a minibatch."""

from collections.abc import Sequence
from typing import Literal

import torch

from holdfast.config.trainer import PPOConfig
from holdfast.learn import losses
from holdfast.learn.advantage import Targets, gae, vtrace
from holdfast.learn.teachers import TeacherOutput
from holdfast.policies import LSTMWrapper
from holdfast.policies.recurrent_policy import PolicyBatch
from holdfast.rollout import Segments
from holdfast.rollout.segments import shift_left
from holdfast.types import Float, Tensor


@torch.no_grad()
def compute_targets(segments: Segments, ppo: PPOConfig, values: Literal["values", "values_now"] = "values") -> Targets:
    """Compute advantages and returns from stored rewards, flags, values and (for V-trace) ratios.

    The values are those of the rollout, or the latest of the update.
    """
    steps, tail = segments.steps, segments.tail
    inputs = {
        "values": steps[values],
        "valid": steps["valid"],
        "next_rewards": shift_left(steps["rewards"], tail["rewards"]),
        "next_terminated": shift_left(steps["dones"], tail["dones"]),
        "next_truncated": shift_left(steps["truncateds"], tail["truncateds"]),
        "next_last_values": shift_left(steps["last_values"], tail["last_values"]),
        "end_values": tail["values"],
        "gamma": ppo.gamma,
        "lam": ppo.gae_lambda,
    }
    if ppo.advantage == "gae":
        advantages = gae(**inputs)
    else:
        advantages = vtrace(**inputs, ratio=steps["ratio"], rho_clip=ppo.rho_clip, c_clip=ppo.c_clip)
    return Targets(advantages, advantages + steps[values])


def normalize_advantages(
    targets: Targets, segments: Segments, ppo: PPOConfig, weights: Float[Tensor, " B"] | None
) -> Targets:
    """Normalize the advantages of a minibatch (`ppo.norm_adv`), and apply importance-sampling weights."""
    advantages = targets.advantages
    if ppo.norm_adv:
        advantages = losses.masked_normalize(advantages, segments.steps["valid"])
    if weights is not None:
        advantages = advantages * weights[:, None]
    return Targets(advantages, targets.returns)


def compute_loss(
    policy: LSTMWrapper,
    outputs: PolicyBatch,
    segments: Segments,
    targets: Targets,
    teacher_outputs: Sequence[TeacherOutput] = (),
    *,
    ppo: PPOConfig,
    initial_weights: Sequence[Tensor] = (),
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Total loss of replayed segments as the config weighs its terms, and its terms and diagnostics."""
    valid, extra = segments.steps["valid"], {}
    if ppo.l2_reg:
        extra["losses/l2_reg"] = (ppo.l2_reg, losses.l2_distance(policy.parameters()))
    if ppo.l2_init:
        extra["losses/l2_init"] = (ppo.l2_init, losses.l2_distance(policy.parameters(), initial_weights))
    for teacher in teacher_outputs:
        params = outputs[policy.actions.key]
        action = losses.teacher_action_loss(policy.actions, teacher.params, params, valid)
        scale = policy.value_scale
        value = losses.teacher_value_loss(teacher.values / scale, outputs["values"] / scale, valid)
        extra[f"losses/teacher_action@{teacher.name}"] = (teacher.action, action)
        extra[f"losses/teacher_value@{teacher.name}"] = (teacher.value, value)
    return losses.ppo_loss(
        outputs,
        segments.steps,
        targets,
        clip_coef=ppo.clip_coef,
        vf_clip_coef=ppo.vf_clip_coef if ppo.clip_vloss else None,
        vf_coef=ppo.vf_coef,
        ent_coef=ppo.ent_coef,
        extra=extra,
        value_scale=policy.value_scale,
    )
