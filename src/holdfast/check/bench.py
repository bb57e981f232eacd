"""The bench a policy is tested on: both precisions, the scripts it lives, and how numbers are compared."""

import copy
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from holdfast.check.probes import Flags, Life, live_and_replay, live_by_hand
from holdfast.check.results import Measurement
from holdfast.check.script import Script, write_script
from holdfast.policies import LSTMWrapper
from holdfast.shapes import Bool, Float, Tensor
from holdfast.worlds import WorldSpec

AGENTS = 8
"""A whole number of the blocks that matrix products work in, so that permuted rows are bit-equal."""
HORIZON = 8
SEGMENTS = 2
ROLLOUTS = 2
STEPS = HORIZON * SEGMENTS * ROLLOUTS
SHARE_OF_STARTS = 0.12
BOUND = {torch.float64: 1e-9, torch.float32: 1e-5}
SHORT = {torch.float64: "f64", torch.float32: "f32"}

Reach = dict[str, Float[Tensor, "N A N"]]
"""How much each output `[.,A,N]` moves when an observation `[N,.,.]` is changed, lived and replayed."""


@dataclass(frozen=True)
class Bench:
    """The policy under test in both precisions, and the scripts it lives."""

    proof: LSTMWrapper
    """In float64."""
    practice: LSTMWrapper
    """In float32."""
    spec: WorldSpec
    script: Script
    unbroken: Script
    """The same without any episode start but the first, and without trials and absences."""

    @property
    def policies(self) -> dict[torch.dtype, LSTMWrapper]:
        """The policy by its precision."""
        return {torch.float64: self.proof, torch.float32: self.practice}

    def live(self, script: Script, policy: LSTMWrapper | None = None) -> Life:
        """Live and replay a script, in float64 unless another policy is given."""
        return live_and_replay(policy or self.proof, self.spec, script, rollouts=ROLLOUTS, segments=SEGMENTS)

    def by_hand(
        self,
        script: Script,
        steps_a_call: int = 1,
        flags: Flags = "first",
        policy: LSTMWrapper | None = None,
    ) -> Tensor:
        """Live a script from an empty memory, by direct calls, in float64 unless another policy is given."""
        policy = policy or self.proof
        policy.reset_memory()
        with torch.no_grad():
            return live_by_hand(policy, script, steps_a_call=steps_a_call, flags=flags)

    @property
    def clears(self) -> Bool[Tensor, "A N1"]:
        """Where this policy's memory must be emptied."""
        if self.proof.clear_on == "never":
            return torch.zeros_like(self.script.first)
        return self.script.first | self.script.trial if self.proof.clear_on == "trial" else self.script.first

    @cached_property
    def reach(self) -> Reach:
        """Information reach: change what everybody sees at one step, and see what moves."""
        # Without truncations, whose values cost a second call a step; other measurements have them.
        script = replace(self.script, truncates=torch.zeros_like(self.script.truncates))
        base = self.live(script)
        found: dict[str, list[Tensor]] = {"lived": [], "replayed": []}
        for seen in range(STEPS):
            where = torch.zeros_like(script.first)
            where[:, seen] = True
            life = self.live(script.changed(where))
            for name, now, was in pairs(life, base):
                found[name].append((now - was).abs().amax(-1))
        return {name: torch.stack(moved) for name, moved in found.items()}

    @cached_property
    def parted(self) -> Bool[Tensor, "N A N"]:
        """Where a clear lies between what is seen and what is felt: `[seen, agent, felt]`."""
        return _between(self.clears)

    @cached_property
    def bound_to_feel(self) -> Bool[Tensor, "N A N"]:
        """Where what is seen must be felt: later, by somebody who acts, with no clear between."""
        valid = self.script.valid[:, :STEPS]
        later = torch.ones(STEPS, STEPS, dtype=torch.bool).triu(1)[:, None]
        return later & ~self.parted & valid.T[:, :, None] & valid[None]


