"""Measurements of Holdfast policies only: live store, flags, compiled parts, kernels."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import TensorDict
from torch.func import functional_call

from holdfast.check.compare import AXES, BOUND, SHORT, expect_close, expect_zero
from holdfast.check.policy_copy import AGENTS, HORIZON, STEPS, PolicyCopy
from holdfast.check.results import Measurement
from holdfast.check.script import Script
from holdfast.memory import Cell, Kernel, use_kernel
from holdfast.memory.kernels import refusal
from holdfast.memory.rnn import StackedRNN
from holdfast.policies import FunctionalPolicy, LSTMWrapper
from holdfast.policies.recurrent_policy import autocast, to_float32
from holdfast.types import Float, Tensor

if TYPE_CHECKING:
    from holdfast.check.adapters.holdfast import HoldfastPolicy
    from holdfast.check.context import CheckContext

GRADIENT_BOUND = {torch.float64: 2e-5, torch.float32: 2e-5, torch.bfloat16: 5e-2}
"""Bounds of gradient errors, relative to the largest entry.

In bfloat16 two correct orders of summation differ by at most 2.2e-2 (GRU of 16; the LSTM 9e-3, over 32
steps, hidden sizes 16 to 512, one and two layers): a gradient sums as many roundings of 4e-3 as it has steps.
A gate without its gradient, or a step left out, is off by 0.1 to 1.
"""
Gradients = Sequence[Tensor | None]
MIDDLE = STEPS // 2


def _module(policy: PolicyCopy) -> LSTMWrapper:
    return cast("LSTMWrapper", policy.adapter.module)


def random_state(policy: PolicyCopy) -> TensorDict:
    """Draw a state that is not zero."""
    generator = torch.Generator().manual_seed(2)
    state = _module(policy).lstm.cell.initial(AGENTS)
    return cast("TensorDict", state.apply(lambda leaf: torch.rand(leaf.shape, generator=generator).to(leaf) - 0.5))


def same_gradients(what: str, actual: Gradients, expected: Gradients, path: str, kind: torch.dtype) -> Measurement:
    """Require that gradients are equal to within a share of each tensor's largest entry.

    A tensor below a billionth of the largest is rounding, as for a bias that all actions share.
    """
    largest = max((float(b.abs().max()) for b in expected if b is not None), default=0.0)
    errors = [
        (a - b).abs().max() / b.abs().max().clamp(min=max(1e-9 * largest, torch.finfo(b.dtype).tiny))
        for a, b in zip(actual, expected, strict=True)
        if a is not None and b is not None
    ]
    size = float(torch.stack([error.double() for error in errors]).max())
    finding = f"off by {size:.1e} of the largest entry"
    return Measurement(what, size, GRADIENT_BOUND[kind], finding=finding, path=path)


def cell_agrees(policy: PolicyCopy) -> Iterator[Measurement]:
    """Compare the policy's cell with its step-by-step reference, gradients included."""
    cell = _module(policy).lstm.cell
    kernels = _kernels(cell, policy)
    if not kernels:
        yield from _compare_with_reference(cell, policy, SHORT[policy.kind])
    for kernel in kernels:
        use_kernel(cell, kernel)
        try:
            yield from _compare_with_reference(cell, policy, f"{kernel}, {SHORT[policy.kind]}")
        finally:
            use_kernel(cell, "auto")


def _kernels(cell: Cell, policy: PolicyCopy) -> tuple[Kernel, ...]:
    """Return both kernels if a GPU may choose between them: both are measured, whichever it would choose."""
    stacks = [module for module in cell.modules() if isinstance(module, StackedRNN)]
    free_choice = bool(stacks) and all(
        stack.kernel == "auto" and refusal(policy.device, stack.hidden_size) is None for stack in stacks
    )
    return ("torch", "triton") if free_choice and policy.device.type == "cuda" else ()


def _compare_with_reference(cell: Cell, policy: PolicyCopy, suffix: str) -> Iterator[Measurement]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(AGENTS, STEPS, cell.input_size, generator=generator).to(policy.device, policy.dtype)
    clear = (torch.rand(AGENTS, STEPS, generator=generator) < 0.12).to(policy.device)
    output_weights = torch.randn(AGENTS, STEPS, cell.hidden_size, generator=generator).to(x)
    state, inputs = random_state(policy), [x.requires_grad_(), *cell.parameters()]
    precision = "bfloat16" if policy.kind == torch.bfloat16 else "float32"
    outputs, ends, gradients = [], [], []
    with torch.enable_grad():
        for call in (cell, cell.reference_forward):
            with autocast(precision, policy.device):
                y, end = call(x, state, clear)
            outputs.append(to_float32(y))
            ends.append(end)
            gradients.append(torch.autograd.grad((outputs[-1] * output_weights).sum(), inputs))
    bound = BOUND[policy.kind]
    yield expect_close(f"cell against its reference, {suffix}", outputs[0], outputs[1], bound, path="cell")
    for key in ends[0].keys():  # noqa: SIM118
        yield expect_close(f"its state, {suffix}", ends[0][key], ends[1][key], bound, path="cell")
    yield same_gradients(f"its gradients, {suffix}", gradients[0], gradients[1], "cell", policy.kind)


