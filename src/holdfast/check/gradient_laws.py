"""Gradients of a segment: against those of single steps, finite differences, and what each parameter gets."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from holdfast.check.compare import SHORT, State, clone_state, state_leaves
from holdfast.check.context import CheckContext
from holdfast.check.policy_copy import HORIZON, STEPS, PolicyCopy
from holdfast.check.results import Measurement
from holdfast.check.script import StepBatch
from holdfast.types import Tensor

EPSILON = 1e-6
TOLERANCE = 5e-3
"""Largest relative error of a gradient against finite differences in float64, which are exact to about 1e-8."""
SUM_TOLERANCE = 1e-5
"""Largest relative error of all gradients together, above which parameters are compared one by one."""
NOISE = 1e-5
"""Differences below this share of the largest are rounding."""
AT = (0, 4, 9, 14, 18, 23, 27, 31)
"""The step at which the observation of each agent is moved; gradients are taken of the outputs of these steps."""
STEPPED = {"round", "floor", "ceil", "trunc", "sign", "heaviside", "gt", "lt", "ge", "le", "argmax", "argmin", "topk"}
STEPPED |= {f"__{name}__" for name in ("gt", "lt", "ge", "le", "bool", "int", "float")} | {"bernoulli", "multinomial"}
STEPPED |= {"bincount", "one_hot", "searchsorted", "bucketize", "long", "int", "round_", "floor_", "sign_", "sort"}


class _FindsSteps(TorchFunctionMode):
    """Notes functions that are constant between jumps, applied to what has a gradient."""

    stepped = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in STEPPED and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in args):
            self.stepped = True
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Segment:
    """One segment of 32 steps and its entry state."""

    policy: PolicyCopy
    batch: StepBatch
    entry: State | None
    """None: the policy's initial state, made anew for every call, because it may be learned."""

    def outputs(self, batch: StepBatch | None = None) -> dict[str, Tensor]:
        """Replay it; each output as `[B,T,k]`."""
        adapter = self.policy.adapter
        entry = adapter.initial(len(self.batch.first)) if self.entry is None else clone_state(self.entry)
        outputs = adapter.replay(batch or self.batch, entry)
        return {name: leaf.reshape(*self.batch.first.shape, -1) for name, leaf in outputs.items()}

    @cached_property
    def is_smooth(self) -> bool:
        """Whether no part of it is constant between jumps, as rounding and hard gates are."""
        with torch.enable_grad(), self.policy.default_dtype(), _FindsSteps() as mode:
            batch = self.batch
            if batch.obs.is_floating_point():
                batch = replace(batch, obs=batch.obs.clone().requires_grad_())
            self.outputs(batch)
        return not mode.stepped


def segment_gradients(context: CheckContext) -> list[Measurement]:
    """All gradients of a segment of 32 steps: to earlier observations, to parameters, of hand-written functions."""
    policy = context.exact
    if policy.dtype != torch.float64 or policy.has_no_memory:
        return []
    inputs = policy.to_policy(context.script)
    few = torch.arange(2 if _is_large(context) else 8)
    all_steps = Segment(policy, inputs.step_batches(0, STEPS)[few], None)
    _, states = policy.steps(context.script.without_flags(), stop=HORIZON)
    carried = Segment(policy, inputs.without_flags().step_batches(0, STEPS)[few], policy.rows.pick(states[-1], few))
    parts = _hand_written(policy, replace(all_steps, batch=all_steps.batch[:, :4]))
    return [*parts, *_to_observations(carried), *_of_single_steps(all_steps), *_to_parameters(all_steps)]


def is_smooth(context: CheckContext) -> bool:
    """Whether no part of a replay is constant between jumps."""
    inputs = context.exact.to_policy(context.script)
    return Segment(context.exact, inputs.step_batches(0, HORIZON), None).is_smooth


def _is_large(context: CheckContext) -> bool:
    return context.script.obs[0, 0].numel() > 1000


def _weighted(leaf: Tensor) -> Tensor:
    """Sum the last axis with different weights."""
    weights = torch.linspace(0.6, 1.4, leaf.shape[-1], dtype=leaf.dtype)
    return (leaf * weights).sum(-1)


