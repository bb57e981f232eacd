"""Recorded rollouts: the right one passes, each wrong one is caught and named, malformed files are one line."""

import json
import random
import re
import struct

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from helpers.mutations import mutate
from holdfast.check import rollout_file
from holdfast.check.rollout_file import check_rollout
from holdfast.cli import main
from holdfast.errors import ConfigError

T, E, H, SEGMENTS, GAMMA, LAMBDA = 12, 3, 2, 3, 0.9, 0.8


def right():
    """A rollout that holds all laws."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(T, E)) for name in ("values", "log_probs", "rewards", "final_values")}
    ended = rng.random((T, E)) < 0.3
    ended[4, 0] = ended[7, 1] = True
    kind = rng.random((T, E)) < 0.5
    kind[4, 0], kind[7, 1] = True, False
    arrays["terminated"], arrays["truncated"] = ended & kind, ended & ~kind
    arrays["first"] = np.concatenate([np.ones((1, E), bool), ended[:-1]])
    arrays["last_values"] = rng.normal(size=E)
    following = np.concatenate([arrays["values"][1:], arrays["last_values"][None]])
    arrays["next_values"] = np.where(ended, np.where(kind, 0.0, arrays["final_values"]), following)
    states = rng.normal(size=(T + 1, E, H))
    arrays["states"] = np.where(arrays["first"][..., None], 0.0, states[:T])
    length = T // SEGMENTS
    arrays["entry_states"], arrays["exit_states"] = states[:T:length].copy(), states[length::length].copy()
    last, arrays["advantages"] = 0.0, np.zeros((T, E))
    for t in reversed(range(T)):
        delta = arrays["rewards"][t] + GAMMA * arrays["next_values"][t] - arrays["values"][t]
        arrays["advantages"][t] = last = delta + GAMMA * LAMBDA * np.where(ended[t], 0.0, last)
    arrays["returns"] = arrays["advantages"] + arrays["values"]
    arrays["replayed_values"], arrays["replayed_log_probs"] = arrays["values"].copy(), arrays["log_probs"].copy()
    return arrays


def write(path, arrays, metadata=None):
    text = json.dumps({"version": 1, "gamma": GAMMA, "lambda": LAMBDA})
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(contiguous, path, metadata={"holdfast_rollout": text} if metadata is None else metadata)
    return path


def test_a_right_rollout_holds_all_laws_and_all_are_measured(tmp_path):
    laws = check_rollout(write(tmp_path / "r.safetensors", right()))
    assert laws.ok, laws
    assert [part.what for law in laws.values() for part in law.parts if part.path == "n/a"] == []
    assert laws.notes[0].startswith("12 steps of 3 environments; ")


def never_clears(a):
    a["states"] = a["states"] + a["first"][..., None]


def clears_on_terminated(a):
    a["states"][1:] += (a["truncated"] & ~a["terminated"])[:-1, :, None]


def clears_on_truncated(a):
    a["states"][1:] += (a["terminated"] & ~a["truncated"])[:-1, :, None]


def entries_of_zeros(a):
    a["entry_states"] *= 0


def entry_of_another_environment(a):
    a["entry_states"] = np.roll(a["entry_states"], 1, 1)


def replayed_without_clearing(a):
    wrong = np.zeros((T, E))
    wrong[1:] = a["first"][1:]
    a["replayed_values"] += wrong


def replayed_from_zeros(a):
    wrong = np.zeros((T, E))
    wrong[:: T // SEGMENTS] = 1
    a["replayed_log_probs"] += wrong * ~a["first"]


def late_flags(a):
    a["first"][1:] = a["first"][:-1].copy()
    a["first"][1] = False


def bootstrap_zero(a):
    a["next_values"] = np.where(a["truncated"], 0.0, a["next_values"])


def bootstrap_of_reset(a):
    following = np.concatenate([a["values"][1:], a["last_values"][None]])
    a["next_values"] = np.where(a["truncated"], following, a["next_values"])


def bootstrap_of_step_before(a):
    a["next_values"] = np.where(a["truncated"], a["values"], a["next_values"])


def bootstrap_after_termination(a):
    a["next_values"] = np.where(a["terminated"], a["final_values"], a["next_values"])


def bootstrap_zero_at_the_end(a):
    a["next_values"][-1] *= (a["terminated"] | a["truncated"])[-1]


def advantages_late(a):
    a["advantages"] = np.roll(a["advantages"], 1, 0)
    a["returns"] = a["advantages"] + a["values"]


def advantages_early(a):
    a["advantages"] = np.roll(a["advantages"], -1, 0)
    a["returns"] = a["advantages"] + a["values"]


def returns_without_values(a):
    a["returns"] = a["advantages"]


def not_a_number(a):
    a["replayed_values"][3, 1] = np.nan


@pytest.mark.parametrize(
    ("change", "law", "words"),
    [
        (never_clears, "clear", "never cleared"),
        (clears_on_terminated, "clear", "cleared on terminated only"),
        (clears_on_truncated, "clear", "cleared on truncated only"),
        (entries_of_zeros, "carry", "segments start from zeros"),
        (entry_of_another_environment, "carry", "must be the state after the segment before"),
        (replayed_without_clearing, "replay", "replayed without clearing"),
        (replayed_from_zeros, "replay", "replayed from another entry state"),
        (late_flags, "flags", "first is one step late"),
        (bootstrap_zero, "bootstrap", "treated as a termination"),
        (bootstrap_of_reset, "bootstrap", "first observation of the next episode"),
        (bootstrap_of_step_before, "bootstrap", "value of the step before the end"),
        (bootstrap_after_termination, "bootstrap", "values after terminations"),
        (bootstrap_zero_at_the_end, "bootstrap", "values of next steps: env 0, step 11"),
        (advantages_late, "advantage", "one step late"),
        (advantages_early, "advantage", "one step early"),
        (returns_without_values, "advantage", "returns"),
        (not_a_number, "replay", "env 1, step 3: off by inf"),
    ],
)
def test_a_wrong_rollout_is_caught_and_named(tmp_path, change, law, words):
    arrays = right()
    change(arrays)
    laws = check_rollout(write(tmp_path / "r.safetensors", arrays))
    assert not laws[law].ok
    assert words in laws[law].finding


def test_what_is_not_in_the_file_is_not_measured(tmp_path, capsys):
    arrays = right()
    few = {name: arrays[name] for name in rollout_file.REQUIRED}
    path = write(tmp_path / "r.safetensors", few)
    laws = check_rollout(path)
    assert laws.ok
    assert [name for name, law in laws.items() if law.worst.path == "n/a"] == [
        "clear",
        "carry",
        "bootstrap",
        "advantage",
    ]
    assert "bootstrap: not measured, the file has no next_values" in laws.notes
    assert main(["check", f"rollout:{path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["✓" in line for line in lines[1:7]] == [True, False, False, True, False, False]


def test_a_state_stored_after_clearing_is_as_good(tmp_path):
    arrays = right()
    arrays["entry_states"] = arrays["states"][:: T // SEGMENTS]
    assert check_rollout(write(tmp_path / "r.safetensors", arrays)).ok


def test_a_learnt_initial_state(tmp_path):
    arrays = right()
    arrays["states"] = np.where(arrays["first"][..., None], 7.0, arrays["states"])
    assert not check_rollout(write(tmp_path / "r.safetensors", arrays))["clear"].ok
    arrays["initial_state"] = np.full(H, 7.0)
    assert check_rollout(write(tmp_path / "r.safetensors", arrays)).ok


def changed(**arrays):
    return {**right(), **arrays}


def without(name):
    return {key: array for key, array in right().items() if key != name}


@pytest.mark.parametrize(
    ("arrays", "metadata", "words"),
    [
        (without("log_probs"), None, "has no array log_probs"),
        (changed(extra=np.zeros(1)), None, "'extra' is not an array of a rollout"),
        (changed(values=np.zeros((T, 1))), None, r"values is \[12, 1\], must be \[12, 3\]"),
        (changed(last_values=np.zeros(2)), None, r"last_values is \[2\], must be \[3\]"),
        (changed(first=np.ones(4)), None, r"first is \[4\], must be \[T,E\]"),
        (changed(first=np.full((T, E), 2)), None, "first has numbers besides 0 and 1"),
        (changed(entry_states=np.zeros((5, E, H))), None, "5 segments, which do not divide 12 steps"),
        (changed(entry_states=np.zeros((3, E, 4))), None, "must be equal"),
        (changed(states=np.zeros((T, E))), None, "states is"),
        (changed(states=np.zeros((3, E, H))), None, "states is"),
        (changed(initial_state=np.zeros(5)), None, r"initial_state is \[5\], must be \[2\]"),
        (right(), {}, "no key holdfast_rollout"),
        (right(), {"holdfast_rollout": "{"}, "no JSON"),
        (right(), {"holdfast_rollout": "[" * 9000}, "no JSON"),
        (right(), {"holdfast_rollout": "{}"}, "no version 1"),
        (right(), {"holdfast_rollout": '{"version": 1, "gamma": 3}'}, "gamma is '3'; write a number from 0 to 1"),
        (right(), {"holdfast_rollout": '{"version": 1, "lambda": NaN}'}, "lambda is 'nan'"),
    ],
)
def test_a_malformed_file_is_an_error_of_one_line(tmp_path, capsys, arrays, metadata, words):
    path = write(tmp_path / "r.safetensors", arrays, metadata)
    assert main(["check", f"rollout:{path}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(words, error), error


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, struct.pack("<Q", 2**60), b"\x80\x04K\x01."])
def test_other_files_are_an_error_of_one_line(tmp_path, capsys, content):
    path = tmp_path / "r.safetensors"
    path.write_bytes(content)
    assert main(["check", f"rollout:{path}"]) == 2
    error = capsys.readouterr().err
    assert "cannot be read as safetensors" in error
    assert error.count("\n") == 1


def test_a_large_file_is_refused(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "r.safetensors", right())
    monkeypatch.setattr(rollout_file, "LARGEST", 100)
    assert main(["check", f"rollout:{path}"]) == 2
    assert "at most 100 are read" in capsys.readouterr().err


def test_half_precision_is_read(tmp_path):
    from safetensors.torch import save_file as save_torch

    tensors = {name: torch.as_tensor(np.ascontiguousarray(array)) for name, array in right().items()}
    tensors["values"] = tensors["replayed_values"] = None
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    tensors["log_probs"] = tensors["log_probs"].bfloat16()
    tensors["replayed_log_probs"] = tensors["log_probs"].clone()
    save_torch(tensors, tmp_path / "r.safetensors", metadata={"holdfast_rollout": '{"version": 1}'})
    assert check_rollout(tmp_path / "r.safetensors")["replay"].ok


def test_mutated_files_are_refused_or_measured(tmp_path):
    path = write(tmp_path / "r.safetensors", right())
    intact, refused = path.read_bytes(), 0
    for number in range(60):
        path.write_bytes(intact)
        mutate(path, random.Random(number))
        error = refusal(path)
        refused += bool(error)
        assert "\n" not in error
    assert refused > 10


def refusal(path):
    """The error of a file that is refused; empty if it was measured."""
    try:
        laws = check_rollout(path)
    except ConfigError as error:
        return str(error)
    assert len(laws) == 6
    return ""
