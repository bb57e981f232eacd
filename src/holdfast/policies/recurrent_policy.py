"""RecurrentPolicy: encode, memory, decode; and the precision it computes in."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, final

import torch
from tensordict import TensorDict, TensorDictBase

from holdfast.cuda_graphs import is_recording
from holdfast.errors import ContractError
from holdfast.memory.cell import Mask
from holdfast.memory.episode_resets import reset_mask
from holdfast.policies.lstm_wrapper import LSTMWrapper, require_rows_and_steps, slice_start
from holdfast.types import Float, Shaped, Tensor
from holdfast.worlds.obs import Obs, device_of, mask_invalid

Precision = Literal["float32", "bfloat16"]
LOW = (torch.bfloat16, torch.float16)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Compute matrix products in `precision`; weights, states and sums keep their dtype."""
    return nullcontext() if precision == "float32" else torch.autocast(device.type, torch.bfloat16)


def full_precision(layer: Callable[..., Tensor], *inputs: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Call the last layer of a head outside of autocast.

    Logits and values are differences of large sums: rounded to 8 bits they would move ratios by a
    percent. The layers before may be rounded, and take most of the time.
    """
    device = inputs[0].device.type
    if not torch.is_autocast_enabled(device):
        return layer(*inputs)
    with torch.autocast(device, enabled=False):
        return layer(*map(to_float32, inputs))


def to_float32(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Cast 16-bit floats to float32."""
    return x.float() if x.dtype in LOW else x


LEAST_ROWS, ROW_BLOCK = 64, 8
"""Products of matrices of fewer rows, or with a remainder, are computed by other code, which rounds differently."""


def padded_rows(rows: int, rows_alone: int) -> int:
    """Number of rows that gives each row the same bits as among the `rows_alone` of a single rank.

    Measured on a CPU in float32 and float64: products of at least 64 rows, and a multiple of 4, agree bit for bit.
    """
    return min(rows_alone, max(LEAST_ROWS, -(-rows // ROW_BLOCK) * ROW_BLOCK))


class PolicyOutput(NamedTuple):
    """Logits (`policy.actions.size` of them) and value for each observation."""

    logits: Float[Tensor, "*batch actions"]
    values: Float[Tensor, "*batch"]


PolicyBatch = TensorDictBase | dict[str, Any]
"""What `forward` reads, and writes its outputs into."""
PolicyStep = tuple[PolicyOutput, TensorDict]
"""Outputs, and the state after them."""


class FunctionalPolicy(LSTMWrapper, ABC):
    """A policy whose forward pass is one pure function, `unroll`.

    Separate from `RecurrentPolicy` because a graph of components has no single `encode` and `decode`.
    """

    translates_names = True
    has_values: ClassVar[bool] = True
    """Whether it has a critic; without one, values are NaN."""
    precision: Precision = "float32"
    """Dtype of the layers. Weights, stored states and outputs are float32 in any case."""
    compiled_methods: ClassVar[tuple[str, ...]]
    """Methods to compile: all but the recurrent calls."""
    _compiled: Mapping[str, Callable[..., Any]] = MappingProxyType({})

    @abstractmethod
    def unroll(self, obs: Obs, first: Mask, state: TensorDict, valid: Mask | None = None) -> PolicyStep:
        """Compute one step (`first[B]`) or a segment (`first[B,T]`), and the state after it.

        Pure: reads and writes nothing but its arguments. Where `first` is true, memory is cleared before it reads. The
        returned state is detached. Observations and logits are in the order of the world the policy is bound to.
        """

    def compile_parts(self, backend: str = "inductor") -> None:
        """Compile everything around the memory; the recurrent call keeps its own kernel."""
        # Unbound methods, so that a copy of this policy uses its own weights.
        self._compiled = {
            name: torch.compile(getattr(type(self), name), backend=backend, dynamic=True)
            for name in self.compiled_methods
        }

    def _call_compiled(self, name: str, *args: Any) -> Any:
        """Call one of `compiled_methods`, compiled or not."""
        compiled = self._compiled.get(name)
        return getattr(self, name)(*args) if compiled is None else compiled(self, *args)

    def _prepare(self, obs: Obs, valid: Mask | None) -> Obs:
        """Blank invalid observations, translate the world's features, and normalize numbers."""
        obs = self.binding.translate_obs(obs if valid is None else mask_invalid(obs, valid, self.binding.blank))
        return obs if self.obs_norm is None else self.obs_norm(obs)

    def _finish(self, output: PolicyOutput) -> PolicyOutput:
        """Cast outputs to float32, scale values, and translate logits into the world's order of actions."""
        if self.precision != "float32":
            output = PolicyOutput(*map(to_float32, output))
        values = output.values if self.value_norm is None else self.value_norm.denormalize(output.values)
        return PolicyOutput(self.binding.translate_logits(output.logits), values)

    @final
    def forward(
        self, td: PolicyBatch, state: TensorDict | None = None, action: Shaped[Tensor, "..."] | None = None
    ) -> PolicyBatch:
        """Act (without `action`) or evaluate `action`, for a step `[B]` or segments `[B,T]`.

        Reads and writes the state store, whatever T; inside `replay(entry)`, or with `state`, it
        starts from there and writes nothing. A flat `[B*T]` batch has its shape in `bptt` and `batch`.
        A dictionary of tensors `[B]` or `[B,T]` does as well as a TensorDict, and costs less.
        """
        clear, valid, obs = reset_mask(td, self.clear_on), td.get("valid", None), td["env_obs"]
        if isinstance(td, dict):
            batch, valid = clear.shape, None if valid is None else valid.bool()
        else:
            batch = td.batch_size
            B, T = _rows_and_steps(td)
            shape = (B,) if T == 1 and td.batch_dims == 1 else (B, T)
            clear, valid = clear.reshape(shape), None if valid is None else valid.bool().reshape(shape)
            obs = obs.reshape(*shape, *obs.shape[td.batch_dims :])
        if valid is not None and valid.is_cpu and not is_recording() and bool(valid.all()):
            # Looking costs less than selecting.
            valid = None
        with self.replay(state) if state is not None else nullcontext():
            start = 0 if self.store.is_replaying else slice_start(td)
            entry, rows = self.store.read(start, len(clear)), padded_rows(len(clear), self.rows_alone)
            if rows > len(clear) and clear.dim() == 1:
                # The last row is repeated, and the repetitions are dropped.
                index = torch.arange(rows, device=clear.device).clamp(max=len(clear) - 1)
                inputs = (obs[index], clear[index], entry[index], None if valid is None else valid[index])
                (logits, values), state = self.unroll(*inputs)
                output, state = PolicyOutput(logits[: len(clear)], values[: len(clear)]), state[: len(clear)]
            else:
                output, state = self.unroll(obs, clear, entry, valid)
            self.store.write(start, state)
        if output.values.shape != batch:
            output = PolicyOutput(output.logits.reshape(*batch, -1), output.values.reshape(batch))
        draws = td["draws"] if action is None and "draws" in td else None
        td.update(self._sample(output, draws) if action is None else self._evaluate(output, action))
        return td

    def _sample(self, output: PolicyOutput, draws: Tensor | None) -> dict[str, Tensor]:
        """Sample actions, from uniform numbers where they are given."""
        actions = self.actions
        if draws is None:
            draws = torch.rand((*output.values.shape, *actions.shape), device=output.logits.device)
        params, action, log_prob = actions.act(output.logits, draws)
        return {"actions": action, "act_log_prob": log_prob, "values": output.values, actions.key: params}

    def _evaluate(self, output: PolicyOutput, action: Tensor) -> dict[str, Tensor]:
        """Evaluate actions."""
        actions, params = self.actions, self.actions.parameters(output.logits)
        action = action.reshape(*output.values.shape, *actions.shape)
        return {
            "entropy": actions.entropy(params),
            "value": output.values,
            "act_log_prob": actions.log_prob(params, action),
            "values": output.values,
            actions.key: params,
        }


class RecurrentPolicy(FunctionalPolicy, ABC):
    """A recurrent policy: observation -> `encode` -> memory -> `decode` -> logits and value."""

    compiled_methods = ("encode", "decode")

    @abstractmethod
    def encode(self, obs: Any) -> Float[Tensor, "N D"]:
        """Encode observations for the memory, each row on its own.

        `obs` is a tensor `[N,...]`, or for Dict observations a TensorDict: `obs["image"]`.
        """

    @abstractmethod
    def decode(self, features: Float[Tensor, "N H"]) -> PolicyOutput:
        """Turn the memory's outputs into logits `[N,actions]` and values `[N]`."""

    def unroll(self, obs: Obs, first: Mask, state: TensorDict, valid: Mask | None = None) -> PolicyStep:
        """Encode all steps at once, run the memory over time, decode all steps at once."""
        batch, obs = first.shape, self._prepare(obs, valid)
        is_step = len(batch) == 1
        with autocast(self.precision, first.device):
            x = self._call_compiled("encode", obs if is_step else obs.flatten(0, 1))
            y, state = self.lstm.cell(x if is_step else x.unflatten(0, batch), state, first, valid)
            logits, values = self._call_compiled("decode", y if is_step else y.flatten(0, 1))
        if not is_step:
            logits, values = logits.unflatten(0, batch), values.unflatten(0, batch)
        return self._finish(PolicyOutput(logits, values)), state


def _rows_and_steps(td: TensorDictBase) -> tuple[int, int]:
    """Return B and T, and write them into the batch as `batch` and `bptt` where they are absent."""
    if td.batch_dims == 2:
        B, T = td.batch_size
    elif td.batch_dims == 1:
        T = int(td["bptt"][0]) if "bptt" in td and td.numel() else 1
        B = td.batch_size[0] // T
        if td.batch_size[0] != B * T:
            raise ContractError(f"A flat batch of {td.batch_size[0]} is not rows of bptt={T} steps.")
    else:
        raise ContractError(f"A policy takes batches [B] or [B,T]; this one is {td.batch_size}.")
    require_rows_and_steps(td, B, T)
    for key, number in (("bptt", T), ("batch", B)):
        if key not in td:
            device = device_of(td["env_obs"])
            td[key] = torch.full(td.batch_size, number, dtype=torch.long, device=device)
    return B, T
