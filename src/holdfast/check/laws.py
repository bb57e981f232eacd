"""Run the laws: the ten of memory on a policy in float64 and in training precision, the nine of a world."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from holdfast.check.adapters import adapt
from holdfast.check.adapters.base import PolicyAdapter
from holdfast.check.compare import SHORT
from holdfast.check.context import CheckContext, prepare
from holdfast.check.diagnose import diagnose
from holdfast.check.flow_laws import carry, clear, cut, isolate
from holdfast.check.preflight import Conditions
from holdfast.check.results import Law, Laws, Measurement, Reach, not_measured
from holdfast.check.shard import shard
from holdfast.check.state_laws import agree, bounded, pure, replay, restore
from holdfast.check.world_laws import WORLD_LAWS
from holdfast.check.world_recording import Make, WorldUnderTest
from holdfast.errors import ConfigError, HoldfastError, one_line
from holdfast.memory import Kernel
from holdfast.policies.recurrent_policy import Precision
from holdfast.torch_versions import matmul_precision
from holdfast.worlds import World, closing_world, make_world

OnProgress = Callable[[str], None]

LAWS: dict[str, Callable[[CheckContext], list[Measurement]]] = {
    law.__name__: law for law in (cut, carry, clear, replay, isolate, pure, bounded, restore, agree, shard)
}
EXACT = ("cut", "pure", "restore")
"""Laws with bound 0 in any precision."""


def check(
    policy: Any,
    world: World | None = None,
    *,
    device: str = "cpu",
    precision: Precision | None = None,
    kernel: Kernel | None = None,
    **options: Any,
) -> Laws:
    """Measure the ten laws of memory on a recurrent policy; `laws.ok` is true if all hold.

    The policy is copied, never modified: a name, a Holdfast policy (`world` is the one it was built for, `recall` by
    default), a module `(x, state) -> (y, state)`, a CleanRL-style agent, a PufferLib, sb3-contrib or TorchRL policy,
    or a `PolicyAdapter`. `options` go to the adapter: `obs=(4,)` or a Gymnasium space is the observation space of a
    policy from another library.

    `device`, `precision` and `kernel` apply to Holdfast policies: the device, the dtype their layers compute in, and
    the kernel of their LSTM or GRU; by default the CPU and the policy's own.
    """
    return run_laws(adapt(policy, world, **options), conditions=Conditions(device, precision, kernel))


def run_laws(
    adapter: PolicyAdapter, on_progress: OnProgress = lambda doing: None, *, conditions: Conditions | None = None
) -> Laws:
    """Measure every law of memory, and diagnose the broken ones."""
    with one_thread(), matmul_precision(tf32=False), warnings.catch_warnings():
        # Copies of weights are not contiguous: slower on a GPU, without effect on results.
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        on_progress("preparing copies of the policy")
        context = prepare(adapter, conditions)
        laws: list[Law] = []
        for number, name in enumerate(LAWS, 1):
            on_progress(f"measuring {name} ({number} of {len(LAWS)})")
            laws += measure(context, [name])
        on_progress("diagnosing")
        laws = diagnose(context, laws)
        return Laws(laws, notes=_notes(context), reach=reach_of(context, laws))


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: small products on two busy cores can be thirty times slower than on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _notes(context: CheckContext) -> tuple[str, ...]:
    if "gradient" in vars(context) and context.gradient is None:
        return (*context.notes, "gradients from step to step were not measured: observations are integers")
    return context.notes


def measure(context: CheckContext, names: Iterable[str] = tuple(LAWS)) -> Iterator[Law]:
    """Measure laws one by one; a policy that raises breaks the law."""
    for name in names:
        try:
            parts = [*LAWS[name](context), *context.adapter.extra_measurements(name, context)]
            trained = context.as_trained_context
            if trained is not None and name in EXACT:
                suffix = SHORT[trained.as_trained.kind]
                extra = [*LAWS[name](trained), *trained.adapter.extra_measurements(name, trained)]
                parts += [replace(part, what=f"{part.what}, {suffix}") for part in extra]
        except Exception as error:
            parts = [_raised(name, error, "the policy raised ")]
        yield Law(name, parts)


def _raised(name: str, error: Exception, culprit: str = "") -> Measurement:
    """Return the measurement of a law during which a policy or world raised."""
    finding = one_line(error, 300)
    if not isinstance(error, HoldfastError):
        finding = f"{culprit}{type(error).__name__}: {finding}"
    return Measurement(f"measuring {name}", float("inf"), finding=finding, path="raised")


def reach_of(context: CheckContext, laws: Iterable[Law]) -> Reach | None:
    """Collect the arrays for plots, unless the policy raised."""
    raised = any(part.path == "raised" for law in laws for part in law.parts)
    return None if raised else context.reach()


def check_world(
    world: Make | str, *, agents: int | None = None, steps: int | None = None, seed: int = 0, **options: Any
) -> Laws:
    """Measure the nine laws of a world; `laws.ok` is true if all hold.

    `world` is a class called as `Class(agents, seed=seed, **options)`, a function `make(agents, seed) -> World`, or
    the name of a world with its options: `check_world("recall", delay=4)`. It is made about a dozen times, for 24
    agents or two environments unless `agents` is given, and stepped with scripted actions until every agent ended
    some episodes, within 1,024 steps and a time limit, or for exactly `steps` steps.
    """
    return run_world_laws(WorldUnderTest(_maker(world, options), agents, steps, seed))


def _maker(world: Make | str, options: dict[str, Any]) -> Make:
    if isinstance(world, str):
        return lambda agents, seed: make_world(world, agents=agents, seed=seed, **options)
    if isinstance(world, type):
        return lambda agents, seed: world(agents, seed=seed, **options)
    if not callable(world):
        raise ConfigError(f"{world!r} is an instance; give its class, or a function that makes one.")
    if options:
        raise ConfigError(f"{', '.join(options)}: options go with a world's name; a function has its own.")
    return world


def run_world_laws(target: WorldUnderTest, on_progress: OnProgress = lambda doing: None) -> Laws:
    """Measure every law of a world."""
    with one_thread():
        on_progress("making the world")
        with closing_world(target.world):
            on_progress("recording")
            steps, laws = len(target.recording.actions), []
            for number, name in enumerate(WORLD_LAWS, 1):
                on_progress(f"measuring {name} ({number} of {len(WORLD_LAWS)}), {steps} steps a recording")
                laws.append(Law(name, _measure_world(target, name), diagnosed=False))
            return Laws(laws, notes=_world_notes(target, laws), of="a world")


def _measure_world(target: WorldUnderTest, name: str) -> list[Measurement]:
    """Measure one law; a world that raises in it breaks it."""
    if name != "kind" and (target.recording.unreadable or not target.recording.steps):
        return [not_measured("nothing, since kind is broken", "fix kind first")]
    try:
        return WORLD_LAWS[name](target)
    except Exception as error:
        return [_raised(name, error)]


def _world_notes(target: WorldUnderTest, laws: list[Law]) -> list[str]:
    """Summarize the recording, and give advice on what could not be measured."""
    recording = target.recording
    if not recording.steps:
        return []
    ended, truncated = int(recording.ended.sum()), int(recording["truncated"].sum())
    size = f"{target.world.agents} agents, {len(recording.actions)} steps"
    summary = f"{size}; {ended} episodes ended, {truncated} by truncation"
    advice = [
        f"{law.name}: {part.what}; {part.finding}"
        for law in laws
        for part in law.parts
        if part.path == "n/a" and part.finding and not recording.unreadable
    ]
    return [summary, *dict.fromkeys(advice)]
