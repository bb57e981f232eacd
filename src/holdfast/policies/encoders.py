"""Encoders of tokens: a box of feature channels, and convolutions over it."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from holdfast.cuda_graphs import constant
from holdfast.errors import ContractError
from holdfast.kernel_support import refused_on
from holdfast.policies.binding import NamedModule
from holdfast.torch_versions import is_exporting
from holdfast.types import Float, Shaped, Tensor, UInt8
from holdfast.worlds.step import Feature
from holdfast.worlds.tokens import GLOBAL

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)

SMALLEST_BOX = 11


def orthogonal(layer: Layer, gain: float = 1.0) -> Layer:
    """Initialize a layer with orthogonal weights and zero bias."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


@torch.no_grad()
def widen(layer: nn.Linear | nn.Conv2d, new: int) -> None:
    """Add input channels with zero weights to a layer."""
    weight = layer.weight
    zeros = weight.new_zeros(weight.shape[0], new, *weight.shape[2:])
    weight.data = torch.cat([weight, zeros], 1)
    if isinstance(layer, nn.Linear):
        layer.in_features += new
    else:
        layer.in_channels += new


DENSE = 4096
"""Numbers of an image up to which a convolution is computed as one matrix, in 16 bits."""


def round_up(size: int) -> int:
    """Round a length up to what 16-bit matrix products like."""
    return -(-size // 8) * 8


MANY_ROWS = 64
"""From so many rows on, oneDNN takes less time than MKL."""


def linear(
    x: Float[Tensor, "N D"], weight: Float[Tensor, "O D"], bias: Float[Tensor, " O"] | None
) -> Float[Tensor, "N O"]:
    """Compute x W' + b, on the CPU by oneDNN.

    torch calls MKL, which uses half of the vector width of processors that are not Intel's: on an AMD EPYC 128 -> 1024
    takes 4.0 ms forward and backward for 512 rows, and 2.0 ms by oneDNN.
    """
    can_run = x.is_cpu and x.dtype == torch.float32 and x.dim() == 2
    if (
        not can_run
        # Before the rows are counted: an exported policy takes any number of them.
        or torch.compiler.is_compiling()
        or len(x) < MANY_ROWS
        or not torch.backends.mkldnn.enabled
        or torch.is_autocast_enabled("cpu")
    ):
        return functional.linear(x, weight, bias)
    return _OneDNNLinear.apply(x, weight, bias)


class _OneDNNLinear(torch.autograd.Function):
    """A linear layer whose three matrix products are oneDNN's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        (x, weight), (grad,) = ctx.saved_tensors, grads
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _onednn_linear(grad, weight.T) if needs_x else None,
            _onednn_linear(grad.T, x.T) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # What torch.compile calls for a linear layer.
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class LinearLayer(nn.Linear):
    """A linear layer that is fast on every processor."""

    def forward(self, input: Float[Tensor, "N D"]) -> Float[Tensor, "N O"]:
        """Apply the layer to each row."""
        return linear(input, self.weight, self.bias)


class Conv(nn.Conv2d):
    """A convolution without padding, as one matrix product (im2col) wherever that is faster.

    cuDNN spends most of a small image's time on the weight gradient: on an H200 a first layer of 5x5 over 25x11x11
    takes 5.1 ms forward and backward as a convolution and 0.95 ms by patches, a last one that covers its image 1.5 ms
    and 0.3 ms. The gradient into overlapping patches is slow, so layers whose input needs one stay convolutions.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride)

    def forward(self, input: Float[Tensor, "N C R K"]) -> Float[Tensor, "N O R2 K2"]:
        """Convolve each image."""
        N, C, *sides = input.shape
        weight, out = self.weight.flatten(1), self.out_channels
        if tuple(sides) == self.kernel_size:
            if input.stride(1) == 1:
                # Channels last, as the layer before leaves them: reordering the weights costs less than the images.
                input, weight = input.permute(0, 2, 3, 1), self.weight.permute(0, 2, 3, 1).flatten(1)
            return linear(input.flatten(1), weight, self.bias).reshape(N, out, 1, 1)
        if input.requires_grad:
            return functional.conv2d(input, self.weight, self.bias, self.stride)
        if input.is_cuda and torch.is_autocast_enabled("cuda") and C * math.prod(sides) <= DENSE:
            return self._as_product(input)
        if input.device.type == "cpu" and not is_exporting():
            # Gathering by the patches of an image of indices takes a quarter of the time.
            index = torch.arange(C * math.prod(sides)).reshape(1, C, *sides)
            flat = input.flatten(1).index_select(1, self._patches(index).flatten())
        else:
            flat = self._patches(input)
        rows, columns = (
            (side - size) // step + 1 for side, size, step in zip(sides, self.kernel_size, self.stride, strict=True)
        )
        y = linear(flat.reshape(N * rows * columns, weight.shape[1]), weight, self.bias)
        return y.reshape(N, rows, columns, out).permute(0, 3, 1, 2)

    def _as_product(self, input: Float[Tensor, "N C R K"]) -> Float[Tensor, "N O R2 K2"]:
        """Convolve as one product with the matrix of the whole convolution.

        It has several times as many multiplications as patches, which 16-bit matrix units do in less time than patches
        take to be copied.
        """
        N, C, *sides = input.shape
        size, width = C * math.prod(sides), round_up(C * math.prod(sides))
        matrix = constant(self.weight, "matrix", lambda: self._matrix(C, sides, width))
        if input.stride(0) == width and input.stride(1) == math.prod(sides):
            # Rows of boxes are padded with numbers that meet zeros.
            flat = input.as_strided((N, width), (width, 1))
        else:
            flat = functional.pad(input.flatten(1), (0, width - size))
        bias = None if self.bias is None else self.bias[:, None, None].expand(matrix.shape[1:]).flatten()
        return functional.linear(flat, matrix.flatten(1).t(), bias).unflatten(1, matrix.shape[1:])

    def _matrix(self, channels: int, sides: Sequence[int], width: int) -> Float[Tensor, "W O R2 K2"]:
        """Return the outputs of an image with a single 1, for each of its numbers, and zeros for the padding."""
        cells, device = math.prod(sides), self.weight.device
        # [taps, cells, places]: whether a tap of the kernel reads a cell, in each place.
        reads = self._patches(torch.arange(cells, device=device).reshape(1, 1, *sides))[0, :, :, 0].flatten(2)
        taps = reads.movedim(2, 0)[:, None] == torch.arange(cells, device=device)[:, None, None]
        with torch.autocast("cuda", enabled=False):
            # A product, whose gradient does not depend on the order of threads.
            spread = self.weight.flatten(0, 1).flatten(1) @ taps.flatten(1).to(self.weight.dtype)
        outputs = spread.unflatten(1, taps.shape[1:]).unflatten(0, (-1, channels))
        outputs = outputs.permute(1, 2, 0, 3, 4).flatten(0, 1)
        return functional.pad(outputs, (0, 0, 0, 0, 0, 0, 0, width - len(outputs)))

    def _patches(self, images: Shaped[Tensor, "N C R K"]) -> Shaped[Tensor, "N R2 K2 C r k"]:
        (rows, columns), (down, right) = self.kernel_size, self.stride
        return images.unfold(2, rows, down).unfold(3, columns, right).permute(0, 2, 3, 1, 4, 5)


