"""The token front: each token becomes a vector that says which feature, where, and how much of it."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from holdfast.errors import ContractError
from holdfast.policies.binding import ByName
from holdfast.shapes import Bool, Float, Tensor, UInt8
from holdfast.worlds.step import Feature
from holdfast.worlds.tokens import GLOBAL, PADDING, shorten

EMBEDDING_STD = 1.0
"""As large as the Fourier numbers beside it; at 0.02 features drown in them, and are not told apart."""


def strip_padding(obs: UInt8[Tensor, "N M 3"]) -> UInt8[Tensor, "N M2 3"]:
    """Leave out the padding that all rows end in, where looking costs nothing: on the CPU.

    On a GPU the host would have to wait for the device at every call; there it was left out once a
    rollout by the collector, and the mask does the rest. A program that is exported looks at nothing.
    """
    here = obs.device.type == "cpu" and not torch.compiler.is_exporting()
    return shorten(obs) if here else obs


def position_codes(window: tuple[int, int], frequencies: int) -> Float[Tensor, "256 codes"]:
    """Give every location byte its Fourier code: cosines and sines of row and column.

    Coordinates 0..10 become -1..1; a global token is at the centre of the window. At frequency 1 no two
    places share both cosine and sine, since even 14 becomes no more than 1.8.
    """
    location = torch.arange(256)
    row, column = location >> 4, location & 0x0F
    row[GLOBAL], column[GLOBAL] = window[0] // 2, window[1] // 2
    waves = [(place / 5.0 - 1.0)[:, None] * 2.0 ** torch.arange(frequencies) for place in (row, column)]
    return torch.cat([turn(wave) for wave in waves for turn in (torch.cos, torch.sin)], -1)


class TokenFront(ByName):
    """Turn each token into a vector: which feature, where, and how much of it.

    Padding, unknown features and places outside the window are told apart by a mask, and whoever reads
    the vectors must not look there.
    """

    knows = "features"

    def __init__(
        self, features: Sequence[Feature], window: tuple[int, int], embedding: int, frequencies: int
    ) -> None:
        super().__init__()
        self.require_room(features, ())
        self.size = embedding + 4 * frequencies + 1
        self.embedding = nn.Embedding(256, embedding, padding_idx=PADDING)
        nn.init.trunc_normal_(self.embedding.weight, std=EMBEDDING_STD)
        with torch.no_grad():
            self.embedding.weight[PADDING] = 0.0
        rows, columns = window
        location = torch.arange(256)
        inside = (location == GLOBAL) | ((location >> 4 < rows) & (location & 0x0F < columns))
        # Not saved: sizes are those of the world the policy lives in, and told with its features.
        self.register_buffer("normalization", torch.ones(256), persistent=False)
        self.register_buffer("inside", inside, persistent=False)
        self.register_buffer("codes", position_codes(window, frequencies), persistent=False)
        self.normalization: Tensor
        self.inside: Tensor
        self.codes: Tensor
        self.know(features, ())

    def require_room(self, features: Sequence[Feature], actions: Sequence[str]) -> None:
        """Refuse more features than there are ids."""
        if len(features) > PADDING:
            raise ContractError(f"The world has {len(features)} features; ids name at most {PADDING}.")

    def know(self, features: Sequence[Feature], actions: Sequence[str]) -> None:
        """Size features anew; those that were added have an embedding already, which nobody has used."""
        self.known = len(features)
        sizes = self.normalization.new_tensor([feature.normalization for feature in features])
        self.normalization[: self.known] = sizes

    def forward(self, obs: UInt8[Tensor, "N M 3"]) -> tuple[Float[Tensor, "N M2 D"], Bool[Tensor, "N M2"]]:
        """Turn `[N,M,3]` tokens into vectors, and say which of them are there to be seen."""
        obs = strip_padding(obs)
        location, feature = obs[..., 0].int(), obs[..., 1].int()
        # Bytes are few: what is known of each is looked up, not computed again for each token.
        value = obs[..., 2].to(self.normalization.dtype) / self.normalization[feature]
        tokens = torch.cat(
            [self.embedding(feature), functional.embedding(location, self.codes), value.unsqueeze(-1)], -1
        )
        return tokens, self.inside[location] & (feature < self.known)
