"""Probes of a policy: gradients, bytes and graph nodes for the laws, yes-or-no experiments for the diagnosis."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from holdfast.check.adapters.base import flat
from holdfast.check.compare import State, clone_state, state_leaves
from holdfast.check.policy_copy import HORIZON, STEPS, PolicyCopy
from holdfast.check.script import Script, StepBatch
from holdfast.rng import isolated_rng
from holdfast.types import Bool, Float, Tensor


@dataclass(frozen=True)
class GradientReach:
    """Largest gradient from the outputs of each call into the weights of every call, `[output, call]`."""

    reach: Float[Tensor, "calls calls"]
    kinds: list[str]
    """What each call was: `act` or `replay`."""

    def between(self, source: str, target: str) -> Float[Tensor, "source target"]:
        """Select calls of one kind against calls of another, without gradients of a call into itself."""
        others = self.reach.masked_fill(torch.eye(len(self.reach), dtype=torch.bool), 0.0)
        rows, columns = ([at for at, kind in enumerate(self.kinds) if kind == wanted] for wanted in (source, target))
        return others[rows][:, columns]


def gradient_between_calls(policy: PolicyCopy, script: Script) -> GradientReach:
    """Run a script and replay every segment, with separate copies of the weights for each call.

    A gradient from one call into an earlier one ends in the earlier call's copies, whatever its path.
    """
    adapter, outputs, copies, kinds = policy.adapter, [], [], []

    def call(name: str, batch: StepBatch, state: State) -> Any:
        state = pytree.tree_map_only(Tensor, torch.clone, state)
        if not torch.is_grad_enabled():
            return getattr(adapter, name)(batch, state)
        with torch.no_grad():
            weights = {key: leaf.clone() for key, leaf in adapter.module.named_parameters() if leaf.requires_grad}
        for leaf in weights.values():
            leaf.requires_grad_()
        result = adapter.call(weights, name, batch, state)
        outputs.append(flat(result[0], 1) if name == "act" else flat(result, 2))
        copies.append(list(weights.values()))
        kinds.append(name)
        return result

    script = policy.to_policy(script)
    with policy.default_dtype(), torch.enable_grad():
        state = adapter.initial(script.agents)
        for start in range(0, script.steps, HORIZON):
            entry = state
            with torch.set_grad_enabled(adapter.rollout_has_grad):
                for t in range(start, start + HORIZON):
                    _, state = call("act", script.at(t), state)
            call("replay", script.step_batches(start, start + HORIZON), entry)
    return GradientReach(_largest_gradients(outputs, copies), kinds)


def _largest_gradients(outputs: list[Tensor], copies: list[list[Tensor]]) -> Float[Tensor, "calls calls"]:
    reach = torch.zeros(len(outputs), len(outputs))
    for row, output in enumerate(outputs):
        inputs = [weight for weights in copies[: row + 1] for weight in weights]
        if not output.requires_grad or not inputs:
            continue
        gradients = torch.autograd.grad(_weighted_sum(output), inputs, retain_graph=True, allow_unused=True)
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                call = number // len(copies[0])
                reach[row, call] = torch.maximum(reach[row, call], gradient.abs().max().float().cpu())
    return reach


def gradient_within_segments(policy: PolicyCopy, script: Script) -> Float[Tensor, "N A N"] | None:
    """Measure the gradients of outputs with respect to observations, `[input, agent, output]`.

    Segments are replayed from the states of a rollout. None for integer observations, if the adapter names no module
    that reads their encoding.
    """
    result = torch.zeros(script.steps, script.agents, script.steps)
    _, states = policy.steps(script)
    script = policy.to_policy(script)
    for start in range(0, script.steps, HORIZON):
        batch = script.step_batches(start, start + HORIZON)
        with policy.default_dtype(), torch.enable_grad(), _differentiable(policy, batch) as (inputs, batch):
            outputs = flat(policy.adapter.replay(batch, states[start]), 2)
            if not inputs:
                return None
            for t in range(HORIZON):
                if not outputs.requires_grad:
                    break
                loss = _weighted_sum(outputs[:, t])
                largest = result[start : start + HORIZON, :, start + t]
                for gradient in torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True):
                    if gradient is not None:
                        size = gradient.abs().flatten(2).amax(2).T.float().cpu()
                        largest.copy_(torch.maximum(largest, size))
    return result


@contextmanager
def _differentiable(policy: PolicyCopy, batch: StepBatch) -> Iterator[tuple[list[Tensor], StepBatch]]:
    """Yield tensors `[B,T,...]` that gradients of the observations arrive at, and the batch to replay."""
    inputs: list[Tensor] = []
    if batch.obs.is_floating_point():
        inputs.append(batch.obs.clone().requires_grad_())
        yield inputs, replace(batch, obs=inputs[0])
        return
    hooked: set[nn.Module] = set()

    def add_zeros(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if module in hooked:
            return arguments
        hooked.add(module)
        inputs.append(torch.zeros_like(arguments[0]).requires_grad_())
        return arguments[0] + inputs[-1], *arguments[1:]

    handles = [module.register_forward_pre_hook(add_zeros) for module in policy.adapter.memory_modules()]
    try:
        yield inputs, batch
    finally:
        for handle in handles:
            handle.remove()


def _weighted_sum(outputs: Float[Tensor, "*batch K"]) -> Float[Tensor, ""]:
    """Sum outputs with different weights: a plain sum of probabilities is always 1."""
    generator = torch.Generator().manual_seed(4)
    return (outputs * (0.5 + torch.rand(outputs.shape[-1], generator=generator)).to(outputs)).sum()


def gradient_of_each(policy: PolicyCopy, script: Script) -> dict[str, float]:
    """Measure the largest gradient of each replayed output with respect to the weights."""
    adapter, result = policy.adapter, {}
    weights = [weight for weight in adapter.module.parameters() if weight.requires_grad]
    script = policy.to_policy(script)
    with policy.default_dtype(), torch.enable_grad():
        outputs = adapter.replay(script.step_batches(0, HORIZON), adapter.initial(script.agents))
        for name, leaf in outputs.items():
            loss, gradients = _weighted_sum(leaf.flatten(2) if leaf.dim() > 2 else leaf[..., None]), ()
            if loss.requires_grad and weights:
                gradients = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
            sizes = [gradient.abs().max() for gradient in gradients if gradient is not None]
            result[name] = float(torch.stack(sizes).max()) if sizes else 0.0
    return result


def draws_random_numbers(policy: PolicyCopy, script: Script) -> bool:
    """Whether identical rollouts differ by random numbers, not by state kept elsewhere."""
    _, one, other = (_short_run(policy, script) for _ in range(3))
    if one.equal(other):
        return False
    one, other = (_run_with_seed(0, policy, script) for _ in range(2))
    if one.equal(other):
        return True
    # A generator of its own draws on, whatever the seed; what is kept elsewhere is the same after the same episodes.
    always, outputs = torch.ones_like(script.first), []
    for seed in (0, 1):
        copy = policy.unused_copy()
        copy.steps(script.with_starts(always), stop=HORIZON)
        outputs.append(_run_with_seed(seed, copy, script))
    return not outputs[0].equal(outputs[1])


def _short_run(policy: PolicyCopy, script: Script) -> Float[Tensor, "A N K"]:
    """Return the outputs of a few steps, and of a segment."""
    outputs, states = policy.steps(script, stop=3)
    return torch.cat([outputs, policy.replay(script.step_batches(0, HORIZON), states[0])], dim=1)


def _run_with_seed(seed: int, policy: PolicyCopy, script: Script) -> Float[Tensor, "A N K"]:
    with isolated_rng(seed):
        return _short_run(policy, script)


def keeps_hidden_state(policy: PolicyCopy, script: Script) -> bool:
    """Whether steps from the same state depend on earlier calls."""
    _, states = policy.steps(script)
    always = torch.ones_like(script.first)
    outputs = []
    for earlier in (script.without_flags(), script.with_starts(always), script.changed(always)):
        policy.steps(earlier, stop=HORIZON)
        outputs.append(policy.steps(script, start=STEPS - 3, state=states[STEPS - 3])[0])
    # What counts calls may show only in some of them.
    outputs = [torch.stack(outputs), *(policy.steps(script)[0] for _ in range(2))]
    return not (bool((outputs[0] == outputs[0][0]).all()) and outputs[1].equal(outputs[2]))


def mixes_rows(policy: PolicyCopy, script: Script) -> bool:
    """Whether steps or a segment of a row depend on the observations of other rows."""
    return _depends_on_rows(policy, script.without_flags(), Script.changed)


def mixes_flags(policy: PolicyCopy, script: Script) -> bool:
    """Whether steps or a segment of a row depend on the flags of other rows."""
    return _depends_on_rows(policy, script, lambda script, where: script.with_starts(script.first | where))


def _depends_on_rows(
    policy: PolicyCopy, script: Script, change: Callable[[Script, Bool[Tensor, "A N1"]], Script]
) -> bool:
    base = _short_run(policy, script)
    if not _short_run(policy, script).equal(base):
        # Calls are not repeatable.
        return False
    for rows in (torch.arange(1), torch.arange(1, script.agents)):
        where, others = torch.zeros_like(script.first), torch.ones(script.agents, dtype=torch.bool)
        where[rows], others[rows] = True, False
        if not _short_run(policy, change(script, where))[others].equal(base[others]):
            return True
    return False


def acts_otherwise(policy: PolicyCopy, script: Script) -> bool:
    """Whether outputs change when the action that is drawn is given."""
    step, state = policy.to_policy(script).at(1), policy.steps(script, stop=1)[1][-1]
    with torch.no_grad(), policy.default_dtype():
        evaluated = policy.adapter.act_with_action(step, clone_state(state))
        if evaluated is None:
            return False
        outputs, _ = policy.adapter.act(step, clone_state(state))
    return not torch.allclose(flat(outputs, 1), flat(evaluated, 1), atol=1e-9)


def ignores_state(policy: PolicyCopy, script: Script) -> bool:
    """Whether the outputs of a step do not depend on its state."""
    script = script.without_flags()
    _, states = policy.steps(script)
    one = policy.steps(script, start=HORIZON, stop=HORIZON + 1, state=states[HORIZON])[0]
    return one.equal(policy.steps(script, start=HORIZON, stop=HORIZON + 1)[0])


def returns_graph(policy: PolicyCopy, script: Script) -> bool:
    """Whether the state after a step has a graph, where gradients are on."""
    with policy.default_dtype(), torch.enable_grad():
        _, state = policy.adapter.act(policy.to_policy(script).at(0), policy.adapter.initial(script.agents))
    return any(leaf.requires_grad for leaf in state_leaves(state))


class _FindsDetaching(TorchFunctionMode):
    """Notes calls that cut the graph of a tensor with a gradient."""

    calls: str = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with_graph = bool(args) and isinstance(args[0], Tensor) and args[0].grad_fn is not None
        if with_graph and func in _DETACHING:
            self.calls = _DETACHING[func]
        return func(*args, **(kwargs or {}))


_DETACHING: dict[Any, str] = {
    Tensor.detach: "detach()",
    Tensor.detach_: "detach_()",
    Tensor.data.__get__: ".data",  # type: ignore[attr-defined]
    Tensor.numpy: "numpy()",
    Tensor.tolist: "tolist()",
    Tensor.item: "item()",
}


def detaching_calls(policy: PolicyCopy, script: Script) -> str:
    """Name a call in a replayed segment that cuts the graph; empty if there is none."""
    adapter, script = policy.adapter, policy.to_policy(script)
    with policy.default_dtype(), torch.enable_grad(), _FindsDetaching() as mode:
        adapter.replay(script.step_batches(0, STEPS), adapter.initial(script.agents))
    return mode.calls
