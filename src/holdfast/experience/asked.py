"""Asking a policy: a step in its words, and what observations are worth to it."""

from typing import Any

import torch
from tensordict import TensorDict

from holdfast.policies import LSTMWrapper
from holdfast.shapes import Bool, Float, Tensor
from holdfast.worlds import Step
from holdfast.worlds.seen import Seen


def as_batch(step: Step, start: int, uniform: Tensor) -> TensorDict:
    """Put a step into the words that policies read."""
    agents = len(step.reward)
    return TensorDict(
        {
            "env_obs": step.obs,
            "rewards": step.reward,
            "dones": step.terminated,
            "truncateds": step.truncated,
            "first": step.first,
            "valid": step.valid,
            "trial": step.trial,
            # On the host, which looks it up: from a GPU it would have to wait for it in every step.
            "training_env_id_start": torch.full((agents,), start),
            "draws": uniform,
        },
        batch_size=[agents],
    )


def value_of(
    policy: LSTMWrapper,
    state: TensorDict,
    obs: Seen,
    first: Bool[Tensor, " A"],
    trial: Bool[Tensor, " A"],
    valid: Bool[Tensor, " A"] | None = None,
) -> Float[Tensor, " A"]:
    """Ask what observations are worth, given a state. Nothing advances: it is a replay."""
    batch: dict[str, Any] = {"env_obs": obs, "first": first, "trial": trial}
    if valid is not None:
        batch["valid"] = valid
    batch["draws"] = policy.actions.idle(len(first), first.device)
    with torch.no_grad(), policy.replay(state):
        return policy(TensorDict(batch, batch_size=first.shape))["values"]
