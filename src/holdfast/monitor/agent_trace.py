"""Agent trace (--trace): episodes, resets and state norms of one agent, line by line."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from tensordict import TensorDict, TensorDictBase

from holdfast.errors import ConfigError
from holdfast.learn import replay
from holdfast.memory import Cell
from holdfast.memory.episode_resets import reset_mask
from holdfast.monitor.state_audit import (
    CellInputs,
    current_state,
    on_cell_input,
    on_cell_output,
    same_randomness,
    state_norms,
)
from holdfast.policies import LSTMWrapper
from holdfast.rollout import Segments
from holdfast.types import Bool, Tensor
from holdfast.worlds.obs import tensors_of

KEYS = ("first", "valid", "trial", "dones", "truncateds", "rewards")


@dataclass(frozen=True)
class EpisodeEnd:
    """The end of an episode."""

    step: int
    reason: str
    reward: float


@dataclass(frozen=True)
class EpisodeSpan:
    """Steps between two starts: an episode or a part of one. Steps are counted in the segment."""

    start: int
    stop: int
    """Start of the next span."""
    opens: str
    """What starts here: `episode`, `trial` or `nothing` (a reset without a start); "": it started before."""
    cleared: bool
    ends: tuple[EpisodeEnd, ...]
    inactive: tuple[tuple[int, int], ...]
    """First and last step of each run of invalid steps."""
    acted: int
    rewards: float
    """Sum of the rewards of this span's actions."""

    @property
    def kind(self) -> tuple[object, ...] | None:
        """Key of complete episodes that are printed in one line; none: no complete episode of this segment."""
        if self.opens != "episode" or len(self.ends) != 1:
            return None
        inactive = sum(stop - start + 1 for start, stop in self.inactive)
        return self.acted, self.ends[0].reason, self.cleared, inactive


def parse_row(row: TensorDictBase, clear: Bool[Tensor, " T"]) -> list[EpisodeSpan]:
    """Split one row `[T]` of a segment's steps into spans; `clear` is the mask of memory resets."""
    steps = {key: row[key].tolist() for key in KEYS}
    cleared, T = clear.tolist(), len(clear)
    starts = [t for t in range(T) if steps["first"][t] or cleared[t]]
    spans = []
    for start, stop in zip([0, *starts], [*starts, T], strict=True):
        # The first span started before, and may be empty: an end comes with the step that starts the next.
        opened = start in starts and (start > 0 or bool(spans))
        ends = [_end(steps, t) for t in range(start + opened, min(stop + 1, T))]
        kind = "episode" if steps["first"][start] else "trial" if steps["trial"][start] else "nothing"
        spans.append(
            EpisodeSpan(
                start,
                stop,
                kind if opened else "",
                opened and cleared[start],
                tuple(end for end in ends if end is not None),
                _inactive(steps["valid"], start, stop),
                sum(steps["valid"][start:stop]),
                math.fsum(steps["rewards"][t + 1] for t in range(start, min(stop, T - 1)) if steps["valid"][t]),
            )
        )
    return spans


def _end(steps: dict[str, list], t: int) -> EpisodeEnd | None:
    flags = [name for name, key in (("terminated", "dones"), ("truncated", "truncateds")) if steps[key][t]]
    return EpisodeEnd(t, " and ".join(flags), steps["rewards"][t]) if flags else None


def _inactive(valid: list[bool], start: int, stop: int) -> tuple[tuple[int, int], ...]:
    invalid = (list(run) for is_valid, run in groupby(range(start, stop), valid.__getitem__) if not is_valid)
    return tuple((run[0], run[-1]) for run in invalid)


MIN_GROUP = 3
"""At least so many equal episodes in a row are printed in one line."""


