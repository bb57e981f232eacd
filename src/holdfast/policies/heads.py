"""Heads: from the memory's output to logits and a value."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from holdfast.errors import ContractError
from holdfast.policies.binding import NamedModule
from holdfast.policies.encoders import LinearLayer, orthogonal
from holdfast.policies.recurrent_policy import full_precision
from holdfast.types import Float, Tensor
from holdfast.worlds.step import Feature

MAX_ACTIONS = 100
EMBEDDING_SIZE = 16


class Critic(nn.Module):
    """A value head with one tanh layer."""

    def __init__(self, input_size: int, width: int = 1024) -> None:
        super().__init__()
        self.fc1 = orthogonal(LinearLayer(input_size, width), gain=math.sqrt(2))
        self.fc2 = orthogonal(LinearLayer(width, 1))

    def forward(self, x: Float[Tensor, "N H"]) -> Float[Tensor, " N"]:
        """Return the values of `[N,H]`."""
        return full_precision(self.fc2, torch.tanh(self.fc1(x))).squeeze(-1)


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
        return torch.tanh(x @ self.weight[0]) @ embeddings.T + self.bias


class BilinearActor(nn.Module):
    """One linear layer, then logits from action embeddings."""

    def __init__(self, input_size: int, actions: Sequence[str], width: int = 512) -> None:
        super().__init__()
        self.fc1 = orthogonal(LinearLayer(input_size, width))
        self.scores = Bilinear(width, EMBEDDING_SIZE)
        self.embeddings = ActionEmbeddings(actions)

    def forward(self, x: Float[Tensor, "N H"]) -> Float[Tensor, "N actions"]:
        """Return the logits of `[N,H]`."""
        return full_precision(self.scores, torch.relu(self.fc1(x)), self.embeddings())


class LinearActor(nn.Module):
    """Logits from one hidden layer; small at first, so that all actions are tried."""

    def __init__(self, input_size: int, num_logits: int, width: int = 512) -> None:
        super().__init__()
        self.fc1 = orthogonal(LinearLayer(input_size, width), gain=math.sqrt(2))
        self.fc2 = orthogonal(LinearLayer(width, num_logits), gain=0.01)

    def forward(self, x: Float[Tensor, "N H"]) -> Float[Tensor, "N logits"]:
        """Return the logits of `[N,H]`."""
        return full_precision(self.fc2, torch.tanh(self.fc1(x)))


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
