"""The laws of state: replay, pure, bounded, restore and agree compare calls that must give the same."""

import copy
import gc
import tempfile
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from holdfast.check.call_laws import bootstrap_values, evaluation_as_training, exit_states
from holdfast.check.compare import (
    BOUND,
    SHORT,
    State,
    clone_state,
    expect_close,
    expect_zero,
    named_leaves,
    state_leaves,
    with_leaves,
)
from holdfast.check.context import CheckContext
from holdfast.check.held_memory import bytes_held
from holdfast.check.long_laws import long_segments, other_sizes
from holdfast.check.policy_copy import AGENTS, HORIZON, STEPS, PolicyCopy
from holdfast.check.results import Measurement
from holdfast.check.script import Script, StepBatch
from holdfast.types import Tensor

MIDDLE = STEPS // 2


def replay(context: CheckContext) -> list[Measurement]:
    """Replaying a segment gives the outputs of the rollout: PPO's first ratio is 1."""
    parts = []
    for dtype, outputs in context.outputs.items():
        for name in dict.fromkeys(context.columns):
            index = [at for at, column in enumerate(context.columns) if column == name]
            actual, expected = outputs.replay[..., index], outputs.rollout[..., index]
            what = f"{name}, {SHORT[dtype]}"
            parts.append(expect_close(what, actual, expected, BOUND[dtype], path="replay"))
    return [*parts, *bootstrap_values(context)]


def pure(context: CheckContext) -> list[Measurement]:
    """Bootstrap values and replays do not advance the hidden state."""
    policy, script, columns = context.exact, context.script, context.columns
    expected, states = policy.steps(script)
    adapter, inputs = policy.adapter, policy.to_policy(script)
    with torch.no_grad(), policy.default_dtype():
        policy.steps(script, stop=MIDDLE)
        adapter.value(inputs.at(MIDDLE + 1), clone_state(states[MIDDLE]))
        adapter.replay(inputs.step_batches(0, HORIZON), clone_state(states[MIDDLE + 1]))
    after, _ = policy.steps(script, start=MIDDLE, state=states[MIDDLE])
    repeated, _ = policy.steps(script, start=MIDDLE, state=states[MIDDLE])
    return [
        expect_zero(what, diff, "agent", "step after it", columns=columns, path="bootstrap")
        for what, diff in (
            ("outputs after a bootstrap value and a replay", after - expected[:, MIDDLE:]),
            ("outputs of the same steps repeated", repeated - after),
        )
    ] + [*_inputs_unmodified(policy, inputs, states[MIDDLE]), _state_unmodified(policy, inputs, states[MIDDLE])]


def _inputs_unmodified(policy: PolicyCopy, script: Script, state: State) -> list[Measurement]:
    """Compare the inputs of each call before and after it."""
    parts = []
    with torch.no_grad(), policy.default_dtype():
        step, segment = script.at(MIDDLE), script.step_batches(MIDDLE, MIDDLE + HORIZON)
        for name, before in (("act", step), ("value", step), ("replay", segment)):
            inputs, input_state = copy.deepcopy(before), clone_state(state)
            getattr(policy.adapter, name)(inputs, input_state)
            changed = [
                field.name
                for field in fields(StepBatch)
                if not getattr(inputs, field.name).equal(getattr(before, field.name))
            ]
            changed += [f"state {leaf}" for leaf in _changed_leaves(input_state, state)]
            finding = f"{name} wrote into its {', '.join(changed)}"
            what = f"inputs modified by {name}"
            parts.append(Measurement(what, float(len(changed)), finding=finding, path="inputs"))
    return parts


def _state_unmodified(policy: PolicyCopy, script: Script, state: State) -> Measurement:
    """Check that a returned state is not modified by the next call."""
    with torch.no_grad(), policy.default_dtype():
        _, returned = policy.adapter.act(script.at(MIDDLE), clone_state(state))
        before = clone_state(returned)
        policy.adapter.act(script.at(MIDDLE + 1), clone_state(returned))
    changed = _changed_leaves(returned, before)
    finding = f"the next call wrote into {', '.join(changed)} of the state it had returned"
    what = "returned states modified by the next call"
    return Measurement(what, float(len(changed)), finding=finding, path="inputs")


def _changed_leaves(after: State, before: State) -> list[str]:
    pairs = zip(named_leaves(before).items(), state_leaves(after), strict=True)
    return [name for (name, was), now in pairs if not now.equal(was)]


