"""The laws of state: what is replayed, asked, kept and restored is what was lived."""

import copy
import tempfile
from dataclasses import fields, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

from holdfast.check.bench import Bench
from holdfast.check.case import AGENTS, HORIZON, STEPS, Case
from holdfast.check.compare import BOUND, SHORT, close, nothing
from holdfast.check.probes import held
from holdfast.check.results import Measurement
from holdfast.check.script import Moments, Script
from holdfast.check.tree import State, copied, leaves, names_of
from holdfast.shapes import Tensor

MIDDLE = STEPS // 2


def replays(bench: Bench) -> list[Measurement]:
    """Replaying a segment from its entry state gives what was lived: PPO's first ratio is 1."""
    parts = []
    for dtype, life in bench.life.items():
        for name in dict.fromkeys(bench.columns):
            picked = [at for at, column in enumerate(bench.columns) if column == name]
            now, was = life.replayed[..., picked], life.lived[..., picked]
            parts.append(close(f"{name}, {SHORT[dtype]}", now, was, BOUND[dtype], about="replayed"))
    return parts


def pure(bench: Bench) -> list[Measurement]:
    """Asking for a value, or replaying, advances nothing; inputs are left as they were."""
    case, script, columns = bench.proof, bench.script, bench.columns
    whole, states = case.steps(script)
    subject, shown = case.subject, case.shown(script)
    with torch.no_grad(), case.precisely():
        case.steps(script, stop=MIDDLE)
        subject.value(shown.at(MIDDLE + 1), copied(states[MIDDLE]))
        subject.replay(shown.moments(0, HORIZON), copied(states[MIDDLE + 1]))
    rest, _ = case.steps(script, start=MIDDLE, state=states[MIDDLE])
    again, _ = case.steps(script, start=MIDDLE, state=states[MIDDLE])
    after = ("agent", "step after it")
    return [
        nothing(
            "outputs after asking for values",
            rest - whole[:, MIDDLE:],
            *after,
            columns=columns,
            about="asked",
        ),
        nothing("outputs of the same steps again", again - rest, *after, columns=columns, about="asked"),
        *_inputs_untouched(case, shown, states[MIDDLE]),
        _outputs_untouched(case, shown, states[MIDDLE]),
    ]


def _inputs_untouched(case: Case, script: Script, state: State) -> list[Measurement]:
    """Compare what was given to the policy before and after it was called."""
    parts = []
    with torch.no_grad(), case.precisely():
        step, segment = script.at(MIDDLE), script.moments(MIDDLE, MIDDLE + HORIZON)
        for name, moments in (("act", step), ("value", step), ("replay", segment)):
            given, lent = copy.deepcopy(moments), copied(state)
            getattr(case.subject, name)(given, lent)
            changed = [
                each.name
                for each in fields(Moments)
                if not getattr(given, each.name).equal(getattr(moments, each.name))
            ]
            changed += [
                f"state {which}"
                for which, now, was in zip(names_of(state), leaves(lent), leaves(state), strict=True)
                if not now.equal(was)
            ]
            finding = f"{name} wrote into its {', '.join(changed)}"
            parts.append(
                Measurement(
                    f"inputs written to by {name}", float(len(changed)), 0.0, finding=finding, about="inputs"
                )
            )
    return parts


def _outputs_untouched(case: Case, script: Script, state: State) -> Measurement:
    """See whether a state that was handed out is changed by the calls after it."""
    with torch.no_grad(), case.precisely():
        _, handed = case.subject.act(script.at(MIDDLE), copied(state))
        kept = copied(handed)
        case.subject.act(script.at(MIDDLE + 1), copied(handed))
    changed = [
        name
        for name, now, was in zip(names_of(kept), leaves(handed), leaves(kept), strict=True)
        if not now.equal(was)
    ]
    told = f"the next call wrote into {', '.join(changed)} of the state it had returned"
    what = "states written to after they were returned"
    return Measurement(what, float(len(changed)), 0.0, finding=told, about="inputs")


