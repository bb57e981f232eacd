"""Laws of a trainer's states: cleared, carried, not changed by values, handed to the update."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from holdfast.check.results import Measurement, not_measured
from holdfast.check.trainer.recording import NEAR, RecurrentCall, TrainerRecording
from holdfast.check.trainer.script import NONE
from holdfast.types import Float, Tensor

BOUND = 1e-5
"""Largest difference of two states or outputs, relative to max(1, |x|)."""

STEP_BEFORE = "the state after the step before"
AFTER_STEP = "hypothesis: the entry state is stored after the step"


@dataclass(frozen=True)
class Acting:
    """What a recurrent module did with one observation when acting."""

    entry: Float[Tensor, " S"]
    y: Float[Tensor, " H"]
    exit: Float[Tensor, " S"]
    update: int
    """Calls of updates before it."""


@dataclass(frozen=True)
class Difference:
    """A state or output that is not what it must be, for one observation."""

    number: int
    size: float
    actual: str
    """What it is, in words."""


class Memory:
    """The states of one recurrent module during a training."""

    def __init__(self, recording: TrainerRecording, module: nn.Module, name: str) -> None:
        self.recording, self.script, self.module, self.name = recording, recording.script, module, name
        self.calls: list[RecurrentCall] = recording.recurrent[module]

    @cached_property
    def acting(self) -> dict[int, list[Acting]]:
        """All calls of one step, by observation, in order."""
        result, updates = defaultdict(list), 0
        for call in self.calls:
            updates += call.kind == "learn"
            if call.kind == "act":
                for number, entry, y, exit_state in call.rows():
                    result[number].append(Acting(entry, y, exit_state, updates))
        return dict(result)

    @cached_property
    def updates(self) -> list[RecurrentCall]:
        """The calls that replay steps with gradients."""
        return [call for call in self.calls if call.kind == "learn"]

    @cached_property
    def initial(self) -> Float[Tensor, " S"]:
        """The state that most first observations of environments were read with."""
        entries = [acts[-1].entry for number, acts in self.acting.items() if self.script.before[number] == NONE]
        rows = torch.stack(entries) if entries else torch.zeros(1, self.calls[0].entry.shape[1], dtype=torch.float64)
        return rows.mode(0).values

    @cached_property
    def _exits(self) -> tuple[list[int], Tensor]:
        numbers = [number for number, acts in self.acting.items() for _ in acts]
        return numbers, torch.stack([act.exit for acts in self.acting.values() for act in acts])

    @cached_property
    def _computed(self) -> Tensor:
        """Exit states of all calls of updates."""
        states = [call.exit for call in self.calls if call.kind != "act"]
        return torch.cat(states) if states else torch.zeros(0, len(self.initial), dtype=torch.float64)

    def before(self, number: int) -> int:
        """Return the observation acted on before, in the same environment."""
        return self.script.before[number]

    def name_of(self, state: Float[Tensor, " S"], number: int) -> str:
        """Say which state of the rollout a state is."""
        if near(state, self.initial):
            return "the initial state" if bool(self.initial.any()) else "zeros"
        previous = self.before(number)
        if any(near(state, act.exit) for act in self.acting.get(previous, [])):
            return "the last state of the episode before" if number in self.script.first else STEP_BEFORE
        if any(near(state, act.exit) for act in self.acting.get(number, [])):
            return "the state after this step"
        numbers, exits = self._exits
        at = _nearest(state, exits)
        if at is not None:
            return f"the state after {self.script.place(numbers[at])}"
        if _nearest(state, self._computed) is not None:
            return "a state that the update computed"
        half = len(state) // 2
        if near(state[:half], self.initial[:half]) != near(state[half:], self.initial[half:]):
            return "half of it the initial state"
        return "no state of the rollout"


def near(x: Tensor, y: Tensor) -> bool:
    """Whether two rows are the same up to rounding."""
    return bool((x - y).abs().max() <= NEAR * y.abs().max().clamp(min=1))


def distance(x: Tensor, y: Tensor) -> float:
    """Return the largest difference, relative to max(1, |y|); NaN is infinite."""
    return float(((x - y).abs().max() / y.abs().max().clamp(min=1)).nan_to_num(torch.inf))


def _nearest(state: Tensor, table: Tensor) -> int | None:
    if not len(table):
        return None
    gaps = (table - state).abs().amax(1)
    at = int(gaps.argmin())
    return at if near(state, table[at]) else None


def summarize(
    memory: Memory, what: str, differences: list[Difference], count: int, must: str, why: Callable[[], str]
) -> Measurement:
    """Return the largest difference; the finding names the first one and a hypothesis."""
    if not count:
        return not_measured(memory.name + what, "no such call occurred")
    wrong = [each for each in differences if each.size > BOUND]
    size = max((each.size for each in differences), default=0.0)
    if not wrong:
        return Measurement(memory.name + what, size, BOUND)
    first = min(wrong, key=lambda each: (memory.script.steps[each.number], each.number))
    finding = f"{memory.script.place(first.number)}: it is {first.actual}, must be {must}, off by {first.size:.1e}"
    return Measurement(memory.name + what, size, BOUND, finding=f"{finding} ({len(wrong)} of {count}){_because(why())}")


def _because(hypothesis: str) -> str:
    return f"; {hypothesis}" if hypothesis else ""


def clear(memory: Memory) -> list[Measurement]:
    """The state at an episode's first observation is the initial one, in rollout and update."""
    differences, count, wrong = [], 0, set()
    for number, acts in memory.acting.items():
        if number in memory.script.first:
            count += 1
            differences.append(_compare(memory, acts[-1].entry, memory.initial, number))
            if differences[-1].size > BOUND:
                wrong.add(number)
    parts = [
        summarize(
            memory,
            "states at episode starts, acting",
            differences,
            count,
            "the initial state",
            lambda: _clear_rule(memory, wrong),
        )
    ]
    return [*parts, *_clear_in_updates(memory)]