def set_up(policy: LSTMWrapper, spec: WorldSpec) -> Bench:
    """Copy a policy in both precisions and write its scripts."""
    script = write_script(spec, AGENTS, STEPS, share_of_starts=SHARE_OF_STARTS, seed=0)
    # A start on a segment's first step, on its last, and two in a row, whatever was drawn.
    script.first[0, HORIZON] = script.first[1, 2 * HORIZON - 1] = True
    script.first[2, HORIZON + 3 : HORIZON + 5] = True
    never = torch.zeros_like(script.first)
    only_once = never.clone()
    only_once[:, 0] = True
    # In training mode: that is how the trainer lives and learns.
    copied = copy.deepcopy(policy).cpu().train()
    return Bench(
        proof=_in_float64(copied),
        practice=copied.float(),
        spec=spec,
        script=script,
        unbroken=replace(script, first=only_once, trial=never, valid=~never),
    )


def _in_float64(policy: LSTMWrapper) -> LSTMWrapper:
    """Copy a policy for the proof: while it thinks, float64 is what numbers are made of by default."""
    proof = copy.deepcopy(policy).double()
    before: list[torch.dtype] = []

    def enter(module: nn.Module, arguments: tuple[TensorDictBase, ...]) -> None:
        before.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        if arguments[0]["env_obs"].is_floating_point():
            arguments[0]["env_obs"] = arguments[0]["env_obs"].double()

    def leave(module: nn.Module, arguments: tuple[TensorDictBase, ...], result: object) -> None:
        torch.set_default_dtype(before.pop())

    proof.register_forward_pre_hook(enter)
    proof.register_forward_hook(leave, always_call=True)
    return proof


def _between(clears: Bool[Tensor, "A N1"]) -> Bool[Tensor, "N A N"]:
    later = clears[:, :STEPS].expand(STEPS, -1, -1).clone()
    for seen in range(STEPS):
        later[seen, :, : seen + 1] = False
    return later.cumsum(-1) > 0


def pairs(now: Life, was: Life) -> list[tuple[str, Tensor, Tensor]]:
    """Set what was lived and what was replayed of two lives side by side, `[A,N,K]`."""
    return [("lived", now.lived, was.lived), ("replayed", now.replayed, was.replayed)]


def segment_of(script: Script) -> TensorDict:
    """Put the script's second segment into the words that policies read."""
    when = slice(HORIZON, 2 * HORIZON)
    obs, first = script.obs[:, when], script.first[:, when]
    batch = {"env_obs": obs, "first": first, "trial": script.trial[:, when], "valid": script.valid[:, when]}
    batch["draws"] = torch.zeros(first.shape)
    return TensorDict(batch, batch_size=first.shape)


def random_state(policy: LSTMWrapper) -> TensorDict:
    """Make a state that is not empty."""
    generator = torch.Generator().manual_seed(2)
    state = policy.lstm.cell.initial(AGENTS)
    for key, leaf in state.items():
        state[key] = torch.rand(leaf.shape, generator=generator).to(leaf.dtype) - 0.5
    return state


@torch.no_grad()
def nothing(what: str, moved: Tensor, *axes: str) -> Measurement:
    """Demand that a tensor is exactly zero; a finding names its largest entry by its axes."""
    moved = moved.abs()
    size = float(moved.max()) if moved.numel() else 0.0
    return Measurement(what, size, 0.0, finding=f"{_place(moved, axes)} moves by {size:.1e}, must be 0")


@torch.no_grad()
def close(what: str, now: Tensor, was: Tensor, bound: float) -> Measurement:
    """Demand that two tensors are equal to within `bound * max(1, |x|)`."""
    error = (now - was).abs() / was.abs().max().clamp(min=1)
    size = float(error.max())
    found = f"{_place(error, ('agent', 'step'))} is off by {size:.1e}, may be by {bound:.0e}"
    return Measurement(what, size, bound, finding=found)


def alive(what: str, size: float, finding: str) -> Measurement:
    """Demand that something moves."""
    return Measurement(what, size, 0.0, "more than", finding)


def _place(moved: Tensor, axes: tuple[str, ...]) -> str:
    """Name the first entry that is not zero, or the largest if none is."""
    if not moved.numel():
        return "nothing"
    where = (moved != 0).nonzero()
    index = where[0].tolist() if len(where) else [0] * moved.dim()
    return ", ".join(f"{axis} {at}" for axis, at in zip(axes, index, strict=False))
