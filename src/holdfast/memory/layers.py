"""LSTM and GRU layers on tensors. State is reset here, on three paths: dense, packed and our kernels."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from holdfast.cuda_graphs import is_recording
from holdfast.errors import ContractError
from holdfast.memory import kernels, reference
from holdfast.memory.packing import PackingPlan, plan_packing
from holdfast.types import Bool, Float, Tensor

Kernel = Literal["auto", "torch", "triton"]
"""What runs a segment: torch.lstm or torch.gru, or our Triton kernels; auto: ours where the GPU can."""

Leaves = list[Float[Tensor, "B L H"]]
LeavesOutput = tuple[Float[Tensor, "B *T H"], Leaves]


def detached(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Cut the gradient of a state."""
    return [leaf.detach() for leaf in leaves]


def is_autocast(device: str) -> bool:
    """Return whether autocast is on; the device `meta` has none."""
    return device != "meta" and torch.is_autocast_enabled(device)


CLOSED = -1e4
"""A gate with this bias is exactly 0 in every float type, and with +1e4 exactly 1."""


FEW_ROWS = 24
"""Up to so many rows a step by `torch.lstm_cell` takes less than by `torch.lstm`: half at 8."""


class RecurrentLayers(ABC):
    """Stacked recurrent layers; the state is a list of leaves `[B,L,H]`, one for each of `state_keys`."""

    state_keys: ClassVar[tuple[str, ...]]
    """Names of the state leaves; a NaN, once in the state, stays in the last one."""
    reference_step: ClassVar[reference.Step]
    torch_kernel: ClassVar[Callable[..., tuple[Tensor, ...]]]
    """`torch.lstm` or `torch.gru`."""
    torch_cell: ClassVar[Callable[..., Any]]
    """`torch.lstm_cell` or `torch.gru_cell`: one step of one layer."""
    triton_kernel: ClassVar[Literal["lstm", "gru"]]
    """Our kernel's name in kernels/ops.py, which is imported when it is about to run."""
    gate_bias: ClassVar[list[list[float]]]
    """Added to the gates (rows) in reset and padding slots (columns)."""
    num_flags: ClassVar[int]
    """Flags of a packed slot that every layer reads beside its input."""
    kernel: Kernel = "auto"
    """Set by `use_kernel` for all cells of a policy."""
    hidden_size: int
    num_layers: int

    @abstractmethod
    def torch_rnn(self) -> nn.RNNBase:
        """Return the module that has the weights."""

    def run(
        self,
        x: Float[Tensor, "B *T D"],
        state: Leaves,
        clear: Bool[Tensor, "B *T"] | None,
        valid: Bool[Tensor, "B *T"] | None = None,
    ) -> LeavesOutput:
        """Process one step `[B,D]` or one segment `[B,T,D]`; the returned state has the dtypes of the one before."""
        device = x.device.type
        autocast, dtype = is_autocast(device), None
        if device != "cpu" or self.kernel == "triton":
            weight: Any = self.torch_rnn().weight_ih_l0
            dtype = torch.get_autocast_dtype(device) if autocast else weight.dtype
        if dtype is not None and self._has_kernel(x.device, dtype):
            y, after = self._run_kernel(x, state, clear, valid, dtype)
        else:
            # Where looking costs less than selecting. An exported policy takes any resets, and any number of rows.
            is_eager_on_cpu = device == "cpu" and not torch.compiler.is_compiling() and not is_recording()
            entry = state
            if clear is not None and not (is_eager_on_cpu and x.dim() == 2 and not clear.any()):
                first_B11 = (clear if x.dim() == 2 else clear[:, 0])[:, None, None]
                # torch.where, because 0 x NaN is NaN.
                entry = [torch.where(first_B11, 0.0, leaf) for leaf in state]
            if x.dim() == 2:
                few_rows = is_eager_on_cpu and not autocast and len(x) <= FEW_ROWS
                y, after = self._run_one(x, entry, valid, few_rows=few_rows)
            elif is_recording() and clear is not None:
                # The other paths read the mask on the host.
                y, after = self.run_reference(x, state, clear, valid)
            elif (clear is None or not clear[:, 1:].any()) and (valid is None or valid.all()):
                y, after = self._run_dense(x, entry)
            else:
                clear = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device) if clear is None else clear
                packed = self._run_packed(x, entry, clear, torch.ones_like(clear) if valid is None else valid)
                y, after = self.run_reference(x, state, clear, valid) if packed is None else packed
        return y, [new if new.dtype == old.dtype else new.to(old.dtype) for new, old in zip(after, state, strict=True)]

    def run_reference(
        self, x: Float[Tensor, "B T D"], state: Leaves, clear: Bool[Tensor, "B T"], valid: Bool[Tensor, "B T"] | None
    ) -> LeavesOutput:
        """Process a segment step by step."""
        steps = [partial(self.reference_step, self.layer(number)) for number in range(self.num_layers)]
        return reference.run(steps, x, state, clear, valid)

    def layer(self, number: int) -> reference.LayerWeights:
        """Return one layer's weights."""
        weight_ih, weight_hh, *biases = self.torch_rnn().all_weights[number]
        bias_ih, bias_hh = biases or (weight_ih.new_zeros(len(weight_ih)),) * 2
        return weight_ih, weight_hh, bias_ih, bias_hh

    @abstractmethod
    def _layer_packed(self, number: int, x_SBD: Tensor, before: list[Tensor], plan: PackingPlan) -> Sequence[Tensor]:
        """Run one packed layer on inputs and flags; return the output, 0 in reset and padding slots, and the leaves."""

    def _gate_bias_like(self, weight: Tensor) -> Float[Tensor, "GH 2"]:
        return weight.new_tensor(self.gate_bias).repeat_interleave(self.hidden_size, 0)

    def refused_kernel(self, device: torch.device) -> str | None:
        """Return why `kernel="triton"` cannot run on a device; None: it can, or was not requested."""
        reason = kernels.refusal(device, self.hidden_size) if self.kernel == "triton" else None
        return reason and f"our kernels cannot run this memory: {reason}. Use auto."

    def _has_kernel(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether our kernels run this; they support at most 32 bits."""
        if self.kernel == "triton":
            reason = self.refused_kernel(device)
            if dtype not in kernels.DTYPES:
                reason = f"our kernels run 32 bits and fewer, not {dtype}. Use auto."
            if reason is not None:
                raise ContractError(f"kernel triton: {reason}")
            return True
        if self.kernel == "torch" or device.type == "cpu" or dtype not in kernels.DTYPES:
            return False
        return kernels.refusal(device, self.hidden_size) is None

    def _run_kernel(
        self, x: Tensor, state: Leaves, clear: Tensor | None, valid: Tensor | None, dtype: torch.dtype
    ) -> LeavesOutput:
        from holdfast.memory.kernels import ops

        run_layer = getattr(ops, self.triton_kernel)
        y_BTH = x[:, None] if x.dim() == 2 else x
        clear = torch.zeros(x.shape[:-1], dtype=torch.bool, device=x.device) if clear is None else clear
        # A copy: the caller may overwrite the clears before the backward pass.
        bits = clear.view(torch.uint8)
        code = bits.clone() if valid is None else torch.add(bits, (~valid).view(torch.uint8), alpha=2)
        layers = []
        for number in range(self.num_layers):
            before = [leaf[:, number] for leaf in state]
            y_BTH, *after = run_layer(y_BTH, self.layer(number), *before, code.reshape(y_BTH.shape[:2]), dtype)
            layers.append(after)
        return (y_BTH[:, 0] if x.dim() == 2 else y_BTH), reference.stack_layers(layers)

    def _run_dense(self, x_BTD: Tensor, entry: Leaves) -> LeavesOutput:
        rnn, before = self.torch_rnn(), [leaf.transpose(0, 1).contiguous() for leaf in entry]
        weights = [weight for layer in rnn.all_weights for weight in layer]
        # torch.gru takes one tensor where torch.lstm takes a list of two.
        hx = before if before[1:] else before[0]
        y_TBH, *after = self.torch_kernel(
            x_BTD.transpose(0, 1), hx, weights, rnn.bias, self.num_layers, 0.0, rnn.training, False, False
        )
        return y_TBH.transpose(0, 1), [leaf_LBH.transpose(0, 1) for leaf_LBH in after]

    def _run_one(self, x_BD: Tensor, entry: Leaves, valid: Tensor | None, *, few_rows: bool) -> LeavesOutput:
        if few_rows:
            y, after = self._run_cells(x_BD, entry)
        else:
            y_B1H, after = self._run_dense(x_BD[:, None], entry)
            y = y_B1H[:, 0]
        if valid is None:
            return y, after
        pairs, valid_B11 = zip(after, entry, strict=True), valid[:, None, None]
        return torch.where(valid[:, None], y, 0.0), [torch.where(valid_B11, *pair) for pair in pairs]

    def _run_cells(self, x_BD: Tensor, entry: Leaves) -> LeavesOutput:
        y, layers = x_BD, []
        for number, weights in enumerate(self.torch_rnn().all_weights):
            before = [leaf[:, number] for leaf in entry]
            # torch.gru_cell takes and returns one tensor where torch.lstm_cell takes and returns two.
            after = self.torch_cell(y, before, *weights) if before[1:] else [self.torch_cell(y, before[0], *weights)]
            y = after[0]
            layers.append(after)
        return y, reference.stack_layers(layers)

    def _run_packed(self, x_BTD: Tensor, entry: Leaves, clear_BT: Tensor, valid_BT: Tensor) -> LeavesOutput | None:
        """Run packed segments; None if a state is not finite: 0 x NaN is NaN, so a closed gate would let it through."""
        plan = plan_packing(clear_BT, valid_BT, x_BTD.dtype)
        flags_SBF, layers = plan.flags_SB3[..., : self.num_flags], []
        y_SBH = x_SBD = plan.pack(x_BTD, flags_SBF)
        for number in range(self.num_layers):
            if number:
                x_SBD = torch.cat([y_SBH, flags_SBF], dim=-1)
            y_SBH, *after = self._layer_packed(number, x_SBD, [leaf[:, number] for leaf in entry], plan)
            layers.append(after)
        state = reference.stack_layers(layers)
        if not torch.isfinite(state[-1]).all():
            return None
        if y_SBH.dtype != entry[0].dtype:
            # Autocast rounded the entry state; rows without a valid step must return it unchanged.
            empty_B11, pairs = plan.empty_B[:, None, None], zip(entry, state, strict=True)
            state = [torch.where(empty_B11, old, new.to(old.dtype)) for old, new in pairs]
        return plan.unpack(y_SBH), state


class LSTMLayers(RecurrentLayers):
    """Stacked LSTM layers; the leaves are h and c."""

    state_keys = ("h", "c")
    reference_step = staticmethod(reference.lstm_step)
    torch_kernel = staticmethod(torch.lstm)
    torch_cell = staticmethod(torch.lstm_cell)
    triton_kernel = "lstm"
    num_flags = 2
    gate_bias = [[CLOSED, CLOSED], [CLOSED, -CLOSED], [0.0, 0.0], [CLOSED, CLOSED]]  # noqa: RUF012

    def _layer_packed(self, number: int, x_SBD: Tensor, before: list[Tensor], plan: PackingPlan) -> Sequence[Tensor]:
        weight_ih, *rest = self.layer(number)
        weights = [torch.cat([weight_ih, self._gate_bias_like(weight_ih)], dim=1), *rest]
        weights = _contiguous_weights(weights) if x_SBD.is_cuda else weights
        hx, training = [leaf_BH[None].contiguous() for leaf_BH in before], self.torch_rnn().training
        y_SBH, _, c_1BH = torch.lstm(x_SBD, hx, weights, True, 1, 0.0, training, False, False)
        # The closed output gate makes the output of padding slots 0, so h is that of the last real slot.
        h_BH = torch.where(plan.empty_B[:, None], before[0], y_SBH.flatten(0, 1)[plan.last_B])
        return y_SBH, h_BH, c_1BH[0][plan.row_B]


def _contiguous_weights(weights: list[Tensor]) -> list[Tensor]:
    """Copy weights into one buffer; cuDNN warns if they are not contiguous."""
    flat = torch.cat([weight.flatten() for weight in weights])
    chunks = flat.split([weight.numel() for weight in weights])
    return [chunk.view(weight.shape) for chunk, weight in zip(chunks, weights, strict=True)]


class GRULayers(RecurrentLayers):
    """Stacked GRU layers; the leaf is h."""

    state_keys = ("h",)
    reference_step = staticmethod(reference.gru_step)
    torch_kernel = staticmethod(torch.gru)
    torch_cell = staticmethod(torch.gru_cell)
    triton_kernel = "gru"
    num_flags = 3
    gate_bias = [[CLOSED, CLOSED], [CLOSED, -CLOSED], [0.0, 0.0]]  # noqa: RUF012

    def _layer_packed(self, number: int, x_SBD: Tensor, before: list[Tensor], plan: PackingPlan) -> Sequence[Tensor]:
        weight_ih, weight_hh, bias_ih, bias_hh = self.layer(number)
        gates, candidate = bias_ih.split([2 * self.hidden_size, self.hidden_size])
        # The candidate's bias applies to real steps only: in reset and padding slots the candidate n and its
        # gradient are exactly 0, so n + z (h - n) is exactly 0 and exactly h.
        column = torch.cat([torch.zeros_like(gates), candidate])[:, None]
        bias = torch.cat([gates, torch.zeros_like(candidate)])
        weights = [torch.cat([weight_ih, self._gate_bias_like(weight_ih), column], dim=1), weight_hh, bias, bias_hh]
        hx, training = before[0][None].contiguous(), self.torch_rnn().training
        y_SBH, h_1BH = torch.gru(x_SBD, hx, weights, True, 1, 0.0, training, False, False)
        # In reset and padding slots the next layer must read nothing but its flags.
        return torch.where(x_SBD[:, :, -1:] > 0, y_SBH, 0.0), h_1BH[0][plan.row_B]
