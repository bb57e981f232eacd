"""Sequences and agents alone in their batch, and agents served in slices: what explains that they differ."""

from typing import TYPE_CHECKING

import torch

from holdfast.check import hypotheses
from holdfast.check.case import AGENTS, HORIZON, STEPS
from holdfast.check.state import replay_alone
from holdfast.check.subjects.measures import served_in_slices
from holdfast.check.tree import copied
from holdfast.shapes import Tensor

if TYPE_CHECKING:
    from holdfast.check.diagnose import Doctor

IGNORED = "clears ignored when the batch holds one sequence"
UNCLEARED = ("memory is never cleared", "clears looked at in a segment's first step only")


def of_sequences(doctor: "Doctor") -> str | None:
    """Say what becomes of a sequence that is replayed alone."""
    case, script, clear = doctor.bench.proof, doctor.bench.script, doctor.bench.clears
    _, states = case.steps(script)
    starts = range(0, STEPS, HORIZON)
    said = torch.cat([replay_alone(case, script.moments(t, t + HORIZON), states[t]) for t in starts], dim=1)
    entry, right = next(iter(hypotheses.entries(case, states))).state, doctor.direct(case, states)
    for clock in hypotheses.segment_clocks(case, script, clear):
        if doctor.explains(case, hypotheses.replayed(case, script, entry, clock), said, right):
            return IGNORED if clock.name in UNCLEARED else clock.name or None
    among_others = hypotheses.replayed(case, script, entry, hypotheses.Clock("", clear[:, :STEPS]))
    read = "a sequence alone is read differently" if doctor.same(case, right, among_others) else None
    return doctor.beside(None) or read


def of_agents(doctor: "Doctor") -> str | None:
    """Say what becomes of an agent that acts alone."""
    case, script, few = doctor.bench.proof, doctor.bench.script, torch.arange(3)
    said = torch.cat([case.steps(script.of(rows))[0] for rows in few.split(1)])
    right = case.steps(script)[0][few]
    for clock in hypotheses.clocks(case, script, doctor.bench.clears):
        with case.precisely():
            empty = case.subject.initial(script.agents)
        predicted, _ = hypotheses.chain(case, script.moments(0, STEPS), empty, clock)
        if clock.name and doctor.explains(case, predicted[few], said, right):
            return IGNORED if clock.name in UNCLEARED else clock.name
    return doctor.beside(None)


def of_slices(doctor: "Doctor") -> str | None:
    """Say whether agents served in two slices act from one state: each slice from what the other left."""
    case, script, half = doctor.bench.proof, doctor.bench.script, AGENTS // 2
    with case.precisely():
        state = case.subject.initial(half)
    parts: list[list[Tensor]] = [[], []]
    for t in range(STEPS):
        for number, rows in enumerate(torch.arange(AGENTS).split(half)):
            said, states = case.steps(script.of(rows), start=t, stop=t + 1, state=copied(state))
            parts[number].append(said)
            state = states[-1]
    predicted = torch.cat([torch.cat(part, dim=1) for part in parts])
    whole, _ = case.steps(script)
    found = doctor.explains(case, predicted, served_in_slices(doctor.bench), whole)
    return "state shared between slices" if found else doctor.beside(None)