class AgentTrace:
    """Trace of one agent, rollout by rollout.

    Steps are numbered from the start of the run, invalid ones too. |state| is the norm of a state as one vector.
    """

    def __init__(self, policy: LSTMWrapper, agents: int, agent: int = 42) -> None:
        if not 0 <= agent < agents:
            raise ConfigError(f"There is no agent {agent} to trace; there are agents 0 to {agents - 1}: --trace=N.")
        self._policy, self._agents, self.agent = policy, agents, agent

    @torch.no_grad()
    def rollout(self, segments: Segments, iteration: int) -> list[str]:
        """Return the lines of a rollout, numbered from 0; call it before the update."""
        count, T = len(segments) // self._agents, segments.steps.shape[1]
        start = iteration * count * T
        index = torch.arange(count, device=segments.steps["valid"].device) + self.agent * count
        rows = segments.rows(index)
        entries = self._norms(rows.entry_state)
        after = [*entries[1:], *self._norms(current_state(self._policy)[self.agent : self.agent + 1])]
        lines = [
            f"Agent {self.agent} · rollout {iteration + 1} · steps {start}-{start + count * T - 1} · weights "
            f"of version {int(segments.version[0])}"
        ]
        for k in range(count):
            begin = start + k * T
            branch = list(self._segment(rows.rows(index[k : k + 1] - index[0]), begin, entries[k]))
            carried = "" if after[k] is None else f"state carried over, |state| {after[k]:.4g}; "
            branch.append(f"edge after step {begin + T - 1}: {carried}gradient cut")
            lines += [f"Steps {begin}-{begin + T - 1}: segment {k + 1} of {count}", *_branches(branch)]
        return lines

    def update(self, before: int, after: int, numbers: Mapping[str, float] | None = None) -> list[str]:
        """Return the lines of an update: the versions of the weights before and after it, and metrics."""
        metrics = [f"{name} {number:.4g}" for name, number in (numbers or {}).items()]
        return [f"Update · weights changed: version {before} → {after}", *_branches(metrics)]

    def _norms(self, state: TensorDict) -> list[float | None]:
        """Norm of each state; none: the policy has no memory."""
        return state_norms(state).tolist() if self._policy.has_memory() else [None] * len(state)

    def _segment(self, row: Segments, begin: int, entry: float | None) -> Iterator[str]:
        """Yield the lines of one row, whose first step has the number `begin`."""
        if entry is None:
            yield "the policy has no memory"
        else:
            yield f"entry state: {f'|state| {entry:.4g}' if entry else 'zeros'}"
        spans = parse_row(row.steps[0], self._cleared(row))
        for key, group in groupby(spans, lambda span: span.kind or span):
            equal_spans = list(group)
            if isinstance(key, tuple) and len(equal_spans) >= MIN_GROUP:
                yield from _group_lines(equal_spans, begin, self._memory(row, equal_spans, entry))
            else:
                for span in equal_spans:
                    yield from _span_lines(span, begin, self._memory(row, [span], entry))

    def _cleared(self, row: Segments) -> Bool[Tensor, " T"]:
        """Mask of the steps where all cells are reset: measured, because a policy may ignore `reset_mask`."""
        clears: dict[Cell, list[Tensor]] = {}

        def record(cell: Cell, call: CellInputs) -> None:
            clears.setdefault(cell, []).append(call["clear"].reshape(-1))

        with same_randomness(self._policy), on_cell_input(self._policy, record):
            replay(self._policy, row)
        masks = [torch.cat(calls) for calls in clears.values()]
        # Only Holdfast cells have hooks; without any, take the flags.
        return torch.stack(masks).all(0) if masks else reset_mask(row.steps, self._policy.clear_on)[0]

    def _memory(self, row: Segments, spans: list[EpisodeSpan], entry: float | None) -> str:
        """Describe what the starts of spans do to the memory."""
        if entry is None:
            return ""
        if not spans[0].cleared:
            return ", memory kept"
        norms = [self._norm_before(row, span.start, entry) for span in spans]
        sizes = [f"{size:.4g}" for size in sorted(norm for norm in norms if norm is not None)]
        return ", memory cleared" + (f": |state| {'..'.join(sizes[:1] + sizes[1:][-1:])} → 0" if sizes else "")

    def _norm_before(self, row: Segments, t: int, entry: float) -> float | None:
        """Norm of the state before step t of a row, by replaying the steps before it."""
        if t == 0:
            return entry
        states: dict[Cell, TensorDict] = {}
        prefix = Segments(row.steps[:, :t], row.entry_state, row.tail, row.version)
        with same_randomness(self._policy), on_cell_output(self._policy, states.__setitem__):
            replay(self._policy, prefix)
        squares = [float(state_norms(state)) ** 2 for state in states.values() if not state.is_empty()]
        return sum(squares) ** 0.5 if squares else None


def _branches(lines: list[str]) -> list[str]:
    return [f"{'├─' if number < len(lines) else '└─'} {line}" for number, line in enumerate(lines, 1)]


def _span_lines(span: EpisodeSpan, start: int, memory: str) -> Iterator[str]:
    """Yield the lines of one span in order of time; an end comes before the invalid steps."""
    if span.opens:
        yield f"step {start + span.start}: {span.opens} starts{memory}"
    events = [
        (end.step, 0, f"step {start + end.step}: episode ended ({end.reason}), reward {end.reward:.4g}")
        for end in span.ends
    ]
    for first, last in span.inactive:
        events.append((first, 1, f"{_steps(start + first, start + last)}: inactive"))
    yield from (line for _, _, line in sorted(events))


def _group_lines(spans: list[EpisodeSpan], start: int, memory: str) -> Iterator[str]:
    one = spans[0]
    inactive = sum(last - first + 1 for first, last in one.inactive)
    mean = sum(span.rewards for span in spans) / len(spans)
    when = _steps(start + one.start, start + spans[-1].stop - 1)
    length = f"{one.acted} steps{f' and {inactive} inactive' if inactive else ''}"
    yield f"{when}: {len(spans)} episodes of {length}, {one.ends[0].reason}, mean return {mean:.4g}"
    if memory:
        yield f"{when}: {len(spans)} times{memory.removeprefix(',')}"


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first}-{last}"


def shapes(tree: TensorDictBase) -> list[str]:
    """List every tensor of a batch with its shape and dtype."""
    names = [name if isinstance(name, str) else ".".join(name) for name in tree.keys(True, True)]
    width = max(map(len, names), default=0)
    return [
        f"{name:<{width}}  {list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
        for name, leaf in zip(names, tensors_of(tree), strict=True)
    ]
