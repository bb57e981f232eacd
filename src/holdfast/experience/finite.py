"""What is not finite is named: which tensor, whose, and when."""

from collections.abc import Mapping

import torch
from torch import nn

from holdfast.errors import ContractError
from holdfast.shapes import Bool, Tensor

SHOWN = 4


class NotFiniteError(ContractError):
    """A NaN or an Inf where a number must be; weights are those before it was met, unless it is theirs."""


def not_finite_in(named: Mapping[str, Tensor]) -> list[str]:
    """Name the tensors that hold a NaN or an Inf, and how many of them."""
    found = []
    for name, tensor in named.items():
        bad = int((~tensor.isfinite()).sum())
        if bad:
            found.append(f"{name} ({bad} of {tensor.numel()})")
    return found


def are_finite(policy: nn.Module) -> bool:
    """Say whether every weight is a number."""
    return all(bool(weight.isfinite().all()) for weight in policy.state_dict().values())


def require_finite_weights(policy: nn.Module, when: str) -> None:
    """Refuse weights that are no numbers."""
    bad = not_finite_in(dict(policy.named_parameters()))
    if bad:
        raise NotFiniteError(
            f"{when}: weights are not finite: {some_of(bad)}. No such weights are saved; lower "
            "trainer.optimizer.learning_rate or trainer.ppo.max_grad_norm."
        )


def require_finite_answer(
    policy: nn.Module, answer: Mapping[str, Tensor], valid: Bool[Tensor, " A"], when: str
) -> None:
    """Refuse what a policy says where somebody acts, if it is no number."""
    said = torch.stack([told.reshape(len(valid), -1).isfinite().all(1) for told in answer.values()])
    if bool((said | ~valid).all()):
        return
    require_finite_weights(policy, when)
    for name, told in answer.items():
        bad = (~told.reshape(len(valid), -1).isfinite().all(1) & valid).nonzero().flatten().tolist()
        if bad:
            raise NotFiniteError(f"{when}: the policy's {name} are not finite for {agents_told(bad)}.")


def agents_told(agents: list[int]) -> str:
    """Name some agents."""
    word = "agent" if len(agents) == 1 else "agents"
    return f"{word} {some_of([str(agent) for agent in agents])}"


def some_of(names: list[str]) -> str:
    """Name some of several things, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
