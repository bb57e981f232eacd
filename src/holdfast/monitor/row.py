"""What happened in one segment, step by step: where episodes began and ended, and where nobody acted."""

import math
from dataclasses import dataclass

from tensordict import TensorDictBase

from holdfast.shapes import Bool, Tensor

KEYS = ("first", "valid", "trial", "dones", "truncateds", "rewards")


@dataclass(frozen=True)
class End:
    """An episode's end, as it was told."""

    step: int
    how: str
    reward: float


@dataclass(frozen=True)
class Piece:
    """What lies between two starts: part of an episode, or all of it. Steps are counted in the segment."""

    begin: int
    stop: int
    """Where the next piece begins."""
    opens: str
    """What begins here, an episode, a trial, or nothing though memory is cleared; "": it began before."""
    cleared: bool
    ends: tuple[End, ...]
    away: tuple[tuple[int, int], ...]
    """Stretches in which nobody acts: first and last step."""
    acted: int
    rewards: float
    """The sum of what was paid for actions in this piece."""

    @property
    def whole(self) -> bool:
        """Whether an episode begins and ends inside the segment."""
        return self.opens == "episode" and len(self.ends) == 1

    @property
    def kind(self) -> tuple[object, ...]:
        """What is alike in episodes that are told as one."""
        return self.acted, self.ends[0].how, self.cleared, sum(stop - begin + 1 for begin, stop in self.away)


def read_row(row: TensorDictBase, clear: Bool[Tensor, " T"]) -> list[Piece]:
    """Cut one row `[T]` of a segment's steps into pieces; `clear` says where memory is cleared."""
    told = {key: row[key].tolist() for key in KEYS}
    cleared, T = clear.tolist(), len(clear)
    starts = [t for t in range(T) if told["first"][t] or cleared[t]]
    pieces = []
    for begin, stop in zip([0, *starts], [*starts, T], strict=True):
        # The first stretch began before: also one of no steps, as an end may be told where the next begins.
        opened = begin in starts and (begin > 0 or bool(pieces))
        ends = [_end(told, t) for t in range(begin + opened, min(stop + 1, T))]
        word = "episode" if told["first"][begin] else "trial" if told["trial"][begin] else "nothing"
        pieces.append(
            Piece(
                begin,
                stop,
                word if opened else "",
                opened and cleared[begin],
                tuple(end for end in ends if end is not None),
                _away(told["valid"], begin, stop),
                sum(told["valid"][begin:stop]),
                math.fsum(told["rewards"][t + 1] for t in range(begin, min(stop, T - 1)) if told["valid"][t]),
            )
        )
    return pieces


def _end(told: dict[str, list], t: int) -> End | None:
    flags = [word for word, key in (("terminated", "dones"), ("truncated", "truncateds")) if told[key][t]]
    return End(t, " and ".join(flags), told["rewards"][t]) if flags else None


def _away(valid: list[bool], begin: int, stop: int) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for t in range(begin, stop):
        if not valid[t]:
            joins = bool(found) and found[-1][1] == t - 1
            found = [*found[:-1], (found[-1][0], t)] if joins else [*found, (t, t)]
    return tuple(found)
