"""Known bugs: their fixes, and the outputs a policy would have with each, computed from its own single steps.

Every prediction is a chain of single steps without flags; the states between them are cleared, dropped or exchanged
by hand. The bug whose chain gives the measured numbers explains them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch

from holdfast.check.adapters.base import flat
from holdfast.check.compare import State, broadcast, clone_state, state_leaves, with_leaves
from holdfast.check.policy_copy import AGENTS, HORIZON, STEPS, PolicyCopy
from holdfast.check.script import Script, StepBatch
from holdfast.types import Bool, Float, Int, Tensor

_CLEAR = "state = torch.where(first, initial, state) before the cell reads, in rollout and update."
_ROW_BY_ROW = "Reset row by row: torch.where(first[:, None], initial, state), not"
_AT_STARTS_ONLY = "reset it where `first` is true and nowhere else."
_EITHER = "first = terminated | truncated; reset on either."
_ALL_TENSORS = "hidden and cell states of all layers."

RESET_FIXES = {
    "state never reset": _CLEAR,
    "state reset one step late": f"first[t] belongs to obs[t], not to the step after it: {_CLEAR}",
    "state reset one step early": (
        f"done[t] comes with obs[t], which starts the next episode; do not reset a step before: {_CLEAR}"
    ),
    "state reset after the step has read": f"Reset before the cell reads obs[t], not its result: {_CLEAR}",
    "state reset on terminated only": _EITHER,
    "state reset on truncated only": _EITHER,
    "state reset only where both flags are set": _EITHER,
    "state not reset where both flags are set": _EITHER,
    "one episode start resets all rows": f"{_ROW_BY_ROW} `if first.any()`.",
    "state reset only when all rows start together": f"{_ROW_BY_ROW} `if first.all()`.",
    "the first row's flags reset all rows": "Use the flag of each row: first[:, None], not first[0].",
    "every call starts from zeros": (
        "Pass the state of the last call to the next one; initial states are for episode starts only."
    ),
    "state reset at every segment": f"Carry the state from segment to segment; {_AT_STARTS_ONLY}",
    "state reset before each rollout": f"Carry the state from rollout to rollout; {_AT_STARTS_ONLY}",
    "state reset before each rollout and nowhere else": f"Carry the state from rollout to rollout, and: {_CLEAR}",
    "only a segment's first flag resets the state": (
        "Reset at every step of the segment: pass first[B,T], not first[:, 0]."
    ),
    "the first flag of every call is ignored": (
        "Reset before the first step of a call too: the calls of a rollout have one step each."
    ),
    "a segment's first flag is ignored": (
        "Store the entry state before the reset, and apply first[:, 0] in the replay too."
    ),
    "invalid steps update the state": "Keep the state where valid is false: torch.where(valid, new_state, state).",
    "trial starts ignored": "clear = first | trial where memory.clear_on is trial.",
    "only part of the state is reset": f"Reset every tensor of the state, every layer and unit: {_ALL_TENSORS}",
    "soft reset": f"Put the initial state in, do not scale the old one: {_CLEAR}",
    "two different initial states": "Use one initial state for None, the first rollout and episode starts.",
    "flags are inverted": "first is true where an episode starts: torch.where(first, initial, state), not (~first).",
    "state reset by the flags of other rows": f"{_ROW_BY_ROW} first of rolled or reordered rows.",
    "state reset again one step later": f"first[t] belongs to obs[t] and to no other step: {_CLEAR}",
    "flags of some rows are ignored": f"Reset every row: {_CLEAR}",
    "state reset two steps late": f"first[t] belongs to obs[t]: {_CLEAR}",
    "state reset two steps early": f"first[t] belongs to obs[t]: {_CLEAR}",
    "a segment's last flag is ignored": "Reset at every step of the segment, the last one too: first[:, t] for all t.",
    "a segment's flags reset later steps too": "Reset at the flagged step alone: first[:, t], nothing cumulated.",
    "some of a segment's flags are ignored": "Reset at every step of the segment: first[:, t] for all t.",
    "a segment's flags are rolled by one step": "Use first[:, t] with obs[:, t]; roll() moves flags across the edge.",
    "a segment's flags are read backwards": "Use first[:, t] with obs[:, t], in the order of time.",
    "state not reset after a long episode": f"Reset whatever the episode's length: {_CLEAR}",
    "forgets after a fixed number of steps": f"Carry the state through the whole episode; {_AT_STARTS_ONLY}",
}
"""Bugs of when the state is reset, each with its fix; a bug may be confined to one phase."""

FIXES = {
    **RESET_FIXES,
    # Where a replay starts.
    "replay starts from zeros": "Store the state at each segment's entry and start its replay there, not from zeros.",
    "entry state stored after the step": "Copy the entry state before the segment's first step, not after it.",
    "entry state stored one step early": "Copy the entry state right before the segment's first step, not earlier.",
    "every segment starts from the rollout's entry state": "Store a state for every segment, not one for each rollout.",
    "entry state of another segment of the same agent": "Keep entry states in the order of their segments.",
    "entry states of other rows": (
        "Shuffle entry states with the same index as their segments: entry[index], steps[index]."
    ),
    "part of the entry state is lost": f"Store every tensor of the state: {_ALL_TENSORS}",
    "entry state is rounded": "Store the state in the dtype the cell computes in.",
    "parts of the entry state are swapped": "Store and read tensors and layers of the state in the same order.",
    "entry state is scaled": "Store the entry state as it is.",
    "parts of the returned state are swapped": "Return tensors and layers of the state in the order they came in.",
    "the returned state is of other rows": "Return the states of the rows in the order they came in.",
    "the returned state is rounded": "Return the state in the dtype the cell computes in.",
    "part of the returned state is lost": f"Return every tensor of the new state: {_ALL_TENSORS}",
    "the returned state is the one before the last step": "Return the state after the last step, not the one it read.",
    "entry state is shifted by one": "Store and read the window of the state with the same offset.",
    # How a segment is read.
    "segments are read in chunks": "Carry the state from chunk to chunk of a segment; reset it where `first` is true.",
    "observations of other rows in updates": "Shuffle observations with the same index as states, flags and actions.",
    "observations of a segment are shifted by one step": "Replay obs[:, t] with first[:, t] and action[:, t].",
    "outputs of other rows in updates": "Keep the order of rows in what a segment returns.",
    "outputs of a segment are shifted by one step": "Return the output of step t at t: values[:, t].",
    "acting without an action differs": "Compute the same, whether an action is given or sampled.",
    "the state of a segment is not that of its steps": (
        "Return the state as the cell gave it, in every call; count positions in the state, not in the call (arange)."
    ),
    "outputs of a segment are computed in another way": "Compute outputs of steps and segments by the same code.",
    "long segments are read differently": "Do nothing that depends on the length of a segment.",
    "many rows are read differently": "Do nothing that depends on the number of rows.",
    "the state a segment returns is wrong": "Return the state after the segment's last step, with its resets.",
    "evaluation mode computes something else": "Do nothing in the memory that depends on module.training.",
    "bootstrap value of another state": (
        "Compute the bootstrap value from the next observation and the state after the last step, like any other value."
    ),
    "something in the state that is no tensor": "Make it a tensor with a row for each agent, and reset that too.",
    "a state that is not finite survives a reset": "torch.where(first, initial, state): 0 * inf is NaN.",
    "time and batch axes swapped": "Use transpose(0, 1) between [B,T] and [T,B]; reshape and view regroup numbers.",
    "resets ignored in a batch of one": "Reset for any batch size; do not squeeze or branch on a batch of one.",
    "a batch of one is read differently": "Treat one row like many; do not squeeze the batch axis.",
    "outputs depend on later steps": "Mask later steps, and read a segment in one direction only.",
    "rows of a batch mix": (
        "Normalize over features, not over the batch: nn.LayerNorm, not nn.BatchNorm; no any() or max() over rows."
    ),
    "state shared between slices": (
        "Keep a state for each slice of environments: states[env_id_start], not one for all."
    ),
    # Graphs.
    "stored state keeps its graph": "state = state.detach() where it leaves a call, or act under torch.no_grad().",
    "gradient flows into the entry state": "Start a replay from entry.detach().",
    "graph kept outside the state": "Keep no tensor with a graph on self between calls: detach it, or do not keep it.",
    "graph cut inside the segment": "Detach at a segment's edge only; within the segment the state keeps its graph.",
    "wrong gradient": "Compare with torch.autograd.gradcheck; look for detach(), hooks and .data in the segment.",
    "wrong hand-written backward": "Correct the backward; torch.autograd.gradcheck compares it with differences.",
    "a parameter gets no gradient": "Take detach(), .data and no_grad() out of its path, or set requires_grad=False.",
    "no gradient": "Let outputs depend on the weights: no torch.no_grad() and no detach() in the path of the loss.",
    "gradient is NaN": "Look for sqrt, log or division at 0, and for where() around them, in the backward path.",
    # Purity.
    "random numbers in the forward pass": "Switch dropout and noise off, or draw from a seed that is replayed.",
    "state kept outside the returned state": (
        "Return everything the next call needs in the state: no attribute, closure or global."
    ),
    "bootstrap value advances the state": "Compute bootstrap values from a copy of the state; drop the returned one.",
    "inputs modified in place": "Work on copies: x = x.clone() before in-place operations; return a new state.",
    "memory use grows with time": "Keep nothing that grows with time; detach and drop what was logged.",
    "part of the state is not saved": f"Save every tensor of the state: {_ALL_TENSORS}",
    # Evaluation and other modes.
    "evaluation modifies the training state": "Evaluate a copy of the policy, or restore the live state afterwards.",
    "compiled and eager outputs differ": (
        "Do nothing that depends on torch.compiler.is_compiling(); compare eager and compiled outputs."
    ),
    "the cell differs from its reference": "Compare the kernel with holdfast.memory.reference step by step.",
}
"""All known bugs, each with its fix."""

ONE_CAUSE = {
    "state after evaluation": "evaluation modifies the training state",
    "inputs": "inputs modified in place",
    "entry": "gradient flows into the entry state",
    "replay into replay": "graph kept outside the state",
    "replay into act": "stored state keeps its graph",
    "graph nodes": "stored state keeps its graph",
    "compiled": "compiled and eager outputs differ",
    "cell": "the cell differs from its reference",
    "no gradient": "no gradient",
    "not a number": "gradient is NaN",
    "no parameter gradient": "a parameter gets no gradient",
    "hand-written backward": "wrong hand-written backward",
    "overflow": "a state that is not finite survives a reset",
}
"""Measurements with one possible cause."""


def fix_of(name: str) -> str:
    """Return the fix of a bug whose name ends with a number."""
    return next(fix for start, fix in FIXES.items() if name.startswith(start))


Selection = tuple[str, int] | None
"""A part of a state: `("tensor", 1)`, `("layer", 0)`, or None for all of it."""


@dataclass(frozen=True)
class ResetRule:
    """When the state is cleared, which part of it, and whether invalid steps leave it alone."""

    name: str
    clear: Bool[Tensor, "A N"]
    selection: Selection = None
    handles_invalid: bool = True


@torch.no_grad()
def chain(
    policy: PolicyCopy, batch: StepBatch, state: State, rule: ResetRule
) -> tuple[Float[Tensor, "A N K"], list[State]]:
    """Run single steps from a state, clearing by hand; return outputs and the state before each step."""
    outputs, states = [], []
    batch = policy.to_policy(batch.without_flags())
    if not rule.handles_invalid:
        batch = replace(batch, valid=torch.ones_like(batch.valid))
    with policy.default_dtype():
        for t in range(batch.batch[1]):
            states.append(clone_state(state))
            state = _clear(policy, state, rule.clear[:, t], rule.selection)
            before = clone_state(state)
            step_outputs, state = policy.adapter.act(batch[:, t], state)
            state = policy.rows.where(batch.valid[:, t], state, before)
            outputs.append(flat(step_outputs, 1))
    return torch.stack(outputs, dim=1).cpu(), [*states, clone_state(state)]


def run_from_initial(policy: PolicyCopy, script: Script, rule: ResetRule) -> tuple[Float[Tensor, "A N K"], list[State]]:
    """Predict a whole rollout under a reset rule."""
    with policy.default_dtype():
        initial = policy.adapter.initial(script.agents)
    return chain(policy, script.step_batches(0, STEPS), initial, rule)


def _clear(policy: PolicyCopy, state: State, mask: Bool[Tensor, " A"], selection: Selection) -> State:
    """Clear the state of some rows, or a part of it."""
    cleared = policy.rows.where(mask, policy.adapter.initial(len(mask)), clone_state(state))
    return cleared if selection is None else _replace_part(policy, state, cleared, selection)


def _replace_part(policy: PolicyCopy, state: State, source: State, selection: tuple[str, int]) -> State:
    """Take one tensor, or one layer of all tensors, from another state."""
    kind, which = selection
    leaves, triples = [], zip(state_leaves(state), state_leaves(source), policy.rows.axes, strict=True)
    for at, (leaf, other, rows) in enumerate(triples):
        if kind == "tensor":
            leaves.append(other if at == which else leaf)
        else:
            layer = _layer_axis(leaf, rows)
            mask = torch.arange(leaf.shape[layer]) == which
            leaves.append(torch.where(broadcast(mask, layer, leaf), other, leaf))
    return with_leaves(state, leaves)


def _layer_axis(leaf: Tensor, rows: int) -> int:
    return next(axis for axis in range(leaf.dim() - 1) if axis != rows)


def selections(policy: PolicyCopy) -> Iterator[tuple[str, int]]:
    """List the parts of a state: its tensors, and its layers where there are several."""
    with policy.default_dtype():
        leaves = state_leaves(policy.adapter.initial(2))
    if len(leaves) > 1:
        yield from (("tensor", at) for at in range(len(leaves)))
    layers = {
        leaf.shape[_layer_axis(leaf, axis)] if leaf.dim() > 2 else 1
        for leaf, axis in zip(leaves, policy.rows.axes, strict=True)
    }
    if len(layers) == 1 and (count := layers.pop()) > 1:
        yield from (("layer", at) for at in range(count))


AT_EVERY_SEGMENT = "state reset at every segment"
BEFORE_ROLLOUT = "state reset before each rollout"
BEFORE_ROLLOUT_ONLY = "state reset before each rollout and nowhere else"
LATE, EARLY = "state reset one step late", "state reset one step early"


def reset_rules(policy: PolicyCopy, script: Script, clear: Bool[Tensor, "A N1"]) -> Iterator[ResetRule]:
    """List the ways to clear over a whole rollout, the right one first."""
    right, step = clear[:, :STEPS], torch.arange(STEPS)
    rollout = STEPS // policy.adapter.rollouts
    yield ResetRule("", right)
    yield ResetRule("state never reset", torch.zeros_like(right))
    yield ResetRule(LATE, torch.nn.functional.pad(right[:, :-1], (1, 0)))
    yield ResetRule(EARLY, clear[:, 1 : STEPS + 1])
    terminated, truncated = script.terminated[:, :STEPS], script.truncated[:, :STEPS]
    yield ResetRule("state reset on terminated only", right & ~(truncated & ~terminated))
    yield ResetRule("state reset on truncated only", right & ~(terminated & ~truncated))
    yield ResetRule("state reset only where both flags are set", right & (terminated == truncated))
    yield ResetRule("state not reset where both flags are set", right & ~(terminated & truncated))
    yield ResetRule("one episode start resets all rows", right.any(0).expand_as(right))
    yield ResetRule("state reset only when all rows start together", right.all(0).expand_as(right))
    yield ResetRule("the first row's flags reset all rows", right[:1].expand_as(right))
    yield ResetRule("every call starts from zeros", torch.ones_like(right))
    yield ResetRule(AT_EVERY_SEGMENT, right | (step % HORIZON == 0))
    yield ResetRule(BEFORE_ROLLOUT, right | (step % rollout == 0))
    yield ResetRule(BEFORE_ROLLOUT_ONLY, (step % rollout == 0).expand_as(right))
    yield ResetRule("only a segment's first flag resets the state", right & (step % HORIZON == 0))
    yield ResetRule("a segment's first flag is ignored", right & (step % HORIZON != 0))
    yield ResetRule("trial starts ignored", script.first[:, :STEPS])
    yield ResetRule("invalid steps update the state", right, handles_invalid=False)
    for selection in selections(policy):
        yield ResetRule("only part of the state is reset", right, selection)


def segment_reset_rules(policy: PolicyCopy, script: Script, clear: Bool[Tensor, "A N1"]) -> Iterator[ResetRule]:
    """List the ways to clear in segments replayed one by one: flags of other segments have no effect."""
    offset = torch.arange(STEPS) % HORIZON
    for rule in reset_rules(policy, script, clear):
        if rule.name == LATE:
            yield replace(rule, clear=rule.clear & (offset != 0))
        elif rule.name == EARLY:
            yield replace(rule, clear=rule.clear & (offset != HORIZON - 1))
        elif rule.name not in (AT_EVERY_SEGMENT, BEFORE_ROLLOUT, BEFORE_ROLLOUT_ONLY):
            yield rule


def entry_rules(policy: PolicyCopy, states: list[State]) -> Iterator[tuple[str, State]]:
    """List what all segments, agent by agent, might start from, by the name of the bug; the right states first."""
    rows, starts, rollout = policy.rows, range(0, STEPS, HORIZON), STEPS // policy.adapter.rollouts
    with policy.default_dtype():
        zeros = rows.cat([policy.adapter.initial(AGENTS) for _ in starts])
    right = rows.cat([states[t] for t in starts])
    yield "", right
    yield "replay starts from zeros", zeros
    yield "entry state stored after the step", rows.cat([states[t + 1] for t in starts])
    yield "entry state stored one step early", rows.cat([states[max(t - 1, 0)] for t in starts])
    yield "every segment starts from the rollout's entry state", rows.cat([states[t - t % rollout] for t in starts])
    for selection in selections(policy):
        yield "part of the entry state is lost", _replace_part(policy, right, zeros, selection)


def predict_replay(
    policy: PolicyCopy,
    script: Script,
    entry: State,
    rule: ResetRule,
    change: Callable[[Tensor], Tensor] = lambda obs_BT: obs_BT,
) -> Float[Tensor, "A N K"]:
    """Predict the outputs of replaying all segments from given entry states, with changed observations."""
    batch = in_segments(script)
    batch = replace(batch, obs=change(batch.obs))
    outputs, _ = chain(policy, batch, entry, replace(rule, clear=_segments(rule.clear)))
    return torch.cat(outputs.split(script.agents), dim=1)


def predict_chunks(
    policy: PolicyCopy, script: Script, entry: State, rule: ResetRule, length: int
) -> Float[Tensor, "A N K"]:
    """Predict the outputs of segments whose chunks of some steps all start from the entry state."""
    batch, clear, chunks = in_segments(script), _segments(rule.clear), []
    for start in range(0, HORIZON, length):
        part = slice(start, start + length)
        chunks.append(chain(policy, batch[:, part], entry, replace(rule, clear=clear[:, part]))[0])
    return torch.cat(torch.cat(chunks, dim=1).split(script.agents), dim=1)


def in_segments(script: Script) -> StepBatch:
    """Stack all segments of all agents, `[segments * A, T]`."""
    batches = [script.step_batches(t, t + HORIZON) for t in range(0, STEPS, HORIZON)]
    return StepBatch(**{f.name: torch.cat([getattr(batch, f.name) for batch in batches]) for f in fields(StepBatch)})


def _segments(flags: Bool[Tensor, "A N"]) -> Bool[Tensor, "B T"]:
    return torch.cat(flags.split(HORIZON, dim=1))


def match_entries(
    policy: PolicyCopy,
    script: Script,
    entry: State,
    rule: ResetRule,
    outputs: Tensor,
    same: Callable[[Tensor, Tensor], bool],
) -> Int[Tensor, " B"] | None:
    """Find the segment whose entry state each segment was replayed from; None if one has no match."""
    batch, clear = in_segments(script), _segments(rule.clear)
    count = len(batch.first)
    indices = torch.arange(count)
    measured = torch.cat(outputs.split(HORIZON, dim=1))
    matches = torch.full((count,), -1)
    # Other segments of the same agent are tried first.
    for shift in sorted(range(count), key=lambda shift: (shift % script.agents, shift)):
        state = policy.rows.pick(entry, indices.roll(shift))
        predicted, _ = chain(policy, batch, state, replace(rule, clear=clear))
        for row in indices[matches < 0].tolist():
            if same(predicted[row], measured[row]):
                matches[row] = indices.roll(shift)[row]
        if bool((matches >= 0).all()):
            return matches
    return None


def swapped_axes(
    policy: PolicyCopy, script: Script, states: list[State], clear: Bool[Tensor, "A N1"]
) -> Iterator[Tensor]:
    """Predict replays with time and batch swapped in observations, flags or outputs."""
    for in_obs, in_flags, in_outputs in ((1, 0, 0), (1, 1, 1), (1, 1, 0), (1, 0, 1), (0, 1, 0), (0, 0, 1), (0, 1, 1)):
        segments = []
        for start in range(0, STEPS, HORIZON):
            batch = script.step_batches(start, start + HORIZON)
            starts = clear[:, start : start + HORIZON]
            batch = replace(batch, obs=_swap(batch.obs)) if in_obs else batch
            rule = ResetRule("", _swap(starts) if in_flags else starts)
            outputs, _ = chain(policy, batch, states[start], rule)
            segments.append(_swap(outputs) if in_outputs else outputs)
        yield torch.cat(segments, dim=1)


def _swap(x_BT: Tensor) -> Tensor:
    """Read `(t b)` where `(b t)` is written."""
    B, T = x_BT.shape[:2]
    return x_BT.reshape(T, B, *x_BT.shape[2:]).transpose(0, 1)
