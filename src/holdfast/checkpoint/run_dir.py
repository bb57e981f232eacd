"""The folder of a run: config, command, metrics and checkpoints."""

import fcntl
import hashlib
import math
import os
import platform
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from holdfast.checkpoint.format import (
    CONFIG,
    MANIFEST,
    Checkpoint,
    file_sha256,
    open_checkpoint,
    policy_manifest,
    set_aside,
    set_symlink,
    sync,
)
from holdfast.checkpoint.serialization import CorruptFileError
from holdfast.config.run import Config
from holdfast.errors import ConfigError, ContractError, one_line, writing
from holdfast.policies import ComponentPolicy
from holdfast.state_tree import get_field
from holdfast.version import __version__

GRAPH = "agent.yaml"
"""The component graph of a `ComponentPolicy`."""
PACKAGES = ("torch", "tensordict", "numpy", "pydantic", "safetensors")
NUMBERED = re.compile(r"\d{6,}")
"""A checkpoint's name: its iteration."""
ERRORS = "error.txt"
"""Errors of environments and workers, with their tracebacks."""
LOG_FILES = ("metrics.jsonl", "machine.jsonl", "trace.txt")
"""Files that grow line by line."""
Log = Callable[[str], object]
_LOCK, _LOCKED = threading.Lock(), set[Path]()
"""Runs that train in this process, and the lock of the set."""


