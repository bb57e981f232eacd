"""Run a trainer on scripted environments and measure its laws."""

import inspect
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from holdfast.check.results import Law, Laws, Measurement, not_measured
from holdfast.check.trainer.environments import INTERFACES
from holdfast.check.trainer.recording import TrainerRecording
from holdfast.check.trainer.returns import Returns, advantage, bootstrap, heads_replay
from holdfast.check.trainer.script import NONE, TrainerScript
from holdfast.check.trainer.states import BOUND, STATE_LAWS, Difference, Memory, distance, summarize
from holdfast.errors import ConfigError, ContractError, HoldfastError, located_error_text

Train = Callable[[Any], object]
GAMMA, LAMBDA = 0.99, 0.95
NAMES = ("weights", *STATE_LAWS, "advantage", "bootstrap", "once")
CONTRACT = "write def train(envs): ... that trains two or three updates with learning rate 0"


def check_trainer(
    train: Train,
    *,
    interface: str = "",
    gamma: float = GAMMA,
    lam: float = LAMBDA,
    hands_over_final: bool | None = None,
    on_progress: Callable[[str], None] = lambda doing: None,
) -> Laws:
    """Measure the laws of memory on a trainer; `laws.ok` is true if all that could be measured hold.

    `train(envs)` trains a recurrent policy on the environments that it is handed, for two or three updates, with
    learning rate 0, no dropout, no normalization of observations or returns, and with `gamma` and `lam`.
    `interface` is the kind of environments, one of `gym`, `sb3`, `rsl_rl`, `torchrl`; by default what the function's
    annotation names, else `gym`. `hands_over_final=False` says that the trainer's own interface drops final
    observations, so that the value of the step before a truncation may stand for theirs.
    """
    chosen = interface or _annotated(train)
    if chosen not in INTERFACES:
        raise ConfigError(f"interface {chosen!r} is not known; choose one of {', '.join(INTERFACES)}.")
    recording = TrainerRecording(TrainerScript(on_step=lambda step: on_progress(f"the trainer took {step} steps")))
    environments = INTERFACES[chosen](recording.script)
    # Compiled modules run eagerly, as hooks do not see their calls.
    with recording.recording(), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using `torch.compile")
        try:
            train(environments)
        except HoldfastError:
            raise
        except Exception as error:
            raise ContractError(f"The trainer raised {located_error_text(error)}.") from error
    on_progress("comparing states, outputs and returns")
    sees_final = chosen != "rsl_rl" if hands_over_final is None else hands_over_final
    return measure_recording(recording, gamma, lam, sees_final=sees_final)


def _annotated(train: Train) -> str:
    """Return the interface that the annotation of the first parameter asks for."""
    try:
        parameters = list(inspect.signature(train).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{train!r} is not a function; {CONTRACT}.") from error
    if not parameters:
        raise ConfigError(f"The trainer takes no environments; {CONTRACT}.")
    text = str(parameters[0].annotation)
    names = {"rsl_rl": "rsl_rl", "stable_baselines3": "sb3", "torchrl": "torchrl"}
    return next((interface for word, interface in names.items() if word in text), "gym")


def measure_recording(recording: TrainerRecording, gamma: float, lam: float, *, sees_final: bool = True) -> Laws:
    """Measure all laws on what was recorded."""
    _require_readable(recording)
    changed = recording.changed_weight()
    weights = Measurement("largest change of a weight", changed, finding="set the learning rate to 0")
    laws = [Law("weights", [weights], diagnosed=False)]
    memories = []
    for index, module in enumerate(recording.recurrent):
        name = f"{type(module).__name__} {index}, " if len(recording.recurrent) > 1 else ""
        memories.append(Memory(recording, module, name))
    returns = Returns(recording, gamma, lam)
    for law in NAMES[1:]:
        if changed:
            parts = [not_measured("nothing, since weights changed", "set the learning rate to 0")]
        elif law in STATE_LAWS:
            parts = [part for memory in memories for part in STATE_LAWS[law](memory)]
        elif law == "once":
            parts = once(recording, memories)
        elif law == "advantage":
            parts = advantage(returns)
        else:
            finals = [_final_states(memory) for memory in memories] if sees_final else []
            parts = [*_bootstraps(returns, sees_final), *finals]
        if law == "replay" and not changed and all(part.ok for part in parts):
            parts += heads_replay(recording)
        measured = [part for part in parts if part.path != "n/a"]
        # An actor's LSTM computes no bootstrap value: what one of several measured is enough.
        names = {_unnamed(part, memories) for part in measured}
        rest = [part for part in parts if part.path == "n/a" and _unnamed(part, memories) not in names]
        laws.append(Law(law, [*measured, *rest], diagnosed=False))
    return Laws(laws, notes=_notes(recording, laws, sees_final), of="a trainer")


def _unnamed(part: Measurement, memories: list[Memory]) -> str:
    """Return what was measured, without the module's name."""
    return next(
        (part.what.removeprefix(m.name) for m in memories if m.name and part.what.startswith(m.name)), part.what
    )


def _bootstraps(returns: Returns, sees_final: bool) -> list[Measurement]:
    parts = bootstrap(returns)
    if sees_final:
        return parts
    # Without final observations there is no right value, and the one before stands for it.
    approximate = "step before the end, an approximation"
    return [
        not_measured(part.what, "this interface hands over no final observations; the value of the step before is used")
        if approximate in part.finding and part.what == "values after truncations"
        else part
        for part in parts
    ]


def _require_readable(recording: TrainerRecording) -> None:
    if not recording.script.transitions:
        raise ContractError(f"The trainer took no step of the environments; {CONTRACT}.")
    if not recording.recurrent:
        raise ContractError(
            "No recurrent module was called on the observations: the check reads calls of torch.nn.LSTM, GRU, RNN and "
            "their cells, whose rows it knows by observations that are neither normalized nor changed."
        )
    learning = any(call.kind == "learn" for calls in recording.recurrent.values() for call in calls)
    if not learning and not recording.unidentified.total():
        raise ContractError(f"No recurrent module was called with gradients on steps of a rollout; {CONTRACT}.")


def _final_states(memory: Memory) -> Measurement:
    """A final observation is valued with the state before clearing."""
    differences = []
    for number in memory.acting.keys() & memory.script.final:
        previous = memory.acting.get(memory.before(number))
        if previous:
            act = memory.acting[number][0]
            size = distance(act.entry, previous[-1].exit)
            differences.append(Difference(number, size, memory.name_of(act.entry, number) if size > BOUND else ""))
    what, must = "states of final observations", "the state after the step before, not cleared"
    return summarize(memory, what, differences, len(differences), must, lambda: "hypothesis: cleared too early")


def once(recording: TrainerRecording, memories: list[Memory]) -> list[Measurement]:
    """Every step is trained on equally often."""
    script, parts = recording.script, []
    for memory in memories:
        counts = Counter[int]()
        times = set()
        for call in memory.updates:
            present = call.ids[call.ids != NONE]
            if len(present) > len(present.unique()):
                # Of overlapping windows, each trains on its last step.
                present = call.ids[:, -1]
            counts.update(present[present != NONE].tolist())
            times.add(call.time)
        if not times:
            continue
        steps = script.transitions[: max(times)]
        numbers = [int(number) for step in steps for number in step.ids]
        usual = Counter(counts[number] for number in numbers if counts[number]).most_common(1)[0][0]
        never = [number for number in numbers if not counts[number]]
        uneven = [number for number in numbers if counts[number] not in (0, usual)]
        for what, bad in (
            (f"steps never trained on, of {len(numbers)}", never),
            (f"steps not trained on {usual} times", uneven),
        ):
            finding = ""
            if bad:
                finding = (
                    f"{script.place(bad[0])}: {counts[bad[0]]} times, most steps {usual} times ({len(bad)} such steps)"
                )
            parts.append(Measurement(memory.name + what, float(len(bad)), finding=finding))
    return parts


def _notes(recording: TrainerRecording, laws: list[Law], sees_final: bool) -> list[str]:
    script = recording.script
    ended = sum(int(step.ended.sum()) for step in script.transitions)
    truncated = sum(int((step.truncated & ~step.terminated).sum()) for step in script.transitions)
    updates = len({call.time for calls in recording.recurrent.values() for call in calls if call.kind == "learn"})
    notes = [
        f"{script.envs} environments, {len(script.transitions)} steps, {updates} updates; {ended} episodes ended, "
        f"{truncated} by truncation alone"
    ]
    if updates < 2:
        notes.append("one update: states after an update were not measured; train for two or three")
    notes += recording.notes
    notes += [
        f"{law.name}: {part.what}: not measured, {part.finding}"
        for law in laws
        for part in law.parts
        if part.path == "n/a"
    ]
    return list(dict.fromkeys(notes))
