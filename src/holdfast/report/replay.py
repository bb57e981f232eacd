"""Replay: what some agents saw, did and remembered for some hundred steps, and its file."""

import base64
import gzip
import io
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.config.base import first_error_message
from holdfast.errors import ConfigError, ContractError, writing

KIND, FORMAT = "holdfast replay", 1
SUFFIX = ".json.gz"
LARGEST_FILE, LARGEST_TEXT = 32_000_000, 128_000_000
"""Most bytes of a file, and of its text."""
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "int8", "int16", "int32", "float32")}
AXES = {
    "N": 10_000,
    "A": 64,
    "K": 64,
    "P": 256,
    "M": 1024,
    "D": 256,
    "U": 1024,
    "G": 4096,
    "E": 256,
    "R": 512,
    "C": 2048,
    "X": 1_000_000,
    "F": 10_000,
}
"""The axes of arrays and their longest: steps, agents, action parts, probabilities, tokens, numbers of an observation,
units, agents on grids, environments, rows, columns, changes, frames."""
LAYOUT = {
    "reward": ("float32", "N A"),
    "end": ("uint8", "N A"),
    "first": ("uint8", "N A"),
    "valid": ("uint8", "N A"),
    "value": ("float32", "N A"),
    "norm": ("float32", "N A"),
    "action": ("float32", "N A K"),
    "units": ("int8", "N A U"),
    "probs": ("uint8", "N A P"),
    "tokens": ("uint8", "N A M 3"),
    "obs": ("float32", "N A D"),
    "grid": ("uint8", "E R C"),
    "places": ("int16", "N G 2"),
    "changes": ("int32", "X 3"),
    "frame_steps": ("int32", "F"),
}
"""Dtype and axes of each array. `reward` and `end` (1 terminated, 2 truncated) answer the action of their step;
`grid` is that of the first step, `changes` are (step, cell, kind)."""
REQUIRED = ("reward", "end", "first", "valid", "value", "norm", "action", "units")
TOGETHER = ("grid", "places", "changes")

Name = Annotated[str, Field(max_length=200)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TokenFeature(_Model):
    """A token feature by its id."""

    id: int = Field(ge=0, le=255)
    name: Name
    scale: float = Field(gt=0, le=1e9)


class ReplayHeader(_Model):
    """What a replay is of."""

    run: Name
    world: Name
    policy: Name
    steps_trained: int = Field(ge=0, le=10**15)
    weights: Name
    """Hash of the weights."""
    memory: bool
    """Whether the policy has one."""
    greedy: bool
    """Whether actions are the most likely ones, or sampled."""
    horizon: int = Field(ge=1, le=10**9)
    """Steps of a segment in training."""
    agents_per_env: int = Field(ge=1, le=10**6)
    agents: Annotated[tuple[int, ...], Field(max_length=AXES["A"], strict=False)]
    """The agents of the rows, numbered in their world."""
    actions: Annotated[tuple[Name, ...], Field(max_length=4096, strict=False)]
    """Names of the actions; empty: actions are numbers."""
    features: Annotated[tuple[TokenFeature, ...], Field(max_length=256, strict=False)]
    """The token features; empty: observations are no tokens."""
    window: Annotated[tuple[int, int], Field(strict=False)]
    """Rows and columns that token locations refer to."""
    kinds: Annotated[tuple[Name, ...], Field(max_length=255, strict=False)]
    """What a cell of a grid can be; empty: there is no grid."""


class _EncodedArray(_Model):
    dtype: Literal["uint8", "int8", "int16", "int32", "float32"]
    shape: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=4, strict=False)]
    data: str


class _File(_Model):
    kind: Literal["holdfast replay"]
    format: Literal[1]
    header: ReplayHeader
    arrays: dict[str, _EncodedArray]
    frames: Annotated[tuple[str, ...], Field(max_length=AXES["F"], strict=False)]


