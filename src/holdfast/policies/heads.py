"""Heads: from the memory's output to logits and a value."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from holdfast.cuda_graphs import constant
from holdfast.errors import ContractError
from holdfast.policies.binding import NamedModule
from holdfast.policies.encoders import LinearLayer, linear, orthogonal, round_up
from holdfast.policies.recurrent_policy import full_precision
from holdfast.torch_versions import has_mixed_products, mixed_product
from holdfast.types import Float, Tensor
from holdfast.worlds.step import Feature

WIDE = 256
"""From so many inputs on, casting them takes longer than multiplying three matrices."""
MAX_ACTIONS = 100
EMBEDDING_SIZE = 16


def exact_linear(
    x: Float[Tensor, "N K"], weight: Float[Tensor, "n K"], bias: Float[Tensor, " n"] | None
) -> Float[Tensor, "N n"]:
    """Compute a last layer in full precision, see `full_precision`; on a GPU without casting its input.

    There three 16-bit matrices that add up to the weights are multiplied by the input, which has 16 bits, and summed in
    32 bits.
    """
    is_wide = x.is_cuda and x.dtype == torch.bfloat16 and x.dim() == 2 and x.shape[1] >= WIDE
    if is_wide and has_mixed_products():
        return _ExactLinear.apply(x, weight, bias)
    if bias is None:
        return full_precision(torch.matmul, x, weight.t())
    return full_precision(linear, x, weight, bias)


class _ExactLinear(torch.autograd.Function):
    """A product of a 16-bit matrix and one of 32 bits, by matrix units."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = sum_of_parts(x, weight)
        return y if bias is None else y + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, weight = ctx.saved_tensors
        grad = grads[0]
        # Two parts have twice the digits of the input, by whose gradient the result is rounded anyway.
        first, second = split_in_parts(grad.float(), 2)
        high, low = split_in_parts(weight, 2)
        left, right = _padded(torch.cat([first, second, first], 1), 1), _padded(torch.cat([high, high, low], 0), 0)
        stacked = _padded(torch.cat([first, second], 1), 1)
        grad_weight = mixed_product(stacked.t(), x)[: 2 * len(weight)].unflatten(0, (2, -1)).sum(0)
        return left @ right, grad_weight, grad.sum(0) if ctx.needs_input_grad[2] else None


def split_in_parts(x: Float[Tensor, "R C"], count: int) -> list[Float[Tensor, "R C"]]:
    """Return 16-bit tensors that add up to one of 32 bits: each rounds what those before leave."""
    parts = []
    for _ in range(count):
        parts.append(x.bfloat16())
        x = x - parts[-1].float()
    return parts


def sum_of_parts(x: Float[Tensor, "N K"], weight: Float[Tensor, "n K"]) -> Float[Tensor, "N n"]:
    """Multiply by the parts of a matrix, and add up the results."""
    parts = constant(weight, "parts", lambda: _padded(torch.cat(split_in_parts(weight, 3)), 0))
    y = mixed_product(x, parts.t())[:, : 3 * len(weight)]
    return y.unflatten(1, (3, -1)).sum(1)


def _padded(x: Float[Tensor, "R C"], axis: int) -> Float[Tensor, "R2 C2"]:
    """Add zeros along an axis up to what 16-bit matrix products like."""
    missing = round_up(x.shape[axis]) - x.shape[axis]
    return functional.pad(x, (0, missing) if axis else (0, 0, 0, missing))


class Critic(nn.Module):
    """A value head with one tanh layer."""

    def __init__(self, input_size: int, width: int = 1024) -> None:
        super().__init__()
        self.fc1 = orthogonal(LinearLayer(input_size, width), gain=math.sqrt(2))
        self.fc2 = orthogonal(LinearLayer(width, 1))

    def forward(self, x: Float[Tensor, "N H"]) -> Float[Tensor, " N"]:
        """Return the values of `[N,H]`."""
        return exact_linear(torch.tanh(self.fc1(x)), self.fc2.weight, self.fc2.bias).squeeze(-1)


