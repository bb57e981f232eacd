"""What LSTM and GRU share: a stack of layers, one dense call, or slots where something starts inside."""

from abc import abstractmethod
from typing import ClassVar, Literal

import torch
from tensordict import TensorDict
from torch import nn

from holdfast.errors import ContractError
from holdfast.memory import kernels, reference
from holdfast.memory.cell import Cell, like, require_fit, select_rows, stack_layers
from holdfast.memory.slots import Slots, plan_slots
from holdfast.shapes import Bool, Float, Tensor

Kernel = Literal["auto", "torch", "triton"]
"""What runs a segment: torch's own call, ours in Triton; auto is ours on GPUs that can, torch's elsewhere."""


class Stack(Cell):
    """Layers one above the other, around torch's kernel; its state is `[B,L,H]` for each of `leaves`.

    Weights are orthogonal, biases 0. `drive` says what a blank slot and a hold add to each gate: see
    slots.py.
    """

    leaves: ClassVar[tuple[str, ...]]
    """What a layer carries; the last one keeps a NaN, if there was any."""
    plain_layer: ClassVar[reference.Layer]
    """One layer step by step, from reference.py."""
    kernel: Kernel = "auto"
    """Set by `use_kernel`, for all memories of a policy at once."""

    def __init__(self, rnn: nn.RNNBase, drive: list[list[float]]) -> None:
        super().__init__(rnn.input_size, rnn.hidden_size, rnn.num_layers)
        self.rnn = rnn
        for name, weight in rnn.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(weight)
            else:
                nn.init.zeros_(weight)
        per_unit = torch.tensor(drive).repeat_interleave(rnn.hidden_size, 0)
        self.register_buffer("_drive", per_unit, persistent=False)
        self._drive: Tensor

    def initial(self, batch: int) -> TensorDict:
        """Make the state of `batch` agents that remember nothing yet: zeros."""
        weight, *_ = self.layer(0)
        size = (batch, self.num_layers, self.hidden_size)
        return TensorDict({leaf: weight.new_zeros(size) for leaf in self.leaves}, batch_size=[batch])

    def forward(
        self,
        x: Float[Tensor, "B *T D"],
        state: TensorDict,
        clear: Bool[Tensor, "B *T"],
        valid: Bool[Tensor, "B *T"] | None = None,
    ) -> tuple[Float[Tensor, "B *T H"], TensorDict]:
        """Read one step `[B,D]` or one segment `[B,T,D]`."""
        require_fit(self, x, state, clear)
        dtype = _computed_in(x, self.layer(0)[0])
        if self._has_kernel(x.device, dtype):
            return self._in_kernel(x, state, clear, valid, dtype)
        first = clear if x.dim() == 2 else clear[:, 0]
        entry = select_rows(first, self.initial(len(x)), state)
        if x.dim() == 2:
            y_B1H, after = self._dense(x[:, None], entry)
            if valid is None:
                return y_B1H[:, 0], after
            return torch.where(valid[:, None], y_B1H[:, 0], 0.0), select_rows(valid, after, entry.detach())
        if not clear[:, 1:].any() and (valid is None or valid.all()):
            return self._dense(x, entry)
        return self._in_slots(x, entry, clear, torch.ones_like(clear) if valid is None else valid)

    def plain(
        self,
        x: Float[Tensor, "B T D"],
        state: TensorDict,
        clear: Bool[Tensor, "B T"],
        valid: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T H"], TensorDict]:
        """Read a segment step by step."""
        layers = [self.layer(number) for number in range(self.num_layers)]
        return reference.run(self.plain_layer, layers, self.leaves, x, state, clear, valid)

    def layer(self, number: int) -> reference.LayerWeights:
        """Return one layer's weights."""
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        a, b, c, d = (getattr(self.rnn, f"{name}_l{number}") for name in names)
        return a, b, c, d

    @abstractmethod
    def _call(
        self, x_TBD: Tensor, before: list[Tensor], weights: list[Tensor], layers: int
    ) -> tuple[Tensor, ...]:
        """Call torch's kernel; the output comes back, then what each leaf `[L,B,H]` has become."""

    @abstractmethod
    def _flags(self, slots: Slots) -> Tensor:
        """Say what is read in every slot beside the step: `[S,B,F]`, the same for all layers."""

    @abstractmethod
    def _layer_in_slots(
        self, number: int, x_SBD: Tensor, before: list[Tensor], slots: Slots
    ) -> tuple[Tensor, ...]:
        """Run one layer over slots: zeros from blanks and holds, then what each leaf `[B,H]` has become.

        What it reads has the flags in its last columns.
        """

    @abstractmethod
    def _layer_in_kernel(
        self, number: int, x_BTD: Tensor, before: list[Tensor], code_BT: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Run one layer by our own kernel; the output, then what each leaf `[B,H]` has become."""

    def refused_kernel(self, device: torch.device) -> str | None:
        """Say why a kernel that was asked for cannot run there; none: it can, or none was."""
        refused = kernels.refusal(device, self.hidden_size) if self.kernel == "triton" else None
        return refused and f"our kernels cannot run this memory: {refused}. Use auto."

    def _has_kernel(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Say whether our kernels run this; they do 32 bits and fewer."""
        if self.kernel == "triton":
            refused = self.refused_kernel(device)
            if dtype not in kernels.DTYPES:
                refused = f"our kernels run 32 bits and fewer, not {dtype}. Use auto."
            if refused is not None:
                raise ContractError(f"kernel triton: {refused}")
            return True
        if self.kernel == "torch" or device.type == "cpu" or dtype not in kernels.DTYPES:
            return False
        return kernels.refusal(device, self.hidden_size) is None

    def _in_kernel(
        self, x: Tensor, state: TensorDict, clear: Tensor, valid: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, TensorDict]:
        y_BTH = x[:, None] if x.dim() == 2 else x
        # A copy: the gradients come when the clears may have been overwritten.
        code = clear.byte() if valid is None else clear.byte() | ((~valid).byte() << 1)
        layers = []
        for number in range(self.num_layers):
            before = [state[leaf][:, number] for leaf in self.leaves]
            y_BTH, *after = self._layer_in_kernel(number, y_BTH, before, code.reshape(y_BTH.shape[:2]), dtype)
            layers.append(after)
        after = like(stack_layers(self.leaves, layers), state)
        return y_BTH[:, 0] if x.dim() == 2 else y_BTH, after

    def _dense(self, x_BTD: Tensor, entry: TensorDict) -> tuple[Tensor, TensorDict]:
        before = [entry[leaf].transpose(0, 1).contiguous() for leaf in self.leaves]
        weights = [weight for number in range(self.num_layers) for weight in self.layer(number)]
        y_TBH, *after = self._call(x_BTD.transpose(0, 1), before, weights, self.num_layers)
        return y_TBH.transpose(0, 1), like(stack_layers(self.leaves, zip(*after, strict=True)), entry)

    def _in_slots(
        self, x_BTD: Tensor, entry: TensorDict, clear_BT: Tensor, valid_BT: Tensor
    ) -> tuple[Tensor, TensorDict]:
        slots = plan_slots(clear_BT, valid_BT, x_BTD.dtype)
        flags_SBF, layers = self._flags(slots), []
        y_SBH = x_SBD = slots.spread(x_BTD, flags_SBF)
        for number in range(self.num_layers):
            if number:
                x_SBD = torch.cat([y_SBH, flags_SBF], dim=-1)
            before = [entry[leaf][:, number] for leaf in self.leaves]
            y_SBH, *after = self._layer_in_slots(number, x_SBD, before, slots)
            layers.append(after)
        state = stack_layers(self.leaves, layers)
        if not torch.isfinite(state[self.leaves[-1]]).all():
            # A NaN survives a shut gate (0 x NaN is NaN), but must not survive its episode.
            return self.plain(x_BTD, entry, clear_BT, valid_BT)
        if y_SBH.dtype != entry[self.leaves[0]].dtype:
            # What is only held was rounded on its way in; where nothing is read, memory stands still.
            state = like(select_rows(slots.empty_B, entry.detach(), state), entry)
        return slots.collect(y_SBH), state


def _computed_in(x: Tensor, weight: Tensor) -> torch.dtype:
    """Say what layers compute in: autocast's numbers where it is on, else those of the weights."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
