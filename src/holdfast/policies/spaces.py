"""Encoders and actors by space: whatever a world shows and takes, something fitting is built for it."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import nn

from holdfast.errors import ContractError
from holdfast.policies.encoders import BoxEncoder, orthogonal
from holdfast.policies.heads import BilinearActor, GaussianActor, LinearActor
from holdfast.shapes import Float, Shaped, Tensor
from holdfast.worlds.seen import parts_of
from holdfast.worlds.step import WorldSpec

SQRT2 = math.sqrt(2)
SMALLEST_IMAGE = 3
"""What a convolution of 3x3 fits into; anything smaller is a vector."""
SHRUNK = 8
"""Images are halved until no side is longer."""
FARTHEST_WALLS = 1000.0
"""Walls farther apart say that numbers end somewhere, not how large they usually are."""


def make_encoder(spec: WorldSpec, size: int) -> nn.Module:
    """Build an encoder for what a world shows: `[N,...]` or a TensorDict `[N]` to features `[N,size]`."""
    if spec.features:
        return BoxEncoder(spec.features, spec.window, size)
    return encoder_of(spec.sight, size)


def make_actor(spec: WorldSpec, input_size: int) -> nn.Module:
    """Build an actor that gives the scores a world's actions are made of."""
    if isinstance(spec.action, spaces.Box):
        return GaussianActor(input_size, spec.action.shape[0])
    if isinstance(spec.action, spaces.MultiDiscrete):
        return LinearActor(input_size, int(spec.action.nvec.sum()))
    return BilinearActor(input_size, spec.action_names)


def require_tokens(policy: str, spec: WorldSpec) -> None:
    """Refuse a world that a policy made for tokens and named actions cannot live in."""
    if spec.features and spec.action is None:
        return
    what = f"takes {spec.action}" if spec.features else f"shows {spec.sight}"
    raise ContractError(
        f"{policy} looks at tokens and takes named actions; this world {what}. Use policy=fast: it fits any."
    )