class TokensToBox(NamedModule):
    """Scatter tokens into a box `[channels,rows,columns]`, one normalized channel per feature.

    The box is at least 11x11 with the window centred in it; a global token is written at the centre. Of two tokens on
    one (feature, cell) the larger value counts. Padding, unknown features and tokens outside the window are dropped.
    """

    named_kind = "features"

    def __init__(self, features: Sequence[Feature], window: tuple[int, int], *, rounds: bool = False) -> None:
        super().__init__()
        self.channels = len(features)
        self.rounds = rounds
        """Whether boxes come in the dtype of autocast: all that reads them would round them to it."""
        self.window = window
        self.rows, self.columns = (max(SMALLEST_BOX, side) for side in window)
        # Not saved: normalizations come with the features of the world the policy is bound to.
        norm = torch.tensor([feature.normalization for feature in features])
        self.register_buffer("normalization", norm, persistent=False)
        self.normalization: Tensor
        self.readers: list[tuple[nn.Linear | nn.Conv2d, int]] = []
        """Layers that read the channels, with the number of cells of each channel they read."""
        self.closed = ""
        """A component that reads the channels and cannot be widened."""

    def read_by(self, layer: Layer) -> Layer:
        """Register a layer that reads the channels: it is widened when features are added."""
        self.readers.append((layer, 1))
        return layer

    def require_room(self, features: Sequence[Feature], actions: Sequence[str]) -> None:
        """Reject fewer features, and more than the layers that read the box can be widened to."""
        if len(features) < self.channels:
            raise ContractError(
                f"The policy has channels for {self.channels} features; {len(features)} are too few. "
                "Build it for the world its weights come from, load them, then bind it to the other."
            )
        if len(features) > self.channels and (self.closed or not self.readers):
            layer = self.closed or "a layer not registered by read_by"
            raise ContractError(f"New features cannot be added: {layer} reads the box and cannot be widened.")

    def set_names(self, features: Sequence[Feature], actions: Sequence[str]) -> None:
        """Set channels and normalizations; added features get channels with zero weights."""
        for layer, cells in self.readers:
            widen(layer, (len(features) - self.channels) * cells)
        self.channels = len(features)
        self.normalization = self.normalization.new_tensor([feature.normalization for feature in features])

    def forward(self, obs: UInt8[Tensor, "N M 3"]) -> Float[Tensor, "N C R K"]:
        """Turn `[N,M,3]` tokens into `[N,channels,rows,columns]`."""
        if obs.is_cuda and self.normalization.dtype == torch.float32 and refused_on(obs.device) is None:
            return self._by_kernel(obs)
        location, feature, value = obs.long().unbind(-1)
        row, column = location >> 4, location & 0x0F
        is_global = location == GLOBAL
        inside = is_global | ((row < self.window[0]) & (column < self.window[1]))
        row = row + (self.rows - self.window[0]) // 2
        column = column + (self.columns - self.window[1]) // 2
        cell = row * self.columns + column
        cell = torch.where(is_global, (self.rows // 2) * self.columns + self.columns // 2, cell)
        size = self.channels * self.rows * self.columns
        index = feature * (self.rows * self.columns) + cell
        index = torch.where(inside & (feature < self.channels), index, size)
        # Normalize tokens, not the box: tokens are far fewer than cells.
        norm = self.normalization[feature.clamp(max=self.channels - 1)]
        box = torch.zeros(len(obs), size + 1, dtype=norm.dtype, device=obs.device)
        box.scatter_reduce_(1, index, value / norm, "amax")
        return box[:, :size].unflatten(1, (self.channels, self.rows, self.columns))

    def _by_kernel(self, obs: UInt8[Tensor, "N M 3"]) -> Float[Tensor, "N C R K"]:
        """Do the same in one kernel; the rows of boxes are padded to what matrix products like."""
        from holdfast.policies.box_kernel import BoxShape, fill_boxes

        shape = BoxShape(self.channels, self.rows, self.columns, self.window)
        size, low = self.channels * self.rows * self.columns, self.rounds and torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if low else torch.float32
        # Triton uses the current GPU.
        with torch.cuda.device(obs.device):
            boxes = fill_boxes(obs, self.normalization, shape, round_up(size), dtype)
        return boxes[:, :size].unflatten(1, (self.channels, self.rows, self.columns))


class BoxEncoder(nn.Module):
    """Two convolutions and two linear layers from a token box to a feature vector."""

    def __init__(self, features: Sequence[Feature], window: tuple[int, int], size: int) -> None:
        super().__init__()
        self.box = TokensToBox(features, window, rounds=True)
        self.conv1 = self.box.read_by(orthogonal(Conv(self.box.channels, 64, kernel_size=5, stride=3)))
        self.conv2 = orthogonal(Conv(64, 64, kernel_size=3))
        rows, columns = ((side - 5) // 3 + 1 - 2 for side in (self.box.rows, self.box.columns))
        self.fc1 = orthogonal(LinearLayer(64 * rows * columns, 128))
        self.fc2 = orthogonal(LinearLayer(128, size))

    def forward(self, obs: UInt8[Tensor, "N M 3"]) -> Float[Tensor, "N D"]:
        """Encode `[N,M,3]` tokens."""
        x = torch.relu(self.conv1(self.box(obs)))
        x = torch.relu(self.conv2(x)).flatten(1)
        return torch.relu(self.fc2(torch.relu(self.fc1(x))))
