"""Heads: from what the memory says to action scores and a value."""

import math

import torch
from torch import nn

from holdfast.errors import ContractError
from holdfast.policies.encoders import orthogonal
from holdfast.shapes import Float, Tensor

MAX_ACTIONS = 100
EMBEDDING_SIZE = 16


class Critic(nn.Module):
    """A value from one wide tanh layer."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.fc1 = orthogonal(nn.Linear(input_size, 1024), gain=math.sqrt(2))
        self.fc2 = orthogonal(nn.Linear(1024, 1))

    def forward(self, x: Float[Tensor, "N H"]) -> Float[Tensor, " N"]:
        """Judge `[N,H]`."""
        return self.fc2(torch.tanh(self.fc1(x))).squeeze(-1)


class BilinearActor(nn.Module):
    """Scores each action by how well a query fits the action's embedding."""

    def __init__(self, input_size: int, num_actions: int) -> None:
        super().__init__()
        if num_actions > MAX_ACTIONS:
            raise ContractError(
                f"The world has {num_actions} actions; this actor has embeddings for {MAX_ACTIONS}."
            )
        self.num_actions = num_actions
        self.fc1 = orthogonal(nn.Linear(input_size, 512))
        bound = 1 / math.sqrt(512)
        self.weight = nn.Parameter(torch.empty(1, 512, EMBEDDING_SIZE).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(1).uniform_(-bound, bound))
        self.embeddings = nn.Embedding(MAX_ACTIONS, EMBEDDING_SIZE)
        with torch.no_grad():
            table = nn.init.orthogonal_(self.embeddings.weight)
            table.mul_(0.1 / table.abs().max())

    def forward(self, x: Float[Tensor, "N H"]) -> Float[Tensor, "N actions"]:
        """Score every action for `[N,H]`."""
        query = torch.tanh(torch.relu(self.fc1(x)) @ self.weight[0])
        return query @ self.embeddings.weight[: self.num_actions].T + self.bias


class LinearActor(nn.Module):
    """Gives any number of scores from one hidden layer; they start small, so that everything is tried."""

    def __init__(self, input_size: int, scores: int) -> None:
        super().__init__()
        self.fc1 = orthogonal(nn.Linear(input_size, 512), gain=math.sqrt(2))
        self.fc2 = orthogonal(nn.Linear(512, scores), gain=0.01)

    def forward(self, x: Float[Tensor, "N H"]) -> Float[Tensor, "N scores"]:
        """Score `[N,H]`."""
        return self.fc2(torch.tanh(self.fc1(x)))


class GaussianActor(nn.Module):
    """Gives the means and log deviations of numbers; the deviations, 1 at first, are the same everywhere."""

    def __init__(self, input_size: int, numbers: int) -> None:
        super().__init__()
        self.mean = LinearActor(input_size, numbers)
        self.log_deviation = nn.Parameter(torch.zeros(numbers))

    def forward(self, x: Float[Tensor, "N H"]) -> Float[Tensor, "N scores"]:
        """Score `[N,H]`: means and log deviations side by side."""
        mean = self.mean(x)
        return torch.cat([mean, self.log_deviation.expand_as(mean)], dim=-1)
