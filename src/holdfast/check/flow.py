"""The laws of flow: where gradients and information may go, and where not."""

import torch

from holdfast.check.bench import Bench
from holdfast.check.case import AGENTS, HORIZON, STEPS
from holdfast.check.compare import BOUND, SHORT, alive, close, nothing
from holdfast.check.probes import pulls_of_each
from holdfast.check.results import Measurement
from holdfast.check.subject import flat
from holdfast.shapes import Float, Tensor

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
    for name, size in pulls_of_each(bench.proof, bench.script).items():
        told = ("it is not a number", "not a number") if size != size else ("none arrives", "no gradient")
        parts.append(alive(f"gradient of {name} in a replay", size, *told))
    if bench.gradient is not None and not bench.proof.forgetful:
        parts.append(_step_to_step(bench, bench.gradient))
    return parts


def _step_to_step(bench: Bench, gradient: Float[Tensor, "N A N"]) -> Measurement:
    """Demand that what is said pulls on the step before it, wherever that step pulls on itself."""
    sizes, where = [], []
    for t in range(STEPS - 1):
        if (t + 1) % HORIZON:
            looked = bench.bound_to_feel[t, :, t + 1] & (gradient[t, :, t] != 0)
            if bool(looked.any()):
                sizes.append(gradient[t, looked, t + 1].min())
                where.append(t)
    if not sizes:
        return alive("gradient from step to step of a segment", 0.0, "none arrives anywhere", "no gradient")
    least = torch.stack(sizes)
    at = where[int(least.argmin())]
    told = f"what is said at step {at + 1} does not pull on what was seen at step {at}, in one segment"
    return alive("gradient from step to step of a segment", float(least.min()), told, "step to step")


def carry(bench: Bench) -> list[Measurement]:
    """What is seen before an edge is felt after it, lived and replayed, unless a clear lies between."""
    if bench.proof.forgetful:
        return [Measurement("nothing: it has no memory to carry anything", 0.0, 0.0, about="n/a")]
    parts = [_carried(bench, name, moved) for name, moved in bench.moved.items()]
    return [*parts, _carried_in_evaluation(bench)]


def _carried(bench: Bench, name: str, moved: Float[Tensor, "N A N K"]) -> Measurement:
    """Find the smallest thing felt across an edge, where what is seen is felt at once."""
    felt = moved.amax(-1)
    at_once = felt.diagonal(dim1=0, dim2=2).T[:, :, None] > 0
    # In single precision what is far away may be rounded off; the nearest step may not.
    reach = FELT_ACROSS if bench.proof.dtype == torch.float64 else 1
    looked = bench.bound_to_feel & at_once
    felt = felt.masked_fill(~looked, torch.inf)
    least, where = float("inf"), "nothing was bound to be felt"
    for distance in range(1, reach + 1):
        for edge in range(HORIZON, STEPS, HORIZON):
            for seen in range(max(0, edge - distance), min(edge, STEPS - distance)):
                size, agent = felt[seen, :, seen + distance].min(0)
                if float(size) < least:
                    least = float(size)
                    where = (
                        f"agent {int(agent)} sees it at step {seen} and does not feel it at step "
                        f"{seen + distance}, across the edge at {edge}, in any of "
                        f"{', '.join(dict.fromkeys(bench.columns))}; {_longest(moved)} steps is the farthest"
                    )
    return alive(f"information across edges, {name}", 0.0 if least == float("inf") else least, where, name)


def _longest(moved: Float[Tensor, "N A N K"]) -> int:
    """Find over how many steps anything is felt at all."""
    felt = moved.amax((1, 3)) > 0
    seen, later = felt.nonzero().unbind(1)
    return int((later - seen).max()) if len(seen) else 0


def _carried_in_evaluation(bench: Bench) -> Measurement:
    """Change one late step in an evaluation; whoever goes on must feel it at the next."""
    case, counts = bench.proof, bench.subject.counted(bench.script)
    bound = [bench.bound_to_feel[t, :, t + 1] & counts[:, t + 1] for t in range(STEPS - 1)]
    # The last step after which some go on and, if there is such a one, others start.
    starts = [bool(bench.clears[:, t + 1].any()) for t in range(STEPS - 1)]
    seen = max(range(STEPS - 1), key=lambda t: (bool(bound[t].any()), starts[t], t))
    where = torch.zeros_like(bench.script.first)
    where[:, seen] = True
    moved = (case.evaluate(bench.script.changed(where)) - case.evaluate(bench.script)).abs().amax(-1)
    looked = bound[seen] & (moved[:, seen] > 0)
    sizes = torch.where(looked, moved[:, seen + 1], torch.inf)
    size, agent = sizes.min(0)
    told = f"agent {int(agent)} sees it at step {seen} and does not feel it at step {seen + 1}"
    least = float(size) if bool(looked.any()) else 0.0
    return alive("information from step to step, evaluated", least, told, "evaluated")


def clear(bench: Bench) -> list[Measurement]:
    """Nothing seen before a clear, or by nobody, is felt after it: lived, replayed and evaluated."""
    if not bench.subject.told_of_starts:
        told = "nothing: it is not told of starts, whoever calls it clears its state"
        return [Measurement(told, 0.0, 0.0, about="n/a")]
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
        parts += [_begins_anew(bench, dtype) for dtype in bench.cases]
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


def _begins_anew(bench: Bench, dtype: torch.dtype) -> Measurement:
    """Put the initial state in at every start: an episode must go as if life began there."""
    case = bench.cases[dtype]
    script = case.shown(bench.script).copied()
    said = []
    with torch.no_grad(), case.precisely():
        state = case.subject.initial(script.agents)
        for t in range(STEPS):
            state = case.rows.choose(bench.clears[:, t], case.subject.initial(script.agents), state)
            answer, state = case.subject.act(script.at(t), state)
            said.append(flat(answer, 1))
    now, what = torch.stack(said, dim=1).cpu(), f"an episode as a life that begins with it, {SHORT[dtype]}"
    return close(what, bench.life[dtype].lived, now, BOUND[dtype], columns=bench.columns, about="lived")


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
    now, bound = torch.cat(halves), BOUND[bench.proof.kind]
    parts.append(close("half of the agents alone", now, whole, bound, columns=columns, about="lived"))
    few = torch.arange(3)
    single = torch.cat([bench.proof.steps(bench.script.of(rows))[0] for rows in few.split(1)])
    parts.append(close("one agent alone", single, whole[few], bound, columns=columns, about="one agent"))
    return parts


def _permuted(bench: Bench) -> list[Measurement]:
    """Let the agents stand in another order; each must say what it said.

    To the last bit, unless sums are cut elsewhere for another order: by a trainer that cuts rows anew,
    and by single-precision products of eight rows.
    """
    dtype, order = bench.proof.kind, torch.arange(AGENTS).roll(2)
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
