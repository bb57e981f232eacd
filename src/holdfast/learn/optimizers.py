"""Optimizers: Adam, AdamW, or Muon with AdamW for what is no hidden matrix."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import ConfigError, ContractError
from holdfast.policies import LSTMWrapper
from holdfast.policies.actions import MultiCategorical
from holdfast.saved import taken
from holdfast.shapes import Tensor

OptimizerName = Literal["adam", "adamw", "muon"]


class Several(Optimizer):
    """Several optimizers that act as one, each on weights of its own."""

    def __init__(self, parts: dict[str, Optimizer]) -> None:
        self.parts = parts
        # The groups are those of the parts, not copies: a learning rate that is set here is set there.
        super().__init__([group for part in parts.values() for group in part.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let each take a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts.values():
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Say what each remembers, by name."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Bring back what each remembered."""
        if set(state_dict) != set(self.parts):
            raise ContractError(
                f"What was saved is of {', '.join(state_dict)}; this optimizer is made of "
                f"{', '.join(self.parts)}. Train with the trainer.optimizer it was saved with."
            )
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]


def moments_of(optimizer: Optimizer) -> dict[str, Any]:
    """Say what an optimizer remembers of past gradients, part by part, weight by weight."""
    return {name: part.state_dict()["state"] for name, part in _parts(optimizer).items()}


def restore_moments(optimizer: Optimizer, saved: Any) -> None:
    """Bring it back; what does not belong to these weights is refused before anything is changed."""
    parts = _parts(optimizer)
    for name, part in parts.items():
        weights = [weight for group in part.param_groups for weight in group["params"]]
        found = taken(saved, name, dict)
        if not set(found) <= set(range(len(weights))):
            raise ContractError(f"What was saved of {name} is of more than its {len(weights)} weights.")
        for number, told in found.items():
            for key in taken(found, number, dict):
                about = taken(told, key, Tensor)
                if about.shape not in (weights[number].shape, torch.Size([])):
                    raise ContractError(
                        f"What was saved of {name} as {key!r} of weight {number} is {list(about.shape)}; the "
                        f"weight is {list(weights[number].shape)}."
                    )
    whole = {
        name: {"state": saved[name], "param_groups": part.state_dict()["param_groups"]}
        for name, part in parts.items()
    }
    # As one where it is several: its groups are those of its parts.
    optimizer.load_state_dict(whole if isinstance(optimizer, Several) else next(iter(whole.values())))


def _parts(optimizer: Optimizer) -> dict[str, Optimizer]:
    return optimizer.parts if isinstance(optimizer, Several) else {type(optimizer).__name__: optimizer}


def make_optimizer(
    policy: LSTMWrapper,
    *,
    name: OptimizerName,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    momentum: float,
) -> Optimizer:
    """Make the optimizer of a policy's weights; `momentum` is Muon's, `betas` and `eps` are Adam's.

    Muon (Jordan et al. 2024) moves the hidden matrices, at AdamW's learning rate, and AdamW the rest.
    """
    adam: dict[str, Any] = {"lr": learning_rate, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    if name == "adam":
        return torch.optim.Adam(policy.parameters(), **adam)
    if name == "adamw":
        return torch.optim.AdamW(policy.parameters(), **adam)
    hidden = hidden_matrices(policy)
    matrices = [weight for key, weight in policy.named_parameters() if key in hidden]
    rest = [weight for key, weight in policy.named_parameters() if key not in hidden]
    if not matrices:
        raise ConfigError(
            "Muon moves hidden matrices, and this policy has none; use trainer.optimizer.name=adamw."
        )
    muon = torch.optim.Muon(
        matrices,
        lr=learning_rate,
        momentum=momentum,
        weight_decay=weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return Several({"muon": muon, "adamw": torch.optim.AdamW(rest, **adam)})


def hidden_matrices(policy: LSTMWrapper) -> set[str]:
    """Name the weights that turn hidden vectors into hidden vectors.

    Those are the `weight...` of modules that have two axes, but for embeddings and output layers. An output
    layer has as many rows as there are values (1), action scores, both in one, or scores of one part of an
    action; a hidden layer that happens to be as narrow goes with them.
    """
    outputs = _output_rows(policy)
    return {
        f"{place}.{key}" if place else key
        for place, module in policy.named_modules()
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for key, weight in module.named_parameters(recurse=False)
        if key.startswith("weight") and weight.dim() == 2 and len(weight) not in outputs
    }


def _output_rows(policy: LSTMWrapper) -> set[int]:
    actions = policy.actions
    if actions.size is None:
        raise ContractError("This policy is bound to no world yet; call policy.bind(world.spec).")
    whole = {1, actions.size, actions.size + 1}
    if isinstance(actions, MultiCategorical):
        return whole | set(actions.nvec)
    # The means of a Gaussian are half of what it is told by.
    return whole | set(actions.shape)
