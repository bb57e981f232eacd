"""Of what kind everything in a step must be."""

from typing import Any

import torch
from tensordict import TensorDictBase

from holdfast.shapes import Tensor
from holdfast.worlds.seen import blank, device_of
from holdfast.worlds.step import Step, WorldSpec

FLAGS = ("terminated", "truncated", "first", "valid", "trial")


def flat_leaves(obs: Any, name: str) -> dict[str, Tensor]:
    """List the tensors of an observation by their places in it: `obs`, or `obs['image']` and so on."""
    if isinstance(obs, Tensor):
        return {name: obs}
    found: dict[str, Tensor] = {}
    for key in sorted(obs.keys()) if isinstance(obs, TensorDictBase) else []:
        found |= flat_leaves(obs[key], f"{name}[{key!r}]")
    return found


class Kinds:
    """What kinds of tensors a world must speak in, by its spec."""

    def __init__(self, spec: WorldSpec, agents: int) -> None:
        self.spec, self.agents = spec, agents
        self._wanted = flat_leaves(blank(spec.sight), "")

    def fault_of(self, step: Any) -> tuple[str, bool]:
        """Tell the first thing in a step that is of the wrong kind, and whether the rest can be read."""
        if not isinstance(step, Step):
            return f"the world says {type(step).__name__}, must be holdfast.Step", False
        fault, readable = self.seen_fault(step.obs, "obs")
        if not readable:
            return fault, False
        for name in ("reward", *FLAGS):
            told, whole = getattr(step, name), f"a tensor [{self.agents}]"
            if not isinstance(told, Tensor):
                return f"{name} is {type(told).__name__}, must be {whole}", False
            if told.shape != (self.agents,):
                return f"{name} is {list(told.shape)}, must be {whole}", False
            right = told.is_floating_point() if name == "reward" else told.dtype == torch.bool
            if not fault and not right:
                fault = f"{name} is {told.dtype}, must be {'a float' if name == 'reward' else 'torch.bool'}"
            if not fault and told.device != device_of(step.obs):
                fault = f"{name} lies on {told.device}, must lie where obs does, on {device_of(step.obs)}"
        return fault, True

    def seen_fault(self, seen: Any, name: str) -> tuple[str, bool]:
        """Tell what of an observation is of another kind than the spec says, and whether it can be read."""
        if isinstance(seen, TensorDictBase) and seen.batch_size != (self.agents,):
            return f"{name} has batch_size {list(seen.batch_size)}, must be [{self.agents}]", False
        wanted = {f"{name}{place}": leaf for place, leaf in self._wanted.items()}
        there, fault = flat_leaves(seen, name), ""
        if set(wanted) != set(there):
            is_now = ", ".join(sorted(there)) or type(seen).__name__
            return f"{name} is {is_now}, must be {', '.join(sorted(wanted))} as torch tensors", False
        for key, leaf in there.items():
            shape, dtype = [self.agents, *wanted[key].shape[1:]], wanted[key].dtype
            if list(leaf.shape) != shape:
                return f"{key} is {list(leaf.shape)}, must be {shape}", False
            # Tokens are bytes; elsewhere fractions may have any precision, and whole numbers any size.
            right = leaf.is_floating_point() == dtype.is_floating_point
            if not fault and (leaf.dtype != dtype if self.spec.features else not right):
                fault = f"{key} is {leaf.dtype}, must be {dtype}"
        return fault, True