def run_by_hand(
    policy: PolicyCopy,
    script: Script,
    *,
    steps_a_call: int = 1,
    flags: Any = "first",
    slices: Sequence[tuple[int, int]] = ((0, AGENTS),),
    start: int = 0,
    stop: int = STEPS,
    weights: dict[str, Tensor] | None = None,
    module: LSTMWrapper | None = None,
) -> Float[Tensor, "A N K"]:
    """Call the policy over its live store, `steps_a_call` steps at a time, slice by slice."""
    module, adapter = module or _module(policy), cast("HoldfastPolicy", policy.adapter)
    script, outputs = policy.to_policy(script), []
    with policy.default_dtype():
        for t in range(start, stop, steps_a_call):
            rows = []
            for begin, length in slices:
                batch = script.step_batches(t, t + steps_a_call)[begin : begin + length]
                td = adapter.as_td(batch[:, 0] if steps_a_call == 1 else batch, begin, flags)
                td = module(td) if weights is None else functional_call(module, weights, (td,))
                rows.append(adapter.outputs(td).reshape(length, steps_a_call, -1))
            outputs.append(torch.cat(rows))
    return torch.cat(outputs, dim=1).cpu()


def _run_from_initial(policy: PolicyCopy, script: Script, **options: Any) -> Float[Tensor, "A N K"]:
    _module(policy).store.close()
    with torch.no_grad():
        return run_by_hand(policy, script, **options)


def cut(context: "CheckContext") -> list[Measurement]:
    """No gradient crosses from one call over the live store to another, nor into a replay's entry state."""
    policy, script, parts = context.exact, context.script, []
    module = _module(policy)
    for steps in (1, HORIZON):
        module.store.close()
        outputs, copies = [], list[list[Tensor]]()
        with torch.enable_grad():
            for t in range(0, 2 * HORIZON, steps):
                weights = {name: leaf.clone().requires_grad_() for name, leaf in module.named_parameters()}
                calls = run_by_hand(policy, script, steps_a_call=steps, start=t, stop=t + steps, weights=weights)
                outputs.append(calls)
                copies.append(list(weights.values()))
        worst = torch.zeros(len(outputs))
        for at in range(1, len(outputs)):
            earlier = [weight for weights in copies[:at] for weight in weights]
            gradients = torch.autograd.grad(outputs[at].sum(), earlier, retain_graph=True, allow_unused=True)
            worst[at] = max(map(_largest, gradients))
        parts.append(expect_zero(f"gradient across live calls of {steps}", worst, "call", path="act into act"))
    return [*parts, _gradient_into_entry(context)]


def _gradient_into_entry(context: "CheckContext") -> Measurement:
    policy = context.exact
    entry = random_state(policy)
    inputs = [cast("Tensor", leaf).requires_grad_() for leaf in entry.values()]
    batch = policy.to_policy(context.script).step_batches(HORIZON, 2 * HORIZON)
    with torch.enable_grad(), policy.default_dtype():
        outputs = policy.adapter.replay(batch, entry)
        loss = torch.stack([leaf.sum() for leaf in outputs.values()]).sum()
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True) if inputs else ()
    sizes = torch.tensor([_largest(gradient) for gradient in gradients])
    return expect_zero("gradient into a replay's entry state", sizes, "tensor", path="entry")


def _largest(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.abs().max())


def clear(context: "CheckContext") -> list[Measurement]:
    """No information crosses a start, whatever key carries it and however many steps a call has."""
    if context.adapter.clear_on == "never":
        return []
    before = context.before_last_clear
    changed, parts = context.script.changed(before), []
    for flags in ("first", "dones", "truncateds"):
        for dtype, policy in context.copies.items():
            for steps in (1, HORIZON):
                actual, expected = (
                    _run_from_initial(policy, script, steps_a_call=steps, flags=flags)
                    for script in (changed, context.script)
                )
                diff = (actual - expected) * ~before[:, :STEPS, None]
                what = f"information across starts given by {flags}, live calls of {steps}, {SHORT[dtype]}"
                parts.append(expect_zero(what, diff, *AXES, columns=context.columns, path=flags))
    return parts


def isolate(context: "CheckContext") -> list[Measurement]:
    """Two slices of agents have separate states."""
    actual, expected = run_in_slices(context), _run_from_initial(context.exact, context.script)
    bound, columns = BOUND[context.exact.kind], context.columns
    return [expect_close("agents in two slices", actual, expected, bound, columns=columns, path="slices")]


