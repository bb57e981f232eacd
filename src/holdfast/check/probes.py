"""Probes: they measure what a policy's memory does; the laws decide whether that is right."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torch.func import functional_call

from holdfast.check.script import Script, ScriptedWorld
from holdfast.experience import Collector
from holdfast.learn import replay
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
    weights: dict[str, Tensor] | None = None,
) -> Float[Tensor, "A N K"]:
    """Call the policy over the live store, `steps_a_call` steps at a time, slice by slice.

    The outputs are the value and all log-probabilities. Steps `start` to `stop` are lived, with other
    `weights` if they are given.
    """
    stop = script.steps if stop is None else stop
    outputs = []
    for t in range(start, stop, steps_a_call):
        rows = []
        for begin, length in slices or ((0, script.agents),):
            td = _batch(script, slice(begin, begin + length), t, steps_a_call, flags)
            told = policy(td) if weights is None else functional_call(policy, weights, (td,))
            rows.append(_answer(told).reshape(length, steps_a_call, -1))
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
        "trial": script.trial[agents, when],
        "valid": script.valid[agents, when],
        "training_env_id_start": torch.full(first.shape, agents.start),
        "draws": torch.zeros(first.shape),
    }
    return TensorDict(batch, batch_size=first.shape)


def gradient_reach(policy: LSTMWrapper, script: Script, *, steps_a_call: int) -> Float[Tensor, "calls calls"]:
    """Measure how strongly each call's outputs pull on the weights of every call: `[output, call]`.

    Every call gets its own copy of the weights. Whatever path a gradient takes from one call into an
    earlier one, it ends in that one's copy.
    """
    outputs, copies = [], []
    with torch.enable_grad():
        for t in range(0, script.steps, steps_a_call):
            weights = {name: weight.clone().requires_grad_() for name, weight in policy.state_dict().items()}
            outputs.append(
                live_by_hand(
                    policy,
                    script,
                    steps_a_call=steps_a_call,
                    start=t,
                    stop=t + steps_a_call,
                    weights=weights,
                )
            )
            copies.append(list(weights.values()))
    reach = torch.zeros(len(outputs), len(outputs))
    for output, told in enumerate(outputs):
        known = [weight for weights in copies[: output + 1] for weight in weights]
        pulls = torch.autograd.grad(told.sum(), known, retain_graph=True, allow_unused=True)
        for number, pull in enumerate(pulls):
            if pull is not None:
                call = number // len(copies[0])
                reach[output, call] = torch.maximum(reach[output, call], pull.abs().max().float())
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