def _parameters(policy: PolicyCopy) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in policy.adapter.module.named_parameters() if leaf.requires_grad}


def _of_single_steps(segment: Segment) -> list[Measurement]:
    """Compare gradients of a segment with those of a chain of single steps, if their states have a graph."""
    policy, batch, weights = segment.policy, segment.batch, _parameters(segment.policy)
    adapter, losses = policy.adapter, []
    if not weights or not adapter.reads_segments:
        return []
    with torch.enable_grad(), policy.default_dtype():
        state, chain = adapter.initial(len(batch.first)), list[Tensor]()
        for t in range(batch.batch[1]):
            outputs, state = adapter.act(batch[:, t], state)
            chain += [_weighted(leaf.reshape(len(leaf), -1)).sum() for leaf in outputs.values()]
            floating = [leaf for leaf in state_leaves(state) if leaf.is_floating_point()]
            if not all(leaf.requires_grad for leaf in floating):
                # Rollouts may detach their states.
                return []
        losses = [torch.stack([_weighted(leaf).sum() for leaf in segment.outputs().values()]).sum(), sum(chain)]
        actual, expected = (
            torch.autograd.grad(loss, list(weights.values()), allow_unused=True, retain_graph=True) for loss in losses
        )
    largest = max((float(leaf.abs().max()) for leaf in expected if leaf is not None), default=0.0)
    worst, which = 0.0, ""
    for name, one, other in zip(weights, actual, expected, strict=True):
        zero = torch.zeros_like(weights[name])
        one, other = zero if one is None else one, zero if other is None else other
        error = float((one - other).abs().max() / other.abs().max().clamp(min=max(1e-7 * largest, 1e-30)))
        if not error <= worst:
            worst, which = error, name
    finding = f"{which} gets another gradient, off by {worst:.1e} of its largest entry"
    what = f"gradients of a segment of {STEPS} against a chain of single steps, {SHORT[policy.kind]}"
    return [Measurement(what, worst, 2e-5, finding=finding, path="chain gradient")]


def _to_observations(segment: Segment) -> list[Measurement]:
    """Compare gradients to earlier observations with finite differences."""
    policy, batch, parts = segment.policy, segment.batch, []
    if not batch.obs.is_floating_point() or not segment.is_smooth:
        return []
    rows, at = torch.arange(len(batch.first)), torch.tensor(AT)[: len(batch.first)]
    direction = torch.zeros_like(batch.obs)
    direction[rows, at] = torch.randn(
        direction[rows, at].shape, generator=torch.Generator().manual_seed(6), dtype=batch.obs.dtype
    )
    with policy.default_dtype():
        plus, minus = (_moved(segment, batch.obs + sign * EPSILON * direction) for sign in (1, -1))
        obs = batch.obs.clone().requires_grad_()
        with torch.enable_grad():
            outputs = segment.outputs(replace(batch, obs=obs))
        for name, leaf in outputs.items():
            differences = _weighted((plus[name] - minus[name]) / (2 * EPSILON))[:, list(AT)]
            actual = torch.zeros_like(differences)
            for column, step in enumerate(AT):
                loss = _weighted(leaf[:, step]).sum()
                if loss.requires_grad:
                    (gradient,) = torch.autograd.grad(loss, obs, retain_graph=True, allow_unused=True)
                    if gradient is not None:
                        actual[:, column] = (gradient * direction).flatten(1).sum(1)
            # What rounding adds to a difference.
            noise = 4 * torch.finfo(leaf.dtype).eps / EPSILON * float(leaf.detach().abs().max())
            parts += _judge(name, actual, differences, at, noise)
    return parts


def _moved(segment: Segment, obs: Tensor) -> dict[str, Tensor]:
    with torch.enable_grad():
        return {name: leaf.detach() for name, leaf in segment.outputs(replace(segment.batch, obs=obs)).items()}


