"""Check a recorded rollout: a safetensors file with arrays `[T,E]`, of a trainer in any language.

The format is in docs/guides/check_your_trainer.md. Nothing in a file is executed.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from holdfast.check.results import Law, Laws, Measurement, not_measured
from holdfast.errors import ConfigError, one_line
from holdfast.types import Bool, Float, Tensor

LARGEST = 2**30
"""Bytes of a file that is read."""
FLAGS = ("first", "terminated", "truncated")
STEPS = ("log_probs", "values", "replayed_log_probs", "replayed_values", "rewards", "advantages", "returns")
BOOTSTRAPS = ("next_values", "final_values")
STATES = ("states", "entry_states", "exit_states")
REQUIRED = (*FLAGS, "log_probs", "replayed_log_probs")
NAMES = (*FLAGS, *STEPS, *BOOTSTRAPS, "last_values", *STATES, "initial_state", "obs")
BOUND = 1e-5
"""Largest difference of numbers, relative to max(1, |x|)."""


@dataclass(frozen=True)
class RolloutFile:
    """The arrays of a rollout, and its numbers."""

    arrays: dict[str, Tensor]
    gamma: float | None
    lam: float | None

    def __getitem__(self, name: str) -> Tensor:
        return self.arrays[name]

    def missing(self, *names: str) -> str:
        """Name the first array that is not in the file; empty if all are."""
        return next((f"the file has no {name}" for name in names if name not in self.arrays), "")

    @cached_property
    def ended(self) -> Bool[Tensor, "T E"]:
        """Where the action ended an episode."""
        return self["terminated"] | self["truncated"]


def read_rollout(path: Path) -> RolloutFile:
    """Read a file; raise an error of one line if it is not a rollout."""
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise ConfigError(f"{path} has {size} bytes; at most {LARGEST} are read: record a shorter rollout.")
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = list(file.keys())
            if unknown := sorted(set(names) - set(NAMES)):
                raise ConfigError(
                    f"{path}: {unknown[0]!r} is not an array of a rollout; these are: {', '.join(NAMES)}."
                )
            arrays = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {one_line(error, 200)}") from error
    gamma, lam = _numbers(path, metadata.get("holdfast_rollout"))
    return RolloutFile(_checked(path, arrays), gamma, lam)


def _numbers(path: Path, text: str | None) -> tuple[float | None, float | None]:
    """Return gamma and lambda from the metadata."""
    example = 'metadata {"holdfast_rollout": \'{"version": 1, "gamma": 0.99, "lambda": 0.95}\'}'
    if text is None:
        raise ConfigError(f"{path} has no key holdfast_rollout in its metadata; write {example}.")
    try:
        numbers = json.loads(text[:10_000])
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: its metadata is no JSON ({one_line(error, 100)}); write {example}.") from error
    if not isinstance(numbers, dict) or numbers.get("version") != 1:
        raise ConfigError(f"{path}: its metadata has no version 1; write {example}.")
    values = []
    for name in ("gamma", "lambda"):
        value = numbers.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1):
            raise ConfigError(f"{path}: {name} is {str(value)[:40]!r}; write a number from 0 to 1.")
        values.append(None if value is None else float(value))
    return values[0], values[1]


def _checked(path: Path, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """Require names, shapes and dtypes, and return flags as bool and numbers in float64."""
    for name in REQUIRED:
        if name not in arrays:
            raise ConfigError(f"{path} has no array {name}; a rollout has at least {', '.join(REQUIRED)}.")
    shape = tuple(arrays["first"].shape)
    if len(shape) != 2 or 0 in shape:
        raise ConfigError(f"{path}: first is {list(shape)}, must be [T,E]: steps, environments.")
    result = {}
    for name, array in arrays.items():
        expected = shape if name in (*FLAGS, *STEPS, *BOOTSTRAPS) else shape[1:] if name == "last_values" else None
        if expected is not None and tuple(array.shape) != expected:
            raise ConfigError(f"{path}: {name} is {list(array.shape)}, must be {list(expected)}.")
        if array.is_complex():
            raise ConfigError(f"{path}: {name} is {array.dtype}; write real numbers.")
        if name in FLAGS:
            if not bool(((array == 0) | (array == 1)).all()):
                raise ConfigError(f"{path}: {name} has numbers besides 0 and 1; write flags.")
            result[name] = array.bool()
        else:
            result[name] = array.double()
    _check_states(path, result, shape)
    return result


def _check_states(path: Path, arrays: dict[str, Tensor], shape: tuple[int, ...]) -> None:
    T, E = shape
    for name in STATES:
        array = arrays.get(name)
        if array is None:
            continue
        if array.dim() < 3 or array.shape[1] != E:
            raise ConfigError(f"{path}: {name} is {list(array.shape)}, must be [N,{E},...]: N segments or steps.")
        if name == "states" and len(array) != T:
            raise ConfigError(f"{path}: states is {list(array.shape)}, must be [{T},{E},...].")
        if name != "states" and (not len(array) or T % len(array)):
            raise ConfigError(f"{path}: {name} has {len(array)} segments, which do not divide {T} steps.")
    both = [arrays[name].shape for name in STATES[1:] if name in arrays]
    if len(set(both)) > 1:
        raise ConfigError(f"{path}: entry_states is {list(both[0])} and exit_states {list(both[1])}; must be equal.")
    initial = arrays.get("initial_state")
    for name in STATES:
        if initial is not None and name in arrays and initial.shape != arrays[name].shape[2:]:
            must = list(arrays[name].shape[2:])
            raise ConfigError(f"{path}: initial_state is {list(initial.shape)}, must be {must}, as in {name}.")


def check_rollout(path: Path) -> Laws:
    """Measure the laws of a recorded rollout; `laws.ok` is true if all that could be measured hold."""
    rollout = read_rollout(path)
    laws = [Law(name, measure(rollout), diagnosed=False) for name, measure in ROLLOUT_LAWS.items()]
    T, E = rollout["first"].shape
    ends = f"{int(rollout.ended.sum())} episodes ended"
    notes = [f"{T} steps of {E} environments; {ends}, {int(rollout['truncated'].sum())} truncated"]
    notes += [f"{law.name}: not measured, {p.finding}" for law in laws for p in law.parts if p.path == "n/a"]
    return Laws(laws, notes=list(dict.fromkeys(notes)), of="a rollout")


def _equal(what: str, actual: Tensor, expected: Tensor, where: Tensor, must: str, why: str = "") -> Measurement:
    """Require equality up to rounding where a mask is true; the finding names the first other step."""
    if not bool(where.any()):
        return not_measured(what, "no such step is in the rollout")
    gap = (actual - expected).abs() / expected.abs().clamp(min=1)
    gap = gap.nan_to_num(torch.inf, torch.inf)
    gap = gap.flatten(2).amax(2) if gap.dim() > 2 else gap
    gap = torch.where(where, gap, 0.0)
    wrong = gap > BOUND
    if not bool(wrong.any()):
        return Measurement(what, float(gap.max()), BOUND)
    step, env = wrong.nonzero()[0].tolist()
    count = f"({int(wrong.sum())} of {int(where.sum())})"
    hypothesis = f"; {why}" if why else ""
    finding = f"env {env}, step {step}: off by {float(gap[step, env]):.1e}, must be {must} {count}{hypothesis}"
    return Measurement(what, float(gap.max()), BOUND, finding=finding)


def flags(rollout: RolloutFile) -> list[Measurement]:
    """A first step follows an ended episode, and nothing else."""
    first, ended = rollout["first"][1:], rollout.ended[:-1]
    parts = []
    for what, bad in (("ends without a first step after them", ended & ~first), ("first steps inside", first & ~ended)):
        finding = ""
        if bool(bad.any()):
            step, env = bad.nonzero()[0].tolist()
            late = bool((first[1:] == ended[:-1]).all()) and not bool((first == ended).all())
            finding = f"env {env}, step {step + 1}" + ("; hypothesis: first is one step late" if late else "")
        parts.append(Measurement(what, float(bad.sum()), finding=finding))
    return parts


def clear(rollout: RolloutFile) -> list[Measurement]:
    """The state that a first step read is the initial one."""
    what = "states at first steps"
    if reason := rollout.missing("states"):
        return [not_measured(what, reason)]
    states, first = rollout["states"], rollout["first"]
    initial = rollout.arrays.get("initial_state", torch.zeros_like(states[0, 0])).expand_as(states)
    wrong = first & ((states - initial).abs().flatten(2).amax(2) > BOUND)
    return [_equal(what, states, initial, first, "the initial state", _clear_rule(rollout, wrong))]


def _clear_rule(rollout: RolloutFile, wrong: Bool[Tensor, "T E"]) -> str:
    first, truncated, terminated = (rollout[name][1:] for name in ("first", "truncated", "terminated"))
    truncated, terminated, wrong = rollout["truncated"][:-1] & first, rollout["terminated"][:-1] & first, wrong[1:]
    if bool((wrong == first).all()):
        return "hypothesis: never cleared"
    if bool((wrong == first & ~terminated).all()):
        return "hypothesis: cleared on terminated only, not on truncated"
    if bool((wrong == first & ~truncated).all()):
        return "hypothesis: cleared on truncated only, not on terminated"
    return ""


def carry(rollout: RolloutFile) -> list[Measurement]:
    """A segment's entry state is the state after the segment before, or the initial one where an episode starts."""
    what = "entry states of segments"
    if reason := rollout.missing("entry_states", "exit_states"):
        return [not_measured(what, reason)]
    entry, exits = rollout["entry_states"], rollout["exit_states"]
    if len(entry) < 2:
        return [not_measured(what, "the rollout has one segment")]
    length = len(rollout["first"]) // len(entry)
    starts = rollout["first"][length::length]
    initial = rollout.arrays.get("initial_state", torch.zeros_like(entry[0, 0])).expand_as(entry[1:])
    # At a start it may be stored before or after clearing.
    cleared = ((entry[1:] - initial).abs().flatten(2).amax(2) <= BOUND) & starts
    why = "hypothesis: segments start from zeros" if not bool(entry[1:].any()) else ""
    return [_equal(what, entry[1:], exits[:-1], ~cleared, "the state after the segment before", why)]


