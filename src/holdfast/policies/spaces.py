"""Encoders and actors for Gymnasium observation and action spaces."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import nn

from holdfast.errors import ContractError
from holdfast.policies.encoders import BoxEncoder, LinearLayer, orthogonal
from holdfast.policies.heads import BilinearActor, GaussianActor, LinearActor
from holdfast.types import Float, Shaped, Tensor
from holdfast.worlds.obs import subspaces
from holdfast.worlds.step import WorldSpec

SQRT2 = math.sqrt(2)
SMALLEST_IMAGE = 3
"""Smallest side of an image that a 3x3 convolution fits into."""
MAX_SIDE = 8
"""Images are halved until no side is longer."""
MAX_RANGE = 1000.0
"""Bounds farther apart do not say how large numbers usually are, so they are not used for scaling."""


def make_encoder(spec: WorldSpec, size: int) -> nn.Module:
    """Build an encoder for a world's observations: `[N,...]` or a TensorDict `[N]` to `[N,size]`."""
    if spec.features:
        return BoxEncoder(spec.features, spec.window, size)
    return encoder_of(spec.observation_space, size)


def make_actor(spec: WorldSpec, input_size: int, width: int = 512) -> nn.Module:
    """Build an actor that gives the logits of a world's action space."""
    if isinstance(spec.action, spaces.Box):
        return GaussianActor(input_size, spec.action.shape[0], width)
    if isinstance(spec.action, spaces.MultiDiscrete):
        return LinearActor(input_size, int(spec.action.nvec.sum()), width)
    return BilinearActor(input_size, spec.action_names, width)


def require_tokens(policy: str, spec: WorldSpec) -> None:
    """Reject a world without tokens or without named actions."""
    if spec.features and spec.action is None:
        return
    actual = f"takes {spec.action}" if spec.features else f"has observations {spec.observation_space}"
    raise ContractError(
        f"{policy} reads tokens and takes named actions; this world {actual}. Use policy=fast: it fits any."
    )


def encoder_of(space: spaces.Space[Any], size: int, name: str = "observation") -> nn.Module:
    """Build an encoder for a space; `name` is the path of the space in error messages."""
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
            f"{name}={space}: no encoder for {type(space).__name__}; supported are Box, "
            "Discrete, MultiDiscrete, MultiBinary, Dict and Tuple. Use one of these in the world, or write "
            "a policy with an `encode` of your own."
        )
    if not math.prod(space.shape):
        raise ContractError(f"{name}={space} is empty; an observation space needs at least one number.")
    return ImageEncoder(space, size, name) if len(space.shape) == 3 else VectorEncoder(space.low, space.high, size)


class VectorEncoder(nn.Module):
    """Two tanh layers over a flattened array.

    Tanh bounds the input of the memory by 1 however large observations are, so its gates do not saturate. Numbers with
    bounds at most `MAX_RANGE` apart are scaled to [-1,1]; others are read as they are, or normalized with
    `policy.normalize_obs`.
    """

    def __init__(self, low: np.ndarray, high: np.ndarray, size: int) -> None:
        super().__init__()
        low, high = (np.asarray(bound, np.float64).reshape(-1) for bound in (low, high))
        bounded = (high > low) & (high - low <= MAX_RANGE)
        low, high = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
        self.register_buffer("middle", torch.tensor((low + high) / 2, dtype=torch.float32))
        self.register_buffer("reach", torch.tensor((high - low) / 2, dtype=torch.float32))
        self.middle: Tensor
        self.reach: Tensor
        self.fc1 = orthogonal(LinearLayer(len(bounded), size), SQRT2)
        self.fc2 = orthogonal(LinearLayer(size, size), SQRT2)

    def forward(self, obs: Shaped[Tensor, "N ..."]) -> Float[Tensor, "N D"]:
        """Encode `[N,...]` arrays."""
        x = obs.reshape(len(obs), len(self.middle)).to(self.middle.dtype)
        return torch.tanh(self.fc2(torch.tanh(self.fc1((x - self.middle) / self.reach))))