def bounded(bench: Bench) -> list[Measurement]:
    """What is held does not grow with time."""
    case = bench.practice
    subject, script = case.subject, case.shown(bench.script.of(torch.arange(2)))
    with case.precisely():
        state = subject.initial(2)
        entry = copied(state)

    def live(steps: int) -> None:
        nonlocal state
        with case.precisely():
            for _ in range(0, steps, 200):
                with torch.enable_grad():
                    subject.replay(script.moments(0, HORIZON), copied(entry))
            with torch.set_grad_enabled(subject.cuts_itself):
                state = subject.pass_time(script, state, steps)

    live(200)
    few = held()
    live(1800)
    many = held()
    return growth(few, many)


def growth(few: tuple[int, int], many: tuple[int, int], what: str = "") -> list[Measurement]:
    """Demand that as much is held after 2,000 steps as after 200."""
    return [
        Measurement(
            f"growth of {kind} from 200 to 2,000 steps{what}",
            float(abs(late - early)),
            0.0,
            finding=f"{early:,} after 200 steps, {late:,} after 2,000",
            about=kind,
        )
        for kind, early, late in zip(("bytes", "graph nodes"), few, many, strict=True)
    ]


def restore(bench: Bench) -> list[Measurement]:
    """Weights and memories written to disk and read back go on as if never stopped."""
    case, script = bench.proof, bench.script
    whole, _ = case.steps(script)
    # Copied before it lives, and spoilt, so that nothing is right but what is loaded.
    with case.precisely():
        other = replace(case, subject=copy.deepcopy(case.subject))
    _spoil(other)
    _, states = case.steps(script, stop=MIDDLE)
    with tempfile.TemporaryDirectory() as folder:
        weights, memory = Path(folder) / "weights.safetensors", Path(folder) / "memory.safetensors"
        save_file(
            {key: leaf.contiguous().clone() for key, leaf in case.subject.module.state_dict().items()},
            weights,
        )
        save_file({str(at): leaf.contiguous() for at, leaf in enumerate(leaves(states[MIDDLE]))}, memory)
        other.subject.module.load_state_dict(load_file(weights))
        saved = load_file(memory)
    kept = iter(range(len(saved)))
    state = pytree.tree_map_only(Tensor, lambda leaf: saved[str(next(kept))].to(leaf.device), states[MIDDLE])
    # Somebody else lives meanwhile: what is kept outside of weights and states is no longer what it was.
    case.steps(script.changed(torch.ones_like(script.first)), stop=HORIZON + 3)
    rest, _ = other.steps(script, start=MIDDLE, state=state)
    what = "outputs after saving and loading"
    return [
        nothing(
            what, rest - whole[:, MIDDLE:], "agent", "step after it", columns=bench.columns, about="saved"
        )
    ]


@torch.no_grad()
def _spoil(case: Case) -> None:
    for leaf in case.subject.module.state_dict().values():
        leaf.logical_not_() if leaf.dtype == torch.bool else leaf.add_(1)


def agree(bench: Bench) -> list[Measurement]:
    """However a segment is laid out in calls, it says the same."""
    parts = []
    for dtype, case in bench.cases.items():
        said, states = case.steps(bench.script)
        long = case.replay(bench.script.moments(0, STEPS), states[0])
        what = f"all {STEPS} steps in one segment as steps, {SHORT[dtype]}"
        parts.append(close(what, long, said, BOUND[dtype], columns=bench.columns, about="replayed"))
        whole, alone, short = [], [], []
        for start in range(0, STEPS, HORIZON):
            moments, entry = bench.script.moments(start, start + HORIZON), states[start]
            whole.append(case.replay(moments, entry))
            alone.append(replay_alone(case, moments, entry))
            pieces = [slice(0, 1), slice(1, 4), slice(4, HORIZON)]
            short.append(
                torch.cat(
                    [case.replay(moments[:, each], states[start + each.start]) for each in pieces], dim=1
                )
            )
        was, kinds = (
            torch.cat(whole, dim=1),
            (
                ("alone", "a sequence alone as among others", alone),
                ("short", "short segments as a long one", short),
            ),
        )
        for about, what, said in kinds:
            now = torch.cat(said, dim=1)
            parts.append(
                close(f"{what}, {SHORT[dtype]}", now, was, BOUND[dtype], columns=bench.columns, about=about)
            )
    return parts


def replay_alone(case: Case, moments: Moments, entry: State) -> Tensor:
    """Replay every row of a segment in a batch of its own."""
    rows = [torch.tensor([agent]) for agent in range(AGENTS)]
    return torch.cat([case.replay(moments[row], case.rows.pick(entry, row)) for row in rows])
