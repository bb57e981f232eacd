"""Plain layers as components: linear, convolution, and the shapes between them."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn

from holdfast.errors import ContractError
from holdfast.policies.actions import actions_of
from holdfast.policies.components.component import Component, Shape, Size, require_axes, tell
from holdfast.policies.encoders import Conv, orthogonal
from holdfast.shapes import Float, Tensor
from holdfast.worlds.step import WorldSpec

Nonlinearity = Literal["relu", "tanh", "none"]
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "none": lambda x: x,
}
Gain = float | int | Literal["sqrt2"]


def _number(gain: Gain) -> float:
    return math.sqrt(2) if gain == "sqrt2" else float(gain)


class Linear(Component):
    """A linear layer and a nonlinearity; `out: actions` gives the scores that the world's actions need."""

    def __init__(
        self, out: Size | Literal["actions"], nonlinearity: Nonlinearity = "relu", gain: Gain = 1.0
    ) -> None:
        super().__init__()
        self.out, self.nonlinearity, self.gain = out, nonlinearity, _number(gain)

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read a vector."""
        (size,) = require_axes(sources, "size")
        out = actions_of(spec).size or 0 if self.out == "actions" else int(self.out)
        self.layer = orthogonal(nn.Linear(size, out), self.gain)
        return (out,)

    def forward(self, x: Float[Tensor, "N D"]) -> Float[Tensor, "N out"]:
        """Transform each row."""
        return FUNCTIONS[self.nonlinearity](self.layer(x))


class Conv2d(Component):
    """A convolution and a nonlinearity."""

    def __init__(
        self,
        out_channels: Size,
        kernel_size: Size,
        stride: Size = 1,
        nonlinearity: Nonlinearity = "relu",
        gain: Gain = 1.0,
    ) -> None:
        super().__init__()
        self.out_channels, self.kernel_size, self.stride = out_channels, kernel_size, stride
        self.nonlinearity, self.gain = nonlinearity, _number(gain)

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read a picture."""
        channels, rows, columns = require_axes(sources, "channels", "rows", "columns")
        if min(rows, columns) < self.kernel_size:
            raise ContractError(
                f"a kernel of {self.kernel_size} does not fit into {tell((channels, rows, columns))}"
            )
        layer = Conv(channels, self.out_channels, self.kernel_size, self.stride)
        self.layer = orthogonal(layer, self.gain)
        shrunk = ((side - self.kernel_size) // self.stride + 1 for side in (rows, columns))
        return (self.out_channels, *shrunk)

    def forward(self, x: Float[Tensor, "N C R K"]) -> Float[Tensor, "N out R2 K2"]:
        """Transform each picture."""
        return FUNCTIONS[self.nonlinearity](self.layer(x))


class Flatten(Component):
    """All numbers of a row side by side."""

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read anything of a fixed size."""
        sizes = require_axes(sources, *["size"] * len(sources[0]) if sources else "size")
        return (math.prod(sizes),)

    def forward(self, x: Float[Tensor, "N ..."]) -> Float[Tensor, "N D"]:
        """Flatten each row."""
        return x.flatten(1)


class Centre(Component):
    """The centre cell of a picture, with all its channels."""

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read a picture."""
        channels, rows, columns = require_axes(sources, "channels", "rows", "columns")
        self.row, self.column = rows // 2, columns // 2
        return (channels,)

    def forward(self, x: Float[Tensor, "N C R K"]) -> Float[Tensor, "N C"]:
        """Take the cell out of each picture."""
        return x[:, :, self.row, self.column]


class Concat(Component):
    """Several vectors side by side, in the order of the sources."""

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read vectors."""
        if len(sources) < 2:
            raise ContractError("it puts several sources side by side; name two or more")
        return (sum(require_axes([shape], "size")[0] for shape in sources),)

    def forward(self, *parts: Float[Tensor, "N _"]) -> Float[Tensor, "N D"]:
        """Join each row."""
        return torch.cat(parts, -1)
