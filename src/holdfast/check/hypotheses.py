"""Hypotheses: what a policy would say if it were wrong in a known way, worked out with its own single steps.

Every prediction is a chain of single steps without any flag; the states between them are cleared,
kept, dropped or exchanged by hand. The hypothesis whose chain gives the measured numbers explains them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch

from holdfast.check.case import HORIZON, STEPS, Case
from holdfast.check.script import Moments, Script
from holdfast.check.subject import flat
from holdfast.check.tree import State, along, copied, leaves, rebuilt
from holdfast.shapes import Bool, Float, Int, Tensor

Part = tuple[str, int] | None
"""Which part of a state is meant: `("tensor", 1)`, `("layer", 0)`, or all of it."""


@dataclass(frozen=True)
class Clock:
    """When memory is emptied, which part of it, and whether absences are noticed."""

    name: str
    clear: Bool[Tensor, "A N"]
    part: Part = None
    heeds_absence: bool = True


@torch.no_grad()
def chain(
    case: Case, moments: Moments, state: State, clock: Clock
) -> tuple[Float[Tensor, "A N K"], list[State]]:
    """Live single steps from a state, clearing by hand; return answers and the state before each step."""
    said, states = [], []
    moments = case.shown(moments.without_flags())
    if not clock.heeds_absence:
        moments = replace(moments, valid=torch.ones_like(moments.valid))
    with case.precisely():
        for t in range(moments.batch[1]):
            states.append(copied(state))
            state = _cleared(case, state, clock.clear[:, t], clock.part)
            before = copied(state)
            answer, state = case.subject.act(moments[:, t], state)
            state = case.rows.choose(moments.valid[:, t], state, before)
            said.append(flat(answer, 1))
    return torch.stack(said, dim=1).cpu(), [*states, copied(state)]


def _cleared(case: Case, state: State, mask: Bool[Tensor, " A"], part: Part) -> State:
    """Empty the memory of some rows, or a part of it."""
    fresh = case.rows.choose(mask, case.subject.initial(len(mask)), copied(state))
    return fresh if part is None else _patched(case, state, fresh, part)


def _patched(case: Case, state: State, fresh: State, part: tuple[str, int]) -> State:
    """Take one tensor, or one layer of all tensors, from another state."""
    kind, which = part
    patched = []
    for at, (leaf, other, rows) in enumerate(zip(leaves(state), leaves(fresh), case.rows.axes, strict=True)):
        if kind == "tensor":
            patched.append(other if at == which else leaf)
        else:
            layer = _layer_axis(leaf, rows)
            mask = torch.arange(leaf.shape[layer]) == which
            patched.append(torch.where(along(mask, layer, leaf), other, leaf))
    return rebuilt(state, patched)


def _layer_axis(leaf: Tensor, rows: int) -> int:
    return next(axis for axis in range(leaf.dim() - 1) if axis != rows)


def parts_of(case: Case) -> Iterator[tuple[str, int]]:
    """List the parts a state has: its tensors, and its layers where there are several."""
    with case.precisely():
        state = leaves(case.subject.initial(2))
    if len(state) > 1:
        yield from (("tensor", at) for at in range(len(state)))
    layers = {
        leaf.shape[_layer_axis(leaf, axis)] if leaf.dim() > 2 else 1
        for leaf, axis in zip(state, case.rows.axes, strict=True)
    }
    if len(layers) == 1 and (count := layers.pop()) > 1:
        yield from (("layer", at) for at in range(count))


def clocks(case: Case, script: Script, clear: Bool[Tensor, "A N1"]) -> Iterator[Clock]:
    """List the ways to clear over a whole life, the right one first."""
    right, when = clear[:, :STEPS], torch.arange(STEPS)
    ended = script.terminated[:, :STEPS] | script.truncated[:, :STEPS]
    rollout = STEPS // case.subject.rollouts
    yield Clock("", right)
    yield Clock("memory is never cleared", torch.zeros_like(right))
    yield Clock("state cleared one step late", torch.nn.functional.pad(right[:, :-1], (1, 0)))
    yield Clock("state cleared one step early", clear[:, 1 : STEPS + 1])
    yield Clock("clears on terminated only", right & ~(ended & script.truncated[:, :STEPS]))
    yield Clock("clears on truncated only", right & ~(ended & script.terminated[:, :STEPS]))
    yield Clock("one agent's start clears everybody", right.any(0).expand_as(right))
    yield Clock("clears only when all agents start together", right.all(0).expand_as(right))
    yield Clock("the first row's flags clear everybody", right[:1].expand_as(right))
    yield Clock("every call starts from nothing", torch.ones_like(right))
    yield Clock("memory wiped at every segment", right | (when % HORIZON == 0))
    yield Clock("memory wiped before each rollout", right | (when % rollout == 0))
    yield Clock(
        "memory wiped before each rollout, and cleared nowhere else", (when % rollout == 0).expand_as(right)
    )
    yield Clock("clears looked at in a segment's first step only", right & (when % HORIZON == 0))
    yield Clock("the clear at a segment's first step is missed", right & (when % HORIZON != 0))
    yield Clock("takes no notice of trials", script.first[:, :STEPS])
    yield Clock("reads where nobody acts", right, heeds_absence=False)
    for part in parts_of(case):
        yield Clock("only part of the state is cleared", right, part)


def segment_clocks(case: Case, script: Script, clear: Bool[Tensor, "A N1"]) -> Iterator[Clock]:
    """List the ways to clear over segments replayed one by one: no flag comes from outside of them."""
    inside = torch.arange(STEPS) % HORIZON
    for clock in clocks(case, script, clear):
        if clock.name == "state cleared one step late":
            yield replace(clock, clear=clock.clear & (inside != 0))
        elif clock.name == "state cleared one step early":
            yield replace(clock, clear=clock.clear & (inside != HORIZON - 1))
        elif not clock.name.startswith("memory wiped"):
            yield clock


@dataclass(frozen=True)
class Entries:
    """The state every segment starts from: rows are agents within segments, segment by segment."""

    name: str
    state: State


def entries(case: Case, states: list[State]) -> Iterator[Entries]:
    """List the states that segments might start from, the right ones first."""
    rows, starts = case.rows, range(0, STEPS, HORIZON)
    with case.precisely():
        empty = rows.join([case.subject.initial(rows.count(states[0])[0]) for _ in starts])
    right = rows.join([states[t] for t in starts])
    yield Entries("", right)
    yield Entries("training starts from zeros", empty)
    yield Entries("entry state is the one after the step", rows.join([states[t + 1] for t in starts]))
    yield Entries("entry state is one step old", rows.join([states[max(t - 1, 0)] for t in starts]))
    length = STEPS // case.subject.rollouts
    yield Entries(
        "every segment starts from the rollout's entry state",
        rows.join([states[t - t % length] for t in starts]),
    )
    for part in parts_of(case):
        yield Entries("part of the entry state is lost", _patched(case, right, empty, part))


def replayed(case: Case, script: Script, entry: State, clock: Clock) -> Float[Tensor, "A N K"]:
    """Predict what replaying all segments from their entries would say."""
    said, _ = chain(case, in_segments(script), entry, replace(clock, clear=_segments(clock.clear)))
    return _whole(said, script.agents)


def in_segments(script: Script) -> Moments:
    """Lay all segments of everybody's life below each other, `[segments * A, T]`."""
    parts = [script.moments(t, t + HORIZON) for t in range(0, STEPS, HORIZON)]
    return Moments(
        **{each.name: torch.cat([getattr(part, each.name) for part in parts]) for each in fields(Moments)}
    )


