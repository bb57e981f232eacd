"""Which known bug gives the outputs that updates had, in all segments that differ or in most of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from holdfast.check import known_bugs, segment_bugs
from holdfast.check.adapters.base import RolloutAndReplay
from holdfast.check.compare import BOUND, State
from holdfast.check.known_bugs import ResetRule
from holdfast.check.policy_copy import AGENTS, HORIZON, STEPS, PolicyCopy
from holdfast.check.script import Script
from holdfast.monitor.replay_check import largest_allowed
from holdfast.types import Bool, Tensor

UNEXPLAINED_SHARE = 0.05
"""A hypothesis may leave at most this share of the error unexplained."""
EXPLAINED_SHARE = 0.85
"""A hypothesis must give at least this share of the segments that differ from the right ones."""
EXACT_SHARE = 1e-3
"""Share of a segment's error that a hypothesis may leave, if it need not explain all segments."""


@dataclass(frozen=True)
class SegmentBug:
    """A bug of updates, what else is known of it, and the share of the differing segments that it gives."""

    name: str
    detail: str = ""
    share: float | None = None


@dataclass(frozen=True)
class SegmentDiagnosis:
    """Compares the outputs of updates with those that known bugs predict."""

    policy: PolicyCopy
    script: Script
    clears: Bool[Tensor, "A N1"]
    columns: Sequence[str]
    states: list[State]
    """States of the rollout before each step."""
    outputs: RolloutAndReplay

    def find(self) -> SegmentBug | None:
        """Return the bug of updates, relative to the rollout as it was; None if no known one explains them."""
        for (entry_bug, entry), reset in self._rule_pairs():
            if self._explains_all(known_bugs.predict_replay(self.policy, self.script, entry, reset)):
                return SegmentBug(entry_bug or reset.name)
        return self._best() or self._swapped() or self._of_other_entries()

    @cached_property
    def _entries(self) -> list[tuple[str, State]]:
        return list(known_bugs.entry_rules(self.policy, self.states))

    @property
    def _rule(self) -> ResetRule:
        return ResetRule("", self.clears[:, :STEPS])

    def _rule_pairs(self) -> list[tuple[tuple[str, State], ResetRule]]:
        """List hypotheses: one wrong rule first, then a wrong entry with a wrong reset."""
        entries = self._entries
        resets = list(known_bugs.segment_reset_rules(self.policy, self.script, self.clears))
        one_wrong = [(entries[0], reset) for reset in resets] + [(entry, resets[0]) for entry in entries[1:]]
        return one_wrong + [(entry, reset) for entry in entries[1:] for reset in resets[1:]]

    def _explains_all(self, predicted: Tensor) -> bool:
        """Whether a prediction gives the measured outputs, and gives them better than the right ones do."""
        measured = self.outputs.replay
        left, error = (float((other - measured).abs().max()) for other in (predicted, self.outputs.rollout))
        return left <= UNEXPLAINED_SHARE * error and left <= self._bound

    @property
    def _bound(self) -> float:
        return largest_allowed(BOUND[self.policy.kind]) * max(1.0, float(self.outputs.replay.abs().max()))

    def _best(self) -> SegmentBug | None:
        """Return the hypothesis that gives the largest share of the differing segments; the simplest of equal ones."""
        best = None
        for name, detail, predict in self._candidates():
            try:
                share = self._share(predict())
            except (ValueError, RuntimeError):
                # The policy raises where a hypothesis is absurd, for example at a state that is not finite.
                share = 0.0
            if share > (EXPLAINED_SHARE if best is None else best.share or 0.0):
                best = SegmentBug(name, detail, share)
            if share == 1:
                break
        if best is not None and best.name in segment_bugs.OF_ENTRIES:
            best = SegmentBug(best.name, best.detail or self._differing_agents(), best.share)
        return best

    def _candidates(self) -> Iterator[tuple[str, str, Callable[[], Tensor]]]:
        """List hypotheses by name, detail and the outputs that they predict, simple ones first."""
        policy, script, rule = self.policy, self.script, self._rule
        predict = partial(known_bugs.predict_replay, policy, script)
        (_, right), (_, zeros), *_ = self._entries
        pairs = self._rule_pairs()
        simple = [(entry, reset) for entry, reset in pairs if not (entry[0] and reset.name)]
        for (name, entry), reset in simple:
            if name or reset.name:
                yield name or reset.name, "", partial(predict, entry, reset)
        for other in segment_bugs.flag_rules(self.clears):
            yield other.name, "", partial(predict, right, other)
        for name, detail, entry in segment_bugs.entry_rules(policy, right, zeros):
            yield name, detail, partial(predict, entry, rule)
        for name, outputs in segment_bugs.changed_outputs(self.outputs.rollout, self.columns):
            yield name, "", lambda outputs=outputs: outputs
        for name, change in segment_bugs.OBS_CHANGES:
            yield name, "", partial(predict, right, rule, change)
        for length in range(1, HORIZON):
            name = f"segments are read in chunks of {length} from the entry state"
            yield name, "", partial(known_bugs.predict_chunks, policy, script, right, rule, length)
        for (name, entry), reset in pairs:
            if name and reset.name:
                yield name, "", partial(predict, entry, reset)
        scale = self._scale(right, rule)
        yield segment_bugs.SCALED, f"by {scale:.3g}", partial(predict, segment_bugs.scaled(right, scale), rule)

    def _scale(self, right: State, rule: ResetRule) -> float:
        """Return the factor of the entry states that fits best: golden-section search, coarse values first."""

        def error(scale: float) -> float:
            entry = segment_bugs.scaled(right, scale)
            return float((known_bugs.predict_replay(self.policy, self.script, entry, rule) - measured).abs().sum())

        measured = self.outputs.replay
        coarse = [at / 4 for at in range(-4, 9)]
        best = min(coarse, key=error)
        low, high = best - 0.25, best + 0.25
        for _ in range(30):
            third = (high - low) * 0.382
            low, high = (low, high - third) if error(low + third) < error(high - third) else (low + third, high)
        return (low + high) / 2

    def _share(self, predicted: Tensor) -> float:
        """Return the share of the segments that differ from the right ones which a prediction gives.

        A segment that is right although the prediction says otherwise does not count: a bug may begin later.
        """
        differing, matching = 0, 0
        outputs = (predicted, self.outputs.replay, self.outputs.rollout)
        blocks = (leaf.unflatten(1, (-1, HORIZON)).flatten(0, 1) for leaf in outputs)
        for guess, was, should in zip(*blocks, strict=True):
            wrong = float((was - should).abs().max())
            left = float((guess - was).abs().max())
            if wrong > self._bound:
                differing += 1
                matching += left <= max(self._bound, EXACT_SHARE * wrong)
        return matching / differing if differing else 0.0

    def _differing_agents(self) -> str:
        """Name the agents whose segments differ, if some do not."""
        wrong = (self.outputs.replay - self.outputs.rollout).abs().amax((1, 2)) > self._bound
        listed = ", ".join(map(str, wrong.nonzero().flatten().tolist()))
        return "" if bool(wrong.all()) else f"for agents {listed}"

    def _swapped(self) -> SegmentBug | None:
        """Whether time and batch are swapped, in segments replayed one by one from the right states."""
        starts = range(0, STEPS, HORIZON)
        segments = [self.policy.replay(self.script.step_batches(t, t + HORIZON), self.states[t]) for t in starts]
        replayed = torch.cat(segments, dim=1)
        for predicted in known_bugs.swapped_axes(self.policy, self.script, self.states, self.clears):
            left, error = (float((each - replayed).abs().max()) for each in (predicted, self.outputs.rollout))
            if left <= UNEXPLAINED_SHARE * error and left <= self._bound:
                return SegmentBug("time and batch axes swapped")
        return None

    def _of_other_entries(self) -> SegmentBug | None:
        def same(actual: Tensor, expected: Tensor) -> bool:
            return float((actual - expected).abs().max()) <= self._bound

        entry = self._entries[0][1]
        measured = self.outputs.replay
        sources = known_bugs.match_entries(self.policy, self.script, entry, self._rule, measured, same)
        if sources is None:
            return None
        if bool((sources % AGENTS == torch.arange(len(sources)) % AGENTS).all()):
            return SegmentBug("entry state of another segment of the same agent")
        return SegmentBug("entry states of other rows")
