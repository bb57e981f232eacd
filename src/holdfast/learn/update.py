"""The update: weights change, from minibatches of whole segments replayed from their entry states."""

from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import nn

from holdfast.config import PPO
from holdfast.errors import ContractError
from holdfast.experience import Segments, minibatches
from holdfast.learn import losses
from holdfast.learn.advantage import gae, shift_in
from holdfast.policies import LSTMWrapper
from holdfast.shapes import Float, Tensor


@dataclass(frozen=True)
class Targets:
    """What the update learns from."""

    advantages: Float[Tensor, "B T"]
    returns: Float[Tensor, "B T"]


@torch.no_grad()
def targets_of(segments: Segments, *, gamma: float, lam: float) -> Targets:
    """Compute advantages and returns of every step."""
    steps, tail = segments.steps, segments.tail
    advantages = gae(
        values=steps["values"],
        valid=steps["valid"],
        next_rewards=shift_in(steps["rewards"], tail["rewards"]),
        next_terminated=shift_in(steps["dones"], tail["dones"]),
        next_truncated=shift_in(steps["truncateds"], tail["truncateds"]),
        next_last_values=shift_in(steps["last_values"], tail["last_values"]),
        end_values=tail["values"],
        gamma=gamma,
        lam=lam,
    )
    return Targets(advantages, advantages + steps["values"])


def replay(policy: LSTMWrapper, segments: Segments) -> TensorDictBase:
    """Run the policy over segments again, from their entry states, judging the actions taken."""
    td = segments.steps.select("env_obs", "first", "valid", "trial")
    with policy.replay(segments.entry):
        return policy(td, action=segments.steps["actions"])


def loss_of(
    policy: LSTMWrapper, segments: Segments, targets: Targets, ppo: PPO, ent_coef: float
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Compute the PPO loss of a minibatch, and what to report of it."""
    old, new = segments.steps, replay(policy, segments)
    valid = old["valid"]
    log_ratio = new["act_log_prob"] - old["act_log_prob"]
    advantages = targets.advantages
    if ppo.norm_adv:
        advantages = losses.normalize(advantages, valid)
    clip_value = ppo.vf_clip_coef if ppo.clip_vloss else None
    policy_loss = losses.policy_loss(log_ratio, advantages, valid, ppo.clip_coef)
    value_loss = losses.value_loss(new["values"], old["values"], targets.returns, valid, clip_value)
    entropy = losses.mean_over(new["entropy"], valid)
    loss = policy_loss + ppo.vf_coef * value_loss - ent_coef * entropy
    with torch.no_grad():
        surprise = torch.where(valid, log_ratio.exp() - 1, 0.0).abs().max()
        value_shift = (new["values"] - old["values"]) / old["values"].abs().clamp(min=1)
        report = {
            "losses/policy_loss": policy_loss,
            "losses/value_loss": value_loss,
            "losses/entropy": entropy,
            "losses/approx_kl": losses.approximate_kl(log_ratio, valid),
            "losses/clipfrac": losses.clip_fraction(log_ratio, valid, ppo.clip_coef),
            "ratio_error": surprise,
            "value_error": torch.where(valid, value_shift, 0.0).abs().max(),
        }
        # Copied where gradients are off: what is reported keeps no graph alive.
        return loss, {name: number.clone() for name, number in report.items()}


def update(
    policy: LSTMWrapper,
    optimizer: torch.optim.Optimizer,
    segments: Segments,
    ppo: PPO,
    *,
    ent_coef: float,
    epochs: int,
    rows: int,
    seed: int,
) -> dict[str, float]:
    """Train on every collected step `epochs` times and return the metrics.

    `memory/replay_error` is the first minibatch's ratio before any weight changed: how far replaying
    is from what was lived.
    """
    targets = targets_of(segments, gamma=ppo.gamma, lam=ppo.gae_lambda)
    reports: list[dict[str, Tensor]] = []
    for epoch in range(epochs):
        order = minibatches(segments, rows, seed=seed, epoch=segments.version * epochs + epoch)
        for index in order:
            chosen = Targets(targets.advantages[index], targets.returns[index])
            loss, report = loss_of(policy, segments.rows(index), chosen, ppo, ent_coef)
            report["losses/grad_norm"] = _step(policy, optimizer, loss, ppo.max_grad_norm)
            reports.append(report)
    first, steps = reports[0], segments.steps
    means = {name: float(torch.stack([report[name] for report in reports]).mean()) for name in first}
    spread = losses.explained_variance(steps["values"], targets.returns, steps["valid"])
    return {
        **{name: mean for name, mean in means.items() if name.startswith("losses/")},
        "losses/explained_variance": float(spread),
        "memory/replay_error": float(first["ratio_error"]),
        "memory/replay_value_error": float(first["value_error"]),
    }


def _step(
    policy: LSTMWrapper, optimizer: torch.optim.Optimizer, loss: Tensor, max_norm: float
) -> Float[Tensor, ""]:
    """Take one gradient step; a gradient that is not finite stops the run before it spoils a weight."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
    if not torch.isfinite(norm):
        raise ContractError(
            "The gradient is not finite; the weights are those before this minibatch. Look for NaN or Inf in "
            "observations and rewards."
        )
    optimizer.step()
    return norm
