"""The bench a policy is tested on: both precisions, the scripts it lives, and how numbers are compared."""

import copy
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from tensordict import TensorDict

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
    """The same without any episode start but the first."""

    def live(self, script: Script, policy: LSTMWrapper | None = None) -> Life:
        """Live and replay a script, in float64 unless another policy is given."""
        return live_and_replay(policy or self.proof, self.spec, script, rollouts=ROLLOUTS, segments=SEGMENTS)

    def by_hand(self, script: Script, steps_a_call: int = 1, flags: Flags = "first") -> Tensor:
        """Live a script from an empty memory, by direct calls in float64."""
        self.proof.reset_memory()
        with torch.no_grad():
            return live_by_hand(self.proof, script, steps_a_call=steps_a_call, flags=flags)

    @cached_property
    def reach(self) -> Reach:
        """Information reach: change what everybody sees at one step, and see what moves."""
        base = self.live(self.script)
        found: dict[str, list[Tensor]] = {"lived": [], "replayed": []}
        for seen in range(STEPS):
            where = torch.zeros_like(self.script.first)
            where[:, seen] = True
            life = self.live(self.script.changed(where))
            for name, now, was in pairs(life, base):
                found[name].append((now - was).abs().amax(-1))
        return {name: torch.stack(moved) for name, moved in found.items()}

    @cached_property
    def parted(self) -> Bool[Tensor, "N A N"]:
        """Where an episode start lies between what is seen and what is felt: `[seen, agent, felt]`."""
        later = self.script.first[:, :STEPS].expand(STEPS, -1, -1).clone()
        for seen in range(STEPS):
            later[seen, :, : seen + 1] = False
        return later.cumsum(-1) > 0


def set_up(policy: LSTMWrapper, spec: WorldSpec) -> Bench:
    """Copy a policy in both precisions and write its scripts."""
    script = write_script(spec, AGENTS, STEPS, share_of_starts=SHARE_OF_STARTS, seed=0)
    # A start on a segment's first step, on its last, and two in a row, whatever was drawn.
    script.first[0, HORIZON] = script.first[1, 2 * HORIZON - 1] = True
    script.first[2, HORIZON + 3 : HORIZON + 5] = True
    only_once = torch.zeros_like(script.first)
    only_once[:, 0] = True
    copied = copy.deepcopy(policy).cpu().eval()
    return Bench(
        proof=copy.deepcopy(copied).double(),
        practice=copied.float(),
        spec=spec,
        script=script,
        unbroken=replace(script, first=only_once),
    )


def pairs(now: Life, was: Life) -> list[tuple[str, Tensor, Tensor]]:
    """Set what was lived and what was replayed of two lives side by side, `[A,N,K]`."""
    return [("lived", now.lived, was.lived), ("replayed", now.replayed, was.replayed)]


def segment_of(script: Script) -> TensorDict:
    """Put the script's second segment into the words that policies read."""
    when = slice(HORIZON, 2 * HORIZON)
    obs, first = script.obs[:, when], script.first[:, when]
    batch = {"env_obs": obs, "first": first, "draws": torch.zeros(first.shape)}
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