def _judge(name: str, actual: Tensor, expected: Tensor, at: Tensor, noise: float) -> list[Measurement]:
    """Compare gradients `[agent, step]`; an output that sends none at all, even to its own step, is meant so."""
    lag = torch.tensor(AT)[None] - at[:, None]
    scale = expected.abs().max()
    relevant = (expected.abs() > NOISE * scale) & (lag >= 0)
    beyond_noise = ((actual - expected).abs() - noise).clamp(min=0)
    error = torch.where(relevant, beyond_noise / expected.abs().clamp(min=1e-30), 0.0)
    own = error[lag == 0]
    if not bool(relevant.any()) or bool((own > TOLERANCE).any()):
        return []
    later = error * (lag > 0)
    size = float(later.max())
    agent, column = divmod(int(later.argmax()), len(AT))
    cut = bool((actual[later > TOLERANCE] == 0).all())
    finding = (
        f"agent {agent}: the output of step {AT[column]} changes with the observation of step {int(at[agent])}, "
        f"and its gradient is {float(actual[agent, column]):.1e} instead of {float(expected[agent, column]):.1e}"
    )
    what = f"gradient of {name} to earlier observations against finite differences"
    return [Measurement(what, size, TOLERANCE, finding=finding, path="inside" if cut else "gradient of a segment")]


def _to_parameters(segment: Segment) -> list[Measurement]:
    """Compare the gradients of all parameters with finite differences; one by one where they differ."""
    policy, weights = segment.policy, _parameters(segment.policy)
    with policy.default_dtype():
        if not weights or not segment.is_smooth:
            return []
        generator = torch.Generator().manual_seed(7)
        directions = {name: torch.randn(leaf.shape, generator=generator).to(leaf) for name, leaf in weights.items()}
        with torch.enable_grad():
            losses = {name: _weighted(leaf).sum() for name, leaf in segment.outputs().items()}
            gradients = {
                name: torch.autograd.grad(loss, list(weights.values()), retain_graph=True, allow_unused=True)
                if loss.requires_grad
                else (None,) * len(weights)
                for name, loss in losses.items()
            }
        along = {
            output: {
                name: 0.0 if leaf is None else float((leaf * directions[name]).sum())
                for name, leaf in zip(weights, leaves, strict=True)
            }
            for output, leaves in gradients.items()
        }
        together = _differences(segment, weights, directions, list(weights))
        # Strict, because the gradient that one parameter lacks may be a small share of the sum.
        pairs = [(sum(along[name].values()), number) for name, number in together.items()]
        if pairs and all(abs(actual - number) <= SUM_TOLERANCE * abs(number) + 1e-7 for actual, number in pairs):
            return [Measurement("gradients of all parameters against finite differences", 0.0, TOLERANCE)]
        return _each_parameter(segment, weights, directions, along)


def _each_parameter(
    segment: Segment, weights: dict[str, Tensor], directions: dict[str, Tensor], along: dict[str, dict[str, float]]
) -> list[Measurement]:
    scale = max(abs(number) for numbers in along.values() for number in numbers.values())
    parts = []
    for name in weights:
        expected = _differences(segment, weights, directions, [name])
        relevant = [output for output in expected if abs(expected[output]) > NOISE * max(scale, 1e-12)]
        if relevant and all(along[output][name] == 0 for output in relevant):
            finding = f"outputs change with {name}, which requires gradients and gets none"
            what = "parameters without a gradient"
            parts.append(Measurement(what, 1.0, finding=finding, path="no parameter gradient"))
            continue
        for output in relevant:
            actual = along[output][name]
            # An output that sends a parameter no gradient at all is detached on purpose.
            if actual != 0 and not _close(actual, expected[output], scale):
                error = abs(actual - expected[output]) / max(abs(expected[output]), 1e-30)
                finding = (
                    f"{output}: {name} gets {actual:.3g} along a direction, finite differences {expected[output]:.3g}"
                )
                what = "gradients of parameters against finite differences"
                parts.append(Measurement(what, error, TOLERANCE, finding=finding, path="gradient of a parameter"))
                break
    return parts


def _close(actual: float, expected: float, scale: float) -> bool:
    return abs(actual - expected) <= TOLERANCE * abs(expected) + NOISE * abs(scale) + 1e-7