def encoder_of(space: spaces.Space[Any], size: int, name: str = "observation") -> nn.Module:
    """Build an encoder for a space; `name` says in errors which part of an observation it is."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return TreeEncoder(space, size, name)
    if isinstance(space, spaces.Discrete):
        return ChoiceEncoder([int(space.n)], [int(space.start)], size)
    if isinstance(space, spaces.MultiDiscrete):
        return ChoiceEncoder(space.nvec.flatten().tolist(), space.start.flatten().tolist(), size)
    if isinstance(space, spaces.MultiBinary):
        return VectorEncoder(np.zeros(space.shape), np.ones(space.shape), size)
    if not isinstance(space, spaces.Box):
        raise ContractError(
            f"{name}={space}: there is no encoder for {type(space).__name__}; there is one for Box, "
            "Discrete, MultiDiscrete, MultiBinary, Dict and Tuple. Let the world show one of these, or write "
            "a policy with an `encode` of your own."
        )
    if not math.prod(space.shape):
        raise ContractError(f"{name}={space} is empty: there is nothing to see.")
    return (
        ImageEncoder(space, size, name)
        if len(space.shape) == 3
        else VectorEncoder(space.low, space.high, size)
    )


class VectorEncoder(nn.Module):
    """Two tanh layers over numbers, of any shape, laid side by side.

    Tanh, because nobody knows how large numbers of a world may get: what the memory reads is at most 1,
    and its gates do not close. Between near walls numbers are moved to [-1,1]; numbers without walls
    are read as they are. There is no running normalisation: what changes between a rollout and its
    update would break the law of replay. Scale them in the world.
    """

    def __init__(self, low: np.ndarray, high: np.ndarray, size: int) -> None:
        super().__init__()
        low, high = (np.asarray(wall, np.float64).reshape(-1) for wall in (low, high))
        near = (high > low) & (high - low <= FARTHEST_WALLS)
        low, high = np.where(near, low, -1.0), np.where(near, high, 1.0)
        self.register_buffer("middle", torch.tensor((low + high) / 2, dtype=torch.float32))
        self.register_buffer("reach", torch.tensor((high - low) / 2, dtype=torch.float32))
        self.middle: Tensor
        self.reach: Tensor
        self.fc1 = orthogonal(nn.Linear(len(near), size), SQRT2)
        self.fc2 = orthogonal(nn.Linear(size, size), SQRT2)

    def forward(self, obs: Shaped[Tensor, "N ..."]) -> Float[Tensor, "N D"]:
        """Encode `[N,...]` numbers."""
        x = obs.reshape(len(obs), len(self.middle)).to(self.middle.dtype)
        return torch.tanh(self.fc2(torch.tanh(self.fc1((x - self.middle) / self.reach))))


class ImageEncoder(nn.Module):
    """Convolutions of 3x3 that halve an image until no side is longer than 8, then a linear layer.

    The channels are the shorter of the first and the last axis, the last if both are as long. Numbers
    are divided by the largest there can be (255 for bytes), and read as they are if there is none.
    """

    def __init__(self, space: spaces.Box, size: int, name: str = "observation") -> None:
        super().__init__()
        first, _, last = space.shape
        self.channels_last = last <= first
        sides = list(space.shape[:2] if self.channels_last else space.shape[1:])
        if min(sides) < SMALLEST_IMAGE:
            raise ContractError(
                f"{name}={space} is an image of {sides[0]}x{sides[1]}; images are at least {SMALLEST_IMAGE}x"
                f"{SMALLEST_IMAGE}. Show it as a vector: a Box of shape ({math.prod(space.shape)},)."
            )
        largest = float(np.maximum(np.abs(space.low), np.abs(space.high)).max())
        self.largest = largest if 0 < largest <= FARTHEST_WALLS else 1.0
        layers, channels, out = [], last if self.channels_last else first, 32
        while not layers or max(sides) > SHRUNK:
            stride = [2 if side > SHRUNK else 1 for side in sides]
            layers += [_convolution(channels, out, stride), nn.ReLU()]
            sides = [(side - 1) // each + 1 for side, each in zip(sides, stride, strict=True)]
            channels, out = out, 64
        layers += [_convolution(channels, 64, [1, 1]), nn.ReLU(), nn.Flatten()]
        self.convolutions = nn.Sequential(*layers)
        self.fc = orthogonal(nn.Linear(64 * math.prod(sides), size), SQRT2)

    def forward(self, obs: Shaped[Tensor, "N X Y Z"]) -> Float[Tensor, "N D"]:
        """Encode `[N,rows,columns,channels]` or `[N,channels,rows,columns]` images."""
        x = obs.to(self.fc.weight.dtype) / self.largest
        return torch.relu(self.fc(self.convolutions(x.movedim(-1, 1) if self.channels_last else x)))


def _convolution(inwards: int, outwards: int, stride: Sequence[int]) -> nn.Conv2d:
    return orthogonal(nn.Conv2d(inwards, outwards, 3, (stride[0], stride[1]), padding=1), SQRT2)


class ChoiceEncoder(nn.Module):
    """An embedding for each of some choices; several are added up, as a linear layer would do.

    Choices are whole numbers from `starts` on. One that does not exist is an error of the embedding.
    """

    def __init__(self, counts: Sequence[int], starts: Sequence[int], size: int) -> None:
        super().__init__()
        # Where the choices of each part begin in the common table, less what they count from.
        begin = [sum(counts[:part]) - start for part, start in enumerate(starts)]
        self.register_buffer("begin", torch.tensor(begin))
        self.begin: Tensor
        self.embeddings = nn.Embedding(sum(counts), size)

    def forward(self, obs: Shaped[Tensor, "N ..."]) -> Float[Tensor, "N D"]:
        """Encode `[N]` or `[N,...]` choices."""
        choice = obs.reshape(len(obs), len(self.begin)).long() + self.begin
        return self.embeddings(choice).sum(1) / math.sqrt(len(self.begin))


class TreeEncoder(nn.Module):
    """An encoder for each part of a Dict (in the order of their names) or Tuple, then a linear layer."""

    def __init__(self, space: spaces.Space[Any], size: int, name: str = "observation") -> None:
        super().__init__()
        parts = parts_of(space)
        if not parts:
            raise ContractError(f"{name}={space} is empty: there is nothing to see.")
        self.keys = list(parts)
        # A list: names of parts may be anything, those of modules may not.
        self.parts = nn.ModuleList(encoder_of(part, size, f"{name}[{key!r}]") for key, part in parts.items())
        self.fc = orthogonal(nn.Linear(size * len(parts), size), SQRT2)

    def forward(self, obs: TensorDictBase) -> Float[Tensor, "N D"]:
        """Encode a TensorDict `[N]`."""
        parts = [part(obs[key]) for key, part in zip(self.keys, self.parts, strict=True)]
        return torch.tanh(self.fc(torch.cat(parts, dim=-1)))
