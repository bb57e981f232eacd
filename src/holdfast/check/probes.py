"""Probes: they measure what a policy's memory does; the laws decide whether that is right."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from holdfast.check.script import Script, ScriptedWorld
from holdfast.experience import Collector
from holdfast.learn import replay
from holdfast.memory import Cell
from holdfast.policies import LSTMWrapper
from holdfast.shapes import Float, Tensor
from holdfast.worlds import WorldSpec

Flags = Literal["first", "dones", "truncateds"]


@dataclass(frozen=True)
class Life:
    """The same steps lived in rollouts and replayed as an update would: value and all log-probs of each."""

    lived: Float[Tensor, "A N K"]
    replayed: Float[Tensor, "A N K"]


@torch.no_grad()
def live_and_replay(
    policy: LSTMWrapper, spec: WorldSpec, script: Script, *, rollouts: int, segments: int
) -> Life:
    """Live a script through the trainer's own collector, and replay it through its own update path."""
    length = script.steps // rollouts
    said: list[Tensor] = []

    def listen(module: nn.Module, arguments: tuple[Any, ...], td: TensorDictBase) -> None:
        if not policy.store.is_replaying:
            said.append(_answer(td).clone())

    world = ScriptedWorld(spec, script)
    collector = Collector(world, policy, length=length, horizon=length // segments, seed=0)
    replayed = []
    handle = policy.register_forward_hook(listen)
    for version in range(rollouts):
        again = _answer(replay(policy, collector.rollout(version)))
        replayed.append(again.reshape(script.agents, length, -1))
    handle.remove()
    policy.store.close()
    return Life(torch.stack(said, dim=1), torch.cat(replayed, dim=1))


def _answer(td: TensorDictBase) -> Float[Tensor, "*batch K"]:
    """Take the value and all log-probabilities from a policy's answer."""
    return torch.cat([td["values"][..., None], td["full_log_probs"]], dim=-1)


def live_by_hand(
    policy: LSTMWrapper,
    script: Script,
    *,
    steps_a_call: int = 1,
    flags: Flags = "first",
    slices: Sequence[tuple[int, int]] | None = None,
    start: int = 0,
    stop: int | None = None,
) -> Float[Tensor, "A N K"]:
    """Call the policy over the live store, `steps_a_call` steps at a time, slice by slice.

    The outputs are the value and all log-probabilities. Steps `start` to `stop` are lived.
    """
    stop = script.steps if stop is None else stop
    outputs = []
    for t in range(start, stop, steps_a_call):
        rows = []
        for begin, length in slices or ((0, script.agents),):
            td = _batch(script, slice(begin, begin + length), t, steps_a_call, flags)
            rows.append(_answer(policy(td)).reshape(length, steps_a_call, -1))
        outputs.append(torch.cat(rows))
    return torch.cat(outputs, dim=1)


def _batch(script: Script, agents: slice, t: int, steps: int, flags: Flags) -> TensorDict:
    when = t if steps == 1 else slice(t, t + steps)
    obs, first = script.obs[agents, when], script.first[agents, when]
    if flags != "first" and t == 0:
        # Nothing ended before the run began; only `first` is true there.
        first = first.clone()
        first.reshape(len(obs), -1)[:, 0] = False
    batch = {
        "env_obs": obs,
        flags: first,
        "training_env_id_start": torch.full(first.shape, agents.start),
        "draws": torch.zeros(first.shape),
    }
    return TensorDict(batch, batch_size=first.shape)


@dataclass
class Taps:
    """Zeros added to what the memory reads, so that gradients to each step can be asked for."""

    added: list[Tensor] = field(default_factory=list)
    _depth: int = 0


@contextmanager
def tapped(policy: nn.Module) -> Iterator[Taps]:
    """Add a tap to every call of the policy's outermost recurrent module."""
    taps, handles = Taps(), []

    def before(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        taps._depth += 1
        if taps._depth > 1:
            return arguments
        tap = torch.zeros_like(arguments[0], requires_grad=True)
        taps.added.append(tap)
        return (arguments[0] + tap, *arguments[1:])

    def after(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        taps._depth -= 1

    for module in policy.modules():
        if isinstance(module, Cell | nn.RNNBase | nn.RNNCellBase):
            handles.append(module.register_forward_pre_hook(before))
            handles.append(module.register_forward_hook(after, always_call=True))
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()


def gradient_reach(policy: LSTMWrapper, script: Script, *, steps_a_call: int) -> Float[Tensor, "calls calls"]:
    """Measure how strongly the outputs of each call pull on what every call read: `[output, input]`."""
    outputs, taps_of = [], []
    with torch.enable_grad(), tapped(policy) as taps:
        for t in range(0, script.steps, steps_a_call):
            known = len(taps.added)
            outputs.append(
                live_by_hand(policy, script, steps_a_call=steps_a_call, start=t, stop=t + steps_a_call)
            )
            taps_of.append(taps.added[known:])
        reach = torch.zeros(len(outputs), len(outputs))
        for output, told in enumerate(outputs):
            for read in range(output + 1):
                if not (inputs := taps_of[read]):
                    continue
                pulls = torch.autograd.grad(told.sum(), inputs, retain_graph=True, allow_unused=True)
                sizes = [float(pull.abs().max()) for pull in pulls if pull is not None]
                reach[output, read] = max(sizes, default=0.0)
    return reach


def held() -> tuple[int, int]:
    """Count the bytes of all live tensors and the graph nodes they keep alive."""
    gc.collect()
    storages, roots = {}, []
    for thing in gc.get_objects():
        # Exact types: the fake tensors a compiler leaves behind hold no memory.
        if type(thing) in (Tensor, nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            if thing.grad_fn is not None:
                roots.append(thing.grad_fn)
    seen: set[Any] = set()
    while roots:
        node = roots.pop()
        if node in seen:
            continue
        seen.add(node)
        roots.extend(after for after, _ in node.next_functions if after is not None)
    return sum(storages.values()), len(seen)
