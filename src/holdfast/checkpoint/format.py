"""The checkpoint format: weights, trainer state, live memory and world state, each with its checksum."""

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from holdfast.checkpoint.serialization import CorruptFileError, on_host, pack, pack_weights, refuse_pickle, unpack
from holdfast.errors import ConfigError, ContractError, one_line, writing
from holdfast.state_tree import get_field
from holdfast.types import Tensor
from holdfast.version import __version__

FORMAT = 4
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TRAINER = "trainer_state.safetensors"
MEMORIES = "live_memories.safetensors"
WORLD = "world_state.safetensors"
MANIFEST = "checkpoint.json"
"""The list of files, written last: without it a checkpoint is incomplete."""


@dataclass(frozen=True)
class TrainingSnapshot:
    """A copy of all training state between two iterations."""

    iteration: int
    global_step: int
    weights: Mapping[str, Tensor]
    trainer: Mapping[str, Any]
    memories: Mapping[str, Any]
    world: Mapping[str, Any] | None
    """None: the world's state cannot be saved."""
    score: float | None = None
    """The return by which the best checkpoint is selected; None: no episode ended."""

    @property
    def is_finite(self) -> bool:
        """Whether all weights are finite."""
        return all(bool(weight.isfinite().all()) for weight in self.weights.values())

    def to_cpu(self) -> "TrainingSnapshot":
        """Copy all tensors to the CPU, where any thread can write them."""
        fields = {name: on_host(getattr(self, name)) for name in ("weights", "trainer", "memories", "world")}
        return replace(self, **fields)


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: every file is present and matches its checksum."""

    path: Path
    iteration: int
    global_step: int | None
    """None: an exported policy or a teacher."""
    score: float | None
    environment: Mapping[str, Any]
    files: frozenset[str]
    """The files that belong to it; other files in its folder are ignored."""

    @property
    def has_world(self) -> bool:
        """Whether the world's state was saved."""
        return WORLD in self.files

    def trainer(self) -> Any:
        """Read the trainer state."""
        return unpack(self.path / TRAINER)

    def memories(self) -> Any:
        """Read the live memory."""
        return unpack(self.path / MEMORIES)

    def world(self) -> Any:
        """Read the world's state; None: it was not saved."""
        return unpack(self.path / WORLD) if self.has_world else None

    def bit_exact_warning(self, device: torch.device) -> str:
        """Describe differences in software or hardware that may change the last digits; "": none."""
        saved, now = self.environment, environment(device)
        return ", ".join(f"{key} {saved[key]} → {now[key]}" for key in now if saved.get(key, now[key]) != now[key])