class ImageEncoder(nn.Module):
    """3x3 convolutions that halve an image until no side is longer than 8, then a linear layer.

    The channels are the shorter of the first and the last axis, the last if both are as long. Pixels
    are divided by the largest bound (255 for bytes), or read as they are if there is none.
    """

    def __init__(self, space: spaces.Box, size: int, name: str = "observation") -> None:
        super().__init__()
        first, _, last = space.shape
        self.channels_last = last <= first
        sides = list(space.shape[:2] if self.channels_last else space.shape[1:])
        if min(sides) < SMALLEST_IMAGE:
            raise ContractError(
                f"{name}={space} is an image of {sides[0]}x{sides[1]}; images are at least {SMALLEST_IMAGE}x"
                f"{SMALLEST_IMAGE}. Flatten it: a Box of shape ({math.prod(space.shape)},)."
            )
        largest = float(np.maximum(np.abs(space.low), np.abs(space.high)).max())
        self.largest = largest if 0 < largest <= MAX_RANGE else 1.0
        layers, channels, out = [], last if self.channels_last else first, 32
        while not layers or max(sides) > MAX_SIDE:
            stride = [2 if side > MAX_SIDE else 1 for side in sides]
            layers += [_convolution(channels, out, stride), nn.ReLU()]
            sides = [(side - 1) // step + 1 for side, step in zip(sides, stride, strict=True)]
            channels, out = out, 64
        layers += [_convolution(channels, 64, [1, 1]), nn.ReLU(), nn.Flatten()]
        self.convolutions = nn.Sequential(*layers)
        self.fc = orthogonal(LinearLayer(64 * math.prod(sides), size), SQRT2)

    def forward(self, obs: Shaped[Tensor, "N X Y Z"]) -> Float[Tensor, "N D"]:
        """Encode `[N,rows,columns,channels]` or `[N,channels,rows,columns]` images."""
        x = obs.to(self.fc.weight.dtype) / self.largest
        return torch.relu(self.fc(self.convolutions(x.movedim(-1, 1) if self.channels_last else x)))


def _convolution(in_channels: int, out_channels: int, stride: Sequence[int]) -> nn.Conv2d:
    return orthogonal(nn.Conv2d(in_channels, out_channels, 3, (stride[0], stride[1]), padding=1), SQRT2)


class ChoiceEncoder(nn.Module):
    """Embeddings of Discrete and MultiDiscrete observations, which count from `starts`, summed over components."""

    def __init__(self, counts: Sequence[int], starts: Sequence[int], size: int) -> None:
        super().__init__()
        # Offset of each component in the common table, less its start.
        begin = [sum(counts[:index]) - start for index, start in enumerate(starts)]
        self.register_buffer("begin", torch.tensor(begin))
        self.begin: Tensor
        self.embeddings = nn.Embedding(sum(counts), size)

    def forward(self, obs: Shaped[Tensor, "N ..."]) -> Float[Tensor, "N D"]:
        """Encode `[N]` or `[N,...]` integers."""
        choice = obs.reshape(len(obs), len(self.begin)).long() + self.begin
        return self.embeddings(choice).sum(1) / math.sqrt(len(self.begin))


class TreeEncoder(nn.Module):
    """An encoder for each subspace of a Dict (sorted by key) or Tuple, then a linear layer."""

    def __init__(self, space: spaces.Space[Any], size: int, name: str = "observation") -> None:
        super().__init__()
        fields = subspaces(space)
        if not fields:
            raise ContractError(f"{name}={space} is empty; an observation space needs at least one number.")
        self.keys = list(fields)
        # A ModuleList, because a ModuleDict does not take every key.
        self.parts = nn.ModuleList(encoder_of(field, size, f"{name}[{key!r}]") for key, field in fields.items())
        self.fc = orthogonal(LinearLayer(size * len(fields), size), SQRT2)

    def forward(self, obs: TensorDictBase) -> Float[Tensor, "N D"]:
        """Encode a TensorDict `[N]`."""
        features = [encoder(obs[key]) for key, encoder in zip(self.keys, self.parts, strict=True)]
        return torch.tanh(self.fc(torch.cat(features, dim=-1)))
