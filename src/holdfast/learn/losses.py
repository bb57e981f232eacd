"""The PPO ratio, each term of the loss, and their sum; means and normalization over valid steps."""

from collections.abc import Iterable, Mapping

import torch
from tensordict import TensorDictBase

from holdfast import ranks
from holdfast.cuda_graphs import is_recording
from holdfast.learn.advantage import Targets
from holdfast.policies import ActionDistribution
from holdfast.policies.recurrent_policy import PolicyBatch
from holdfast.types import Bool, Float, Int, Tensor

Valid = Bool[Tensor, "B T"] | tuple[Bool[Tensor, "B T"], Tensor]
"""Which steps are valid; with their number, at least 1, where several means are over the same steps."""


def counted(valid: Bool[Tensor, "B T"]) -> tuple[Bool[Tensor, "B T"], Int[Tensor, ""]]:
    """Return valid steps with their number, at least 1."""
    return valid, valid.sum().clamp(min=1)


def masked_mean(x: Float[Tensor, "B T"], valid: Valid) -> Float[Tensor, ""]:
    """Mean over valid steps: sum(x v) / sum(v)."""
    steps, number = valid if isinstance(valid, tuple) else (valid, None)
    if _are_all(steps):
        return x.mean()
    return torch.where(steps, x, 0.0).sum() / (steps.sum().clamp(min=1) if number is None else number)


def _are_all(valid: Bool[Tensor, "B T"]) -> bool:
    """Whether all steps are valid; on a GPU, where looking would make the host wait, the answer is no."""
    return valid.is_cpu and not is_recording() and valid.numel() > 0 and bool(valid.all())