@torch.no_grad()
def _differences(
    segment: Segment, weights: dict[str, Tensor], directions: dict[str, Tensor], names: list[str]
) -> dict[str, float]:
    """Move parameters along their directions, forth and back; return the change of each output's sum."""
    ends = []
    for sign in (0, 1, -2):
        for name in names:
            weights[name].add_(directions[name], alpha=sign * EPSILON)
        with torch.enable_grad():
            ends.append({output: leaf.detach() for output, leaf in segment.outputs().items()})
    for name in names:
        weights[name].add_(directions[name], alpha=EPSILON)
    here, forth, back = ends
    # Subtracted before they are summed, which keeps the rounding small.
    sides = [
        {name: float(_weighted(one[name] - other[name]).sum()) / EPSILON for name in here}
        for one, other in ((forth, here), (here, back))
    ]
    # Where both sides differ there is no derivative: a ReLU of exactly 0.
    return {
        name: (sides[0][name] + sides[1][name]) / 2
        for name in here
        if _close(sides[0][name], sides[1][name], sides[1][name])
    }


# Functions with a backward of their own.


@contextmanager
def _recorded_functions() -> Iterator[list[tuple[Any, tuple[Any, ...]]]]:
    """Record the first call of each function with a hand-written backward."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if sum(kind is cls for kind, _ in calls) < 3 and not cls.__module__.startswith("torch.") and not kwargs:
            copied = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in args]
            calls.append((cls, tuple(copied)))
        return original.__get__(None, cls)(*args, **kwargs)

    with patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield calls


def _hand_written(policy: PolicyCopy, segment: Segment) -> list[Measurement]:
    """Compare hand-written backwards with finite differences, at the inputs they got in a segment."""
    with policy.default_dtype(), torch.enable_grad(), _recorded_functions() as calls:
        segment.outputs()
    errors: dict[str, float] = {}
    for kind, args in calls:
        error = _backward_error(kind, args)
        if error is not None:
            errors[kind.__name__] = max(error, errors.get(kind.__name__, 0.0))
    return [
        Measurement(
            f"hand-written backward of {name} against finite differences",
            error,
            TOLERANCE,
            finding=f"off by {error:.1e} of the gradient",
            path="hand-written backward",
        )
        for name, error in errors.items()
    ]


def _backward_error(kind: Any, args: tuple[Any, ...]) -> float | None:
    """Return the relative error of a backward; None where the function is constant, or passes its input on."""
    movable = [at for at, leaf in enumerate(args) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    generator = torch.Generator().manual_seed(8)
    if not movable:
        return None
    directions = {at: torch.randn(args[at].shape, generator=generator).to(args[at]) for at in movable}
    inputs = [leaf.requires_grad_() if at in directions else leaf for at, leaf in enumerate(args)]
    with torch.enable_grad():
        result = kind.apply(*inputs)
    leaves = [leaf for leaf in (result if isinstance(result, tuple) else (result,)) if isinstance(leaf, Tensor)]
    leaves = [leaf for leaf in leaves if leaf.is_floating_point() and leaf.requires_grad]
    if not leaves or any(leaf.shape == args[at].shape and leaf.equal(args[at]) for at in movable for leaf in leaves):
        return None
    weights = [torch.randn(leaf.shape, generator=generator).to(leaf) for leaf in leaves]

    def total(results: Any) -> Tensor:
        chosen = [leaf for leaf in (results if isinstance(results, tuple) else (results,)) if isinstance(leaf, Tensor)]
        chosen = [leaf for leaf in chosen if leaf.is_floating_point()]
        return torch.stack([(leaf * w).sum() for leaf, w in zip(chosen, weights, strict=False)]).sum()

    gradients = torch.autograd.grad(total(result), [inputs[at] for at in movable], allow_unused=True)
    worst = 0.0
    for at, gradient in zip(movable, gradients, strict=True):
        with torch.no_grad():
            ends = [
                total(
                    kind.apply(
                        *(leaf + sign * EPSILON * directions[at] if n == at else leaf for n, leaf in enumerate(args))
                    )
                )
                for sign in (1, -1)
            ]
        expected = float(ends[0] - ends[1]) / (2 * EPSILON)
        actual = 0.0 if gradient is None else float((gradient * directions[at]).sum())
        if gradient is None or abs(expected) < 1e-9:
            # No gradient is asked for, or the function is constant between jumps.
            continue
        worst = max(worst, abs(actual - expected) / abs(expected))
    return worst