def run_in_slices(context: "CheckContext") -> Float[Tensor, "A N K"]:
    """Run two halves of the agents in turns."""
    half = AGENTS // 2
    return _run_from_initial(context.exact, context.script, slices=((0, half), (half, AGENTS - half)))


def pure(context: "CheckContext") -> list[Measurement]:
    """Bootstrap values, replays and evaluations leave the live state alone."""
    policy, script = context.exact, context.exact.to_policy(context.script)
    module, entry = _module(policy), dict(random_state(policy).items())
    _run_from_initial(policy, script, stop=MIDDLE)
    before = _live_state(module)
    with torch.no_grad(), policy.default_dtype():
        policy.adapter.value(script.at(MIDDLE), entry)
        policy.adapter.replay(script.step_batches(HORIZON, 2 * HORIZON), entry)
        after = _live_state(module)
        policy.adapter.evaluate(script)
    last = _live_state(module)
    diff = torch.tensor([float((after[key] - before[key]).abs().max()) for key in before])
    changed = sum(key not in last or not last[key].equal(after[key]) for key in after)
    finding = f"{changed} of {len(after)} tensors differ after an evaluation"
    what, path = "live state after an evaluation", "state after evaluation"
    return [
        expect_zero("live state after bootstrap values and replays", diff, "tensor", path="bootstrap"),
        Measurement(what, float(changed), 0.0, finding=finding, path=path),
    ]


def restore(context: "CheckContext") -> list[Measurement]:
    """A copy with the live state of another continues with the same outputs."""
    policy, script = context.exact, context.script
    module, expected = _module(policy), _run_from_initial(context.exact, context.script)
    _run_from_initial(policy, script, stop=MIDDLE)
    from_memory, from_snapshot = (copy.deepcopy(module) for _ in range(2))
    from_memory.set_memory(module.get_memory())
    from_snapshot.store.restore(module.store.snapshot())
    parts = []
    for path, what, restored in (
        ("get_memory", "outputs after set_memory", from_memory),
        ("snapshot", "outputs after a snapshot", from_snapshot),
    ):
        with torch.no_grad():
            actual = run_by_hand(policy, script, start=MIDDLE, module=restored)
        diff, axes = actual - expected[:, MIDDLE:], ("agent", "step after it")
        parts.append(expect_zero(what, diff, *axes, columns=context.columns, path=path))
    return parts


def _live_state(module: LSTMWrapper) -> dict[str, Tensor]:
    """Return the live state, by tensor and slice."""
    tensors = enumerate(module.get_memory())
    return {f"{at} {start}": leaf for at, leaves in tensors for start, leaf in leaves.items()}


def agree(context: "CheckContext") -> list[Measurement]:
    """Live calls over segments, compiled parts and the reference cell give the same outputs."""
    parts, script = [], context.script
    for dtype, policy in context.copies.items():
        actual, expected = (_run_from_initial(policy, script, steps_a_call=steps) for steps in (HORIZON, 1))
        what, columns = f"live segments against steps, {SHORT[dtype]}", context.columns
        parts.append(expect_close(what, actual, expected, BOUND[dtype], columns=columns, path="live segments"))
        parts += cell_agrees(policy)
    if isinstance(_module(context.exact), FunctionalPolicy):
        parts += _compiled_agrees(context.exact, script)
    return parts


def _compiled_agrees(policy: PolicyCopy, script: Script) -> Iterator[Measurement]:
    """Compare a policy with compiled parts with the eager one, gradients included."""
    eager = cast("FunctionalPolicy", policy.adapter.module)
    compiled = copy.deepcopy(eager)
    # Reset, because torch.compile falls back to eager after many recompilations.
    torch.compiler.reset()
    compiled.compile_parts(backend="aot_eager")
    outputs, gradients = [], []
    for module in (compiled, eager):
        module.store.close()
        with torch.enable_grad():
            outputs.append(run_by_hand(policy, script, steps_a_call=HORIZON, module=module))
            weights = list(module.parameters())
            gradients.append(torch.autograd.grad(outputs[-1].square().sum(), weights, allow_unused=True))
    suffix = f"compiled against eager, {SHORT[policy.kind]}"
    yield expect_close(f"outputs {suffix}", outputs[0], outputs[1], BOUND[policy.kind], path="compiled")
    yield same_gradients(f"gradients {suffix}", gradients[0], gradients[1], "compiled", policy.kind)


OF_LAW: dict[str, Callable[["CheckContext"], list[Measurement]]] = {
    "cut": cut,
    "clear": clear,
    "isolate": isolate,
    "pure": pure,
    "restore": restore,
    "agree": agree,
}
"""Measurements in addition to those of every policy, by law."""