def mean_over_ranks(x: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Mean over the valid steps of all ranks."""
    if ranks.count() == 1:
        return masked_mean(x, valid)
    total, steps = ranks.sums(torch.where(valid, x, 0.0).sum(), valid.sum())
    return total / steps.clamp(min=1)


def masked_normalize(x: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Normalize valid steps to mean 0 and standard deviation 1: (x - mean) / (std + 1e-8).

    Mean and deviation are over the valid steps of all ranks.
    """
    centred = x - mean_over_ranks(x, valid)
    return centred / (torch.sqrt(mean_over_ranks(centred.square(), valid)) + 1e-8)


def _clamp(x: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """Clamp between two numbers, or two tensors of one number."""
    return torch.clamp(x, low, high)  # pyright: ignore[reportCallIssue, reportArgumentType]


def policy_loss(
    log_ratio: Float[Tensor, "B T"], advantage: Float[Tensor, "B T"], valid: Valid, clip: float | Tensor
) -> Float[Tensor, ""]:
    """Clipped surrogate loss: mean max(-A r, -A clip(r, 1 - eps, 1 + eps)), r = exp(log_ratio)."""
    ratio = log_ratio.exp()
    return masked_mean(torch.maximum(-advantage * ratio, -advantage * _clamp(ratio, 1 - clip, 1 + clip)), valid)


def value_loss(
    value: Float[Tensor, "B T"],
    old_value: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    valid: Valid,
    clip: float | Tensor | None,
) -> Float[Tensor, ""]:
    """1/2 mean (v - R)^2; with a clip 1/2 mean max((v - R)^2, (v_old + clip(v - v_old) - R)^2)."""
    error = (value - returns).square()
    if clip is not None:
        clipped = old_value + _clamp(value - old_value, -clip, clip)
        error = torch.maximum(error, (clipped - returns).square())
    return 0.5 * masked_mean(error, valid)


def approximate_kl(log_ratio: Float[Tensor, "B T"], valid: Valid) -> Float[Tensor, ""]:
    """Approximate KL(old, new): mean(r - 1 - log r)."""
    return masked_mean(log_ratio.exp() - 1 - log_ratio, valid)


def clip_fraction(log_ratio: Float[Tensor, "B T"], valid: Valid, clip: float | Tensor) -> Float[Tensor, ""]:
    """Share of steps whose ratio is outside [1 - eps, 1 + eps]."""
    return masked_mean(((log_ratio.exp() - 1).abs() > clip).to(log_ratio.dtype), valid)


def explained_variance(
    value: Float[Tensor, "B T"], returns: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """1 - var(R - v) / var(R): 1 is perfect, 0 no better than a constant, or constant returns.

    Over the valid steps of all ranks.
    """

    def variance(x: Tensor) -> Tensor:
        return mean_over_ranks((x - mean_over_ranks(x, valid)).square(), valid)

    total = variance(returns)
    return torch.where(total > 1e-8, 1 - variance(returns - value) / total.clamp(min=1e-8), 0.0)


def l2_distance(
    weights: Iterable[Float[Tensor, "..."]], anchors: Iterable[Float[Tensor, "..."]] | None = None
) -> Float[Tensor, ""]:
    """Squared L2 distance of weights from their anchors (none: zeros): sum (w - a)^2."""
    pairs = ((w, None) for w in weights) if anchors is None else zip(weights, anchors, strict=True)
    return torch.stack([(w if a is None else w - a).square().sum() for w, a in pairs]).sum()


def teacher_action_loss(
    actions: ActionDistribution,
    teacher_params: Float[Tensor, "B T params"],
    params: Float[Tensor, "B T params"],
    valid: Bool[Tensor, "B T"],
) -> Float[Tensor, ""]:
    """Cross entropy with a teacher's action distribution: mean -E_teacher[log p_student]."""
    return masked_mean(actions.cross_entropy(teacher_params, params), valid)


def teacher_value_loss(
    teacher_values: Float[Tensor, "B T"], values: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """Squared distance from a teacher's values: mean (v - v_teacher)^2."""
    return masked_mean((values - teacher_values).square(), valid)


def ppo_loss(
    outputs: PolicyBatch,
    steps: TensorDictBase,
    targets: Targets,
    *,
    clip_coef: float | Tensor,
    vf_clip_coef: float | Tensor | None,
    vf_coef: float | Tensor,
    ent_coef: float | Tensor,
    extra: Mapping[str, tuple[float, Tensor]],
    value_scale: float | Float[Tensor, ""] = 1.0,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Total loss of replayed steps, and its terms and diagnostics without their graph.

    policy_loss + vf_coef value_loss - ent_coef entropy + sum of coefficient * term over `extra`

    `outputs` come from replaying `steps`, whose `act_log_prob` and `values` are those of the rollout. In the value
    loss, values and returns are divided by `value_scale`.
    """
    valid = counted(steps["valid"])
    log_ratio = outputs["act_log_prob"] - steps["act_log_prob"]
    value, old_value, returns = (x / value_scale for x in (outputs["values"], steps["values"], targets.returns))
    terms = {
        "losses/policy_loss": policy_loss(log_ratio, targets.advantages, valid, clip_coef),
        "losses/value_loss": value_loss(value, old_value, returns, valid, vf_clip_coef),
        "losses/entropy": masked_mean(outputs["entropy"], valid),
    }
    loss = terms["losses/policy_loss"] + vf_coef * terms["losses/value_loss"]
    loss = loss - ent_coef * terms["losses/entropy"]
    for name, (coef, term) in extra.items():
        terms[name] = term
        loss = loss + coef * term
    with torch.no_grad():
        value_shift = (outputs["values"] - steps["values"]) / steps["values"].abs().clamp(min=1)
        metrics = terms | {
            "losses/approx_kl": approximate_kl(log_ratio, valid),
            "losses/clipfrac": clip_fraction(log_ratio, valid, clip_coef),
            "losses/importance": masked_mean(log_ratio.exp(), valid),
            "ratio_error": torch.where(valid[0], log_ratio.exp() - 1, 0.0).abs().max(),
            "value_error": torch.where(valid[0], value_shift, 0.0).abs().max(),
        }
        # Cloned without gradients: a metric keeps no graph alive.
        return loss, {name: metric.clone() for name, metric in metrics.items()}
