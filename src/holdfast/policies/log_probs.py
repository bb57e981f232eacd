"""One of some actions, by their log-probabilities."""

import torch

from holdfast.shapes import Float, Int, Shaped, Tensor


def sample(
    log_probs: Float[Tensor, "*batch actions"], uniform: Float[Tensor, "*batch"]
) -> Int[Tensor, "*batch"]:
    """Draw actions from one uniform number each, by inverting the cumulative distribution."""
    cumulative = log_probs.exp().cumsum(-1)
    point = uniform.to(cumulative.dtype).unsqueeze(-1) * cumulative[..., -1:]
    # Rounding may lift the point to the total; the last action that can be drawn is where it is reached.
    last = (cumulative < cumulative[..., -1:]).sum(-1)
    return torch.minimum((cumulative <= point).sum(-1), last)


def looked_up(
    log_probs: Float[Tensor, "*batch actions"], action: Shaped[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """Take the log-probability of each action."""
    return log_probs.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)


def normalised(scores: Float[Tensor, "*batch actions"]) -> Float[Tensor, "*batch actions"]:
    """Make log-probabilities; what cannot happen gets the least number there is, as 0 * -inf is none."""
    return torch.log_softmax(scores, dim=-1).clamp(min=torch.finfo(scores.dtype).min)


def undecided(log_probs: Float[Tensor, "*batch actions"]) -> Float[Tensor, "*batch"]:
    """Compute the entropy: -sum p log p."""
    return -(log_probs.exp() * log_probs).sum(-1)


def divergence(
    log_p: Float[Tensor, "*batch actions"], log_q: Float[Tensor, "*batch actions"]
) -> Float[Tensor, "*batch"]:
    """Compute KL(p || q): sum p (log p - log q); near 0 it may round to a little less."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)
