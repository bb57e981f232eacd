"""The bench a policy is tested on: its copies in both precisions, their script, and what reaches where."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from holdfast.check.case import AGENTS, HORIZON, STEPS, Case
from holdfast.check.conditions import Conditions
from holdfast.check.contact import first_contact
from holdfast.check.probes import Pulls, pulls_between_calls, pulls_within_segments
from holdfast.check.results import Reach
from holdfast.check.script import Script, write_script
from holdfast.check.subject import Life, Subject
from holdfast.errors import ConfigError, ContractError
from holdfast.shapes import Bool, Float, Tensor

SHARE_OF_STARTS = 0.12


@dataclass(frozen=True)
class Bench:
    """The policy under test, and the scripts it lives."""

    cases: dict[torch.dtype, Case]
    """Its copies: in float64 and as in training, or only as in training."""
    script: Script
    columns: list[str]
    """The names of the numbers it says."""
    notes: tuple[str, ...] = ()

    @property
    def proof(self) -> Case:
        """The most precise copy."""
        return next(iter(self.cases.values()))

    @property
    def practice(self) -> Case:
        """The copy in the precision of training."""
        return list(self.cases.values())[-1]

    @property
    def practised(self) -> "Bench | None":
        """Practice as if it were the proof, where it is computed in another way than the proof is."""
        usual = self.practice.kind == torch.float32 and self.practice.device.type == "cpu"
        if usual or len(self.cases) == 1:
            return None
        return replace(self, cases={self.practice.kind: self.practice})

    @property
    def subject(self) -> Subject:
        """The policy in the precision of the proof."""
        return self.proof.subject

    @property
    def clears(self) -> Bool[Tensor, "A N1"]:
        """Where this policy's memory must be emptied."""
        return clears_of(self.script, self.subject.clear_on)

    @cached_property
    def life(self) -> dict[torch.dtype, Life]:
        """The script as it was lived and replayed, in each precision."""
        return {dtype: case.live(self.script) for dtype, case in self.cases.items()}

    @cached_property
    def moved(self) -> dict[str, Float[Tensor, "N A N K"]]:
        """Information reach: change what everybody sees at one step, and see which numbers move."""
        script, base = self.script, self.life[self.proof.dtype]
        lived, replayed = [], []
        for seen in range(STEPS):
            where = torch.zeros_like(script.first)
            where[:, seen] = True
            life = self.proof.live(script.changed(where))
            lived.append((life.lived - base.lived).abs())
            replayed.append((life.replayed - base.replayed).abs())
        return {"lived": torch.stack(lived), "replayed": torch.stack(replayed)}

    @cached_property
    def parted(self) -> Bool[Tensor, "N A N"]:
        """Where a clear lies between what is seen and what is felt: `[seen, agent, felt]`."""
        later = self.clears[:, :STEPS].expand(STEPS, -1, -1).clone()
        for seen in range(STEPS):
            later[seen, :, : seen + 1] = False
        return later.cumsum(-1) > 0

    @cached_property
    def bound_to_feel(self) -> Bool[Tensor, "N A N"]:
        """Where what is seen must be felt: later, by somebody who acts, with no clear between."""
        valid = self.script.valid[:, :STEPS]
        later = torch.ones(STEPS, STEPS, dtype=torch.bool).triu(1)[:, None]
        return later & ~self.parted & valid.T[:, :, None] & valid[None]

    @cached_property
    def pulls(self) -> Pulls:
        """How strongly calls pull on the weights of other calls."""
        return pulls_between_calls(self.proof, self.script)

    @cached_property
    def gradient(self) -> Float[Tensor, "N A N"] | None:
        """Gradient reach: what is said at a step pulls on what was seen at one, `[seen, agent, felt]`."""
        return pulls_within_segments(self.proof, self.script)

    def reach(self) -> Reach:
        """Gather what pictures show."""
        felt = {name: moved.amax(-1) for name, moved in self.moved.items()}
        across = self.pulls.between("replay", "replay").T
        gradient = across.repeat_interleave(HORIZON, 0).repeat_interleave(HORIZON, 1)
        gradient = gradient[:, None].expand(-1, AGENTS, -1)
        if self.gradient is not None:
            gradient = torch.maximum(gradient, self.gradient)
        clears, valid = self.clears[:, :STEPS], self.script.valid[:, :STEPS]
        return Reach(felt["lived"], felt["replayed"], gradient, clears, valid, HORIZON)


def clears_of(script: Script, clear_on: str) -> Bool[Tensor, "A N1"]:
    """Say where memory must be emptied."""
    if clear_on == "never":
        return torch.zeros_like(script.first)
    return script.first | script.trial if clear_on == "trial" else script.first


def set_up(subject: Subject, conditions: Conditions | None = None) -> Bench:
    """Copy a policy in both precisions and write its scripts; refuse what cannot be tested."""
    conditions = conditions or Conditions()
    conditions.require_possible(subject.module)
    script = write_script(
        subject.imagine,
        AGENTS,
        STEPS,
        share_of_starts=SHARE_OF_STARTS if subject.told_of_starts else 0.0,
        absences=subject.knows_absence,
        act=subject.do,
    )
    if subject.told_of_starts:
        _begin_some_more(script)
    practice = _practice(subject, conditions)
    columns, told = first_contact(practice, script), conditions.note(subject.module)
    notes = (*subject.notes, *([told] if told else []))
    try:
        proof = _case(subject, torch.float64, conditions)
        first_contact(proof, script)
    except ContractError as error:
        note = f"not measured in float64, where it does not run: {error}"
        stirred = _practice(subject, conditions, stir=True)
        return Bench({stirred.kind: stirred}, script, columns, (*notes, note))
    return Bench({torch.float64: proof, practice.kind: practice}, script, columns, notes)


def _practice(subject: Subject, conditions: Conditions, *, stir: bool = False) -> Case:
    """Copy a policy as it is trained; what is rounded to bfloat16 has to say enough to be heard."""
    case = _case(subject, torch.float32, conditions)
    return _stirred(case) if stir or case.kind == torch.bfloat16 else case


def _begin_some_more(script: Script) -> None:
    """Begin on a segment's first step, on its last, twice in a row, all at once and near the end."""
    everybody = [(agent, STEPS - 4) for agent in range(AGENTS)]
    some = [(0, HORIZON), (1, 2 * HORIZON - 1), (2, HORIZON + 3), (2, HORIZON + 4), (3, STEPS - 2)]
    for number, (agent, step) in enumerate([*some, *everybody]):
        if not script.first[agent, step]:
            (script.terminated if number % 2 else script.truncated)[agent, step] = True
        script.first[agent, step] = True
        script.valid[agent, step] = True


def _case(subject: Subject, dtype: torch.dtype, conditions: Conditions) -> Case:
    proof = dtype == torch.float64
    try:
        twin = subject.in_precision(dtype)
        conditions.impose(twin.module, proof=proof)
        kind = dtype if proof else conditions.computes_in(twin.module)
        return Case(twin, dtype, kind, torch.device(conditions.device))
    except ConfigError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        where = f"the {conditions.device.upper()} in {str(dtype).removeprefix('torch.')}"
        raise ContractError(f"The policy cannot be copied to {where}: {told}") from error


@torch.no_grad()
def _stirred(case: Case) -> Case:
    """Stir the weights of a copy: a newborn policy says so little that float32 rounds its errors away."""
    generator = torch.Generator().manual_seed(3)
    for weight in case.subject.module.parameters():
        fan_in = max(weight[0].numel(), 1) if weight.dim() > 1 else 10
        weight += torch.randn(weight.shape, generator=generator).to(weight) / fan_in**0.5
    return case