def _segments(flags: Bool[Tensor, "A N"]) -> Bool[Tensor, "B T"]:
    return torch.cat(flags.split(HORIZON, dim=1))


def _whole(said: Float[Tensor, "B T K"], agents: int) -> Float[Tensor, "A N K"]:
    return torch.cat(said.split(agents), dim=1)


def whose_entry(
    case: Case,
    script: Script,
    entry: State,
    clock: Clock,
    said: Tensor,
    same: Callable[[Tensor, Tensor], bool],
) -> Int[Tensor, " B"] | None:
    """Find for every segment whose entry state it was replayed from; None if some row finds none."""
    moments, clear = in_segments(script), _segments(clock.clear)
    segments = len(moments.first)
    every = torch.arange(segments)
    measured = torch.cat(said.split(HORIZON, dim=1))
    found = torch.full((segments,), -1)
    # Other segments of the same agent are tried first.
    for shift in sorted(range(segments), key=lambda shift: (shift % script.agents, shift)):
        state = case.rows.pick(entry, every.roll(shift))
        predicted, _ = chain(case, moments, state, replace(clock, clear=clear))
        for row in every[found < 0].tolist():
            if same(predicted[row], measured[row]):
                found[row] = every.roll(shift)[row]
        if bool((found >= 0).all()):
            return found
    return None


def swaps(case: Case, script: Script, states: list[State], clear: Bool[Tensor, "A N1"]) -> Iterator[Tensor]:
    """Predict what replays say if time and batch are swapped: in what is seen, in flags, in what is said."""
    for seen, flags, told in ((1, 0, 0), (1, 1, 1), (1, 1, 0), (1, 0, 1), (0, 1, 0), (0, 0, 1), (0, 1, 1)):
        parts = []
        for start in range(0, STEPS, HORIZON):
            moments = script.moments(start, start + HORIZON)
            starts = clear[:, start : start + HORIZON]
            moments = replace(moments, obs=_swap(moments.obs)) if seen else moments
            clock = Clock("", _swap(starts) if flags else starts)
            said, _ = chain(case, moments, states[start], clock)
            parts.append(_swap(said) if told else said)
        yield torch.cat(parts, dim=1)


def _swap(x_BT: Tensor) -> Tensor:
    """Read `(t b)` where `(b t)` is written."""
    B, T = x_BT.shape[:2]
    return x_BT.reshape(T, B, *x_BT.shape[2:]).transpose(0, 1)
