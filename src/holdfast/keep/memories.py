"""Live memories as data: a copy that knows whose it is, and the file it is kept in."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from holdfast.errors import ConfigError, ContractError
from holdfast.keep.checkpoint import sync
from holdfast.shapes import Tensor

FORMAT = "1"
"""The version of the file's format."""
KIND = "holdfast live memories"


def fingerprint(policy: nn.Module) -> str:
    """Name weights by what they are: the SHA-256 of every tensor with its name."""
    return _digest(policy.state_dict())


@dataclass(frozen=True)
class Memory(Mapping[str, Tensor]):
    """What some agents remember at one moment: a mapping from a leaf's name to its tensor `[A,...]`.

    It is a copy: changing it changes nobody. It knows which weights it belongs to, and where the random
    numbers of its agents stand.
    """

    leaves: Mapping[str, Tensor]
    weights: str
    """The fingerprint of the weights it belongs to."""
    agents: int
    seed: int
    clock: int
    """How many steps were acted: with the seed, where the draws of actions go on."""

    def __getitem__(self, leaf: str) -> Tensor:
        return self.leaves[leaf]

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)


def write_memory(memory: Memory, file: Path) -> None:
    """Write memories to a file that is never half there, with a checksum of all of it."""
    leaves = {name: leaf.cpu().contiguous() for name, leaf in memory.items()}
    told = _head(memory)
    told["sha256"] = _digest(leaves, told)
    try:
        # Beside the file, under a name of its own: whoever reads meets the old one or the new one.
        with tempfile.TemporaryDirectory(prefix=f".{file.name}.", suffix=".part", dir=file.parent) as folder:
            part = Path(folder) / file.name
            with part.open("wb") as written:
                written.write(save(leaves, told))
                written.flush()
                os.fsync(written.fileno())
            part.replace(file)
        sync(file.parent)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be written: {error}") from error


def read_memory(file: Path) -> Memory:
    """Read memories from a file, executing nothing of it; one that is not whole is refused."""
    if not file.is_file():
        raise ConfigError(f"{file} does not exist; playing.save(file) writes one.")
    try:
        with safe_open(file, "pt") as opened:
            told: dict[str, str] = opened.metadata() or {}
            leaves = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ContractError(f"{file} is damaged, or holds no memories: {reason}.") from error
    if told.get("kind") != KIND:
        raise ContractError(f"{file} holds no live memories; give a file that playing.save wrote.")
    if told.get("format") != FORMAT:
        raise ContractError(
            f"{file} has the format {told.get('format')}; this version of Holdfast reads {FORMAT}."
        )
    checksum = told.pop("sha256", "none")
    if checksum != _digest(leaves, told):
        raise ContractError(f"{file} is damaged: its checksum is not that of what it holds.")
    try:
        numbers = {name: int(told[name]) for name in ("agents", "seed", "clock")}
        return Memory(leaves, told["weights"], **numbers)
    except (KeyError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ContractError(f"{file} does not say whose memories it holds: {reason}.") from error


def _head(memory: Memory) -> dict[str, str]:
    numbers = {name: str(getattr(memory, name)) for name in ("agents", "seed", "clock")}
    return {"kind": KIND, "format": FORMAT, "weights": memory.weights, **numbers}


def _digest(tensors: Mapping[str, Tensor], told: Mapping[str, Any] | None = None) -> str:
    """Sum up tensors with their names, kinds and shapes, and what is told with them."""
    total = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].cpu().contiguous()
        total.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return total.hexdigest()
