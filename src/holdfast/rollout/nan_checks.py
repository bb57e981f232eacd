"""Checks of values: name the tensor that is not finite, or far outside of its space, and its agents."""

from collections.abc import Mapping
from typing import Any

from gymnasium import spaces
from torch import nn

from holdfast.errors import ContractError
from holdfast.rollout.segments import Segments
from holdfast.types import Bool, Int, Tensor
from holdfast.worlds.obs import far_outside

MAX_NAMES = 4


class NonFiniteError(ContractError):
    """A NaN or an Inf; unless the weights hold it, they are those before it appeared."""


def non_finite_in(named: Mapping[str, Tensor]) -> list[str]:
    """Name the tensors that hold a NaN or an Inf, with the number of such entries."""
    names = []
    for name, tensor in named.items():
        count = int((~tensor.isfinite()).sum())
        if count:
            names.append(f"{name} ({count} of {tensor.numel()})")
    return names


def require_finite_weights(policy: nn.Module, when: str) -> None:
    """Raise if a weight is not finite."""
    names = non_finite_in(dict(policy.named_parameters()))
    if names:
        raise NonFiniteError(
            f"{when}: weights are not finite: {first_few(names)}. No such weights are saved; lower "
            "trainer.optimizer.learning_rate or trainer.ppo.max_grad_norm."
        )


def raise_non_finite_outputs(
    policy: nn.Module,
    finite: Mapping[str, Bool[Tensor, " A"]],
    valid: Bool[Tensor, " A"],
    agents: Int[Tensor, " A"],
    when: str,
) -> None:
    """Raise for the weights, or for the first output that is not finite for a valid agent."""
    require_finite_weights(policy, when)
    for name, mask in finite.items():
        bad = agents[~mask & valid].tolist()
        if bad:
            raise NonFiniteError(f"{when}: the policy's {name} are not finite for {agent_list(bad)}.")


def report_outside_box(segments: Segments, space: spaces.Space[Any]) -> str:
    """Describe observations far outside of their Box: how many, of which agents; "": there are none."""
    valid = segments.steps["valid"]
    outside = far_outside(segments.steps["env_obs"], space, valid.numel()).view_as(valid) & valid
    count = int(outside.sum())
    if not count:
        return ""
    agents = sorted({segments.agent_of(row) for row in outside.any(1).nonzero().flatten().tolist()})
    return (
        f"{count:,} of {segments.num_valid:,} observations are far outside of their space {space}: "
        f"{agent_list(agents)}. Training continues; correct the space or the observations."
    )


def agent_list(agents: list[int]) -> str:
    """List agents by number."""
    noun = "agent" if len(agents) == 1 else "agents"
    return f"{noun} {first_few([str(agent) for agent in agents])}"


def first_few(names: list[str]) -> str:
    """Join the first names, and the number of the rest."""
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
