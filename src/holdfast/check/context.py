"""Context of a check: copies of the policy in two precisions, the script, and cached measurements."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from holdfast.check.adapters.base import PolicyAdapter, RolloutAndReplay
from holdfast.check.compare import named_leaves
from holdfast.check.long_laws import LongRun
from holdfast.check.policy_copy import AGENTS, HORIZON, STEPS, PolicyCopy
from holdfast.check.preflight import Conditions, preflight
from holdfast.check.probes import GradientReach, gradient_between_calls, gradient_within_segments
from holdfast.check.results import Reach
from holdfast.check.script import Script, write_script
from holdfast.errors import ConfigError, ContractError, error_text
from holdfast.types import Bool, Float, Tensor

SHARE_OF_STARTS = 0.12
COPIES = 4
"""Copies of the agents in one run."""


@dataclass(frozen=True)
class CheckContext:
    """The policy under test, its script and what was computed from both."""

    copies: dict[torch.dtype, PolicyCopy]
    """In float64 and in training precision, or in training precision only."""
    script: Script
    columns: list[str]
    """The names of the outputs."""
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> PolicyCopy:
        """The most precise copy."""
        return next(iter(self.copies.values()))

    @property
    def as_trained(self) -> PolicyCopy:
        """The copy in training precision."""
        return list(self.copies.values())[-1]

    @property
    def as_trained_context(self) -> "CheckContext | None":
        """A context of the training copy alone, if its kernels differ from those of the float64 copy."""
        same_kernels = self.as_trained.kind == torch.float32 and self.as_trained.device.type == "cpu"
        if same_kernels or len(self.copies) == 1:
            return None
        return replace(self, copies={self.as_trained.kind: self.as_trained})

    @property
    def adapter(self) -> PolicyAdapter:
        """The adapter of the most precise copy."""
        return self.exact.adapter

    @property
    def clears(self) -> Bool[Tensor, "A N1"]:
        """Where this policy's state must be cleared."""
        script, clear_on = self.script, self.adapter.clear_on
        if clear_on == "never":
            return torch.zeros_like(script.first)
        return script.first | script.trial if clear_on == "trial" else script.first

    @cached_property
    def before_last_clear(self) -> Bool[Tensor, "A N1"]:
        """Steps before each agent's last clear."""
        last = torch.stack([row[:STEPS].nonzero().max() for row in self.clears])
        return torch.arange(STEPS + 1)[None] < last[:, None]

    @cached_property
    def outputs(self) -> dict[torch.dtype, RolloutAndReplay]:
        """Outputs of the script in rollout and replay, in each precision."""
        return {dtype: policy.rollout_and_replay(self.script) for dtype, policy in self.copies.items()}

    @cached_property
    def information_reach(self) -> dict[str, Float[Tensor, "N A N K"]]:
        """Change all observations of one step and measure which outputs change."""
        # Four copies of the agents change four steps in one run.
        script = self.script[torch.arange(COPIES * AGENTS) % AGENTS]
        base, apart = self.exact.rollout_and_replay(script), STEPS // COPIES
        reach = torch.zeros(2, STEPS, *base.rollout.unflatten(0, (COPIES, AGENTS)).shape[1:], dtype=base.rollout.dtype)
        for step in range(apart):
            where = torch.zeros_like(script.first)
            for copy in range(COPIES):
                where[copy * AGENTS : (copy + 1) * AGENTS, copy * apart + step] = True
            outputs = self.exact.rollout_and_replay(script.changed(where))
            for number, (changed, was) in enumerate(zip(_pair(outputs), _pair(base), strict=True)):
                reach[number, step::apart] = (changed - was).abs().unflatten(0, (COPIES, AGENTS))
        return {"rollout": reach[0], "replay": reach[1]}

    @cached_property
    def separated_by_reset(self) -> Bool[Tensor, "N A N"]:
        """Where a clear lies between input and output: `[input, agent, output]`."""
        episode = self.clears[:, :STEPS].cumsum(-1)
        return episode > episode.T[:, :, None]

    @cached_property
    def must_propagate(self) -> Bool[Tensor, "N A N"]:
        """Where an input must change a later output: both steps valid, no clear between."""
        valid = self.script.valid[:, :STEPS]
        later = torch.ones(STEPS, STEPS, dtype=torch.bool).triu(1)[:, None]
        return later & ~self.separated_by_reset & valid.T[:, :, None] & valid[None]

    @cached_property
    def gradient_reach(self) -> GradientReach:
        """Gradients from the outputs of each call into the weights of every call."""
        return gradient_between_calls(self.exact, self.script)

    @cached_property
    def gradient(self) -> Float[Tensor, "N A N"] | None:
        """Gradients of outputs with respect to observations, `[input, agent, output]`."""
        return gradient_within_segments(self.exact, self.script)

    @cached_property
    def long_run(self) -> LongRun:
        """Long episodes of many agents."""
        return LongRun.of(self)

    def reach(self) -> Reach:
        """Collect the arrays for plots."""
        change = {name: diff.amax(-1) for name, diff in self.information_reach.items()}
        across = self.gradient_reach.between("replay", "replay").T
        gradient = across.repeat_interleave(HORIZON, 0).repeat_interleave(HORIZON, 1)
        gradient = gradient[:, None].expand(-1, AGENTS, -1)
        if self.gradient is not None:
            gradient = torch.maximum(gradient, self.gradient)
        clears, valid = self.clears[:, :STEPS], self.script.valid[:, :STEPS]
        return Reach(change["rollout"], change["replay"], gradient, clears, valid, HORIZON)


