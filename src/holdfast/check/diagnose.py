"""Diagnosis: find the known bug whose predicted outputs match the measurements of a broken law."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from holdfast.check import known_bugs, probes
from holdfast.check.adapters.holdfast_extras import run_in_slices
from holdfast.check.compare import BOUND, State, clone_state
from holdfast.check.context import CheckContext
from holdfast.check.known_bugs import FIXES, RESET_FIXES, ResetRule
from holdfast.check.policy_copy import AGENTS, HORIZON, STEPS, PolicyCopy
from holdfast.check.results import Law, Measurement, Pattern
from holdfast.check.state_laws import replay_row_by_row
from holdfast.monitor.replay_check import largest_allowed
from holdfast.types import Tensor

UNEXPLAINED_SHARE = 0.05
"""A hypothesis may leave at most this share of the error unexplained."""

HIDDEN_STATE = "state kept outside the returned state"
KEEPS_GRAPH = "stored state keeps its graph"
IGNORED_FOR_ONE = "resets ignored in a batch of one"
NOT_RESET = ("state never reset", "only a segment's first flag resets the state")


def diagnose(context: CheckContext, laws: Sequence[Law]) -> list[Law]:
    """Add the known bug to every broken law that one explains."""
    if all(law.ok for law in laws):
        return list(laws)
    graph_grew = any(part.path == "graph nodes" and not part.ok for law in laws for part in law.parts)
    diagnosis = Diagnosis(context, graph_grew)
    return [law if law.ok else replace(law, pattern=diagnosis.explain(law)) for law in laws]


@dataclass(frozen=True)
class Diagnosis:
    """Compares measured outputs with predictions of known bugs."""

    context: CheckContext
    graph_grew: bool = False
    """Whether the graph grew with time, which explains growing bytes."""

    def explain(self, law: Law) -> Pattern | None:
        """Return the known bug behind a broken law, with the phase it is confined to."""
        try:
            for part in law.broken:
                name = "random numbers in the forward pass" if self.random else self._name(law.name, part)
                if name is not None:
                    confined = name in RESET_FIXES and name != self.rollout_bug and part.path in _PHASES
                    return Pattern(f"{name} ({_PHASES[part.path]})" if confined else name, FIXES[name])
            return None
        except Exception:
            # The policy raised during the diagnosis: no known bug explains that, and the finding stands.
            return None

    def _name(self, law: str, part: Measurement) -> str | None:
        if part.path in _ONE_CAUSE:
            return _ONE_CAUSE[part.path]
        experiments: dict[str, Callable[[], str | None]] = {
            "act into act": self._graph_bug,
            "step to step": lambda: self._any_bug() or "graph cut inside the segment",
            "bootstrap": lambda: HIDDEN_STATE if self.hidden else "bootstrap value advances the state",
            "saved": self._save_bug,
            "get_memory": self._save_bug,
            "bytes": lambda: None if self.graph_grew else "memory use grows with time",
            "one agent": self._single_agent_bug,
            "rollout": lambda: self.rollout_bug or self.side_effect,
            "evaluation": lambda: self.rollout_bug or self.evaluation_bug or self.side_effect,
            # The law replay compares update and rollout, so there the update is tried first.
            "replay": lambda: (self.replay_bug if law == "replay" else None) or self._any_bug(),
            "single sequence": self._single_sequence_bug,
            "slices": self._slices_bug,
            "live segments": lambda: self.side_effect,
        }
        if part.path in experiments:
            return experiments[part.path]()
        return None if part.path == "raised" else self._any_bug()

    def _any_bug(self) -> str | None:
        return self.rollout_bug or self.replay_bug or self.side_effect

    @cached_property
    def side_effect(self) -> str | None:
        """A bug that no reset or entry rule predicts: hidden state, mixed rows, ignored state."""
        if self.hidden:
            return HIDDEN_STATE
        if probes.mixes_rows(self.context.exact, self.context.script):
            return "rows of a batch mix"
        if probes.ignores_state(self.context.exact, self.context.script):
            return "every call starts from zeros"
        return None

    @cached_property
    def random(self) -> bool:
        """Whether the policy draws random numbers."""
        return probes.draws_random_numbers(self.context.exact, self.context.script)

    @cached_property
    def hidden(self) -> bool:
        """Whether the policy keeps state outside of the returned state."""
        return probes.keeps_hidden_state(self.context.exact, self.context.script)

    # Which reset rule and which entry states give the measured outputs.

    @cached_property
    def _rollout_rule(self) -> tuple[PolicyCopy, ResetRule | None, list[State]]:
        """Find the reset rule of the rollout, in the first precision where it is not the right one."""
        results = []
        for dtype, policy in self.context.copies.items():
            rule, states = self._match_rule(policy, self.context.outputs[dtype].rollout)
            results.append((policy, rule, states))
            if rule is None or rule.name:
                return results[-1]
        return results[0]

    def _match_rule(self, policy: PolicyCopy, measured: Tensor) -> tuple[ResetRule | None, list[State]]:
        script, right = self.context.script, None
        for rule in known_bugs.reset_rules(policy, script, self.context.clears):
            outputs, states = known_bugs.run_from_initial(policy, script, rule)
            outputs = outputs[:, : measured.shape[1]]
            right = outputs if right is None else right
            if self.explains(policy, outputs, measured, right):
                return rule, states
        return None, policy.steps(script)[1]

    @cached_property
    def rollout_bug(self) -> str | None:
        """The bug of rollouts."""
        rule = self._rollout_rule[1]
        return None if rule is None else rule.name or None

    @cached_property
    def evaluation_bug(self) -> str | None:
        """The bug of evaluations."""
        policy = self.context.exact
        # Predicted from steps in training mode, which do not have the bug.
        rule, _ = self._match_rule(policy, policy.evaluate(self.context.script))
        return None if rule is None else rule.name or None

    @cached_property
    def replay_bug(self) -> str | None:
        """The bug of updates, relative to the rollout as it was."""
        policy, rule, states = self._rollout_rule
        outputs, script = self.context.outputs[policy.kind], self.context.script
        if (rule is None and self.hidden) or self.same(policy, outputs.replay, outputs.rollout):
            return None
        for (entry_bug, entry), reset in self._rule_pairs(policy, states):
            predicted = known_bugs.predict_replay(policy, script, entry, reset)
            if self.explains(policy, predicted, outputs.replay, outputs.rollout):
                return entry_bug or reset.name or None
        replayed = self._replay_segments(policy, states)
        for predicted in known_bugs.swapped_axes(policy, script, states, self.context.clears):
            if self.explains(policy, predicted, replayed, outputs.rollout):
                return "time and batch axes swapped"
        return self._entry_bug(policy, states, outputs.replay)

    def _rule_pairs(self, policy: PolicyCopy, states: list[State]) -> list[tuple[tuple[str, State], ResetRule]]:
        """List hypotheses: one wrong rule first, then a wrong entry with a wrong reset."""
        entries = list(known_bugs.entry_rules(policy, states))
        resets = list(known_bugs.segment_reset_rules(policy, self.context.script, self.context.clears))
        one_wrong = [(entries[0], reset) for reset in resets] + [(entry, resets[0]) for entry in entries[1:]]
        return one_wrong + [(entry, reset) for entry in entries[1:] for reset in resets[1:]]

    def _replay_segments(
        self, policy: PolicyCopy, states: list[State], replay: Callable[..., Tensor] = PolicyCopy.replay
    ) -> Tensor:
        """Replay segment by segment, from the states of single steps."""
        script, starts = self.context.script, range(0, STEPS, HORIZON)
        return torch.cat([replay(policy, script.step_batches(t, t + HORIZON), states[t]) for t in starts], dim=1)

    def _entry_bug(self, policy: PolicyCopy, states: list[State], outputs: Tensor) -> str | None:
        script, right = self.context.script, ResetRule("", self.context.clears[:, :STEPS])
        _, entry = next(known_bugs.entry_rules(policy, states))
        same = partial(self.same, policy)
        sources = known_bugs.match_entries(policy, script, entry, right, outputs, same)
        if sources is None:
            return None
        if bool((sources % AGENTS == torch.arange(len(sources)) % AGENTS).all()):
            return "entry state of another segment of the same agent"
        return "entry states of other rows"

    def same(self, policy: PolicyCopy, actual: Tensor, expected: Tensor) -> bool:
        """Whether two outputs are equal to within rounding."""
        bound = largest_allowed(BOUND[policy.kind]) * max(1.0, float(expected.abs().max()))
        return float((actual - expected).abs().max()) <= bound

    def explains(self, policy: PolicyCopy, predicted: Tensor, measured: Tensor, right: Tensor) -> bool:
        """Whether a prediction gives the measured outputs, and gives them better than the right ones do."""
        left, error = (float((outputs - measured).abs().max()) for outputs in (predicted, right))
        better = predicted is right or left <= UNEXPLAINED_SHARE * error
        return better and self.same(policy, predicted, measured)

    # Experiments of single paths.

    def _single_sequence_bug(self) -> str | None:
        """Find the bug of a sequence that is replayed in a batch of one."""
        policy, script, clear = self.context.exact, self.context.script, self.context.clears
        _, states = policy.steps(script)
        outputs = self._replay_segments(policy, states, replay_row_by_row)
        _, entry = next(known_bugs.entry_rules(policy, states))
        right = self._replay_segments(policy, states)
        for rule in known_bugs.segment_reset_rules(policy, script, clear):
            predicted = known_bugs.predict_replay(policy, script, entry, rule)
            if self.explains(policy, predicted, outputs, right):
                return IGNORED_FOR_ONE if rule.name in NOT_RESET else rule.name or None
        rule = ResetRule("", clear[:, :STEPS])
        full_batch = known_bugs.predict_replay(policy, script, entry, rule)
        otherwise = "a batch of one is read differently" if self.same(policy, right, full_batch) else None
        return self.side_effect or otherwise

    def _single_agent_bug(self) -> str | None:
        """Find the bug of an agent that acts in a batch of one."""
        policy, script, few = self.context.exact, self.context.script, torch.arange(3)
        outputs = torch.cat([policy.steps(script[rows])[0] for rows in few.split(1)])
        right = policy.steps(script)[0][few]
        for rule in known_bugs.reset_rules(policy, script, self.context.clears):
            predicted, _ = known_bugs.run_from_initial(policy, script, rule)
            if rule.name and self.explains(policy, predicted[few], outputs, right):
                return IGNORED_FOR_ONE if rule.name in NOT_RESET else rule.name
        return self.side_effect

    def _slices_bug(self) -> str | None:
        """Find out whether two slices of agents share one state."""
        policy, script, half = self.context.exact, self.context.script, AGENTS // 2
        with policy.default_dtype():
            state = policy.adapter.initial(half)
        slices: list[list[Tensor]] = [[], []]
        for t in range(STEPS):
            for number, rows in enumerate(torch.arange(AGENTS).split(half)):
                outputs, states = policy.steps(script[rows], start=t, stop=t + 1, state=clone_state(state))
                slices[number].append(outputs)
                state = states[-1]
        predicted = torch.cat([torch.cat(outputs, dim=1) for outputs in slices])
        right, _ = policy.steps(script)
        shared = self.explains(policy, predicted, run_in_slices(self.context), right)
        return "state shared between slices" if shared else self.side_effect

    def _graph_bug(self) -> str:
        """Distinguish a graph of the returned state from one that is kept elsewhere."""
        returned = probes.returns_graph(self.context.exact, self.context.script)
        if self.context.gradient_reach.between("act", "act").any() and not self.hidden and not returned:
            return "graph kept outside the state"
        return KEEPS_GRAPH

    def _save_bug(self) -> str:
        return HIDDEN_STATE if self.hidden else "part of the state is not saved"


_PHASES = {
    **dict.fromkeys(("replay", "single sequence", "short segments"), "in updates"),
    "evaluation": "in evaluation",
}
"""The phase of a measurement, where a bug may be confined to one."""

_ONE_CAUSE = {
    "state after evaluation": "evaluation modifies the training state",
    "inputs": "inputs modified in place",
    "entry": "gradient flows into the entry state",
    "replay into replay": "graph kept outside the state",
    "replay into act": KEEPS_GRAPH,
    "graph nodes": KEEPS_GRAPH,
    "compiled": "compiled and eager outputs differ",
    "cell": "the cell differs from its reference",
    "no gradient": "no gradient",
    "not a number": "gradient is NaN",
}
"""Measurements with one possible cause."""
