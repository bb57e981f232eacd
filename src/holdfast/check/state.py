"""The laws of state: what is replayed, asked, kept and restored is what was lived."""

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file, save_file

from holdfast.check.bench import (
    AGENTS,
    BOUND,
    HORIZON,
    SHARE_OF_STARTS,
    SHORT,
    STEPS,
    Bench,
    close,
    nothing,
    random_state,
    segment_of,
)
from holdfast.check.probes import held, live_by_hand
from holdfast.check.results import Measurement
from holdfast.check.script import Script
from holdfast.experience import value_of
from holdfast.memory import reference
from holdfast.policies import LSTMWrapper, RecurrentPolicy
from holdfast.shapes import Tensor

GRADIENT_BOUND = 2e-5
Gradients = Sequence[Tensor | None]


def replays(bench: Bench) -> list[Measurement]:
    """Replaying a segment from its entry state gives what was lived: PPO's first ratio is 1."""
    parts = []
    for dtype, policy in bench.policies.items():
        life = bench.live(bench.script, policy)
        for what, part in (("values", slice(0, 1)), ("log-probs", slice(1, None))):
            now, was = life.replayed[..., part], life.lived[..., part]
            parts.append(close(f"{what}, {SHORT[dtype]}", now, was, BOUND[dtype]))
    return parts


def pure(bench: Bench) -> list[Measurement]:
    """Asking for a value, or replaying, advances nothing."""
    policy, script, middle = bench.proof, bench.script, STEPS // 2
    undisturbed = bench.by_hand(script)
    policy.reset_memory()
    with torch.no_grad():
        live_by_hand(policy, script, stop=middle)
        before = _memory_of(policy)
        state = policy.store.read(0, AGENTS).clone()
        first = script.first[:, middle]
        value_of(policy, state, script.other_obs[:, middle], first, torch.zeros_like(first))
        with policy.replay(random_state(policy)):
            policy(segment_of(script))
        after = _memory_of(policy)
        rest = live_by_hand(policy, script, start=middle)
    moved = torch.stack([(after[key] - before[key]).abs().max() for key in before])
    return [
        nothing("state after asking for values", moved, "leaf"),
        nothing("outputs after it", rest - undisturbed[:, middle:], "agent", "step"),
    ]


def bounded(bench: Bench) -> list[Measurement]:
    """What is held does not grow with time."""
    policy, script = bench.practice, bench.script.of(torch.arange(2))
    policy.reset_memory()
    segment, entry = segment_of(script), random_state(policy)[:2]

    def live(steps: int) -> None:
        with torch.enable_grad():
            for done in range(0, steps, STEPS):
                steps_a_call = HORIZON if done % (2 * STEPS) else 1
                stop = min(STEPS, steps - done)
                live_by_hand(policy, script, steps_a_call=steps_a_call, stop=stop)
                with policy.replay(entry):
                    policy(segment.clone())

    live(200)
    few = held()
    live(1800)
    many = held()
    return [
        Measurement(
            f"growth of {what} from 200 to 2,000 steps",
            float(abs(late - early)),
            0.0,
            finding=f"{early:,} after 200 steps, {late:,} after 2,000",
        )
        for what, early, late in zip(("bytes", "graph nodes"), few, many, strict=True)
    ]


def restore(bench: Bench) -> list[Measurement]:
    """Weights and memories written to disk and read back go on as if never stopped."""
    policy, script, middle = bench.proof, bench.script, STEPS // 2
    whole = bench.by_hand(script)
    policy.reset_memory()
    # Copied before they live, and spoilt, so that nothing is right but what is loaded.
    others = [_spoilt(policy) for _ in range(2)]
    with torch.no_grad():
        live_by_hand(policy, script, stop=middle)
    with tempfile.TemporaryDirectory() as folder:
        weights, memory = Path(folder) / "weights.safetensors", Path(folder) / "memory.safetensors"
        save_file({key: leaf.contiguous() for key, leaf in policy.state_dict().items()}, weights)
        save_file(_memory_of(policy), memory)
        for other in others:
            other.load_state_dict(load_file(weights))
        saved = load_file(memory)
    first, second = ({int(key.split()[1]): saved[key] for key in saved if key[0] == part} for part in "01")
    others[0].set_memory((first, second))
    others[1].store.restore(policy.store.snapshot())
    parts = []
    for what, other in zip(("outputs after loading", "outputs after a snapshot"), others, strict=True):
        with torch.no_grad():
            rest = live_by_hand(other, script, start=middle)
        parts.append(nothing(what, rest - whole[:, middle:], "agent", "step"))
    return parts


