"""The laws of state: what is replayed, asked, kept and restored is what was lived."""

import copy
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from holdfast.check.bench import (
    AGENTS,
    BOUND,
    HORIZON,
    SHARE_OF_STARTS,
    STEPS,
    Bench,
    close,
    nothing,
    random_state,
    segment_of,
)
from holdfast.check.probes import held, live_by_hand
from holdfast.check.results import Measurement
from holdfast.experience import value_of
from holdfast.memory import reference
from holdfast.policies import LSTMWrapper, RecurrentPolicy
from holdfast.shapes import Tensor

GRADIENT_BOUND = 2e-5
SHORT = {torch.float64: "f64", torch.float32: "f32"}


def replays(bench: Bench) -> list[Measurement]:
    """Replaying a segment from its entry state gives what was lived: PPO's first ratio is 1."""
    parts = []
    for policy, dtype in ((bench.proof, torch.float64), (bench.practice, torch.float32)):
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
    policy, script = bench.practice, bench.script
    policy.reset_memory()

    def live(steps: int) -> None:
        with torch.enable_grad():
            for done in range(0, steps, STEPS):
                live_by_hand(policy, script, stop=min(STEPS, steps - done))

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
    with torch.no_grad():
        live_by_hand(policy, script, stop=middle)
    with tempfile.TemporaryDirectory() as folder:
        weights, memory = Path(folder) / "weights.safetensors", Path(folder) / "memory.safetensors"
        save_file({key: leaf.contiguous() for key, leaf in policy.state_dict().items()}, weights)
        save_file(_memory_of(policy), memory)
        other = copy.deepcopy(policy)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        other.load_state_dict(load_file(weights))
        saved = load_file(memory)
    first, second = ({int(key.split()[1]): saved[key] for key in saved if key[0] == part} for part in "01")
    other.set_memory((first, second))
    with torch.no_grad():
        rest = live_by_hand(other, script, start=middle)
    return [nothing("outputs after loading", rest - whole[:, middle:], "agent", "step")]


def _memory_of(policy: LSTMWrapper) -> dict[str, Tensor]:
    """Copy the live memories under names a file can hold: which part, which slice."""
    parts = enumerate(policy.get_memory())
    return {f"{part} {start}": leaf.contiguous() for part, leaves in parts for start, leaf in leaves.items()}


def agree(bench: Bench) -> list[Measurement]:
    """One call over a segment, calls step by step, compiled parts and the plain cell give the same."""
    parts = []
    for policy, dtype in ((bench.proof, torch.float64), (bench.practice, torch.float32)):
        with torch.no_grad():
            policy.reset_memory()
            by_steps = live_by_hand(policy, bench.script)
            policy.reset_memory()
            by_segments = live_by_hand(policy, bench.script, steps_a_call=HORIZON)
        parts.append(close(f"segments as steps, {SHORT[dtype]}", by_segments, by_steps, BOUND[dtype]))
        parts += _cell_agrees(policy, dtype)
    if isinstance(bench.practice, RecurrentPolicy):
        compiled = copy.deepcopy(bench.practice)
        compiled.compile_parts(backend="aot_eager")
        with torch.no_grad():
            now = live_by_hand(compiled, bench.script, steps_a_call=HORIZON)
        parts.append(close("compiled as eager, f32", now, by_segments, BOUND[torch.float32]))
    return parts


def _cell_agrees(policy: LSTMWrapper, dtype: torch.dtype) -> list[Measurement]:
    """Hold the policy's cell against the LSTM written out step by step, gradients included."""
    cell = policy.lstm.cell
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(AGENTS, STEPS, cell.input_size, generator=generator).to(dtype).requires_grad_()
    clear = torch.rand(AGENTS, STEPS, generator=generator) < SHARE_OF_STARTS
    state = random_state(policy)
    with torch.enable_grad():
        fast, _ = cell(x, state, clear)
        plain, _ = reference.lstm(cell, x, state, clear)
        towards = torch.randn(fast.shape, generator=generator).to(dtype)
        inputs = [x, *cell.parameters()]
        pairs = zip(
            torch.autograd.grad((fast * towards).sum(), inputs),
            torch.autograd.grad((plain * towards).sum(), inputs),
            strict=True,
        )
        error = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return [
        close(f"cell as reference, {SHORT[dtype]}", fast, plain, BOUND[dtype]),
        Measurement(f"its gradients, {SHORT[dtype]}", error, GRADIENT_BOUND, finding=f"off by {error:.1e}"),
    ]
