"""NaN checks: name the non-finite tensor, its agents and the step."""

from collections.abc import Mapping

from torch import nn

from holdfast.errors import ContractError
from holdfast.types import Bool, Tensor

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
    policy: nn.Module, finite: Mapping[str, Bool[Tensor, " A"]], valid: Bool[Tensor, " A"], when: str
) -> None:
    """Raise for the weights, or for the first output that is not finite for a valid agent."""
    require_finite_weights(policy, when)
    for name, mask in finite.items():
        agents = (~mask & valid).nonzero().flatten().tolist()
        if agents:
            raise NonFiniteError(f"{when}: the policy's {name} are not finite for {agent_list(agents)}.")


def agent_list(agents: list[int]) -> str:
    """List agents by number."""
    noun = "agent" if len(agents) == 1 else "agents"
    return f"{noun} {first_few([str(agent) for agent in agents])}"


def first_few(names: list[str]) -> str:
    """Join the first names, and the number of the rest."""
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