def environment(device: torch.device) -> dict[str, Any]:
    """Return what the last digits of results depend on; checkpoints add the choice of kernels."""
    return {
        "torch": torch.__version__,
        "triton": version("triton") if device.type == "cuda" and find_spec("triton") else "none",
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


def write_checkpoint(
    checkpoints: Path,
    snapshot: TrainingSnapshot,
    policy_files: Mapping[str, bytes],
    environment_: Any,
    *,
    logs: Sequence[Path] = (),
    pointers: Sequence[str] = ("latest",),
) -> Path:
    """Write a snapshot and the files that describe the policy, and set symlinks to it.

    Written under a temporary name, synced to disk, then renamed: a checkpoint's name means it is complete. The log
    files are synced too: a checkpoint stores their sizes. On a slow disk a sync takes seconds, so there are only two.
    """
    name = f"{snapshot.iteration:06d}"
    final, partial = checkpoints / name, checkpoints / f".{name}.part"
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        files = {}
        for file, data in _serialize(snapshot, policy_files):
            (partial / file).write_bytes(data)
            files[file] = _manifest_entry(data)
        manifest = {
            "format": FORMAT,
            "holdfast": __version__,
            "iteration": snapshot.iteration,
            "global_step": snapshot.global_step,
            "score": snapshot.score,
            "environment": environment_,
            "files": files,
        }
        (partial / MANIFEST).write_bytes(with_checksum(manifest))
        sync_together([*logs, *(partial / file for file in files), partial / MANIFEST, partial])
        partial.rename(final)
        for pointer in pointers:
            set_symlink(checkpoints / pointer, name)
        sync(checkpoints)
    except (OSError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        with writing(final):
            raise error if isinstance(error, OSError) else OSError(one_line(error)) from error
    return final


def set_symlink(pointer: Path, name: str) -> None:
    """Point a symlink such as `latest` at another checkpoint, atomically."""
    if pointer.is_dir() and not pointer.is_symlink():
        # A copy that followed symlinks has a folder here; the numbered checkpoint may have been removed since.
        set_aside(pointer, "unused")
    new = pointer.with_name(f".{pointer.name}.part")
    new.unlink(missing_ok=True)
    new.symlink_to(name)
    new.replace(pointer)


def set_aside(path: Path, suffix: str) -> None:
    """Rename a folder `NAME.suffix`, or `NAME.suffix-2` and so on."""
    target, number = path.with_name(f"{path.name}.{suffix}"), 1
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{path.name}.{suffix}-{number}")
    path.rename(target)


def policy_manifest(files: Mapping[str, bytes]) -> bytes:
    """Return the manifest of a policy without training state: an export to the Hub, or the copy of a teacher."""
    entries = {name: _manifest_entry(data) for name, data in files.items()}
    return with_checksum({"format": FORMAT, "holdfast": __version__, "files": entries})


def _manifest_entry(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def open_checkpoint(path: Path, *, policy_only: bool = False) -> Checkpoint:
    """Verify every file of a checkpoint; with `policy_only`, of a policy without training state too.

    Raises:
        CorruptFileError: A file is missing, damaged or a pickle.
        ConfigError: The format is not this version's.
        OSError: A file cannot be read, for example for want of permission.
    """
    try:
        manifest = _read_manifest(path / MANIFEST)
        version = get_field(manifest, "format", int)
        if version != FORMAT:
            age = "a newer" if version > FORMAT else "an older"
            raise ConfigError(f"{path} has format {version}, this version reads {FORMAT}; install {age} holdfast.")
        files = get_field(manifest, "files", dict)
        policy_only = policy_only and "iteration" not in manifest
        for name in (CONFIG, WEIGHTS, *(() if policy_only else (TRAINER, MEMORIES)), *files):
            if name not in files or Path(name).name != name:
                raise CorruptFileError(f"{path / MANIFEST} does not list {name} as a file")
            _verify_file(path / name, files[name])
        if policy_only:
            return Checkpoint(path, 0, None, None, {}, frozenset(map(str, files)))
        return Checkpoint(
            path,
            iteration=get_field(manifest, "iteration", int),
            global_step=get_field(manifest, "global_step", int),
            score=None if manifest.get("score") is None else float(manifest["score"]),
            environment=get_field(manifest, "environment", dict),
            files=frozenset(map(str, files)),
        )
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ContractError, TypeError, ValueError, OverflowError) as error:
        raise CorruptFileError(f"{path / MANIFEST} cannot be read: {error}") from error


def _read_manifest(file: Path) -> dict[str, Any]:
    refuse_pickle(file)
    try:
        data = file.read_bytes()
        manifest = json.loads(data)
        del manifest["sha256"]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CorruptFileError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    if data != with_checksum(manifest):
        raise CorruptFileError(f"{file} is damaged: its checksum differs")
    return manifest


def file_sha256(file: Path) -> str:
    """Return the SHA-256 of a file, read in parts."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while part := opened.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _verify_file(file: Path, entry: Any) -> None:
    refuse_pickle(file)
    size, expected = file.stat().st_size, get_field(entry, "bytes", int)
    if size != expected:
        raise CorruptFileError(f"{file} has {size:,} bytes, not {expected:,}")
    if file_sha256(file) != get_field(entry, "sha256", str):
        raise CorruptFileError(f"{file} is damaged: its checksum differs")


def _serialize(snapshot: TrainingSnapshot, policy_files: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield one file after the other, so that only one is in memory twice."""
    yield from policy_files.items()
    yield WEIGHTS, pack_weights(snapshot.weights)
    yield TRAINER, pack(snapshot.trainer)
    yield MEMORIES, pack(snapshot.memories)
    if snapshot.world is not None:
        yield WORLD, pack(snapshot.world)


def sync_together(paths: Sequence[Path]) -> None:
    """Sync files and folders to disk, all at the same time: together they take little longer than one."""
    with ThreadPoolExecutor(len(paths), "sync") as pool:
        for _ in pool.map(sync, paths):
            pass


def sync(path: Path) -> None:
    """Sync a file, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def with_checksum(manifest: Mapping[str, Any]) -> bytes:
    """Serialize a manifest with its own checksum."""
    checksum = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**manifest, "sha256": checksum}, indent=2) + "\n").encode()