def _clear_rule(memory: Memory, wrong: set[int]) -> str:
    """Return the rule that clears exactly the other starts."""
    script = memory.script
    opened = {number for number in memory.acting if number in script.first and script.before[number] != NONE}
    kinds = {"terminated": set(), "truncated": set()}
    for step in script.transitions:
        for name, ends in kinds.items():
            ends |= set(step.next_ids[getattr(step, name)].tolist()) & opened
    late = [number for number in wrong if _cleared_after(memory, number)]
    if len(late) > len(wrong) / 2:
        return "hypothesis: cleared one step late"
    if wrong >= opened:
        return "hypothesis: never cleared"
    if wrong == opened - kinds["terminated"]:
        return "hypothesis: cleared on terminated only, not on truncated"
    if wrong == opened - kinds["truncated"]:
        return "hypothesis: cleared on truncated only, not on terminated"
    if wrong == kinds["terminated"] & kinds["truncated"]:
        return "hypothesis: not cleared where both flags are set"
    return f"hypothesis: flags of other steps or environments clear it; {len(opened - wrong)} starts are cleared"


def _cleared_after(memory: Memory, number: int) -> bool:
    following = [acts for other, acts in memory.acting.items() if memory.script.before[other] == number]
    return any(near(acts[-1].entry, memory.initial) for acts in following if acts)


def _clear_in_updates(memory: Memory) -> list[Measurement]:
    differences, count, crossed = [], 0, list[int]()
    for call in memory.updates:
        for number, entry in _first_column(call):
            if number in memory.script.first:
                count += 1
                differences.append(_compare(memory, entry, memory.initial, number))
        later, before = call.ids[:, 1:], call.ids[:, :-1]
        for number, then in zip(later.flatten().tolist(), before.flatten().tolist(), strict=True):
            if number in memory.script.first and then == memory.before(number):
                count, crossed = count + 1, [*crossed, number]
    what, rule = "states at episode starts, update", "hypothesis: replayed without clearing"
    if not crossed and {each.actual for each in differences if each.size > BOUND} == {"the state after this step"}:
        rule = AFTER_STEP
    if not count:
        return [not_measured(memory.name + what, "no episode started in an update")]
    parts = [summarize(memory, what, differences, count, "the initial state", lambda: rule)] if differences else []
    finding = f"{memory.script.place(crossed[0])} is not the first step of its sequence; {rule}" if crossed else ""
    what = f"{memory.name}episode starts inside a call of the update"
    return [*parts, Measurement(what, float(len(crossed)), finding=finding)]


def _first_column(call: RecurrentCall) -> Iterable[tuple[int, Tensor]]:
    return [
        (number, entry) for number, entry in zip(call.ids[:, 0].tolist(), call.entry, strict=True) if number != NONE
    ]


def _compare(memory: Memory, actual: Tensor, expected: Tensor, number: int) -> Difference:
    size = distance(actual, expected)
    return Difference(number, size, memory.name_of(actual, number) if size > BOUND else "")


def carry(memory: Memory) -> list[Measurement]:
    """Inside an episode the state is that after the step before, over rollouts and updates too."""
    differences, count, wrong = [], 0, []
    for number, acts in memory.acting.items():
        previous = memory.acting.get(memory.before(number))
        if number in memory.script.first or number in memory.script.final or not previous:
            continue
        # A late clear is reported by clear.
        late = near(acts[0].entry, memory.initial) and _uncleared(memory, memory.before(number))
        pairs = [] if late else [(acts[0], previous[-1].exit)]
        pairs += [(act, acts[0].entry) for act in acts[1:] if act.update != acts[0].update and not _advanced(act, acts)]
        for act, expected in pairs:
            count += 1
            differences.append(_compare(memory, act.entry, expected, number))
            if differences[-1].size > BOUND:
                wrong.append(act.update != previous[-1].update)
    must, what = STEP_BEFORE, "states inside episodes, acting"
    return [summarize(memory, what, differences, count, must, lambda: _carry_rule(differences, all(wrong)))]


def _uncleared(memory: Memory, number: int) -> bool:
    return number in memory.script.first and distance(memory.acting[number][-1].entry, memory.initial) > BOUND


