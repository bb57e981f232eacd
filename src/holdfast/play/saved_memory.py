"""SavedMemory: a copy of a session's hidden states, and its file format."""

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from holdfast.checkpoint.format import sync
from holdfast.errors import ConfigError, ContractError
from holdfast.types import Tensor

FORMAT = "1"
"""Version of the file format."""
KIND = "holdfast live memories"


def weights_hash(policy: nn.Module) -> str:
    """Return the SHA-256 of all weights with their names."""
    return _digest(policy.state_dict())


@dataclass(frozen=True)
class SavedMemory(Mapping[str, Tensor]):
    """A copy of the hidden states of all agents: a mapping from a state key to a tensor `[A,...]`.

    It also holds the hash of its policy's weights, and the position of the random stream.
    """

    leaves: Mapping[str, Tensor]
    weights: str
    """Hash of the weights it belongs to."""
    agents: int
    seed: int
    clock: int
    """Number of steps acted: with the seed, the position of the random stream of actions."""

    def __getitem__(self, leaf: str) -> Tensor:
        return self.leaves[leaf]

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)


def write_memory(memory: SavedMemory, file: Path) -> None:
    """Write hidden states to a file, atomically and with a checksum."""
    leaves = {name: leaf.cpu().contiguous() for name, leaf in memory.items()}
    metadata = {"kind": KIND, "format": FORMAT, "weights": memory.weights}
    metadata |= {name: str(getattr(memory, name)) for name in ("agents", "seed", "clock")}
    metadata["sha256"] = _digest(leaves, metadata)
    try:
        # In a temporary folder beside the file: readers get the old version or the new one.
        with tempfile.TemporaryDirectory(prefix=f".{file.name}.", suffix=".part", dir=file.parent) as folder:
            temporary = Path(folder) / file.name
            temporary.write_bytes(save(leaves, metadata))
            sync(temporary)
            temporary.replace(file)
        sync(file.parent)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be written: {error}") from error


def read_memory(file: Path) -> SavedMemory:
    """Read hidden states from a file, executing nothing of it; reject a damaged one."""
    if not file.is_file():
        raise ConfigError(f"{file} does not exist; session.save(file) writes one.")
    try:
        with safe_open(file, "pt") as opened:
            metadata: dict[str, str] = opened.metadata() or {}
            leaves = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ContractError(f"{file} is damaged, or not a saved memory: {reason}.") from error
    if metadata.get("kind") != KIND:
        raise ContractError(f"{file} is not a saved memory; give a file that session.save wrote.")
    if metadata.get("format") != FORMAT:
        raise ContractError(f"{file} has the format {metadata.get('format')}; this version of Holdfast reads {FORMAT}.")
    checksum = metadata.pop("sha256", "none")
    if checksum != _digest(leaves, metadata):
        raise ContractError(f"{file} is damaged: its checksum does not match its content.")
    try:
        numbers = {name: int(metadata[name]) for name in ("agents", "seed", "clock")}
        return SavedMemory(leaves, metadata["weights"], **numbers)
    except (KeyError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ContractError(f"{file} lacks metadata of its agents: {reason}.") from error


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any] | None = None) -> str:
    """Hash tensors with their names, dtypes and shapes, and the metadata."""
    total = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].cpu().contiguous()
        total.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return total.hexdigest()