class RunDir:
    """`runs/NAME/`, with `config.json`, `command.txt`, `metrics.jsonl` and `checkpoints/`."""

    def __init__(self, path: Path) -> None:
        self.path, self.metrics, self.checkpoints = path, path / "metrics.jsonl", path / "checkpoints"
        self.teachers = path / "teachers"
        """Copies of the teachers, made when the run started."""
        self.unreadable: dict[Path, str] = {}
        """Checkpoints that could not be read, and why: one of them may be the best."""
        self._log_files = [path / name for name in LOG_FILES]
        self._log_hashes = {file.name: hashlib.sha256() for file in self._log_files}
        self._log_sizes = {file.name: 0 for file in self._log_files}

    def log_state(self) -> dict[str, dict[str, Any]]:
        """Return sizes and checksums of the log files; only what was appended since the last call is read."""
        state = dict[str, dict[str, Any]]()
        for file in self._log_files:
            name = file.name
            while appended := _read_at(file, self._log_sizes[name]):
                self._log_hashes[name].update(appended)
                self._log_sizes[name] += len(appended)
            checksum, size = self._log_hashes[name].hexdigest(), _size_of(file)
            if size > self._log_sizes[name]:
                # It cannot be read now: a resume must keep these lines all the same.
                state[name] = {"bytes": size, "sha256": ""}
            elif self._log_sizes[name]:
                state[name] = {"bytes": self._log_sizes[name], "sha256": checksum}
        return state

    def require_plain_logs(self) -> None:
        """Raise if a file that grows is a link: resuming would change a file outside of the run, such as a backup."""
        for file in [*self._log_files, *(self.path / name for name in ("command.txt", ERRORS, ".lock"))]:
            if file.is_symlink():
                raise ConfigError(f"{file} is a link to {os.readlink(file)}; replace it by a copy of that file.")
            if file.exists() and not file.is_file():
                # Opening a named pipe would block.
                raise ConfigError(f"{file} is not a regular file; remove it.")
            if file.exists() and file.stat().st_nlink > 1:
                raise ConfigError(f"{file} has another hard link; replace it by a copy: cp {file} NEW; mv NEW {file}")

    def log_files(self) -> list[Path]:
        """List the files that grow line by line, as far as there are any."""
        return [file for file in self._log_files if file.exists()]

    def truncate_logs(self, state: Mapping[str, Any], log: Log) -> None:
        """Truncate the log files to saved sizes, and report changes; the resumed run writes later lines again."""
        for file in self._log_files:
            entry = get_field(state, file.name, dict) if file.name in state else {"bytes": 0, "sha256": ""}
            with writing(file):
                _truncate_log(file, get_field(entry, "bytes", int), get_field(entry, "sha256", str), log)

    def numbered(self) -> list[Path]:
        """List the checkpoints, newest first."""
        if not self.checkpoints.is_dir():
            return []
        paths = [path for path in self.checkpoints.iterdir() if NUMBERED.fullmatch(path.name)]
        return sorted(paths, key=lambda path: int(path.name), reverse=True)

    def newest(self, log: Log) -> Checkpoint:
        """Open the newest valid checkpoint; report each damaged one."""
        pointer, paths = self.checkpoints / "latest", self.numbered()
        if pointer.is_symlink() and not pointer.exists():
            log(f"{pointer} points to {os.readlink(pointer)}, which does not exist; using the newest.")
        kind, reasons = "", list[str]()
        for path in paths:
            try:
                checkpoint = open_checkpoint(path)
                if checkpoint.iteration == int(path.name):
                    return checkpoint
                kind, number = "has a wrong name", checkpoint.iteration
                reason = f"{path} holds iteration {number}; to use it, rename it {number:06d}"
            except CorruptFileError as error:
                reason, kind = str(error), "is damaged"
            except OSError as error:
                # Not damage: the disk may have refused only this time.
                reason, kind = str(error).rstrip("."), "cannot be read"
            if not os.path.lexists(path):
                # A run that trains has replaced it meanwhile.
                return self.newest(log)
            reasons.append(reason)
            log(f"{path.name} {kind} and is not used: {reason}.")
        if paths:
            failure = OSError if kind == "cannot be read" else CorruptFileError
            raise failure(f"{self.path} has no valid checkpoint: {'; '.join(reasons)}.")
        raise ConfigError(f"{self.path} holds no checkpoint; has the run saved one?")

    def best(self) -> tuple[float, Path] | None:
        """Find the checkpoint with the highest score; of equal ones the oldest. Unreadable ones are left out."""
        scores = ((self._score_of(path), path) for path in reversed(self.numbered()))
        scored = [(score, path) for score, path in scores if score is not None and math.isfinite(score)]
        return max(scored, key=itemgetter(0), default=None)

    def _score_of(self, path: Path) -> float | None:
        """Read a checkpoint's score; None: it has none, is damaged or cannot be read."""
        try:
            checkpoint = open_checkpoint(path)
        except (CorruptFileError, ConfigError):
            return None
        except OSError as error:
            self.unreadable[path] = str(error).rstrip(".")
            return None
        return checkpoint.score if checkpoint.iteration == int(path.name) else None

    def quarantine_newer(self, checkpoint: Checkpoint) -> None:
        """Rename checkpoints newer than this one, which are damaged or unusable, and remove unfinished ones.

        Sets the symlinks, which an interruption may have left at older checkpoints.
        """
        for path in self.numbered():
            if path == checkpoint.path:
                break
            set_aside(path, "damaged" if _is_damaged(path) else "unused")
        for partial in self.checkpoints.glob(".*.part"):
            if partial.is_symlink():
                partial.unlink()
            else:
                shutil.rmtree(partial)
        set_symlink(self.checkpoints / "latest", checkpoint.path.name)
        best = self.best()
        if best is not None:
            set_symlink(self.checkpoints / "best", best[1].name)
        sync(self.checkpoints)

    def keep_teacher(self, name: str, files: Mapping[str, bytes]) -> None:
        """Copy a teacher into the run: its own run may change or be deleted."""
        folder = self.teachers / name
        try:
            folder.mkdir(parents=True)
            for file, data in {**files, MANIFEST: policy_manifest(files)}.items():
                (folder / file).write_bytes(data)
        except OSError as error:
            raise OSError(f"Could not write {folder}: {error.strerror or error}.") from error

    def append_provenance(self, policy_files: Mapping[str, bytes], command: str) -> None:
        """Write the config and append the command of a resumed run."""
        for name, data in policy_files.items():
            new = self.path / f".{name}.part"
            with writing(self.path / name):
                new.unlink(missing_ok=True)
                new.write_bytes(data)
                new.replace(self.path / name)
        with writing(self.path / "command.txt"), (self.path / "command.txt").open("a") as file:
            file.write(_provenance(command))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other processes and other threads of this one."""
        self.require_plain_logs()
        path = self.path.resolve()
        with _LOCK:
            if path in _LOCKED:
                raise ConfigError(f"{self.path} is being trained by this process; stop that run first.")
            _LOCKED.add(path)
        try:
            with self._locked_for_processes():
                yield
        finally:
            _LOCKED.discard(path)

    @contextmanager
    def _locked_for_processes(self) -> Iterator[None]:
        """Hold a lock that ends with the process."""
        try:
            file = (self.path / ".lock").open("a")
        except OSError as error:
            raise ConfigError(f"Cannot write the run's folder {self.path}: {error.strerror}.") from error
        with file:
            try:
                # POSIX locks are not inherited: workers do not hold it.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{self.path} is being trained by another process; stop that one first.") from None
            yield


def _read_at(file: Path, position: int, limit: int = 1 << 20) -> bytes:
    """Read from a position on; nothing if the file cannot be read now, which does not end a run."""
    try:
        with file.open("rb") as opened:
            opened.seek(position)
            return opened.read(limit)
    except OSError:
        return b""


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _truncate_log(file: Path, saved: int, digest: str, log: Log) -> None:
    """Truncate a log file to its saved size; report what is missing, damaged or cannot be verified."""
    size = file.stat().st_size if file.exists() else 0
    if size > saved:
        with file.open("r+b") as opened:
            opened.truncate(saved)
    elif size < saved:
        if size:
            # An incomplete last line would spoil the next one.
            with file.open("r+b") as opened:
                opened.truncate(opened.read().rfind(b"\n") + 1)
        log(f"{file} lacks its last {saved - size:,} bytes; new lines are appended.")
    if size >= saved > 0 and file_sha256(file) != digest:
        difference = "is damaged: lines differ from those the run wrote" if digest else "has no checksum"
        log(f"{file} {difference}; new lines are appended.")


def _is_damaged(path: Path) -> bool:
    try:
        open_checkpoint(path)
    except CorruptFileError:
        return True
    except (ConfigError, OSError):
        return False
    return False


def create_run_dir(config: Config, name: str, command: str, policy: nn.Module) -> RunDir:
    """Create the folder of a new run with its first files."""
    path = new_folder(config, name)
    try:
        for file, data in policy_files(config, policy).items():
            (path / file).write_bytes(data)
        (path / "command.txt").write_text(_provenance(command))
    except OSError as error:
        raise _unwritable(path, error) from error
    return RunDir(path)


def new_folder(config: Config, name: str) -> Path:
    """Create a folder for a run; where the name is taken, append a number. One with an error alone is replaced."""
    number, path = 1, Path(config.runs_dir) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                path.mkdir()
                return path
            except FileExistsError:
                if [file.name for file in path.glob("*")] == [ERRORS]:
                    shutil.rmtree(path)
                else:
                    number += 1
                    path = path.with_name(f"{name}-{number}")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"Cannot write the run's folder {path}: {error.strerror}; set runs_dir=DIR.")


def policy_files(config: Config, policy: nn.Module) -> dict[str, bytes]:
    """Return the files needed to rebuild the policy: the config, and a copy of its component graph."""
    files = {CONFIG: f"{config.model_dump_json(indent=2)}\n".encode()}
    if isinstance(policy, ComponentPolicy):
        files[GRAPH] = policy.graph.text.encode()
    return files


def load_weights(policy: nn.Module, file: Path) -> None:
    """Load weights into a policy of the same shape; safetensors executes no code."""
    try:
        policy.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError, ContractError) as error:
        raise ConfigError(f"{file} does not hold the weights of this policy: {one_line(error, 400)}") from error
    for name, weight in policy.named_parameters():
        if not bool(weight.isfinite().all()):
            raise ConfigError(f"{file} has weights that are not finite, in {name}; use an earlier checkpoint.")


def _provenance(command: str) -> str:
    lines = [f"command: {command}", f"commit: {_commit()}", f"holdfast: {__version__}"]
    lines.append(f"python: {platform.python_version()}")
    lines += [f"{package}: {version(package)}" for package in PACKAGES]
    lines.append(f"torch threads: {torch.get_num_threads()}")
    return "\n".join(lines) + "\n"


def _commit() -> str:
    """Return the git commit of the current directory."""
    try:
        result = subprocess.run(
            # Not --dirty: to compare files, git runs the filters that the repository's own config names.
            ["git", "describe", "--always"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "not in a git repository"
    return result.stdout.strip()