def replay(rollout: RolloutFile) -> list[Measurement]:
    """Replayed log-probabilities and values are those of the rollout."""
    parts, everywhere = [], torch.ones_like(rollout["first"])
    for name in ("log_probs", "values"):
        if reason := rollout.missing(name, f"replayed_{name}"):
            parts.append(not_measured(f"replayed {name}", reason))
            continue
        wrong = (rollout[name] - rollout[f"replayed_{name}"]).abs() > BOUND
        why = _replay_rule(rollout, wrong)
        parts.append(_equal(f"replayed {name}", rollout[f"replayed_{name}"], rollout[name], everywhere, name, why))
    return parts


def _replay_rule(rollout: RolloutFile, wrong: Bool[Tensor, "T E"]) -> str:
    """Return where the errors begin: at segments, or at episode starts."""
    first = rollout["first"]
    begins = wrong & ~torch.cat([torch.zeros_like(wrong[:1]), wrong[:-1]])
    if not bool(begins.any()):
        return ""
    if bool(first[begins].all()):
        return "hypothesis: replayed without clearing, all errors begin where an episode starts"
    segments = len(rollout.arrays.get("entry_states", first[:1]))
    at_entry = torch.arange(len(first)) % (len(first) // segments) == 0
    if bool((at_entry[:, None] | first)[begins].all()) and not bool((wrong & first).any()):
        return "hypothesis: replayed from another entry state, all errors begin at a segment's start"
    return ""


def bootstrap(rollout: RolloutFile) -> list[Measurement]:
    """The value used after a step: 0 when terminated, the final observation's when truncated, else the next one's."""
    names = ("values after terminations", "values after truncations", "values of next steps")
    if reason := rollout.missing("next_values", "values"):
        return [not_measured(name, reason) for name in names]
    used, values, terminated = rollout["next_values"], rollout["values"], rollout["terminated"]
    following, truncated = torch.zeros_like(values), rollout["truncated"] & ~terminated
    following[:-1] = values[1:]
    goes_on = ~rollout.ended
    if "last_values" in rollout.arrays:
        following[-1] = rollout["last_values"]
    else:
        goes_on[-1] = False
    parts = [_equal(names[0], used, torch.zeros_like(used), terminated, "0")]
    if reason := rollout.missing("final_values"):
        parts.append(not_measured(names[1], reason))
    else:
        why = _truncation_rule(used, following, values, truncated)
        parts.append(_equal(names[1], used, rollout["final_values"], truncated, "the final observation's value", why))
    return [*parts, _equal(names[2], used, following, goes_on, "the value of the next step")]


def _truncation_rule(used: Tensor, following: Tensor, values: Tensor, where: Tensor) -> str:
    for words, candidate in (
        ("treated as a termination, the bootstrap is 0", torch.zeros_like(used)),
        ("bootstraps from the first observation of the next episode", following),
        ("bootstraps from the value of the step before the end, an approximation", values),
    ):
        if bool(((used - candidate).abs() <= BOUND)[where].all()):
            return f"hypothesis: {words}"
    return ""


def advantage(rollout: RolloutFile) -> list[Measurement]:
    """Advantages are GAE's, and returns advantages plus values."""
    parts, everywhere = [], torch.ones_like(rollout["first"])
    reason = rollout.missing("advantages", "rewards", "values", "next_values")
    if not reason and (rollout.gamma is None or rollout.lam is None):
        reason = "the metadata has no gamma or no lambda"
    if reason:
        parts.append(not_measured("advantages", reason))
    else:
        expected = _gae(rollout, rollout.gamma or 0.0, rollout.lam or 0.0)
        actual = rollout["advantages"]
        why = ""
        if len(actual) > 2 and bool(((actual[1:] - expected[:-1]).abs() <= BOUND).all()):
            why = "hypothesis: one step late"
        elif len(actual) > 2 and bool(((actual[:-1] - expected[1:]).abs() <= BOUND).all()):
            why = "hypothesis: one step early"
        parts.append(_equal("advantages", actual, expected, everywhere, "GAE of the rewards and next_values", why))
    if reason := rollout.missing("returns", "advantages", "values"):
        return [*parts, not_measured("returns", reason)]
    total = rollout["advantages"] + rollout["values"]
    return [*parts, _equal("returns", rollout["returns"], total, everywhere, "advantages + values")]


def _gae(rollout: RolloutFile, gamma: float, lam: float) -> Float[Tensor, "T E"]:
    delta = rollout["rewards"] + gamma * rollout["next_values"] - rollout["values"]
    result, last = torch.zeros_like(delta), torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        last = delta[t] + gamma * lam * torch.where(rollout.ended[t], 0.0, last)
        result[t] = last
    return result


ROLLOUT_LAWS: dict[str, Callable[[RolloutFile], list[Measurement]]] = {
    law.__name__: law for law in (flags, clear, carry, replay, bootstrap, advantage)
}
