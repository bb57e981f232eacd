"""Runs and checkpoints small enough to be written, damaged and resumed many times in a test."""

import hashlib
import json

import numpy as np
import torch

import holdfast
from holdfast.checkpoint.format import with_checksum
from holdfast.checkpoint.serialization import unpack
from holdfast.report.metrics import find_metric

TINY = {
    "world.agents": 8,
    "world.delay": "2..5",
    "trainer.bptt_horizon": 4,
    "trainer.batch_size": 64,
    "trainer.minibatch_size": 32,
    "trainer.total_timesteps": 384,
    "report": "off",
    "trainer.eval_episodes": 10,
    "trainer.checkpoint_interval": 2,
    "policy.hidden_size": 4,
    "policy.num_layers": 1,
}
LEAST = {
    "trainer.total_timesteps": 32,
    "trainer.batch_size": 32,
    "trainer.minibatch_size": 32,
    "trainer.bptt_horizon": 8,
    "report": "off",
    "trainer.eval_episodes": 2,
    "trainer.check": "off",
    "world.agents": 4,
    "policy.hidden_size": 8,
    "run": "x",
}
"""The shortest run, for tests that need only weights."""
FILES = ("model", "trainer_state", "live_memories", "world_state")
TIMED = ("seconds", "files")
"""Fields in which two equal runs may differ: wall time, and file sizes that depend on its digits."""


def run(folder, name="x", recipe="recall", **keys):
    keys = {key.replace("__", "."): value for key, value in keys.items()}
    return holdfast.train(recipe, {**TINY, "runs_dir": str(folder), "run": name, **keys})


def words(folder, name="x", **keys):
    keys = {**TINY, "runs_dir": folder, "run": name, **{k.replace("__", "."): v for k, v in keys.items()}}
    return ["train", "recall", *(f"{key}={value}" for key, value in keys.items())]


def iterate(trainer, count):
    """Train for some iterations; yield the metrics of each."""
    for _ in range(count):
        segments = trainer.collect()
        checks = trainer.check_replay(segments)
        yield trainer.update(segments) | checks


def lines_of(folder):
    """The metrics of a run, without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: number for name, number in line.items() if find_metric(name).kind != "time"} for line in lines]


def sign(path, **fields):
    """Update the manifest to the files as they are now, so that their checksums match."""
    manifest = json.loads((path / "checkpoint.json").read_text())
    manifest.pop("sha256")
    manifest |= fields
    for name in manifest["files"]:
        data = (path / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "checkpoint.json").write_bytes(with_checksum(manifest))


def differences(one, other, where=""):
    """List the paths at which two saved trees are not bit-equal."""
    if isinstance(one, torch.Tensor):
        equal = isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        return [] if equal else [where]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{where}: {sorted(map(str, one.keys() ^ other.keys()))}"]
        keys = [key for key in one if key not in TIMED]
        return [name for key in keys for name in differences(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [where]
        return [
            name
            for number, (a, b) in enumerate(zip(one, other, strict=True))
            for name in differences(a, b, f"{where}/{number}")
        ]
    if isinstance(one, np.ndarray):
        return [] if one.dtype == other.dtype and np.array_equal(one, other) else [where]
    return [] if one == other else [where]


def apart(one, other):
    """List all differences between the ends of two runs: weights, trainer state, memory, worlds, metrics."""
    latest = [folder / "checkpoints" / "latest" for folder in (one, other)]
    assert latest[0].resolve().name == latest[1].resolve().name
    names = []
    for file in FILES:
        paths = [path / f"{file}.safetensors" for path in latest]
        assert paths[0].exists() == paths[1].exists()
        if not paths[0].exists():
            continue
        if file == "model":
            names += ["model"] if paths[0].read_bytes() != paths[1].read_bytes() else []
        else:
            names += [f"{file}{name}" for name in differences(*map(unpack, paths))]
    lines = [lines_of(folder) for folder in (one, other)]
    return names + ([] if lines[0] == lines[1] else ["metrics.jsonl"])
