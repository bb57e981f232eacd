"""A checkpoint: weights, trainer state, live memories and the world's state, each with its checksum."""

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from holdfast.errors import ConfigError, ContractError
from holdfast.keep.packed import DamagedError, on_host, pack, pack_weights, refuse_pickle, unpack
from holdfast.saved import taken
from holdfast.shapes import Tensor
from holdfast.version import __version__

FORMAT = 2
"""What is written now. Format 1 was weights and config alone, without a list of files; it still loads."""
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TRAINER = "trainer_state.safetensors"
MEMORIES = "live_memories.safetensors"
WORLD = "world_state.safetensors"
LIST = "checkpoint.json"
"""The list of files, written last: what is there without it is not whole."""


@dataclass(frozen=True)
class Moment:
    """A run between two iterations: all that decides how it goes on, copied."""

    iteration: int
    global_step: int
    weights: Mapping[str, Tensor]
    trainer: Mapping[str, Any]
    memories: Mapping[str, Any]
    world: Mapping[str, Any] | None
    """None: the world cannot say where it is."""
    score: float | None = None
    """The return that says how good these weights are; none: no episode ended."""

    @property
    def is_finite(self) -> bool:
        """Whether every weight is a number."""
        return all(bool(weight.isfinite().all()) for weight in self.weights.values())

    def on_host(self) -> "Moment":
        """Bring all of it to the host, where it can be written from any thread."""
        parts = {name: on_host(getattr(self, name)) for name in ("weights", "trainer", "memories", "world")}
        return replace(self, **parts)


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: every file is there, and is what was written."""

    path: Path
    format: int
    iteration: int
    global_step: int | None
    """None: format 1 does not say."""
    score: float | None
    made_with: Mapping[str, Any]
    files: frozenset[str]
    """What belongs to it; whatever else lies there is not looked at."""

    @property
    def has_world(self) -> bool:
        """Whether the world could say where it was."""
        return WORLD in self.files

    def require_trainer(self) -> None:
        """Refuse a checkpoint that no training can go on from."""
        if self.format == 1:
            raise ConfigError(
                f"{self.path} has weights alone, as earlier versions saved them: it can be evaluated, "
                "played, checked and exported, but a training cannot go on from it."
            )

    def trainer(self) -> Any:
        """Read the trainer state."""
        self.require_trainer()
        return unpack(self.path / TRAINER)

    def memories(self) -> Any:
        """Read the live memories."""
        self.require_trainer()
        return unpack(self.path / MEMORIES)

    def world(self) -> Any:
        """Read where the world was; none: it could not say."""
        return unpack(self.path / WORLD) if self.has_world else None

    def not_exact(self, device: torch.device) -> str:
        """Say what is not as it was, so that numbers may differ in their last digits; "": all is."""
        now = made_with(device)
        changed = [f"{key} {self.made_with[key]} → {now[key]}" for key in now if _differs(self, key, now)]
        return ", ".join(changed)


def made_with(device: torch.device) -> dict[str, Any]:
    """List what decides the last digits of a number; a checkpoint has the choices of kernels besides."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "torch": torch.__version__,
        "triton": version("triton") if device.type == "cuda" and find_spec("triton") else "none",
        "threads": torch.get_num_threads(),
        "device": kind,
        "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


def write_checkpoint(checkpoints: Path, moment: Moment, about: Mapping[str, bytes], made: Any) -> Path:
    """Write a moment beside `about`, the files that say how to build the policy.

    It is written by another name, synced to the disk, and renamed: what has a checkpoint's name is whole.
    """
    name = f"{moment.iteration:06d}"
    final, part = checkpoints / name, checkpoints / f".{name}.part"
    try:
        if part.exists():
            shutil.rmtree(part)
        part.mkdir(parents=True)
        files = {}
        for file, data in _files(moment, about):
            _write(part / file, data)
            files[file] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        told = {
            "format": FORMAT,
            "holdfast": __version__,
            "iteration": moment.iteration,
            "global_step": moment.global_step,
            "score": moment.score,
            "made_with": made,
            "files": files,
        }
        _write(part / LIST, signed(told))
        sync(part)
        part.rename(final)
        sync(checkpoints)
        point(checkpoints / "latest", name)
    except (OSError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        why = error.strerror if isinstance(error, OSError) else None
        raise OSError(f"Could not write {final}: {why or ' '.join(str(error).split())}.") from error
    return final


def point(pointer: Path, name: str) -> None:
    """Let a pointer such as `latest` name another checkpoint, at once or not at all."""
    if pointer.is_dir() and not pointer.is_symlink():
        # Who copies a run and follows its links gets a folder here: a second copy of a numbered one.
        shutil.rmtree(pointer)
    new = pointer.with_name(f".{pointer.name}.part")
    new.unlink(missing_ok=True)
    new.symlink_to(name)
    new.replace(pointer)
    sync(pointer.parent)


def open_checkpoint(path: Path) -> Checkpoint:
    """Look at every file of a checkpoint; one that is not whole is refused with the reason.

    What may be whole and cannot be read here, for want of rights or of a newer version, is another error.
    """
    try:
        return _opened(path)
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error.strerror or error}.") from error


