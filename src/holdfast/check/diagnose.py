"""Diagnosis: find the known bug whose predicted outputs match the measurements of a broken law."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from holdfast.check import known_bugs, probes
from holdfast.check.adapters.holdfast_extras import run_in_slices
from holdfast.check.clear_probe import INVERTED, MIXED, NO_TENSOR, PART, Clearing, clearing_bug
from holdfast.check.compare import BOUND, State, clone_state, has_plain_numbers
from holdfast.check.context import CheckContext
from holdfast.check.known_bugs import FIXES, ONE_CAUSE, RESET_FIXES, ResetRule, fix_of
from holdfast.check.path_bugs import BOOTSTRAP, long_segment_bug, source_of_bootstrap
from holdfast.check.policy_copy import AGENTS, HORIZON, STEPS, PolicyCopy
from holdfast.check.results import Law, Measurement, Pattern
from holdfast.check.returned_state import OLD, returned_state_bug, returns_its_input
from holdfast.check.segment_diagnosis import UNEXPLAINED_SHARE, SegmentBug, SegmentDiagnosis
from holdfast.check.segment_experiments import CHANGED, OUTPUTS, segment_experiment
from holdfast.check.state_laws import replay_row_by_row
from holdfast.monitor.replay_check import largest_allowed
from holdfast.types import Tensor

HIDDEN_STATE, FIRST_OF_CALL = "state kept outside the returned state", "the first flag of every call is ignored"
KEEPS_GRAPH = "stored state keeps its graph"
IGNORED_FOR_ONE = "resets ignored in a batch of one"
NOT_RESET = ("state never reset", "only a segment's first flag resets the state")


def diagnose(context: CheckContext, laws: Sequence[Law]) -> list[Law]:
    """Add the known bug to every broken law that one explains."""
    if all(law.ok or law.worst.required for law in laws):
        return list(laws)
    graph_grew = any(part.path == "graph nodes" and not part.ok for law in laws for part in law.parts)
    generic = any(part.path in _GENERIC for law in laws for part in law.broken)
    diagnosis = Diagnosis(context, graph_grew, generic)
    return [law if law.ok or law.worst.required else replace(law, pattern=diagnosis.explain(law)) for law in laws]


@dataclass(frozen=True)
class Diagnosis:
    """Compares measured outputs with predictions of known bugs."""

    context: CheckContext
    graph_grew: bool = False
    """Whether the graph grew with time, which explains growing bytes."""
    generic: bool = False
    """Whether something breaks that needs no long run, many rows or other mode."""

    def explain(self, law: Law) -> Pattern | None:
        """Return the known bug behind a broken law, with the phase it is confined to."""
        try:
            # Wrong values explain gradients that are compared with those of steps, not with finite differences.
            for part in sorted(law.broken, key=lambda part: part.path in _BY_VALUES):
                # What breaks in a short run too is not a matter of size.
                is_generic = self.generic and part.path in _SIZES
                bug = self._any_bug() if is_generic else self._name(law.name, part)
                if bug in (OUTPUTS, CHANGED):
                    # Where a measurement with one possible cause is broken too, that is what segments do differently.
                    bug = next((ONE_CAUSE[other.path] for other in law.broken if other.path in ONE_CAUSE), bug)
                name = "random numbers in the forward pass" if self.random else bug
                if name is not None:
                    confined = name in RESET_FIXES and name not in (self.rollout_bug, FIRST_OF_CALL, self.side_effect)
                    write, detail = FIXES.get(name) or fix_of(name), self.details.get(name, "")
                    phase = _PHASES.get(part.path) or ("in updates" if name == self.replay_bug else "")
                    name_of_phase = f"{name} ({phase})" if confined and phase else name
                    return Pattern(name_of_phase, write, detail, self.shares.get(name))
            return None
        except Exception:
            # The policy raised during the diagnosis: no known bug explains that, and the finding stands.
            return None

    @cached_property
    def details(self) -> dict[str, str]:
        """What else is known of a bug, by its name."""
        return {}

    @cached_property
    def shares(self) -> dict[str, float]:
        """The share of the differing segments that a bug explains, by its name."""
        return {}

    def _name(self, law: str, part: Measurement) -> str | None:
        if part.path in ONE_CAUSE:
            return ONE_CAUSE[part.path]
        experiments: dict[str, Callable[[], str | None]] = {
            "act into act": self._graph_bug,
            "step to step": lambda: self._any_bug() or self._cut_inside(),
            "inside": lambda: self._unrepeatable or CUT,
            "chain gradient": lambda: self._any_bug() or (self._cut_inside() and self._wrong_gradient),
            "gradient of a segment": lambda: self._unrepeatable or self._wrong_gradient,
            "gradient of a parameter": lambda: self._unrepeatable or self._wrong_gradient,
            "bootstrap value": lambda: self._any_bug() or self._bootstrap_bug(),
            "exit state": lambda: self._any_bug() or "the state a segment returns is wrong",
            "none state": lambda: self._any_bug() or self._start_bug() or (NAN if math.isnan(part.measured) else None),
            "episode alone": lambda: self._any_bug() or self._start_bug(),
            "late start": lambda: self._any_bug() or "state not reset after a long episode",
            "late memory": lambda: self._any_bug() or "forgets after a fixed number of steps",
            "long segment": self._any_bug,
            "many rows": lambda: self._any_bug() or "many rows are read differently",
            "evaluation mode": lambda: self._any_bug() or self.evaluation_bug or EVALUATION,
            "one agent in evaluation": lambda: self._any_bug() or self._evaluated_alone_bug(),
            "bootstrap": lambda: HIDDEN_STATE if self.hidden else "bootstrap value advances the state",
            "saved": self._save_bug,
            "get_memory": self._save_bug,
            "bytes": lambda: None if self.graph_grew else "memory use grows with time",
            "one agent": lambda: self._acting_bug or self._single_agent_bug(),
            "rollout": lambda: self._acting_bug or self.side_effect or self._mixing_flags,
            "evaluation": lambda: self._acting_bug or self.evaluation_bug or self.side_effect,
            # The law replay compares update and rollout, so there the update is tried first.
            "replay": lambda: (self._first_of_call or self.replay_bug if law == "replay" else None) or self._any_bug(),
            "single sequence": self._single_sequence_bug,
            "slices": self._slices_bug,
            "live segments": lambda: self.side_effect,
        }
        if part.path in experiments:
            return experiments[part.path]()
        return None if part.path == "raised" else self._any_bug()

    def _any_bug(self) -> str | None:
        return self._acting_bug or self.replay_bug or self.side_effect or self._mixing_flags or self._long_bug

    @cached_property
    def _mixing_flags(self) -> str | None:
        return MIXED if probes.mixes_flags(self.context.exact, self.context.script) else None

    @property
    def _acting_bug(self) -> str | None:
        return self._first_of_call or self.rollout_bug

    @cached_property
    def _first_of_call(self) -> str | None:
        """A bug that has one name in rollouts, whose calls have one step, and another in updates."""
        both = (self.rollout_bug, self.replay_bug if self.rollout_bug == NOT_RESET[0] else None)
        return FIRST_OF_CALL if both == (NOT_RESET[0], "a segment's first flag is ignored") else None

    @cached_property
    def _long_bug(self) -> str | None:
        """What is wrong with the values of long segments."""
        bug = long_segment_bug(self.context)
        if bug is None:
            return None
        self.details[bug[0]] = bug[1]
        return bug[0]

    @cached_property
    def side_effect(self) -> str | None:
        """A bug that no reset or entry rule predicts: hidden state, mixed rows, ignored state."""
        if self.hidden:
            return HIDDEN_STATE
        if probes.mixes_rows(self.context.exact, self.context.script):
            return MIXED
        if self._looks_ahead:
            return "outputs depend on later steps"
        if probes.ignores_state(self.context.exact, self.context.script):
            return self._without_carry
        if probes.acts_otherwise(self.context.exact, self.context.script):
            return "acting without an action differs"
        return None

    @cached_property
    def _looks_ahead(self) -> bool:
        """Whether outputs of a segment depend on later steps."""
        backwards = self.context.information_reach["replay"].amax(-1).transpose(0, 1).tril(-1)
        return bool((backwards != 0).any())

    @cached_property
    def _without_carry(self) -> str:
        """Why a step knows nothing of the one before."""
        returns_input = returns_its_input(self.context.exact, self.context.script)
        return OLD if returns_input else "every call starts from zeros"

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

    @cached_property
    def _clearing(self) -> Clearing | None:
        """What a step's flags clear, by moving one number of the state at a time."""
        if not self.context.adapter.sees_first or self.context.adapter.clear_on != "episode":
            return None
        return clearing_bug(self.context.exact, self.context.script)

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
        if not self.hidden and self._clearing is not None and self._clearing.name == INVERTED:
            # A chain of steps without flags would be cleared at every step.
            return INVERTED
        rule = self._rollout_rule[1]
        exact = self.context.exact
        if rule is not None and rule.name == "every call starts from zeros":
            return self._without_carry
        if rule is not None and rule.name and rule.name != PART:
            return rule.name
        outputs = self.context.outputs[exact.dtype].rollout
        is_right = self.same(exact, exact.steps(self.context.script, reset=self.context.clears)[0], outputs)
        clearing = None if self.hidden or (rule is not None and is_right and not rule.name) else self._clearing
        if clearing is None:
            return None if rule is None else rule.name or None
        if clearing.detail:
            self.details[clearing.name] = clearing.detail
        return clearing.name

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
        segments = SegmentDiagnosis(policy, script, self.context.clears, self.context.columns, states, outputs)
        bug = segments.find() or returned_state_bug(policy, script)
        if bug is None and not self._looks_ahead:
            bug = self._experiment(policy)
        if bug is None:
            return None
        if bug.detail:
            self.details[bug.name] = bug.detail
        if bug.share is not None:
            self.shares[bug.name] = bug.share
        return bug.name

    def _experiment(self, policy: PolicyCopy) -> SegmentBug | None:
        """Say what differs between segments and steps, where nothing but the division into calls may do it."""
        elsewhere = self.hidden or probes.mixes_rows(policy, self.context.script) or self._rollout_rule[1] is None
        return None if elsewhere else segment_experiment(policy, self.context.script)

    def _replay_segments(
        self, policy: PolicyCopy, states: list[State], replay: Callable[..., Tensor] = PolicyCopy.replay
    ) -> Tensor:
        """Replay segment by segment, from the states of single steps."""
        script, starts = self.context.script, range(0, STEPS, HORIZON)
        return torch.cat([replay(policy, script.step_batches(t, t + HORIZON), states[t]) for t in starts], dim=1)

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

    def _cut_inside(self) -> str | None:
        """Whether values are right where the gradient ends, so that nothing but the graph is cut."""
        outputs = self.context.outputs[self.context.exact.dtype]
        right = self.same(self.context.exact, outputs.replay, outputs.rollout)
        return CUT if right else None

    @property
    def _unrepeatable(self) -> str | None:
        """What keeps calls from giving the same twice, which finite differences need."""
        return HIDDEN_STATE if self.hidden else None

    @cached_property
    def _wrong_gradient(self) -> str:
        detaching = probes.detaching_calls(self.context.exact, self.context.script)
        if not detaching:
            return "wrong gradient"
        self.details[CUT] = f"{detaching} is called in the segment"
        return CUT

    def _start_bug(self) -> str | None:
        if has_plain_numbers(self._rollout_rule[2][0]):
            return NO_TENSOR
        clearing = self._clearing
        if clearing is not None:
            self.details[clearing.name] = clearing.detail
        return None if clearing is None else clearing.name

    def _bootstrap_bug(self) -> str:
        detail = source_of_bootstrap(self.context)
        if detail is not None:
            self.details[BOOTSTRAP] = detail
        return BOOTSTRAP

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

    def _evaluated_alone_bug(self) -> str:
        """Find the bug of an agent that is evaluated alone."""
        policy, script, few = self.context.exact, self.context.script, torch.arange(2)
        outputs = torch.cat([policy.evaluate(script[rows]) for rows in few.split(1)])
        rule = ResetRule("", torch.zeros_like(self.context.clears[:, :STEPS]))
        predicted = known_bugs.run_from_initial(policy, script, rule)[0][few]
        return IGNORED_FOR_ONE if self.same(policy, predicted, outputs) else IGNORED_FOR_ONE_IN_EVALUATION

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


_GENERIC = ("rollout", "replay", "evaluation", "one agent", "single sequence")
_SIZES = (
    "exit state",
    "late start",
    "long segment",
    "many rows",
    "evaluation mode",
    "one agent in evaluation",
)
"""Measurements of sizes and modes, which name those only if nothing else is broken."""
NAN, CUT, EVALUATION = ONE_CAUSE["overflow"], "graph cut inside the segment", "evaluation mode computes something else"
_BY_VALUES = ("chain gradient", "step to step")
IGNORED_FOR_ONE_IN_EVALUATION = "a batch of one is read differently"
_PHASES = {
    **dict.fromkeys(("replay", "single sequence", "short segments"), "in updates"),
    "evaluation": "in evaluation",
}
"""The phase of a measurement, where a bug may be confined to one."""
