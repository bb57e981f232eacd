"""The nine laws of memory, measured on a policy. Proof in float64, practice as it is trained."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from holdfast.check import flow, state
from holdfast.check.bench import Bench, set_up
from holdfast.check.compare import SHORT
from holdfast.check.conditions import Conditions
from holdfast.check.diagnose import diagnose
from holdfast.check.results import Law, Laws, Measurement, Reach
from holdfast.check.subject import Subject
from holdfast.check.subjects.find import subject_of
from holdfast.errors import HoldfastError
from holdfast.memory import Kernel
from holdfast.memory.products import products
from holdfast.policies.precision import Precision
from holdfast.worlds import World

LAWS: dict[str, Callable[[Bench], list[Measurement]]] = {
    "cut": flow.cut,
    "carry": flow.carry,
    "clear": flow.clear,
    "replay": state.replays,
    "isolate": flow.isolate,
    "pure": state.pure,
    "bounded": state.bounded,
    "restore": state.restore,
    "agree": state.agree,
}

EXACT = ("cut", "pure", "restore")


def check(
    policy: Any,
    world: World | None = None,
    *,
    device: str = "cpu",
    precision: Precision | None = None,
    kernel: Kernel | None = None,
    **options: Any,
) -> Laws:
    """Measure every law of memory on anybody's recurrent policy; `laws.ok` says whether all hold.

    The policy is copied, not touched: a name, a Holdfast policy (`world` is the one it was built for,
    `recall` by default), a module `(x, state) -> (y, state)`, a CleanRL-style agent, a PufferLib,
    sb3-contrib or TorchRL policy, or a `Subject`. `options` go to the adapter: `obs=(4,)` or a
    Gymnasium space says what a foreign policy sees.

    `device`, `precision` and `kernel` say where Holdfast's own policies are measured, what their layers
    compute in, and what runs their LSTM or GRU; left out, on the CPU and as the policy is.
    """
    return examine(subject_of(policy, world, **options), conditions=Conditions(device, precision, kernel))


def examine(
    subject: Subject,
    tell: Callable[[str], None] = lambda doing: None,
    *,
    conditions: Conditions | None = None,
) -> Laws:
    """Measure every law on a subject, look for what explains broken ones, and tell what is being done."""
    with _calmly():
        tell("meeting the policy")
        bench = set_up(subject, conditions)
        found: list[Law] = []
        for number, name in enumerate(LAWS, 1):
            tell(f"measuring {name} ({number} of {len(LAWS)})")
            found += measure(bench, [name])
        tell("looking for the cause")
        found = diagnose(bench, found)
        return Laws(found, notes=_notes(bench), reach=reach_of(bench, found))


@contextmanager
def _calmly() -> Iterator[None]:
    """Measure by one thread, and let float32 be float32; put back what was before."""
    threads = torch.get_num_threads()
    # Small products on two busy cores can be thirty times slower than on one.
    torch.set_num_threads(1)
    try:
        with products(tf32=False), warnings.catch_warnings():
            # Copies of weights lie apart: on a GPU that costs time, and nothing else.
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
            yield
    finally:
        torch.set_num_threads(threads)


def _notes(bench: Bench) -> tuple[str, ...]:
    blind = "gradients from step to step were not measured: observations are whole numbers"
    unknown = "gradient" not in vars(bench)
    return bench.notes if unknown or bench.gradient is not None else (*bench.notes, blind)


def measure(bench: Bench, names: Iterable[str] = tuple(LAWS)) -> Iterator[Law]:
    """Measure law by law, so that somebody can watch or ask for some laws only."""
    for name in names:
        try:
            parts = [*LAWS[name](bench), *bench.subject.beyond(name, bench)]
            parts += _in_practice(name, bench)
        except Exception as error:
            told = " ".join(str(error).split())[:300]
            if not isinstance(error, HoldfastError):
                told = f"the policy raised {type(error).__name__}: {told}"
            parts = [Measurement(f"measuring {name}", float("inf"), 0.0, finding=told, about="raised")]
        yield Law(name, parts)


def _in_practice(name: str, bench: Bench) -> Iterator[Measurement]:
    """Measure laws that are exact in any precision on practice too, where other kernels run there."""
    practised = bench.practised
    if practised is not None and name in EXACT:
        for part in [*LAWS[name](practised), *practised.subject.beyond(name, practised)]:
            yield replace(part, what=f"{part.what}, {SHORT[practised.practice.kind]}")


def reach_of(bench: Bench, laws: Iterable[Law]) -> Reach | None:
    """Gather the arrays for pictures, unless the policy raised while they were measured."""
    raised = any(part.about == "raised" for law in laws for part in law.parts)
    return None if raised else bench.reach()
