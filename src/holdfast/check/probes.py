"""Probes: they measure what a policy's memory does to gradients, bytes and inputs; the laws judge."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from holdfast.check.case import HORIZON, Case
from holdfast.check.script import Moments, Script
from holdfast.check.subject import flat
from holdfast.check.tree import State
from holdfast.shapes import Float, Tensor


@dataclass(frozen=True)
class Pulls:
    """How strongly what each call says pulls on the weights of every call, `[output, call]`."""

    reach: Float[Tensor, "calls calls"]
    kinds: list[str]
    """What each call was: `act` or `replay`."""
    steps: list[int]
    """The step each call began with."""

    def between(self, saying: str, pulled: str) -> Float[Tensor, "saying pulled"]:
        """Take the calls of one kind against those of another, with what a call does to itself left out."""
        others = self.reach.masked_fill(torch.eye(len(self.reach), dtype=torch.bool), 0.0)
        rows, columns = (
            [at for at, kind in enumerate(self.kinds) if kind == each] for each in (saying, pulled)
        )
        return others[rows][:, columns]

    @property
    def own(self) -> Float[Tensor, " calls"]:
        """What each call does to its own weights, for calls that could do anything."""
        return self.reach.diagonal()


def pulls_between_calls(case: Case, script: Script) -> Pulls:
    """Live a script and replay every segment, with a copy of the weights for each call.

    Whatever path a gradient takes from one call into an earlier one, it ends in that one's copy.
    Rollouts are lived with gradients on only if the subject has to cut its states itself.
    """
    subject, said, copies, kinds, steps = case.subject, [], [], [], []

    def call(name: str, moments: Moments, state: State, t: int) -> Any:
        if not torch.is_grad_enabled():
            # Lived without gradients: there is nothing to pull on.
            return getattr(subject, name)(moments, pytree.tree_map_only(Tensor, torch.clone, state))
        with torch.no_grad():
            weights = {key: leaf.clone() for key, leaf in subject.module.named_parameters()}
        for leaf in weights.values():
            leaf.requires_grad_()
        result = subject.call(weights, name, moments, pytree.tree_map_only(Tensor, torch.clone, state))
        said.append(flat(result[0], 1) if name == "act" else flat(result, 2))
        copies.append(list(weights.values()))
        kinds.append(name)
        steps.append(t)
        return result

    script = case.shown(script)
    with case.precisely(), torch.enable_grad():
        state = subject.initial(script.agents)
        for start in range(0, script.steps, HORIZON):
            entry = state
            with torch.set_grad_enabled(subject.cuts_itself):
                for t in range(start, start + HORIZON):
                    _, state = call("act", script.at(t), state, t)
            call("replay", script.moments(start, start + HORIZON), entry, start)
    return Pulls(_pull(said, copies), kinds, steps)


def _pull(said: list[Tensor], copies: list[list[Tensor]]) -> Float[Tensor, "calls calls"]:
    reach = torch.zeros(len(said), len(said))
    for output, told in enumerate(said):
        if not told.requires_grad:
            continue
        known = [weight for weights in copies[: output + 1] for weight in weights]
        pulls = torch.autograd.grad(_weighed(told), known, retain_graph=True, allow_unused=True)
        for number, pull in enumerate(pulls):
            if pull is not None:
                call = number // len(copies[0])
                reach[output, call] = torch.maximum(reach[output, call], pull.abs().max().float().cpu())
    return reach


def pulls_within_segments(case: Case, script: Script) -> Float[Tensor, "N A N"] | None:
    """Measure how strongly what is said at a step pulls on what was seen at each, `[seen, agent, felt]`.

    Segments are replayed from states lived before. None where sights are whole numbers and nobody
    knows where they enter as fractions.
    """
    subject, found = case.subject, torch.zeros(script.steps, script.agents, script.steps)
    _, states = case.steps(script)
    script = case.shown(script)
    for start in range(0, script.steps, HORIZON):
        moments = script.moments(start, start + HORIZON)
        with case.precisely(), torch.enable_grad(), _sights(case, moments) as (seen, shown):
            said = flat(subject.replay(shown, states[start]), 2)
            if not seen:
                return None
            for t in range(HORIZON):
                if not said.requires_grad:
                    break
                pulls = torch.autograd.grad(_weighed(said[:, t]), seen, retain_graph=True, allow_unused=True)
                felt = found[start : start + HORIZON, :, start + t]
                for pull in pulls:
                    if pull is not None:
                        felt.copy_(torch.maximum(felt, pull.abs().flatten(2).amax(2).T.float().cpu()))
    return found


@contextmanager
def _sights(case: Case, moments: Moments) -> Iterator[tuple[list[Tensor], Moments]]:
    """Make what is seen, `[B,T,...]`, something that gradients arrive at."""
    seen: list[Tensor] = []
    if moments.obs.is_floating_point():
        seen.append(moments.obs.clone().requires_grad_())
        yield seen, replace(moments, obs=seen[0])
        return
    tapped: set[nn.Module] = set()

    def tap(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if module in tapped:
            return arguments
        tapped.add(module)
        seen.append(torch.zeros_like(arguments[0]).requires_grad_())
        return arguments[0] + seen[-1], *arguments[1:]

    handles = [entrance.register_forward_pre_hook(tap) for entrance in case.subject.entrances()]
    try:
        yield seen, moments
    finally:
        for handle in handles:
            handle.remove()


def _weighed(said: Float[Tensor, "*batch K"]) -> Float[Tensor, ""]:
    """Add everything up with weights of its own: a plain sum of probabilities is always 1."""
    generator = torch.Generator().manual_seed(4)
    return (said * (0.5 + torch.rand(said.shape[-1], generator=generator)).to(said)).sum()


def pulls_of_each(case: Case, script: Script) -> dict[str, float]:
    """Measure how strongly each thing that is said in a replay pulls on the weights."""
    subject, found = case.subject, {}
    weights = list(subject.module.parameters())
    script = case.shown(script)
    with case.precisely(), torch.enable_grad():
        said = subject.replay(script.moments(0, HORIZON), subject.initial(script.agents))
        for name, leaf in said.items():
            loss = _weighed(leaf.flatten(2) if leaf.dim() > 2 else leaf[..., None])
            asked = (loss, weights) if loss.requires_grad and weights else None
            pulls = torch.autograd.grad(*asked, retain_graph=True, allow_unused=True) if asked else ()
            sizes = [pull.abs().max() for pull in pulls if pull is not None]
            found[name] = float(torch.stack(sizes).max()) if sizes else 0.0
    return found


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
