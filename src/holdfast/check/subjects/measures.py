"""What only Holdfast's own policies have: a live store, compiled parts, a cell with a reference."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.func import functional_call

from holdfast.check.case import AGENTS, HORIZON, STEPS, Case
from holdfast.check.compare import BOUND, SHORT, close, nothing
from holdfast.check.results import Measurement
from holdfast.check.script import Script
from holdfast.check.subjects.cell import cell_agrees, random_state, same_gradients
from holdfast.policies import LSTMWrapper, PurePolicy
from holdfast.shapes import Float, Tensor

if TYPE_CHECKING:
    from holdfast.check.bench import Bench
    from holdfast.check.subjects.wrapper import Wrapped

MIDDLE = STEPS // 2


def _policy(case: Case) -> LSTMWrapper:
    return cast("LSTMWrapper", case.subject.module)


def live_by_hand(
    case: Case,
    script: Script,
    *,
    steps_a_call: int = 1,
    flags: Any = "first",
    slices: Sequence[tuple[int, int]] = ((0, AGENTS),),
    start: int = 0,
    stop: int = STEPS,
    weights: dict[str, Tensor] | None = None,
    policy: LSTMWrapper | None = None,
) -> Float[Tensor, "A N K"]:
    """Call the policy over its live store, `steps_a_call` steps at a time, slice by slice."""
    policy, subject = policy or _policy(case), cast("Wrapped", case.subject)
    script, outputs = case.shown(script), []
    with case.precisely():
        for t in range(start, stop, steps_a_call):
            rows = []
            for begin, length in slices:
                moments = script.moments(t, t + steps_a_call)[begin : begin + length]
                td = subject.as_td(moments[:, 0] if steps_a_call == 1 else moments, begin, flags)
                told = policy(td) if weights is None else functional_call(policy, weights, (td,))
                rows.append(subject.said(told).reshape(length, steps_a_call, -1))
            outputs.append(torch.cat(rows))
    return torch.cat(outputs, dim=1).cpu()


def _from_nothing(case: Case, script: Script, **how: Any) -> Float[Tensor, "A N K"]:
    _policy(case).store.close()
    with torch.no_grad():
        return live_by_hand(case, script, **how)


def cut(bench: "Bench") -> list[Measurement]:
    """No gradient crosses from one call over the live store to another, nor into a replay's entry state."""
    case, parts = bench.proof, []
    policy = _policy(case)
    for steps in (1, HORIZON):
        policy.store.close()
        outputs, copies = [], list[list[Tensor]]()
        with torch.enable_grad():
            for t in range(0, 2 * HORIZON, steps):
                weights = {name: leaf.clone().requires_grad_() for name, leaf in policy.named_parameters()}
                how: dict[str, Any] = {
                    "steps_a_call": steps,
                    "start": t,
                    "stop": t + steps,
                    "weights": weights,
                }
                outputs.append(live_by_hand(case, bench.script, **how))
                copies.append(list(weights.values()))
        worst = torch.zeros(len(outputs))
        for at in range(1, len(outputs)):
            earlier = [weight for weights in copies[:at] for weight in weights]
            pulls = torch.autograd.grad(outputs[at].sum(), earlier, retain_graph=True, allow_unused=True)
            worst[at] = max(0.0 if pull is None else float(pull.abs().max()) for pull in pulls)
        parts.append(nothing(f"gradient across live calls of {steps}", worst, "call", about="act into act"))
    parts.append(_pull_on_entry(bench))
    return parts


def _pull_on_entry(bench: "Bench") -> Measurement:
    case = bench.proof
    entry = random_state(case)
    pulled = [cast("Tensor", leaf).requires_grad_() for leaf in entry.values()]
    shown = case.shown(bench.script).moments(HORIZON, 2 * HORIZON)
    with torch.enable_grad(), case.precisely():
        said = case.subject.replay(shown, entry)
        loss = torch.stack([leaf.sum() for leaf in said.values()]).sum()
        pulls = torch.autograd.grad(loss, pulled, allow_unused=True) if pulled else ()
    sizes = torch.tensor([0.0 if pull is None else float(pull.abs().max()) for pull in pulls])
    return nothing("gradient into a replay's entry state", sizes, "tensor", about="entry")


def clear(bench: "Bench") -> list[Measurement]:
    """Whatever flag tells of a start, and however many steps a call has, nothing crosses it."""
    if bench.subject.clear_on == "never":
        return []
    last = torch.stack([row[:STEPS].nonzero().max() for row in bench.clears])
    before = torch.arange(STEPS + 1)[None] < last[:, None]
    changed, parts = bench.script.changed(before), []
    for flags in ("first", "dones", "truncateds"):
        for dtype, case in bench.cases.items():
            for steps in (1, HORIZON):
                how = {"steps_a_call": steps, "flags": flags}
                moved = _from_nothing(case, changed, **how) - _from_nothing(case, bench.script, **how)
                what = f"information across starts told by {flags}, live calls of {steps}, {SHORT[dtype]}"
                moved = moved * ~before[:, :STEPS, None]
                parts.append(nothing(what, moved, "agent", "step", columns=bench.columns, about=flags))
    return parts