def _advanced(act: Acting, acts: list[Acting]) -> bool:
    """Whether a call starts from the state after another call for the same observation, which is for pure to report."""
    return any(near(act.entry, other.exit) for other in acts if other is not act)


def _carry_rule(differences: list[Difference], after_updates: bool) -> str:
    names = {each.actual for each in differences if each.size > BOUND}
    if names <= {"zeros", "the initial state"}:
        return f"hypothesis: the state is cleared before each {'rollout' if after_updates else 'call'}"
    if after_updates:
        return "hypothesis: the update, or what runs between rollouts, writes the state"
    return "hypothesis: the state of another environment or step is read"


def pure(memory: Memory) -> list[Measurement]:
    """All calls for one observation, as for a bootstrap value, start from the same state."""
    differences, count = [], 0
    for number, acts in memory.acting.items():
        first = number in memory.script.first
        acted = acts[-1] if first else acts[0]
        for act in acts:
            if act is not acted and (first or act.update == acted.update or _advanced(act, acts)):
                count += 1
                differences.append(_compare(memory, act.entry, acted.entry, number))
    must = "that of the other call for this observation"
    what = "states of repeated calls for one observation"
    return [summarize(memory, what, differences, count, must, lambda: _pure_rule(differences))]


def _pure_rule(differences: list[Difference]) -> str:
    names = {each.actual for each in differences if each.size > BOUND}
    if names & {"the state after this step"}:
        return "hypothesis: a call for a value, as the bootstrap's, changes the state of the rollout"
    if names == {"the last state of the episode before"}:
        return "hypothesis: a call for a value ignores that an episode starts"
    return "hypothesis: a call for a value changes the state of the rollout"


def entry(memory: Memory) -> list[Measurement]:
    """The update's sequences start from the states that the rollout had there, and follow the order of steps."""
    differences, count, breaks, previous = [], 0, list[tuple[int, int]](), dict[int, tuple[int, Tensor]]()
    for call in memory.updates:
        for row, number in enumerate(call.ids[:, 0].tolist()):
            then, state = previous.get(row, (NONE, None)), call.entry[row]
            if number == NONE or number in memory.script.first or number not in memory.acting:
                continue
            if call.ids.shape[1] == 1 and then[0] == memory.before(number):
                continue
            if call.ids.shape[1] == 1 and then[1] is not None and near(state, then[1]) and state.any():
                breaks.append((number, then[0]))
                continue
            count += 1
            differences.append(_compare(memory, state, memory.acting[number][-1].entry, number))
        last = call.ids[:, -1].tolist()
        previous = {row: (number, call.exit[row]) for row, number in enumerate(last)}
        later, before = call.ids[:, 1:], call.ids[:, :-1]
        pairs = torch.stack([later, before], -1)[(later != NONE) & (before != NONE)].tolist()
        breaks += [(now, then) for now, then in pairs if memory.before(now) != then]
    must, what, finding = "the state that the rollout had there", "entry states of sequences, update", ""
    if breaks:
        now, then = breaks[0]
        finding = f"{memory.script.place(now)} follows {memory.script.place(then)}; hypothesis: "
        repeated = "observations are repeated, as padding"
        finding += repeated if now == then else "steps are shuffled, or time and batch are swapped"
    name = f"{memory.name}steps out of order, update"
    order = Measurement(name, float(len(breaks)), finding=finding)
    return [order, summarize(memory, what, differences, count, must, lambda: _entry_rule(memory, differences))]


def _entry_rule(memory: Memory, differences: list[Difference]) -> str:
    wrong = [each for each in differences if each.size > BOUND]
    names = {each.actual for each in wrong}
    if names <= {"zeros", "the initial state"}:
        return "hypothesis: replayed from zeros"
    if names == {"the state after this step"}:
        return AFTER_STEP
    others = [each for each in wrong if each.actual.startswith("the state after env ")]
    other_env = [each for each in others if f"after env {memory.script.env(each.number)}," not in each.actual]
    if len(other_env) > len(wrong) / 2:
        return "hypothesis: entry states of other environments, or steps that are shuffled"
    if len(others) > len(wrong) / 2:
        return "hypothesis: the entry state of another step of the same environment"
    return ""


def replay(memory: Memory) -> list[Measurement]:
    """The update's recurrent outputs are those of the rollout, for every observation."""
    differences, count = [], 0
    for call in memory.updates:
        for index in (call.ids != NONE).nonzero().tolist():
            number = int(call.ids[tuple(index)])
            if number in memory.acting:
                count += 1
                size = distance(call.y[tuple(index)], memory.acting[number][-1].y)
                differences.append(Difference(number, size, "another output"))
    parts = [summarize(memory, "recurrent outputs, update", differences, count, "that of the rollout", lambda: "")]
    unknown = memory.recording.unidentified[memory.module]
    what = f"{memory.name}calls with inputs unlike the rollout's, update"
    rule = "hypothesis: inputs are normalized or dropped out otherwise in updates, or observations changed in place"
    return [Measurement(what, float(unknown), finding=rule), *parts]


STATE_LAWS: dict[str, Callable[[Memory], list[Measurement]]] = {
    law.__name__: law for law in (clear, carry, pure, entry, replay)
}
