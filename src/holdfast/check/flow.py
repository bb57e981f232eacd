"""The laws of flow: where gradients and information may go, and where not."""

import torch

from holdfast.check.bench import Bench
from holdfast.check.case import AGENTS, HORIZON, STEPS
from holdfast.check.compare import BOUND, SHORT, alive, close, nothing
from holdfast.check.results import Measurement
from holdfast.shapes import Tensor

FELT_ACROSS = 8
"""Over how many steps across an edge information must be felt."""


def cut(bench: Bench) -> list[Measurement]:
    """No gradient crosses from one call to another; within a segment it flows."""
    pulls, parts = bench.pulls, []
    for saying, pulled in (("act", "act"), ("replay", "act"), ("replay", "replay")):
        what = f"gradient from {'acting' if saying == 'act' else 'replaying'} into an earlier {pulled}"
        parts.append(
            nothing(
                what, pulls.between(saying, pulled), "call", "earlier call", about=f"{saying} into {pulled}"
            )
        )
    could = [kind == "replay" or bench.subject.cuts_itself for kind in pulls.kinds]
    least = float(pulls.own[could].min())
    told = (
        ("it is not a number", "not a number")
        if least != least
        else ("no gradient arrives at all", "no gradient")
    )
    parts.append(alive("gradient within calls", least, *told))
    if bench.gradient is not None and not bench.proof.forgetful:
        pull = bench.gradient.masked_fill(~bench.bound_to_feel, torch.inf)
        steps = [t for t in range(STEPS - 1) if (t + 1) % HORIZON]
        sizes = torch.stack([pull[t, :, t + 1].min() for t in steps])
        at = steps[int(sizes.argmin())]
        told = f"what is said at step {at + 1} does not pull on what was seen at step {at}, in one segment"
        parts.append(
            alive("gradient from step to step of a segment", float(sizes.min()), told, "step to step")
        )
    return parts


def carry(bench: Bench) -> list[Measurement]:
    """What is seen before an edge is felt after it, lived and replayed, unless a clear lies between."""
    if bench.proof.forgetful:
        return [Measurement("nothing: it has no memory, so there is nothing to carry", 0.0, 0.0)]
    parts = []
    for name, moved in bench.moved.items():
        felt = moved.amax(-1).masked_fill(~bench.bound_to_feel, torch.inf)
        least, where = float("inf"), "nothing was bound to be felt"
        for edge in range(HORIZON, STEPS, HORIZON):
            for distance in range(1, FELT_ACROSS + 1):
                steps = range(max(0, edge - distance), min(edge, STEPS - distance))
                size, seen, agent = min(
                    (
                        float(felt[seen, :, seen + distance].min()),
                        seen,
                        int(felt[seen, :, seen + distance].argmin()),
                    )
                    for seen in steps
                )
                if size < least:
                    least = size
                    where = (
                        f"agent {agent} sees it at step {seen} and does not feel it at step "
                        f"{seen + distance}, across the edge at {edge}, in any of "
                        f"{', '.join(dict.fromkeys(bench.columns))}"
                    )
        parts.append(alive(f"information across edges, {name}", least, where, name))
    return parts


def clear(bench: Bench) -> list[Measurement]:
    """Nothing seen before a clear, or by nobody, is felt after it: lived, replayed and evaluated."""
    parts, axes, columns = [], ("seen at step", "agent", "felt at step"), bench.columns
    absent = ~bench.script.valid[:, :STEPS].T[:, :, None]
    for name, moved in bench.moved.items():
        across = moved * bench.parted[..., None]
        parts.append(
            nothing(f"information across starts, {name}", across, *axes, columns=columns, about=name)
        )
        if bench.subject.knows_absence:
            away = moved * absent[..., None]
            parts.append(
                nothing(
                    f"information from where nobody acts, {name}", away, *axes, columns=columns, about=name
                )
            )
        within = float((moved.amax(-1) * (bench.bound_to_feel | _now())).max())
        parts.append(alive(f"information within episodes, {name}", within, "nothing is felt at all", name))
    if bench.gradient is not None:
        pull = bench.gradient.masked_fill(~bench.parted, 0.0)
        about = "not a number" if bool(pull.isnan().any()) else "replayed"
        parts.append(nothing("gradient across starts", pull, *axes, about=about))
    if bench.subject.clear_on != "never":
        parts += [_clear_in(bench, dtype, "lived") for dtype in bench.cases]
        parts.append(_clear_in(bench, next(iter(bench.cases)), "evaluated"))
    return parts


def _now() -> Tensor:
    return torch.eye(STEPS, dtype=torch.bool)[:, None]


def _clear_in(bench: Bench, dtype: torch.dtype, how: str) -> Measurement:
    """Change everything before each agent's last clear; nothing from there on may move."""
    last = torch.stack([row[:STEPS].nonzero().max() for row in bench.clears])
    before = torch.arange(STEPS + 1)[None] < last[:, None]
    case, changed = bench.cases[dtype], bench.script.changed(before)
    if how == "evaluated":
        was, now = case.evaluate(bench.script), case.evaluate(changed)
    else:
        was, now = bench.life[dtype].lived, case.live(changed).lived
    moved = (now - was) * ~before[:, : was.shape[1], None]
    what = f"information across each agent's last start, {how}, {SHORT[dtype]}"
    return nothing(what, moved, "agent", "step", columns=bench.columns, about=how)


def isolate(bench: Bench) -> list[Measurement]:
    """An agent's outputs depend on its own history only."""
    others = torch.ones_like(bench.script.first)
    others[0] = False
    parts, columns = [], bench.columns
    for dtype, case in bench.cases.items():
        changed, base = case.live(bench.script.changed(others)), bench.life[dtype]
        for name, now, was in (
            ("lived", changed.lived, base.lived),
            ("replayed", changed.replayed, base.replayed),
        ):
            what = f"batch mates changed, {name}, {SHORT[dtype]}"
            parts.append(nothing(what, (now - was)[:1], "agent", "step", columns=columns, about=name))
    parts += _permuted(bench)
    whole, _ = bench.proof.steps(bench.script)
    halves = [bench.proof.steps(bench.script.of(rows))[0] for rows in torch.arange(AGENTS).split(AGENTS // 2)]
    now, bound = torch.cat(halves), BOUND[bench.proof.dtype]
    parts.append(close("half of the agents alone", now, whole, bound, columns=columns, about="lived"))
    return parts


def _permuted(bench: Bench) -> list[Measurement]:
    """Let the agents stand in another order; each must say what it said.

    To the last bit, unless sums are cut elsewhere for another order: by a trainer that cuts rows anew,
    and by single-precision products of eight rows.
    """
    dtype, order = bench.proof.dtype, torch.arange(AGENTS).roll(2)
    base, mixed = bench.life[dtype], bench.proof.live(bench.script.of(order))
    parts = []
    for name, now, was in (
        ("lived", mixed.lived, base.lived[order]),
        ("replayed", mixed.replayed, base.replayed[order]),
    ):
        what, told = f"rows permuted, {name}", {"columns": bench.columns, "about": name}
        if dtype == torch.float64 and not (bench.subject.recuts and name == "replayed"):
            parts.append(nothing(what, now - was, "row", "step", **told))
        else:
            parts.append(close(what, now, was, BOUND[dtype], **told))
    return parts
