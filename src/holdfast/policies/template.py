"""`RecurrentPolicy`: write `encode` and `decode`; everything about memory is done here, once."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, final

import torch
from tensordict import TensorDict, TensorDictBase

from holdfast.errors import ContractError
from holdfast.policies.actions import Actions
from holdfast.policies.clock import clears, slice_start
from holdfast.policies.precision import Precision, computing, widened
from holdfast.policies.wrapper import LSTMWrapper
from holdfast.shapes import Bool, Float, Shaped, Tensor
from holdfast.worlds.seen import Seen, device_of, still


class Thoughts(NamedTuple):
    """What a policy makes of each observation: scores of actions (`policy.actions.size`), and a value."""

    logits: Float[Tensor, "*batch actions"]
    values: Float[Tensor, "*batch"]


class PurePolicy(LSTMWrapper, ABC):
    """A policy that is one pure function, `think`; what is remembered and who acts is minded here, once."""

    hears_by_name = True
    precision: Precision = "float32"
    """What layers compute in. Weights, stored states and what is said are float32 in any case."""
    parts: ClassVar[tuple[str, ...]]
    """Methods that may be compiled: all but the recurrent calls."""
    _compiled: Mapping[str, Callable[..., Any]] = MappingProxyType({})

    @abstractmethod
    def think(
        self,
        obs: Seen,
        first: Bool[Tensor, "B *T"],
        state: TensorDict,
        valid: Bool[Tensor, "B *T"] | None,
    ) -> tuple[Thoughts, TensorDict]:
        """Think about one step (`first[B]`) or a segment (`first[B,T]`); return the state after it."""

    def compile_parts(self, backend: str = "inductor") -> None:
        """Compile everything around the memory; the recurrent call stays with its own kernel."""
        # Unbound, so that a copy of this policy thinks with its own weights.
        self._compiled = {
            name: torch.compile(getattr(type(self), name), backend=backend, dynamic=True)
            for name in self.parts
        }

    def call_part(self, name: str, *arguments: Any) -> Any:
        """Call one of the parts, compiled if it is."""
        compiled = self._compiled.get(name)
        return getattr(self, name)(*arguments) if compiled is None else compiled(self, *arguments)

    def unroll(
        self,
        obs: Seen,
        first: Bool[Tensor, "B *T"],
        state: TensorDict,
        valid: Bool[Tensor, "B *T"] | None = None,
    ) -> tuple[Thoughts, TensorDict]:
        """Think about one step (`first[B]`) or a segment (`first[B,T]`) and return the state after it.

        Pure: nothing is read or kept but what is given. Where `first` is true memory is emptied
        before it reads. The returned state has no graph. Observations and scores are in the words of
        the world the policy is bound to.
        """
        obs = obs if valid is None else still(obs, valid, self.binding.nothing)
        with computing(self.precision, first.device):
            thoughts, state = self.think(self.binding.heard(obs), first, state, valid)
        if self.precision != "float32":
            thoughts = Thoughts(*map(widened, thoughts))
        return Thoughts(self.binding.said(thoughts.logits), thoughts.values), state

    @final
    def forward(
        self,
        td: TensorDictBase,
        state: TensorDict | None = None,
        action: Shaped[Tensor, "..."] | None = None,
    ) -> TensorDictBase:
        """Act (no `action`) or judge given actions, for a step `[B]` or segments `[B,T]`.

        Reads and writes the live store, whatever T; inside `replay(entry)`, or with `state` given,
        it starts from there and writes nothing. A flat `[B*T]` batch says its shape by `bptt` and
        `batch`.
        """
        B, T = _rows_and_steps(td)
        shape = (B,) if T == 1 and td.batch_dims == 1 else (B, T)
        clear = clears(td, self.clear_on).reshape(shape)
        valid = td["valid"].bool().reshape(shape) if "valid" in td else None
        obs = _in_shape(td["env_obs"], shape, td.batch_dims)
        with self.replay(state) if state is not None else nullcontext():
            start = 0 if self.store.is_replaying else slice_start(td)
            thoughts, after = self.unroll(obs, clear, self.store.read(start, B), valid)
            self.store.write(start, after)
        return _answer(self.actions, td, thoughts, action)


class RecurrentPolicy(PurePolicy, ABC):
    """A policy that remembers: observation -> `encode` -> memory -> `decode` -> actions and value."""

    parts = ("encode", "decode")

    @abstractmethod
    def encode(self, obs: Any) -> Float[Tensor, "N D"]:
        """Turn observations into what the memory reads, each on its own.

        They are a tensor `[N,...]`, or in worlds of Dict observations a TensorDict: `obs["image"]`.
        """

    @abstractmethod
    def decode(self, features: Float[Tensor, "N H"]) -> Thoughts:
        """Turn what the memory says into action scores `[N,actions]` and values `[N]`."""

    def think(
        self,
        obs: Seen,
        first: Bool[Tensor, "B *T"],
        state: TensorDict,
        valid: Bool[Tensor, "B *T"] | None,
    ) -> tuple[Thoughts, TensorDict]:
        """Encode all steps at once, remember over time, decode all steps at once."""
        batch = first.shape
        x = self.call_part("encode", obs.flatten(0, len(batch) - 1)).unflatten(0, batch)
        y, state = self.lstm.cell(x, state, first, valid)
        thoughts = self.call_part("decode", y.flatten(0, len(batch) - 1))
        return Thoughts(*(part.unflatten(0, batch) for part in thoughts)), state


def _rows_and_steps(td: TensorDictBase) -> tuple[int, int]:
    """Find B and T, and write them into the batch as `batch` and `bptt` where they are absent."""
    if td.batch_dims == 2:
        B, T = td.batch_size
    elif td.batch_dims == 1:
        T = int(td["bptt"][0]) if "bptt" in td and td.numel() else 1
        B = td.batch_size[0] // T
        if td.batch_size[0] != B * T:
            raise ContractError(f"A flat batch of {td.batch_size[0]} is not rows of bptt={T} steps.")
    else:
        raise ContractError(f"A policy takes batches [B] or [B,T]; this one is {td.batch_size}.")
    for key, number in (("bptt", T), ("batch", B)):
        if key not in td:
            where = device_of(td["env_obs"])
            td[key] = torch.full(td.batch_size, number, dtype=torch.long, device=where)
    return B, T


def _in_shape(obs: Seen, shape: tuple[int, ...], batch_dims: int) -> Seen:
    return obs.reshape(*shape, *obs.shape[batch_dims:])


def _answer(
    actions: Actions, td: TensorDictBase, thoughts: Thoughts, action: Tensor | None
) -> TensorDictBase:
    shape = td.batch_size
    told = actions.tell(thoughts.logits.reshape(*shape, -1))
    values = thoughts.values.reshape(shape)
    if action is None:
        uniform = td["draws"] if "draws" in td else torch.rand((*shape, *actions.shape), device=told.device)
        td["actions"] = chosen = actions.sample(told, uniform)
    else:
        chosen = action.reshape(*shape, *actions.shape)
        td["entropy"] = actions.entropy(told)
        td["value"] = values
    td["act_log_prob"] = actions.log_prob(told, chosen)
    td["values"] = values
    td[actions.key] = told
    return td