def _pair(outputs: RolloutAndReplay) -> tuple[Tensor, Tensor]:
    return outputs.rollout, outputs.replay


def prepare(adapter: PolicyAdapter, conditions: Conditions | None = None) -> CheckContext:
    """Copy a policy in both precisions and draw its script; raise if it cannot be tested."""
    conditions = conditions or Conditions()
    conditions.require_possible(adapter.module)
    script = write_script(
        adapter.random_obs,
        AGENTS,
        STEPS,
        share_of_starts=SHARE_OF_STARTS if adapter.sees_first else 0.0,
        absences=adapter.handles_invalid,
        act=adapter.random_actions,
    )
    if adapter.sees_first:
        _add_starts(script)
    as_trained = _copy_as_trained(adapter, conditions)
    columns, note = preflight(as_trained, script), conditions.note(adapter.module)
    notes = (*adapter.notes, *([note] if note else []))
    try:
        exact = _copy(adapter, torch.float64, conditions)
        preflight(exact, script)
        _require_float64(exact, script)
    except ContractError as error:
        note = f"not measured in float64, where it does not run: {error}"
        perturbed = _copy_as_trained(adapter, conditions, perturb=True)
        return CheckContext({perturbed.kind: perturbed}, script, columns, (*notes, note))
    return CheckContext({torch.float64: exact, as_trained.kind: as_trained}, script, columns, notes)


@torch.no_grad()
def _require_float64(policy: PolicyCopy, script: Script) -> None:
    """Raise if a policy computes in float32 whatever its weights are."""
    with policy.default_dtype():
        inputs = policy.to_policy(script)
        outputs, state = policy.adapter.act(inputs.at(0), policy.adapter.initial(script.agents))
    for name, leaf in [*outputs.items(), *named_leaves(state).items()]:
        if leaf.is_floating_point() and leaf.dtype != torch.float64:
            raise ContractError(f"its {name} is {str(leaf.dtype).removeprefix('torch.')}.")


def _copy_as_trained(adapter: PolicyAdapter, conditions: Conditions, *, perturb: bool = False) -> PolicyCopy:
    """Copy a policy in training precision; bfloat16 needs outputs that are larger than its rounding."""
    policy = _copy(adapter, torch.float32, conditions)
    return _perturb(policy) if perturb or policy.kind == torch.bfloat16 else policy


def _add_starts(script: Script) -> None:
    """Add starts at a segment's first and last step, in two successive steps, in all rows, near the end."""
    all_agents = [(agent, STEPS - 4) for agent in range(AGENTS)]
    edges = [(0, HORIZON), (1, 2 * HORIZON - 1), (2, HORIZON + 3), (2, HORIZON + 4), (3, STEPS - 2)]
    for number, (agent, step) in enumerate([*edges, *all_agents]):
        if not script.first[agent, step]:
            (script.terminated if number % 2 else script.truncated)[agent, step] = True
        script.first[agent, step] = True
        script.valid[agent, step] = True
    for agent, step in script.first[:, 1:].nonzero()[::5].tolist():
        # Some episodes end both ways at once.
        script.terminated[agent, step + 1] = script.truncated[agent, step + 1] = True


def _copy(adapter: PolicyAdapter, dtype: torch.dtype, conditions: Conditions) -> PolicyCopy:
    exact = dtype == torch.float64
    try:
        unused = adapter.in_precision(dtype)
        conditions.impose(unused.module, exact=exact)
        kind = dtype if exact else conditions.computes_in(unused.module)
        return PolicyCopy(unused, dtype, kind, torch.device(conditions.device), unused).unused_copy()
    except ConfigError:
        raise
    except Exception as error:
        reason = error_text(error, 300)
        where = f"the {conditions.device.upper()} in {str(dtype).removeprefix('torch.')}"
        raise ContractError(f"The policy cannot be copied to {where}: {reason}") from error


@torch.no_grad()
def _perturb(policy: PolicyCopy) -> PolicyCopy:
    """Add noise to the weights: outputs of a new policy are so small that float32 rounds its errors away."""
    generator = torch.Generator().manual_seed(3)
    for weight in (policy.unused or policy.adapter).module.parameters():
        fan_in = max(weight[0].numel(), 1) if weight.dim() > 1 else 10
        weight += torch.randn(weight.shape, generator=generator).to(weight) / fan_in**0.5
    return policy.unused_copy()