def _spoilt(policy: LSTMWrapper) -> LSTMWrapper:
    other = copy.deepcopy(policy)
    with torch.no_grad():
        for leaf in other.state_dict().values():
            leaf.add_(1)
    return other


def _memory_of(policy: LSTMWrapper) -> dict[str, Tensor]:
    """Copy the live memories under names a file can hold: which part, which slice."""
    parts = enumerate(policy.get_memory())
    return {f"{part} {start}": leaf.contiguous() for part, leaves in parts for start, leaf in leaves.items()}


def agree(bench: Bench) -> list[Measurement]:
    """One call over a segment, calls step by step, compiled parts and the plain cell give the same."""
    parts = []
    for dtype, policy in bench.policies.items():
        by_steps = bench.by_hand(bench.script, policy=policy)
        by_segments = bench.by_hand(bench.script, HORIZON, policy=policy)
        parts.append(close(f"segments as steps, {SHORT[dtype]}", by_segments, by_steps, BOUND[dtype]))
        parts += _cell_agrees(policy, dtype)
    if isinstance(bench.proof, RecurrentPolicy):
        parts += _compiled_agrees(bench.proof, bench.script)
    return parts


def _compiled_agrees(policy: RecurrentPolicy, script: Script) -> list[Measurement]:
    """Hold a policy with compiled parts against itself, gradients included."""
    compiled = copy.deepcopy(policy)
    compiled.compile_parts(backend="aot_eager")
    outputs, gradients = [], []
    for each in (policy, compiled):
        each.reset_memory()
        with torch.enable_grad():
            outputs.append(live_by_hand(each, script, steps_a_call=HORIZON))
            weights = list(each.parameters())
            gradients.append(torch.autograd.grad(outputs[-1].square().sum(), weights, allow_unused=True))
    return [
        close("compiled as eager, f64", outputs[1], outputs[0], BOUND[torch.float64]),
        _same_gradients("gradients compiled as eager, f64", gradients[1], gradients[0]),
    ]


def _same_gradients(what: str, now: Gradients, was: Gradients) -> Measurement:
    """Demand that gradients are equal to within a share of each one's largest entry."""
    errors = [
        (a - b).abs().max() / b.abs().max().clamp(min=torch.finfo(b.dtype).tiny)
        for a, b in zip(now, was, strict=True)
        if a is not None and b is not None
    ]
    size = float(torch.stack([error.double() for error in errors]).max())
    return Measurement(what, size, GRADIENT_BOUND, finding=f"off by {size:.1e} of the largest entry")


def _cell_agrees(policy: LSTMWrapper, dtype: torch.dtype) -> list[Measurement]:
    """Hold the policy's cell against the LSTM written out step by step, gradients included."""
    cell = policy.lstm.cell
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(AGENTS, STEPS, cell.input_size, generator=generator).to(dtype).requires_grad_()
    clear = torch.rand(AGENTS, STEPS, generator=generator) < SHARE_OF_STARTS
    state = random_state(policy)
    with torch.enable_grad():
        fast, end = cell(x, state, clear)
        plain, plain_end = reference.lstm(cell, x, state, clear)
        towards = torch.randn(fast.shape, generator=generator).to(dtype)
        inputs = [x, *cell.parameters()]
        now = torch.autograd.grad((fast * towards).sum(), inputs)
        was = torch.autograd.grad((plain * towards).sum(), inputs)
    return [
        close(f"cell as reference, {SHORT[dtype]}", fast, plain, BOUND[dtype]),
        *(
            close(f"its state, {SHORT[dtype]}", cast("Tensor", leaf), plain_end[key], BOUND[dtype])
            for key, leaf in end.items()
        ),
        _same_gradients(f"its gradients, {SHORT[dtype]}", now, was),
    ]