@dataclass(frozen=True)
class Replay:
    """Some hundred steps of some agents: `arrays` by name, as `LAYOUT` describes them, and WebP `frames`."""

    header: ReplayHeader
    arrays: Mapping[str, np.ndarray]
    frames: tuple[bytes, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        """Check arrays and frames."""
        sizes = {"A": len(self.header.agents)}
        for name in self.arrays:
            if name not in LAYOUT:
                raise ContractError(f"A replay has no array {name!r}.")
        missing = [name for name in REQUIRED if name not in self.arrays]
        if missing or len({name in self.arrays for name in TOGETHER}) > 1:
            raise ContractError(f"The replay lacks the array {', '.join(missing) or ' or '.join(TOGETHER)}.")
        for name, array in self.arrays.items():
            _check_layout(name, array, sizes)
        if not sizes["N"] or not sizes["A"]:
            raise ContractError("The replay has no steps, or no agents.")
        _check_ranges(self.arrays, self.header)
        steps = self.arrays.get("frame_steps", np.zeros(0, np.int32))
        if len(steps) != len(self.frames) or (np.diff(steps) <= 0).any():
            raise ContractError(f"The replay has {len(self.frames)} frames, at {len(steps)} steps; must be in order.")
        if not all(frame[:4] == b"RIFF" and frame[8:12] == b"WEBP" for frame in self.frames):
            raise ContractError("The replay has a frame that is not WebP.")

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.arrays["reward"])

    def to_bytes(self) -> bytes:
        """Return the compressed file."""
        content = {
            "kind": KIND,
            "format": FORMAT,
            "header": self.header.model_dump(mode="json"),
            "arrays": encode_arrays(self.arrays),
            "frames": [base64.b64encode(frame).decode() for frame in self.frames],
        }
        return gzip.compress(json.dumps(content).encode(), 6, mtime=0)

    def save(self, file: str | Path) -> Path:
        """Write the replay to a file that ends in `.json.gz`, atomically."""
        path = Path(file)
        if not path.name.endswith(SUFFIX):
            raise ConfigError(f"{path}: a replay ends in {SUFFIX}; try {path.name}{SUFFIX}.")
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.part")
            temporary.write_bytes(self.to_bytes())
            temporary.replace(path)
        return path

    @classmethod
    def load(cls, file: str | Path) -> "Replay":
        """Read a replay, executing nothing of it; reject a damaged file, or one of another version."""
        path = Path(file)
        if not path.is_file():
            raise ConfigError(f"{path} does not exist; give a replay, such as runs/NAME/replays/final{SUFFIX}.")
        try:
            return cls._from_file(_read_json(path))
        except ContractError as error:
            raise ContractError(f"{path} cannot be shown: {error}") from None

    @classmethod
    def _from_file(cls, content: Any) -> "Replay":
        if not isinstance(content, dict) or content.get("kind") != KIND:
            raise ContractError("it is not a replay.")
        if content.get("format") != FORMAT:
            version = str(content.get("format"))[:20]
            raise ContractError(f"it has the format {version!r}; this version of Holdfast reads {FORMAT}.")
        try:
            encoded = _File.model_validate(content)
        except ValidationError as error:
            raise ContractError(f"it is damaged: {first_error_message(error, '')[:300]}") from None
        arrays = {name[:50]: _decode(name, array) for name, array in encoded.arrays.items()}
        frames = tuple(_from_base64("a frame", frame) for frame in encoded.frames)
        return cls(encoded.header, arrays, frames)


def encode_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Return arrays as JSON: dtype, shape, and little-endian bytes in base64."""
    return {
        name: {
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            "data": base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode(),
        }
        for name, array in arrays.items()
    }


def _decode(name: str, encoded: _EncodedArray) -> np.ndarray:
    data, dtype = _from_base64(f"the array {name[:50]!r}", encoded.data), DTYPES[encoded.dtype]
    # Python's integers: a product of huge sizes does not overflow.
    size = dtype.itemsize
    for length in encoded.shape:
        size *= length
    if len(data) != size:
        raise ContractError(f"the array {name[:50]!r} has {len(data)} bytes, not those of its shape.")
    return np.frombuffer(data, dtype).reshape(encoded.shape).astype(encoded.dtype)


def _from_base64(what: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ContractError(f"{what} is not base64.") from None


def _read_json(path: Path) -> Any:
    """Return the content of a file, without reading more than the limits."""
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise ContractError(f"it has {size:,} bytes; a replay has at most {LARGEST_FILE:,}.")
        with gzip.open(io.BytesIO(path.read_bytes())) as opened:
            text = opened.read(LARGEST_TEXT + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ContractError(f"it is damaged, or not a replay: {error}.") from None
    if len(text) > LARGEST_TEXT:
        raise ContractError(f"it unpacks to more than {LARGEST_TEXT:,} bytes.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ContractError(f"it is damaged, or not a replay: {str(error)[:200]}.") from None


def _check_layout(name: str, array: np.ndarray, sizes: dict[str, int]) -> None:
    """Check dtype and shape; axes of the same letter have the same size."""
    dtype, axes = LAYOUT[name][0], LAYOUT[name][1].split()
    if array.dtype.name != dtype or array.ndim != len(axes):
        raise ContractError(f"The array {name!r} is {array.dtype.name} {list(array.shape)}; must be {dtype} {axes}.")
    for axis, length in zip(axes, array.shape, strict=True):
        expected = int(axis) if axis.isdigit() else sizes.setdefault(axis, length)
        if length != expected:
            raise ContractError(f"The array {name!r} is {list(array.shape)}, its axis {axis} must be {expected}.")
        if length > AXES.get(axis, length):
            raise ContractError(f"The array {name!r} is {list(array.shape)}, its axis {axis} at most {AXES[axis]}.")
    if dtype == "float32" and not np.isfinite(array).all():
        raise ContractError(f"The array {name!r} is not finite.")


def _check_ranges(arrays: Mapping[str, np.ndarray], header: ReplayHeader) -> None:
    """Check that numbers name actions, cells, kinds and steps that exist."""
    steps = len(arrays["reward"])
    limits: dict[str, tuple[np.ndarray, int, int]] = {
        "first": (arrays["first"], 0, 1),
        "valid": (arrays["valid"], 0, 1),
        "end": (arrays["end"], 0, 2),
    }
    if header.actions:
        limits["action"] = arrays["action"], 0, len(header.actions) - 1
    if "frame_steps" in arrays:
        limits["frame_steps"] = arrays["frame_steps"], 0, steps - 1
    if "grid" in arrays:
        grid, changes, kinds = arrays["grid"], arrays["changes"], len(header.kinds) - 1
        limits["grid"] = grid, 0, kinds
        limits["places"] = arrays["places"], -1, max(grid.shape[1:]) - 1
        columns = zip(("step", "cell", "kind"), changes.T, (steps - 1, grid.size - 1, kinds), strict=True)
        limits |= {f"changes ({name})": (column, 0, highest) for name, column, highest in columns}
    for name, (array, low, high) in limits.items():
        if array.size and not low <= array.min() <= array.max() <= high:
            raise ContractError(f"The array {name!r} has {array.min():g} to {array.max():g}; must be {low} to {high}.")
