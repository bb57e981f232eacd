"""Heads: from what the memory says to action scores and a value."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from holdfast.errors import ContractError
from holdfast.policies.binding import ByName
from holdfast.policies.encoders import orthogonal
from holdfast.policies.precision import in_full
from holdfast.shapes import Float, Tensor
from holdfast.worlds.step import Feature

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
        return in_full(self.fc2, torch.tanh(self.fc1(x))).squeeze(-1)


class ActionEmbeddings(ByName):
    """A vector for each action, with room for actions that are met later."""

    knows = "actions"

    def __init__(self, actions: Sequence[str], room: int = MAX_ACTIONS, size: int = EMBEDDING_SIZE) -> None:
        super().__init__()
        self.table = nn.Embedding(room, size)
        with torch.no_grad():
            weight = nn.init.orthogonal_(self.table.weight)
            weight.mul_(0.1 / weight.abs().max())
        self.require_room((), actions)
        self.know((), actions)

    def require_room(self, features: Sequence[Feature], actions: Sequence[str]) -> None:
        """Refuse more actions than there are vectors."""
        if len(actions) > self.table.num_embeddings:
            raise ContractError(
                f"The policy is to know {len(actions)} actions; it has embeddings for "
                f"{self.table.num_embeddings}."
            )

    def know(self, features: Sequence[Feature], actions: Sequence[str]) -> None:
        """Give vectors to all actions; those that were added have one already, which nobody has used."""
        self.known = len(actions)

    def forward(self) -> Float[Tensor, "actions D"]:
        """Give the vectors of all actions that are known."""
        return self.table.weight[: self.known]


class Bilinear(nn.Module):
    """Scores each action by how well a query fits the action's vector: tanh(x W) . v + b."""

    def __init__(self, input_size: int, embedding_size: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(input_size)
        self.weight = nn.Parameter(torch.empty(1, input_size, embedding_size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(1).uniform_(-bound, bound))

    def forward(
        self, x: Float[Tensor, "N H"], embeddings: Float[Tensor, "actions D"]
    ) -> Float[Tensor, "N actions"]:
        """Score every action for `[N,H]`."""
        return torch.tanh(x @ self.weight[0]) @ embeddings.T + self.bias


class BilinearActor(nn.Module):
    """Scores actions by their embeddings, behind one layer."""

    def __init__(self, input_size: int, actions: Sequence[str]) -> None:
        super().__init__()
        self.fc1 = orthogonal(nn.Linear(input_size, 512))
        self.scores = Bilinear(512, EMBEDDING_SIZE)
        self.embeddings = ActionEmbeddings(actions)

    def forward(self, x: Float[Tensor, "N H"]) -> Float[Tensor, "N actions"]:
        """Score every action for `[N,H]`."""
        return in_full(self.scores, torch.relu(self.fc1(x)), self.embeddings())


class LinearActor(nn.Module):
    """Gives any number of scores from one hidden layer; they start small, so that everything is tried."""

    def __init__(self, input_size: int, scores: int) -> None:
        super().__init__()
        self.fc1 = orthogonal(nn.Linear(input_size, 512), gain=math.sqrt(2))
        self.fc2 = orthogonal(nn.Linear(512, scores), gain=0.01)

    def forward(self, x: Float[Tensor, "N H"]) -> Float[Tensor, "N scores"]:
        """Score `[N,H]`."""
        return in_full(self.fc2, torch.tanh(self.fc1(x)))


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
