"""Diagnosis: which known way to be wrong explains the numbers of a broken law, by measuring alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from holdfast.check import alone, experiments, hypotheses
from holdfast.check.bench import Bench
from holdfast.check.case import AGENTS, HORIZON, STEPS, Case
from holdfast.check.compare import BOUND, most
from holdfast.check.patterns import CLOCKS, PATTERNS, pattern
from holdfast.check.results import Law, Measurement, Pattern
from holdfast.check.tree import State
from holdfast.shapes import Tensor

EXPLAINS = 0.05
"""A hypothesis may leave at most this share of the error unexplained."""


CUT_INSIDE = "graph cut inside the segment"
OUTSIDE = "keeps state outside of the state it returns"


def diagnose(bench: Bench, laws: Sequence[Law]) -> list[Law]:
    """Look for the pattern behind every broken law; a law that nothing explains keeps none."""
    if all(law.ok for law in laws):
        return list(laws)
    grew = any(part.about == "graph nodes" and not part.ok for law in laws for part in law.parts)
    doctor = Doctor(bench, grew)
    return [law if law.ok else replace(law, pattern=doctor.explain(law)) for law in laws]


@dataclass(frozen=True)
class Doctor:
    """Holds what was measured against what known faults would give."""

    bench: Bench
    graph_grew: bool = False
    """Whether graphs were kept, so that whatever else is held hangs on them."""

    def explain(self, law: Law) -> Pattern | None:
        """Name the pattern behind a broken law."""
        try:
            if self.random:
                return PATTERNS["draws random numbers while it thinks"]
            causes = (self._cause(law.name, part) for part in law.parts if not part.ok)
            return next((cause for cause in causes if cause is not None), None)
        except Exception:
            # It raised while it was examined: nothing known explains that, and the finding stands.
            return None

    def _cause(self, law: str, part: Measurement) -> Pattern | None:
        """Look for the cause of one measurement that is out of bounds, and say in which phase it lies."""
        name = self._name(law, part)
        if name is None:
            return None
        phase = ""
        if (
            name not in (self.lived, None)
            and name in CLOCKS
            and part.about in ("replayed", "evaluated", "alone", "short")
        ):
            phase = "in evaluation" if part.about == "evaluated" else "in updates"
        return pattern(name, phase)

    def _name(self, law: str, part: Measurement) -> str | None:
        if part.about in _SIGNS:
            return _SIGNS[part.about]
        ask: dict[str, Callable[[], str | None]] = {
            "act into act": self._graph,
            "step to step": lambda: (
                self.beside(self.lived or self.replayed) or "graph cut inside the segment"
            ),
            "asked": self._asked,
            "saved": self._saved,
            "get_memory": self._saved,
            "graph nodes": lambda: "graph kept across calls",
            "bytes": lambda: None if self.graph_grew else "keeps everything it meets",
            "one agent": lambda: alone.of_agents(self),
            "lived": lambda: self.beside(self.lived),
            "evaluated": lambda: self.beside(self.lived or self.evaluated),
            "replayed": lambda: self.beside(self._of_updates(law)),
            "alone": lambda: alone.of_sequences(self),
            "slices": lambda: alone.of_slices(self),
            "live segments": lambda: self.beside(None),
        }
        if part.about in ask:
            return ask[part.about]()
        return None if part.about == "raised" else self.beside(self.lived or self.replayed)

    def _of_updates(self, law: str) -> str | None:
        """Where rollouts and updates differ the update is asked first; where they agree, the rollout."""
        return self.replayed or self.lived if law == "replay" else self.lived or self.replayed

    def beside(self, found: str | None) -> str | None:
        """Fall back on what shows only beside the clock: rows that see each other, states kept elsewhere."""
        if found is not None:
            return found
        if self.hidden:
            return OUTSIDE
        if self.mixes:
            return "rows see each other within a call"
        return "every call starts from nothing" if self.deaf else None

    @cached_property
    def random(self) -> bool:
        """Whether it draws random numbers."""
        return experiments.draws_numbers(self.bench.proof, self.bench.script)

    @cached_property
    def hidden(self) -> bool:
        """Whether it keeps something outside of its state."""
        return experiments.keeps_something(self.bench.proof, self.bench.script)

    @cached_property
    def mixes(self) -> bool:
        """Whether rows see each other."""
        return experiments.mixes_rows(self.bench.proof, self.bench.script)

    @cached_property
    def deaf(self) -> bool:
        """Whether it does not listen to its state."""
        return experiments.is_deaf(self.bench.proof, self.bench.script)

    # Which clock and which entry states give the numbers.

    @cached_property
    def _clock(self) -> tuple[Case, hypotheses.Clock | None, list[State]]:
        """Find the clock that gives what was lived, in the first precision where it is not the right one."""
        found = None
        for dtype, case in self.bench.cases.items():
            clock, states = self._clock_of(case, self.bench.life[dtype].lived)
            found = found or (case, clock, states)
            if clock is None or clock.name:
                return case, clock, states
        assert found is not None, "there is always a case"
        return found

    def _clock_of(self, case: Case, lived: Tensor) -> tuple[hypotheses.Clock | None, list[State]]:
        script, right = self.bench.script, None
        for clock in hypotheses.clocks(case, script, self.bench.clears):
            with case.precisely():
                empty = case.subject.initial(script.agents)
            said, states = hypotheses.chain(case, script.moments(0, STEPS), empty, clock)
            said = said[:, : lived.shape[1]]
            right = said if right is None else right
            if self.explains(case, said, lived, right):
                return clock, states
        return None, case.steps(script)[1]

    @cached_property
    def lived(self) -> str | None:
        """What is wrong in rollouts."""
        clock = self._clock[1]
        return None if clock is None else clock.name or None

    @cached_property
    def evaluated(self) -> str | None:
        """What is wrong in evaluations."""
        case = self.bench.proof
        case.subject.module.eval()
        try:
            clock, _ = self._clock_of(case, case.evaluate(self.bench.script))
        finally:
            case.subject.module.train()
        return None if clock is None else clock.name or None

    @cached_property
    def replayed(self) -> str | None:
        """What is wrong in updates, given what was really lived."""
        case, clock, states = self._clock
        said, script = self.bench.life[case.kind].replayed, self.bench.script
        lived = self.bench.life[case.kind].lived
        if (clock is None and self.hidden) or self.same(case, said, lived):
            return None
        for entry, when in self._pairs(case, states):
            predicted = hypotheses.replayed(case, script, entry.state, when)
            if self.explains(case, predicted, said, lived):
                return entry.name or when.name or None
        direct = self.direct(case, states)
        for predicted in hypotheses.swaps(case, script, states, self.bench.clears):
            if self.explains(case, predicted, direct, lived):
                return "rows mixed: time and batch swapped"
        return self._other_rows(case, states, said)

    def _pairs(self, case: Case, states: list[State]) -> list[tuple[hypotheses.Entries, hypotheses.Clock]]:
        """List what may be wrong: one thing at first, then a start from elsewhere with another clock."""
        all_entries = list(hypotheses.entries(case, states))
        all_clocks = list(hypotheses.segment_clocks(case, self.bench.script, self.bench.clears))
        single = [(all_entries[0], clock) for clock in all_clocks] + [
            (entry, all_clocks[0]) for entry in all_entries[1:]
        ]
        return single + [(entry, clock) for entry in all_entries[1:] for clock in all_clocks[1:]]

    def direct(self, case: Case, states: list[State]) -> Tensor:
        """Replay segment by segment, from states lived step by step."""
        starts = range(0, STEPS, HORIZON)
        return torch.cat(
            [case.replay(self.bench.script.moments(t, t + HORIZON), states[t]) for t in starts], dim=1
        )

    def _other_rows(self, case: Case, states: list[State], said: Tensor) -> str | None:
        script, right = self.bench.script, hypotheses.Clock("", self.bench.clears[:, :STEPS])
        entry = next(iter(hypotheses.entries(case, states))).state
        whose = hypotheses.whose_entry(case, script, entry, right, said, partial(self.same, case))
        if whose is None:
            return None
        own = whose % AGENTS == torch.arange(len(whose)) % AGENTS
        return (
            "entry state of another segment of the same agent"
            if bool(own.all())
            else "entry states of other rows"
        )

    def same(self, case: Case, now: Tensor, was: Tensor) -> bool:
        """Whether two lives are equal to within rounding."""
        return float((now - was).abs().max()) <= most(BOUND[case.kind]) * max(1.0, float(was.abs().max()))

    def explains(self, case: Case, predicted: Tensor, measured: Tensor, right: Tensor) -> bool:
        """Whether a prediction gives the measured numbers, and gives them better than being right does."""
        left = float((predicted - measured).abs().max())
        error = float((right - measured).abs().max())
        bound = most(BOUND[case.kind]) * max(1.0, float(measured.abs().max()))
        if predicted is right:
            return left <= bound
        return left <= bound and left <= EXPLAINS * error

    def _graph(self) -> str:
        """Tell a graph that hangs on the state from one that is kept elsewhere."""
        handed = experiments.hands_out_graphs(self.bench.proof, self.bench.script)
        if self.bench.pulls.between("act", "act").any() and not self.hidden and not handed:
            return "graph kept beside the state"
        return "graph kept across calls"

    def _asked(self) -> str | None:
        """Tell a memory that a look advances from one that lies outside of the state."""
        return OUTSIDE if self.hidden else "asking for a value advances the memory"

    def _saved(self) -> str:
        return OUTSIDE if self.hidden else "part of the memory is not saved"


_SIGNS = {
    "evaluation": "evaluation touches the training's memory",
    "inputs": "writes into its inputs",
    "entry": "gradient flows into the entry state",
    "replay into replay": "graph kept beside the state",
    "replay into act": "graph kept across calls",
    "compiled": "different once it is compiled",
    "cell": "the cell differs from its reference",
    "no gradient": "no gradient arrives",
    "not a number": "the gradient is not a number",
}
"""Measurements that have one cause only."""
