"""The life of one agent, in lines: what its memory went through, from what a run really stored."""

from collections.abc import Iterator, Mapping
from itertools import groupby

import torch
from tensordict import TensorDict, TensorDictBase

from holdfast.errors import ConfigError
from holdfast.experience import Segments
from holdfast.learn import replay
from holdfast.memory import Cell
from holdfast.monitor.cells import Heard, following, hearing, lengths, live_state, same_randomness
from holdfast.monitor.row import Piece, read_row
from holdfast.policies import LSTMWrapper
from holdfast.policies.clock import clears
from holdfast.shapes import Bool, Tensor
from holdfast.worlds.seen import leaves_of

FEWEST = 3
"""So many episodes alike in a row are told in one line."""


class Trace:
    """Tells what happens to one agent of a run, rollout by rollout.

    Steps are numbered from the start of the run, those too in which nobody acts. What is said of states are
    lengths, all numbers of a state taken as one vector.
    """

    def __init__(self, policy: LSTMWrapper, agents: int, agent: int = 42) -> None:
        if not 0 <= agent < agents:
            raise ConfigError(
                f"There is no agent {agent} to trace; there are agents 0 to {agents - 1}: --trace=N."
            )
        self._policy, self._agents, self.agent = policy, agents, agent

    @torch.no_grad()
    def rollout(self, segments: Segments, iteration: int) -> list[str]:
        """Tell a rollout, counted from 0, after it and before the weights change."""
        count, T = len(segments) // self._agents, segments.steps.shape[1]
        start = iteration * count * T
        index = torch.arange(count, device=segments.steps["valid"].device) + self.agent * count
        mine = segments.rows(index)
        entries = self._sizes(mine.entry)
        after = [*entries[1:], *self._sizes(live_state(self._policy)[self.agent : self.agent + 1])]
        lines = [
            f"Agent {self.agent} · rollout {iteration + 1} · steps {start}-{start + count * T - 1} · weights "
            f"of version {int(segments.version[0])}"
        ]
        for k in range(count):
            begin = start + k * T
            told = list(self._segment(mine.rows(index[k : k + 1] - index[0]), begin, entries[k]))
            told.append(f"edge after step {begin + T - 1}: {_edge(after[k])}")
            branches = [*["├─"] * (len(told) - 1), "└─"]
            lines.append(f"Steps {begin}-{begin + T - 1}: segment {k + 1} of {count}")
            lines += [f"{branch} {line}" for branch, line in zip(branches, told, strict=True)]
        return lines

    def update(self, before: int, after: int, numbers: Mapping[str, float] | None = None) -> list[str]:
        """Tell an update: the versions of the weights before and after it, and what was measured."""
        lines = [f"Update · weights changed: version {before} → {after}"]
        told = [f"{name} {number:.4g}" for name, number in (numbers or {}).items()]
        return lines + [f"{'└─' if line == told[-1] else '├─'} {line}" for line in told]

    def _sizes(self, state: TensorDict) -> list[float | None]:
        """Say how long each state is; none: this policy remembers nothing."""
        return lengths(state).tolist() if self._policy.has_memory() else [None] * len(state)

    def _segment(self, row: Segments, begin: int, entry: float | None) -> Iterator[str]:
        """Tell what happened in one row, `begin` being the number of its first step."""
        if entry is None:
            yield "nothing is remembered"
        else:
            yield f"memory comes in {f'with |state| {entry:.4g}' if entry else 'as zeros'}"
        pieces = read_row(row.steps[0], self._cleared(row))
        for alike, group in groupby(pieces, lambda piece: piece.kind if piece.whole else piece):
            several = list(group)
            if isinstance(alike, tuple) and len(several) >= FEWEST:
                yield from _alike(several, begin, self._memory(row, several, entry))
            else:
                for piece in several:
                    yield from _piece(piece, begin, self._memory(row, [piece], entry))

    def _cleared(self, row: Segments) -> Bool[Tensor, " T"]:
        """Say where all memories really are cleared: what the clock says is not what a policy need do."""
        heard: dict[Cell, list[Tensor]] = {}

        def hear(cell: Cell, call: Heard) -> None:
            heard.setdefault(cell, []).append(call["clear"].reshape(-1))

        with same_randomness(self._policy), hearing(self._policy, hear):
            replay(self._policy, row)
        # A memory that is none of ours cannot be heard; then the clock must do.
        mine = [torch.cat(calls) for calls in heard.values()]
        return torch.stack(mine).all(0) if mine else clears(row.steps, self._policy.clear_on)[0]

    def _memory(self, row: Segments, pieces: list[Piece], entry: float | None) -> str:
        """Say what the starts of some pieces do to the memory."""
        if entry is None:
            return ""
        if not pieces[0].cleared:
            return ", memory kept"
        known = [self._before(row, piece.begin, entry) for piece in pieces]
        sizes = [f"{size:.4g}" for size in sorted(size for size in known if size is not None)]
        return ", memory cleared" + (
            f": |state| {'..'.join(sizes[:1] + sizes[1:][-1:])} → 0" if sizes else ""
        )

    def _before(self, row: Segments, t: int, entry: float) -> float | None:
        """Say how long the state was before step t of a row: replay what came before it."""
        if t == 0:
            return entry
        left: dict[Cell, TensorDict] = {}
        part = Segments(row.steps[:, :t], row.entry, row.tail, row.version)
        with same_randomness(self._policy), following(self._policy, left.__setitem__):
            replay(self._policy, part)
        squares = [float(lengths(state)) ** 2 for state in left.values() if not state.is_empty()]
        return sum(squares) ** 0.5 if squares else None


def _piece(piece: Piece, start: int, memory: str) -> Iterator[str]:
    """Tell one stretch in the order of time; an end comes before the row in which nobody acts."""
    if piece.opens:
        yield f"step {start + piece.begin}: {piece.opens} starts{memory}"
    told = [
        (end.step, 0, f"step {start + end.step}: episode ended ({end.how}), reward {end.reward:.4g}")
        for end in piece.ends
    ]
    for first, last in piece.away:
        told.append((first, 1, f"{_steps(start + first, start + last)}: nobody acts"))
    yield from (line for _, _, line in sorted(told))


def _alike(pieces: list[Piece], start: int, memory: str) -> Iterator[str]:
    one = pieces[0]
    away = sum(last - first + 1 for first, last in one.away)
    mean = sum(piece.rewards for piece in pieces) / len(pieces)
    when = _steps(start + one.begin, start + pieces[-1].stop - 1)
    length = f"{one.acted} steps{f' and {away} away' if away else ''}"
    yield f"{when}: {len(pieces)} episodes of {length}, {one.ends[0].how}, mean return {mean:.4g}"
    if memory:
        yield f"{when}: {len(pieces)} times{memory.removeprefix(',')}"


def _edge(after: float | None) -> str:
    return "gradient cut" if after is None else f"values kept, |state| {after:.4g} goes on; gradient cut"


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first}-{last}"


def shapes(tree: TensorDictBase) -> list[str]:
    """List every tensor of a batch with its shape and the kind of its numbers."""
    names = [name if isinstance(name, str) else ".".join(name) for name in tree.keys(True, True)]
    width = max(map(len, names), default=0)
    return [
        f"{name:<{width}}  {list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
        for name, leaf in zip(names, leaves_of(tree), strict=True)
    ]