def _opened(path: Path) -> Checkpoint:
    if not (path / LIST).exists():
        return _of_format_1(path)
    told = _list_of(path / LIST)
    try:
        form = taken(told, "format", int)
        if not 2 <= form <= FORMAT:
            raise ConfigError(
                f"{path} has format {form}, this version reads up to {FORMAT}; install a newer holdfast."
            )
        listed = taken(told, "files", dict)
        for name in (CONFIG, WEIGHTS, TRAINER, MEMORIES, *listed):
            if name not in listed or Path(name).name != name:
                raise DamagedError(f"{path / LIST} does not list {name} as a file")
            _require_whole(path / name, listed[name])
        step, made = taken(told, "global_step", int), taken(told, "made_with", dict)
        score = None if told.get("score") is None else float(told["score"])
        files = frozenset(map(str, listed))
        return Checkpoint(path, form, taken(told, "iteration", int), step, score, made, files)
    except (ContractError, TypeError, ValueError) as error:
        raise DamagedError(f"{path / LIST} cannot be read: {error}") from error


def _of_format_1(path: Path) -> Checkpoint:
    """Take weights and config as they are; where there is more, the list is what is missing."""
    for name in (TRAINER, MEMORIES):
        if (path / name).exists():
            raise DamagedError(f"{path / LIST} is missing")
    for name in (WEIGHTS, CONFIG):
        if not (path / name).exists():
            raise DamagedError(f"{path / name} is missing")
        refuse_pickle(path / name)
    iteration = path.resolve().name.partition("-")[0]
    files = frozenset(file.name for file in path.iterdir())
    return Checkpoint(path, 1, int(iteration) if iteration.isdecimal() else 0, None, None, {}, files)


def _list_of(file: Path) -> dict[str, Any]:
    refuse_pickle(file)
    try:
        data = file.read_bytes()
        told = json.loads(data)
        del told["sha256"]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    if data != signed(told):
        raise DamagedError(f"{file} is not what was written: its checksum differs")
    return told


def _require_whole(file: Path, listed: Any) -> None:
    if not file.exists():
        raise DamagedError(f"{file} is missing")
    refuse_pickle(file)
    size, wanted = file.stat().st_size, taken(listed, "bytes", int)
    if size != wanted:
        raise DamagedError(f"{file} has {size:,} bytes, not {wanted:,}")
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != taken(listed, "sha256", str):
        raise DamagedError(f"{file} is not what was written: its checksum differs")


def _files(moment: Moment, about: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Make one file after the other, so that only one lies in memory twice."""
    yield from about.items()
    yield WEIGHTS, pack_weights(moment.weights)
    yield TRAINER, pack(moment.trainer)
    yield MEMORIES, pack(moment.memories)
    if moment.world is not None:
        yield WORLD, pack(moment.world)


def _write(file: Path, data: bytes) -> None:
    with file.open("wb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())


def sync(folder: Path) -> None:
    """Let the names in a folder be on the disk, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def signed(told: Mapping[str, Any]) -> bytes:
    """Write the list of files with a checksum of its own."""
    own = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**told, "sha256": own}, indent=2) + "\n").encode()


def _differs(checkpoint: Checkpoint, key: str, now: Mapping[str, Any]) -> bool:
    return key in checkpoint.made_with and checkpoint.made_with[key] != now[key]