class ActionEmbeddings(NamedModule):
    """One embedding per action, with room for actions that are added later."""

    named_kind = "actions"

    def __init__(self, actions: Sequence[str], room: int = MAX_ACTIONS, size: int = EMBEDDING_SIZE) -> None:
        super().__init__()
        self.table = nn.Embedding(room, size)
        with torch.no_grad():
            weight = nn.init.orthogonal_(self.table.weight)
            weight.mul_(0.1 / weight.abs().max())
        self.require_room((), actions)
        self.set_names((), actions)

    def require_room(self, features: Sequence[Feature], actions: Sequence[str]) -> None:
        """Reject more actions than there are embeddings."""
        if len(actions) > self.table.num_embeddings:
            raise ContractError(
                f"The policy needs embeddings for {len(actions)} actions; it has {self.table.num_embeddings}."
            )

    def set_names(self, features: Sequence[Feature], actions: Sequence[str]) -> None:
        """Set the number of actions; added ones use an embedding that exists already, untrained."""
        self.num_actions = len(actions)

    def forward(self) -> Float[Tensor, "actions D"]:
        """Return the embeddings of all actions."""
        return self.table.weight[: self.num_actions]


class Bilinear(nn.Module):
    """Logits of actions from their embeddings v: tanh(x W) . v + b."""

    def __init__(self, input_size: int, embedding_size: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(input_size)
        self.weight = nn.Parameter(torch.empty(1, input_size, embedding_size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(1).uniform_(-bound, bound))

    def forward(self, x: Float[Tensor, "N H"], embeddings: Float[Tensor, "actions D"]) -> Float[Tensor, "N actions"]:
        """Return the logits of `[N,H]`."""
        return full_precision(_scores, exact_linear(x, self.weight[0].t(), None), embeddings, self.bias)


def _scores(
    x: Float[Tensor, "N D"], embeddings: Float[Tensor, "actions D"], bias: Tensor
) -> Float[Tensor, "N actions"]:
    return torch.tanh(x) @ embeddings.T + bias


class BilinearActor(nn.Module):
    """One linear layer, then logits from action embeddings."""

    def __init__(self, input_size: int, actions: Sequence[str], width: int = 512) -> None:
        super().__init__()
        self.fc1 = orthogonal(LinearLayer(input_size, width))
        self.scores = Bilinear(width, EMBEDDING_SIZE)
        self.embeddings = ActionEmbeddings(actions)

    def forward(self, x: Float[Tensor, "N H"]) -> Float[Tensor, "N actions"]:
        """Return the logits of `[N,H]`."""
        return self.scores(torch.relu(self.fc1(x)), self.embeddings())


class LinearActor(nn.Module):
    """Logits from one hidden layer; small at first, so that all actions are tried."""

    def __init__(self, input_size: int, num_logits: int, width: int = 512) -> None:
        super().__init__()
        self.fc1 = orthogonal(LinearLayer(input_size, width), gain=math.sqrt(2))
        self.fc2 = orthogonal(LinearLayer(width, num_logits), gain=0.01)

    def forward(self, x: Float[Tensor, "N H"]) -> Float[Tensor, "N logits"]:
        """Return the logits of `[N,H]`."""
        return exact_linear(torch.tanh(self.fc1(x)), self.fc2.weight, self.fc2.bias)


class GaussianActor(nn.Module):
    """Means, and log standard deviations that do not depend on the input (std 1 at first)."""

    def __init__(self, input_size: int, count: int, width: int = 512) -> None:
        super().__init__()
        self.mean = LinearActor(input_size, count, width)
        self.log_std = nn.Parameter(torch.zeros(count))

    def forward(self, x: Float[Tensor, "N H"]) -> Float[Tensor, "N logits"]:
        """Return means and log standard deviations of `[N,H]`, concatenated."""
        mean = self.mean(x)
        return torch.cat([mean, self.log_std.expand_as(mean)], dim=-1)
