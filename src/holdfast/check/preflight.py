"""Preflight: check that a policy can be tested at all; device, precision and kernel of the test."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from holdfast.check.adapters.base import Outputs
from holdfast.check.compare import AXES, State, clone_state, named_leaves
from holdfast.check.policy_copy import PolicyCopy
from holdfast.check.script import Script, StepBatch
from holdfast.errors import ConfigError, ContractError, HoldfastError, error_text
from holdfast.memory import Kernel, use_kernel
from holdfast.policies import FunctionalPolicy, LSTMWrapper
from holdfast.policies.recurrent_policy import Precision

STATE_LEAVES = (torch.Tensor, int, float, bool, str, type(None))
SEGMENT = 5
"""Steps of the trial segment: different from the number of agents, so that swapped axes show."""


@torch.no_grad()
def preflight(policy: PolicyCopy, script: Script) -> list[str]:
    """Act one step and replay one segment; return the names of the outputs, or raise a `ContractError`."""
    adapter, agents = policy.adapter, script.agents
    script = policy.to_policy(script)
    step, segment = script.at(0), script.step_batches(0, SEGMENT)
    with policy.default_dtype():
        state = _try("make an initial state", step, lambda: adapter.initial(agents))
        _require_copyable(state)
        result = _try("act one step", step, lambda: adapter.act(script.at(0), clone_state(state)))
        if not isinstance(result, tuple) or len(result) != 2:
            raise ContractError(f"act must return (outputs, state); it returned {type(result).__name__}.")
        outputs, after = result
        _require_outputs("act", outputs, step, policy.device)
        _require_state(state, after)
        # Inferred here, so that an ambiguous batch axis is an error and not a broken law.
        _ = policy.rows
        replayed = _try("replay a segment", segment, lambda: adapter.replay(segment, clone_state(state)))
        _require_outputs("replay", replayed, segment, policy.device)
        _try("compute a bootstrap value", step, lambda: adapter.value(script.at(0), clone_state(state)))
        _try("run rollouts and replays", script, lambda: adapter.rollout_and_replay(script))
    act_shapes, replay_shapes = (
        {name: list(leaf.shape[dims:]) for name, leaf in leaves.items()}
        for leaves, dims in ((outputs, 1), (replayed, 2))
    )
    if act_shapes != replay_shapes:
        raise ContractError(
            f"act returns {act_shapes} per agent and step, replay {replay_shapes}; both must be equal, in order."
        )
    return [name for name, leaf in outputs.items() for _ in range(leaf[0].numel())]


def _try(what: str, batch: StepBatch, call: Any) -> Any:
    try:
        return call()
    except HoldfastError:
        raise
    except Exception as error:
        reason = error_text(error, 300)
        raise ContractError(f"The policy cannot {what}: {reason} (obs: {_shape(batch.obs)}).") from error


def _shape(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")


def _require_outputs(call: str, outputs: Outputs, batch: StepBatch, device: torch.device) -> None:
    if not outputs:
        raise ContractError(f"{call} returns no outputs.")
    for name, leaf in outputs.items():
        if leaf.shape[: len(batch.batch)] != batch.batch:
            raise ContractError(
                f"{call} returns {name!r} {list(leaf.shape)}; it must begin with {list(batch.batch)}, "
                f"a row for each {'agent' if len(batch.batch) == 1 else 'agent and step'}."
            )
        if not leaf.is_floating_point():
            raise ContractError(f"{call} returns {name!r} as {leaf.dtype}; outputs must be floating-point.")
        if leaf.device.type != device.type:
            moved = f"the check moved the policy to {'the CPU' if device.type == 'cpu' else device}"
            raise ContractError(f"{call} returns {name!r} on {leaf.device} although {moved}.")
        if not bool(leaf.isfinite().all()):
            index = (~leaf.isfinite()).nonzero()[0].tolist()[: len(batch.batch)]
            place = ", ".join(f"{axis} {at}" for axis, at in zip(AXES, index, strict=False))
            raise ContractError(f"{call} returns {name!r} that is not finite, first for {place}.")


def _require_copyable(state: State) -> None:
    for leaf in pytree.tree_leaves(state):
        if not isinstance(leaf, STATE_LEAVES):
            raise ContractError(
                f"The state has a {type(leaf).__name__}, which cannot be copied row by row; make it of "
                "tensors in tuples, lists, dictionaries or named tuples."
            )


def _require_state(before: State, after: State) -> None:
    was, now = ({name: _shape(leaf) for name, leaf in named_leaves(state).items()} for state in (before, after))
    if was != now:
        name = next((name for name in {**was, **now} if was.get(name) != now.get(name)), "")
        raise ContractError(
            f"The state (its {name}) is {was.get(name, 'absent')} at first and {now.get(name, 'absent')} "
            "after a step; a state keeps its structure, shape and dtype."
        )
    for name, leaf in named_leaves(after).items():
        if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            raise ContractError(f"The state{'' if name == 'state' else name} is not finite after one step.")


@dataclass(frozen=True)
class Conditions:
    """Device, precision and kernel of the training copy; the float64 copy uses torch's kernels."""

    device: str = "cpu"
    precision: Precision | None = None
    kernel: Kernel | None = None
    """None: the policy's own, as for the precision."""

    def require_possible(self, module: Any) -> None:
        """Raise if this machine or this policy does not support the conditions."""
        for option, value, choices in (
            ("device", self.device, ("cpu", "cuda")),
            ("precision", self.precision, ("float32", "bfloat16", None)),
            ("kernel", self.kernel, ("auto", "torch", "triton", None)),
        ):
            if value not in choices:
                raise ConfigError(f"--{option} {value}: choose from {', '.join(filter(None, choices))}.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device cuda, but torch finds no GPU here; leave it out.")
        name = type(module).__name__
        if not isinstance(module, LSTMWrapper) and self != Conditions():
            raise ConfigError(
                f"--device, --precision and --kernel are for Holdfast policies; {name} is measured on the "
                "CPU, in float64 and float32. Leave them out."
            )
        if self.precision == "bfloat16" and not isinstance(module, FunctionalPolicy):
            raise ConfigError(f"--precision bfloat16 needs a RecurrentPolicy; {name} is not one.")

    def computes_in(self, module: Any) -> torch.dtype:
        """Return the dtype the layers of the training copy compute in."""
        default = module.precision if isinstance(module, FunctionalPolicy) else "float32"
        return torch.bfloat16 if (self.precision or default) == "bfloat16" else torch.float32

    def impose(self, module: Any, *, exact: bool) -> None:
        """Apply the conditions to a copy of the policy; `exact` is the float64 copy."""
        if not isinstance(module, LSTMWrapper):
            return
        module.to(self.device)
        kernel = "torch" if exact else self.kernel
        if kernel is not None:
            use_kernel(module, kernel)
        if isinstance(module, FunctionalPolicy):
            bfloat16 = not exact and self.computes_in(module) == torch.bfloat16
            module.precision = "bfloat16" if bfloat16 else "float32"

    def note(self, module: Any) -> str | None:
        """Describe conditions that differ from the default."""
        notes = []
        if self.device == "cuda":
            notes.append(f"measured on {torch.cuda.get_device_name()}")
        if self.computes_in(module) == torch.bfloat16:
            noise = "with noise added to the weights: initial outputs are smaller than its rounding"
            notes.append(f"training precision is bfloat16, {noise}")
        if self.kernel is not None:
            notes.append(f"kernel {self.kernel}")
        return "; ".join(notes) or None
