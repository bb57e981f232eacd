"""A run's folder: what was asked, what was measured, and the weights; nothing is ever half there."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from holdfast.config import Config
from holdfast.errors import ConfigError, ContractError
from holdfast.policies import ComponentPolicy
from holdfast.version import __version__

GRAPH = "agent.yaml"
"""The component graph of a policy that is one."""
PACKAGES = ("torch", "tensordict", "numpy", "pydantic", "safetensors")


class RunFolder:
    """`runs/NAME/` with `config.json`, `command.txt`, `metrics.jsonl` and `checkpoints/`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def metrics(self) -> Path:
        """The file of metrics, one JSON object an update."""
        return self.path / "metrics.jsonl"

    def save(self, policy: nn.Module, config: Config, iteration: int) -> Path:
        """Write weights and config as a checkpoint; `latest` moves only to a whole one."""
        checkpoints = self.path / "checkpoints"
        final, temporary = checkpoints / f"{iteration:06d}", checkpoints / f".{iteration:06d}.part"
        number = 1
        while final.exists():
            number += 1
            final = checkpoints / f"{iteration:06d}-{number}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        weights = {key: tensor.contiguous().cpu() for key, tensor in policy.state_dict().items()}
        try:
            save_file(weights, temporary / "model.safetensors", {"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"Could not write {temporary / 'model.safetensors'}: {error}") from error
        _describe(temporary, config, policy)
        for file in temporary.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        temporary.rename(final)
        pointer = checkpoints / ".latest.part"
        pointer.unlink(missing_ok=True)
        pointer.symlink_to(final.name)
        pointer.replace(checkpoints / "latest")
        return final


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
        _describe(path, config, policy)
        (path / "command.txt").write_text(_provenance(command))
    except OSError as error:
        raise ConfigError(
            f"Cannot write the run's folder {path}: {error.strerror}; set runs_dir=DIR."
        ) from error
    return RunFolder(path)


def _describe(folder: Path, config: Config, policy: nn.Module) -> None:
    """Write all that is needed to build the policy again: a graph may have changed or gone by then."""
    (folder / "config.json").write_text(config.model_dump_json(indent=2) + "\n")
    if isinstance(policy, ComponentPolicy):
        (folder / GRAPH).write_text(policy.graph.text, encoding="utf-8")


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
