"""A run's folder: what was asked, what was measured, and its checkpoints; nothing is ever half there."""

import fcntl
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from holdfast.config import Config
from holdfast.errors import ConfigError, ContractError
from holdfast.keep.checkpoint import CONFIG, Checkpoint, open_checkpoint, point
from holdfast.keep.packed import DamagedError
from holdfast.policies import ComponentPolicy
from holdfast.version import __version__

GRAPH = "agent.yaml"
"""The component graph of a policy that is one."""
PACKAGES = ("torch", "tensordict", "numpy", "pydantic", "safetensors")
NUMBERED = re.compile(r"(\d{6,})(?:-(\d+))?")
"""A checkpoint's name: its iteration; format 1 numbered those of one iteration."""
GROWING = ("metrics.jsonl", "machine.jsonl", "trace.txt")
"""Files of a run that get one line after the other."""
Say = Callable[[str], object]


class RunFolder:
    """`runs/NAME/` with `config.json`, `command.txt`, `metrics.jsonl` and `checkpoints/`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def metrics(self) -> Path:
        """The file of metrics, one JSON object an update."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    @property
    def teachers(self) -> Path:
        """Where its teachers are, as they were when it began."""
        return self.path / "teachers"

    def sizes(self) -> dict[str, int]:
        """Say how long the files are that grow line by line."""
        return {file.name: file.stat().st_size for file in self._growing() if file.exists()}

    def sync(self) -> None:
        """Let the disk have every line that was written: a checkpoint counts on them."""
        for file in self._growing():
            if file.exists():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())

    def cut(self, sizes: Mapping[str, int], say: Say) -> None:
        """Cut these files to where they were; what was written later is written again."""
        for file in self._growing():
            there, wanted = file.stat().st_size if file.exists() else 0, sizes.get(file.name, 0)
            if there > wanted:
                with file.open("r+b") as opened:
                    opened.truncate(wanted)
            elif there < wanted:
                if there:
                    # What is left of its last line would spoil the next one.
                    with file.open("r+b") as opened:
                        opened.truncate(opened.read().rfind(b"\n") + 1)
                say(f"{file} lacks its last {wanted - there:,} bytes; what comes is added to what is there.")

    def _growing(self) -> list[Path]:
        return [self.path / name for name in GROWING]

    def numbered(self) -> list[Path]:
        """List what has a checkpoint's name, the newest first."""
        if not self.checkpoints.is_dir():
            return []
        named = {each: NUMBERED.fullmatch(each.name) for each in self.checkpoints.iterdir()}
        found = [(int(match[1]), int(match[2] or 1), each) for each, match in named.items() if match]
        return [each for *_, each in sorted(found, reverse=True)]

    def newest(self, say: Say) -> Checkpoint:
        """Find the newest checkpoint that is whole; each one that is not is named."""
        pointer, found = self.checkpoints / "latest", self.numbered()
        if pointer.is_symlink() and not pointer.exists():
            say(f"{pointer} points to {os.readlink(pointer)}, which is not there; looking for the newest.")
        reasons = list[str]()
        for path in found:
            try:
                return open_checkpoint(path)
            except DamagedError as error:
                reasons.append(str(error))
                say(f"{path.name} is damaged and is not used: {error}.")
        if found:
            raise DamagedError(f"{self.path} has no whole checkpoint: {'; '.join(reasons)}.")
        raise ConfigError(f"{self.path} holds no checkpoint; has the run saved one?")

    def best(self) -> tuple[float, Path] | None:
        """Find the best of the whole checkpoints; none: none was judged."""
        # Of equals the oldest, as it was when they were made.
        scores = ((_score_of(path), path) for path in reversed(self.numbered()))
        judged = [(score, path) for score, path in scores if score is not None and math.isfinite(score)]
        return max(judged, key=itemgetter(0), default=None)

    def clean(self, since: Checkpoint) -> None:
        """Put aside what is newer than a checkpoint, and so damaged, and remove what was never finished.

        Pointers name what they are to name, whenever the run was interrupted.
        """
        for path in self.numbered():
            if path == since.path:
                break
            aside, number = path.with_name(f"{path.name}.damaged"), 1
            while aside.exists():
                number += 1
                aside = path.with_name(f"{path.name}.damaged-{number}")
            path.rename(aside)
        for part in self.checkpoints.glob(".*.part"):
            if part.is_symlink():
                part.unlink()
            else:
                shutil.rmtree(part)
        point(self.checkpoints / "latest", since.path.name)
        best = self.best()
        if best is not None:
            point(self.checkpoints / "best", best[1].name)

    def keep_teacher(self, name: str, files: Mapping[str, bytes]) -> None:
        """Keep a teacher: its run may go on, or go away."""
        (self.teachers / name).mkdir(parents=True)
        for file, data in files.items():
            (self.teachers / name / file).write_bytes(data)

    def reopen(self, about: Mapping[str, bytes], command: str) -> None:
        """Note by which config and command the run goes on."""
        for name, text in about.items():
            new = self.path / f".{name}.part"
            new.write_bytes(text)
            new.replace(self.path / name)
        with (self.path / "command.txt").open("a") as file:
            file.write(_provenance(command))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let nobody else train in this folder meanwhile; the lock goes with the process, however it ends."""
        try:
            file = (self.path / ".lock").open("a")
        except OSError as error:
            raise ConfigError(f"Cannot write the run's folder {self.path}: {error.strerror}.") from error
        with file:
            try:
                # Locks of this kind are not inherited: worlds in processes of their own do not hold it.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                told = f"{self.path} is being trained by another process; stop that one first."
                raise ConfigError(told) from None
            yield


def _score_of(path: Path) -> float | None:
    """Read how good a checkpoint is; none: nobody judged it, or it is damaged."""
    try:
        return open_checkpoint(path).score
    except DamagedError:
        return None


def create_folder(config: Config, name: str, command: str, policy: nn.Module) -> RunFolder:
    """Make a new folder for a run; one that exists is never touched, the new one gets a number."""
    parent = Path(config.runs_dir)
    number, path = 1, parent / name
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                path.mkdir()
                break
            except FileExistsError:
                number += 1
                path = parent / f"{name}-{number}"
        for file, text in described(config, policy).items():
            (path / file).write_bytes(text)
        (path / "command.txt").write_text(_provenance(command))
    except OSError as error:
        raise ConfigError(
            f"Cannot write the run's folder {path}: {error.strerror}; set runs_dir=DIR."
        ) from error
    return RunFolder(path)


def described(config: Config, policy: nn.Module) -> dict[str, bytes]:
    """Say all that is needed to build the policy again: a graph may have changed or gone by then."""
    files = {CONFIG: f"{config.model_dump_json(indent=2)}\n".encode()}
    if isinstance(policy, ComponentPolicy):
        files[GRAPH] = policy.graph.text.encode()
    return files


def load_weights(policy: nn.Module, file: Path) -> None:
    """Load weights into a policy of the same shape, without executing anything from the file."""
    try:
        policy.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError, ContractError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{file} does not hold the weights of this policy: {reason}") from error


def _provenance(command: str) -> str:
    lines = [f"command: {command}", f"commit: {_commit()}", f"holdfast: {__version__}"]
    lines.append(f"python: {platform.python_version()}")
    lines += [f"{package}: {version(package)}" for package in PACKAGES]
    lines.append(f"torch threads: {torch.get_num_threads()}")
    return "\n".join(lines) + "\n"


def _commit() -> str:
    """Name the commit of the tree the command was given in, if it is one."""
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "not in a git repository"
    return told.stdout.strip()
