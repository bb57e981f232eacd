"""Bootstrap values: of truncated episodes, and of the step after a segment. No live state changes."""

from typing import Any

import torch
from tensordict import TensorDict

from holdfast.cuda_graphs import is_recording
from holdfast.policies import LSTMWrapper
from holdfast.rollout.segments import policy_batch
from holdfast.types import Bool, Float, Tensor
from holdfast.worlds import Step, WorldSpec
from holdfast.worlds.obs import Obs


def bootstrap_value(
    policy: LSTMWrapper,
    state: TensorDict,
    obs: Obs,
    first: Bool[Tensor, " A"],
    trial: Bool[Tensor, " A"],
    valid: Bool[Tensor, " A"] | None = None,
) -> Float[Tensor, " A"]:
    """Value of observations from a given state, in a replay: the live states do not change."""
    leaves: dict[str, Any] = {"env_obs": obs, "first": first, "trial": trial}
    if valid is not None:
        leaves["valid"] = valid
    with torch.no_grad(), policy.replay(state):
        draws = policy.actions.no_draws(len(first), first.device)
        return policy(policy_batch(policy, leaves, draws=draws))["values"]


def has_truncated(spec: WorldSpec, step: Step) -> bool:
    """Whether an episode may have been truncated; on the CPU, where looking costs nothing, whether one was."""
    if spec.truncates == "never":
        return False
    return step.truncated.device.type != "cpu" or is_recording() or bool(step.truncated.any())


def truncation_values(policy: LSTMWrapper, step: Step) -> Float[Tensor, " A"]:
    """Values of the last observations of truncated episodes, from the states before the reset; else 0."""
    assert step.last_obs is not None, "a checked world that truncates gives the last observation"
    no_start = torch.zeros_like(step.first)
    state = policy.store.read(0, len(no_start))
    values = bootstrap_value(policy, state, step.last_obs, no_start, no_start)
    return torch.where(step.truncated, values, 0.0)