def isolate(bench: "Bench") -> list[Measurement]:
    """Two slices of agents have memories of their own."""
    whole, bound = _from_nothing(bench.proof, bench.script), BOUND[bench.proof.kind]
    sliced = served_in_slices(bench)
    return [close("served in two slices", sliced, whole, bound, columns=bench.columns, about="slices")]


def served_in_slices(bench: "Bench") -> Float[Tensor, "A N K"]:
    """Let two halves of the agents act in turns."""
    half = AGENTS // 2
    return _from_nothing(bench.proof, bench.script, slices=((0, half), (half, AGENTS - half)))


def pure(bench: "Bench") -> list[Measurement]:
    """Asking for values and replaying leave the live memories alone."""
    case, script = bench.proof, bench.proof.shown(bench.script)
    policy, entry = _policy(case), dict(random_state(case).items())
    _from_nothing(case, script, stop=MIDDLE)
    before = _memory_of(policy)
    with torch.no_grad(), case.precisely():
        case.subject.value(script.at(MIDDLE), entry)
        case.subject.replay(script.moments(HORIZON, 2 * HORIZON), entry)
    after = _memory_of(policy)
    moved = torch.tensor([float((after[key] - before[key]).abs().max()) for key in before])
    with torch.no_grad(), case.precisely():
        case.subject.evaluate(script)
    last = _memory_of(policy)
    touched = sum(key not in last or not last[key].equal(after[key]) for key in after)
    told = f"{touched} of {len(after)} tensors are not what they were before an evaluation"
    return [
        nothing("live memories after asking for values", moved, "tensor", about="asked"),
        Measurement(
            "live memories after an evaluation", float(touched), 0.0, finding=told, about="evaluation"
        ),
    ]


def restore(bench: "Bench") -> list[Measurement]:
    """Memories taken from the live store and put into another go on as if never stopped."""
    case, script = bench.proof, bench.script
    policy, whole = _policy(case), _from_nothing(bench.proof, bench.script)
    _from_nothing(case, script, stop=MIDDLE)
    others = [copy.deepcopy(policy) for _ in range(2)]
    others[0].set_memory(policy.get_memory())
    others[1].store.restore(policy.store.snapshot())
    parts = []
    for about, what, other in zip(
        ("get_memory", "snapshot"),
        ("outputs after set_memory", "outputs after a snapshot"),
        others,
        strict=True,
    ):
        with torch.no_grad():
            rest = live_by_hand(case, script, start=MIDDLE, policy=other)
        moved = rest - whole[:, MIDDLE:]
        parts.append(nothing(what, moved, "agent", "step after it", columns=bench.columns, about=about))
    return parts


def _memory_of(policy: LSTMWrapper) -> dict[str, Tensor]:
    """Copy the live memories: which part, which slice."""
    parts = enumerate(policy.get_memory())
    return {f"{part} {start}": leaf for part, leaves in parts for start, leaf in leaves.items()}


def agree(bench: "Bench") -> list[Measurement]:
    """Live calls over segments, compiled parts and the plain cell give the same."""
    parts = []
    for dtype, case in bench.cases.items():
        now, was = _from_nothing(case, bench.script, steps_a_call=HORIZON), _from_nothing(case, bench.script)
        what = f"live segments as steps, {SHORT[dtype]}"
        parts.append(close(what, now, was, BOUND[dtype], columns=bench.columns, about="live segments"))
        parts += cell_agrees(case)
    if isinstance(_policy(bench.proof), PurePolicy):
        parts += _compiled_agrees(bench.proof, bench.script)
    return parts


def _compiled_agrees(case: Case, script: Script) -> Iterator[Measurement]:
    """Hold a policy with compiled parts against itself, gradients included."""
    eager = cast("PurePolicy", case.subject.module)
    compiled = copy.deepcopy(eager)
    # A compiler that has seen many policies gives up and runs them as they are: it begins anew.
    torch.compiler.reset()
    compiled.compile_parts(backend="aot_eager")
    outputs, gradients = [], []
    for each in (eager, compiled):
        each.store.close()
        with torch.enable_grad():
            outputs.append(live_by_hand(case, script, steps_a_call=HORIZON, policy=each))
            weights = list(each.parameters())
            gradients.append(torch.autograd.grad(outputs[-1].square().sum(), weights, allow_unused=True))
    yield close(
        f"compiled as eager, {SHORT[case.kind]}", outputs[1], outputs[0], BOUND[case.kind], about="compiled"
    )
    yield same_gradients(
        f"gradients compiled as eager, {SHORT[case.kind]}", gradients[1], gradients[0], "compiled", case.kind
    )


OF_LAW: dict[str, Callable[["Bench"], list[Measurement]]] = {
    "cut": cut,
    "clear": clear,
    "isolate": isolate,
    "pure": pure,
    "restore": restore,
    "agree": agree,
}
"""What is measured in addition to what the check measures on everybody."""
