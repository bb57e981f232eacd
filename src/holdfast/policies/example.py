"""`example`: the policy to copy. Write `encode` and `decode`; the base class handles memory."""

import math
from typing import Any

import torch
from torch import nn

from holdfast.policies.encoders import Conv, TokensToBox, orthogonal
from holdfast.policies.recurrent_policy import PolicyOutput, RecurrentPolicy, full_precision
from holdfast.policies.spaces import require_tokens
from holdfast.types import Float, Tensor, UInt8
from holdfast.worlds.step import WorldSpec


class Example(RecurrentPolicy):
    """Token box and its centre cell -> memory -> logits and value."""

    # The size of the box does not depend on the number of tokens, so padding may be left out.
    accepts_trimmed_obs = True

    def __init__(self, spec: WorldSpec, hidden_size: int = 512, num_layers: int = 2, **memory: Any) -> None:
        require_tokens("Example", spec)
        # The memory first: its input is the 512 features that `encode` returns, its output `hidden_size`.
        # `memory` holds the options of a run (cell, initialization, when to clear): pass them on.
        super().__init__(512, hidden_size, num_layers, **memory)

        # Tokens are scattered into a box `[features,rows,columns]`, each channel divided by its feature's
        # normalization. Register the layers that read it with `read_by`: if features are added later, they are widened.
        self.box = TokensToBox(spec.features, spec.window)
        channels, rows, columns = self.box.channels, self.box.rows, self.box.columns

        # The surroundings: two convolutions over the box. The usual 11x11 box shrinks to 3x3, then 1x1.
        relu = math.sqrt(2)  # the gain that preserves the scale through a ReLU
        rows, columns = ((side - 5) // 3 + 1 - 2 for side in (rows, columns))
        self.surroundings = nn.Sequential(
            self.box.read_by(orthogonal(Conv(channels, 128, kernel_size=5, stride=3), relu)),
            nn.ReLU(),
            orthogonal(Conv(128, 128, kernel_size=3), relu),
            nn.ReLU(),
            nn.Flatten(),
            orthogonal(nn.Linear(128 * rows * columns, 256), relu),
            nn.ReLU(),
        )
        # The agent itself: the centre cell, where global tokens are written too.
        self.centre = nn.Sequential(self.box.read_by(orthogonal(nn.Linear(channels, 256), relu)), nn.ReLU())

        # One logit for each action of this world, small at first so that all actions are tried.
        self.actor = orthogonal(nn.Linear(hidden_size, len(spec.action_names)), 0.01)
        self.critic = orthogonal(nn.Linear(hidden_size, 1))

    def encode(self, obs: UInt8[Tensor, "N M 3"]) -> Float[Tensor, "N D"]:
        """Encode observations for the memory, each row on its own."""
        # N is agents, or agents x time: no row may depend on another.
        box = self.box(obs)
        centre = box[:, :, self.box.rows // 2, self.box.columns // 2]
        return torch.cat([self.surroundings(box), self.centre(centre)], -1)

    def decode(self, features: Float[Tensor, "N H"]) -> PolicyOutput:
        """Return a logit for each action, and a value."""
        # The base class computes samples, log-probabilities and entropy from the logits.
        # `full_precision` keeps the last layers in float32 with policy.precision=bfloat16.
        return PolicyOutput(full_precision(self.actor, features), full_precision(self.critic, features).squeeze(-1))
