"""`example`: the policy to copy. Write `encode` and `decode`; memory is minded for you."""

import math
from typing import Any

import torch
from torch import nn

from holdfast.policies.encoders import Conv, TokensToBox, orthogonal
from holdfast.policies.precision import in_full
from holdfast.policies.spaces import require_tokens
from holdfast.policies.template import RecurrentPolicy, Thoughts
from holdfast.shapes import Float, Tensor, UInt8
from holdfast.worlds.step import WorldSpec


class Example(RecurrentPolicy):
    """What is around me, and what I am -> memory -> what to do, and how good it is."""

    # However many tokens come, the box is as large: padding may be left out.
    any_length = True

    def __init__(self, spec: WorldSpec, hidden_size: int = 512, num_layers: int = 2, **memory: Any) -> None:
        require_tokens("Example", spec)
        # First the memory: it reads 512 numbers a step (what `encode` returns) and says `hidden_size`.
        # `memory` holds what a run may ask for (which cell, how it starts, when it forgets): pass it on.
        super().__init__(512, hidden_size, num_layers, **memory)

        # The world says which features there are and how large they get. Tokens are drawn into a box
        # `[features,rows,columns]` and divided by those sizes; observations are never written to. Layers that
        # read the box say so by `read_by`: should features be added later, they are widened.
        self.box = TokensToBox(spec.features, spec.window)
        channels, rows, columns = self.box.channels, self.box.rows, self.box.columns

        # What is around me: two convolutions over the box. The usual 11x11 box shrinks to 3x3, then 1x1.
        relu = math.sqrt(2)  # the gain that keeps numbers as large as they were when a ReLU follows
        rows, columns = ((side - 5) // 3 + 1 - 2 for side in (rows, columns))
        self.around = nn.Sequential(
            self.box.read_by(orthogonal(Conv(channels, 128, kernel_size=5, stride=3), relu)),
            nn.ReLU(),
            orthogonal(Conv(128, 128, kernel_size=3), relu),
            nn.ReLU(),
            nn.Flatten(),
            orthogonal(nn.Linear(128 * rows * columns, 256), relu),
            nn.ReLU(),
        )
        # What I am: the centre cell, where the agent stands and global tokens are written.
        self.myself = nn.Sequential(self.box.read_by(orthogonal(nn.Linear(channels, 256), relu)), nn.ReLU())

        # One score for each action of this world. Scores start small, so that all actions are tried.
        self.actor = orthogonal(nn.Linear(hidden_size, len(spec.action_names)), 0.01)
        self.critic = orthogonal(nn.Linear(hidden_size, 1))

    def encode(self, obs: UInt8[Tensor, "N M 3"]) -> Float[Tensor, "N D"]:
        """Turn observations into what the memory reads, each on its own."""
        # N is agents, or agents x time: no row may depend on another, so nothing here may mix rows.
        box = self.box(obs)
        centre = box[:, :, self.box.rows // 2, self.box.columns // 2]
        return torch.cat([self.around(box), self.myself(centre)], -1)

    def decode(self, features: Float[Tensor, "N H"]) -> Thoughts:
        """Turn what the memory says into a score for each action and one value."""
        # Sampling, log-probabilities and entropy are made from the scores by the template.
        # With policy.precision=bfloat16 the last layers stay in full precision: `in_full` sees to that.
        return Thoughts(in_full(self.actor, features), in_full(self.critic, features).squeeze(-1))