def bounded(context: CheckContext) -> list[Measurement]:
    """Memory use does not grow with time."""
    policy = context.as_trained
    adapter, script = policy.adapter, policy.to_policy(context.script[torch.arange(2)])
    with policy.default_dtype():
        state = adapter.initial(2)
        entry = clone_state(state)

    def run(times: int) -> tuple[int, int]:
        """Replay a segment and run 200 steps, `times` times; return the bytes and graph nodes held then."""
        nonlocal state
        for _ in range(times):
            with policy.default_dtype():
                with torch.enable_grad():
                    adapter.replay(script.step_batches(0, HORIZON), clone_state(entry))
                with torch.set_grad_enabled(adapter.rollout_has_grad):
                    state = adapter.run_steps(script, state, 200)
        return bytes_held(adapter, state)

    # What exists already is not searched for garbage again and again.
    gc.freeze()
    try:
        early, middle, late = run(2), run(4), run(4)
    finally:
        gc.unfreeze()
    return [
        Measurement(
            f"growth of {kind} from 400 to 2,000 steps",
            # A cache that is filled once grows in one half only.
            float(max(0, min(later - between, between - before))),
            0.0,
            finding=f"{before:,} after 400 steps, {between:,} after 1,200, {later:,} after 2,000",
            path=kind,
        )
        for kind, before, between, later in zip(("bytes", "graph nodes"), early, middle, late, strict=True)
    ]


def restore(context: CheckContext) -> list[Measurement]:
    """A policy saved and loaded continues with the same outputs."""
    policy, script = context.exact, context.script
    expected, _ = policy.steps(script)
    # A copy that never ran, with changed weights, so that it is right only by what it loads.
    loaded = policy.unused_copy()
    with torch.no_grad():
        for leaf in loaded.adapter.module.state_dict().values():
            if isinstance(leaf, Tensor):
                leaf.logical_not_() if leaf.dtype == torch.bool else leaf.add_(1)
    _, states = policy.steps(script, stop=MIDDLE)
    with tempfile.TemporaryDirectory() as folder:
        weights, memory = Path(folder) / "weights.safetensors", Path(folder) / "memory.safetensors"
        module_state = policy.adapter.module.state_dict()
        tensors = {key: leaf for key, leaf in module_state.items() if isinstance(leaf, Tensor)}
        # What a module saves by get_extra_state is not a tensor.
        extra = copy.deepcopy({key: item for key, item in module_state.items() if key not in tensors})
        save_file({key: leaf.contiguous().clone() for key, leaf in tensors.items()}, weights)
        leaves = state_leaves(states[MIDDLE])
        save_file({str(at): leaf.contiguous() for at, leaf in enumerate(leaves)}, memory)
        loaded.adapter.module.load_state_dict({**load_file(weights), **extra})
        saved = load_file(memory)
    state = with_leaves(states[MIDDLE], [saved[str(at)].to(leaf.device) for at, leaf in enumerate(leaves)])
    # The original runs on other observations, so that state kept outside of the returned state changes.
    policy.steps(script.changed(torch.ones_like(script.first)), stop=HORIZON + 3)
    actual, _ = loaded.steps(script, start=MIDDLE, state=state)
    what, axes = "outputs after saving and loading", ("agent", "step after it")
    return [expect_zero(what, actual - expected[:, MIDDLE:], *axes, columns=context.columns, path="saved")]


def agree(context: CheckContext) -> list[Measurement]:
    """Any division of steps into calls gives the same outputs."""
    parts, script, columns = [], context.script, context.columns
    for dtype, policy in context.copies.items():
        expected, states = policy.steps(script)
        actual = policy.replay(script.step_batches(0, STEPS), states[0])
        what = f"one segment of {STEPS} steps against single steps, {SHORT[dtype]}"
        parts.append(expect_close(what, actual, expected, BOUND[dtype], columns=columns, path="replay"))
        segments, single, short = [], [], []
        for start in range(0, STEPS, HORIZON):
            batch, entry = script.step_batches(start, start + HORIZON), states[start]
            segments.append(policy.replay(batch, entry))
            single.append(replay_row_by_row(policy, batch, entry))
            cuts = (slice(0, 1), slice(1, 4), slice(4, HORIZON))
            short += [policy.replay(batch[:, cut], states[start + cut.start]) for cut in cuts]
        for path, what, outputs in (
            ("single sequence", "a batch of one sequence against the full batch", single),
            ("short segments", "short segments against long ones", short),
        ):
            actual, expected = torch.cat(outputs, dim=1), torch.cat(segments, dim=1)
            what = f"{what}, {SHORT[dtype]}"
            parts.append(expect_close(what, actual, expected, BOUND[dtype], columns=columns, path=path))
    parts += [*other_sizes(context), *long_segments(context.long_run), *exit_states(context)]
    return [*parts, *evaluation_as_training(context)]


def replay_row_by_row(policy: PolicyCopy, batch: StepBatch, entry: State) -> Tensor:
    """Replay every row of a segment in its own batch."""
    rows = [torch.tensor([agent]) for agent in range(AGENTS)]
    return torch.cat([policy.replay(batch[row], policy.rows.pick(entry, row)) for row in rows])
