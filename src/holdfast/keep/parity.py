"""Parity: an exported file lives some random lives beside the policy, and must think the same."""

import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict

from holdfast.errors import ConfigError
from holdfast.shapes import Tensor
from holdfast.worlds import WorldSpec
from holdfast.worlds.seen import Seen, blank, parts_of

Run = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""One step by names: what goes in to what comes out."""
FACTS = "holdfast.json"
"""Where a torch file keeps what is told with it."""
RESTART = 0.1
"""How often an episode starts anew in a random life."""


def some_seen(space: spaces.Space[Any], rows: int, generator: torch.Generator) -> Seen:
    """Draw observations of a space: numbers between its walls, choices that it has."""
    parts = parts_of(space)
    if parts:
        leaves = {name: some_seen(part, rows, generator) for name, part in parts.items()}
        return TensorDict(leaves, batch_size=[rows])
    empty = blank(space)
    shape = (rows, *empty.shape[1:])
    if isinstance(space, spaces.Box) and space.dtype is not None and space.dtype.kind == "f":
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        low, high = (torch.as_tensor(wall.astype(np.float64)) for wall in (space.low, space.high))
        return torch.maximum(torch.minimum(drawn, high), low).to(empty.dtype)
    low, count = _choices(space)
    share = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (low + (share * count).floor()).to(empty.dtype)


def _choices(space: spaces.Space[Any]) -> tuple[Tensor, Tensor]:
    """Say where whole numbers begin, and how many there are."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        count = space.n if isinstance(space, spaces.Discrete) else space.nvec
        return torch.as_tensor(np.asarray(space.start)), torch.as_tensor(np.asarray(count))
    if isinstance(space, spaces.Box):
        low = torch.as_tensor(space.low.astype(np.float64))
        return low, torch.as_tensor(space.high.astype(np.float64)) - low + 1
    return torch.tensor(0), torch.tensor(2)


def some_tokens(spec: WorldSpec, rows: int, generator: torch.Generator) -> Tensor:
    """Draw tokens: features that there are, and now and then any byte, which policies must not see."""
    obs = torch.randint(0, 256, (rows, *spec.obs_shape), generator=generator, dtype=torch.uint8)
    known = torch.tensor(spec.feature_ids, dtype=torch.uint8)
    which = torch.randint(0, len(known), obs.shape[:-1], generator=generator)
    strange = torch.rand(obs.shape[:-1], generator=generator) < RESTART
    obs[..., 1] = torch.where(strange, obs[..., 1], known[which])
    return obs


@torch.no_grad()
def largest_difference(
    mine: Run,
    theirs: Run,
    draw: Callable[[int, torch.Generator], dict[str, Tensor]],
    *,
    rows: int,
    steps: int,
    seed: int = 0,
) -> float:
    """Live `steps` steps with both, each with its own memory, and say how far they ever were apart.

    Episodes start at random, everybody's at first. A difference is measured in sizes of the number where
    that is above 1: |a - b| / max(1, |a|).
    """
    generator = torch.Generator().manual_seed(seed)
    given = draw(rows, generator)
    carried = [name for name in given if name.endswith("_in")]
    memories = [{name: given[name] for name in carried} for _ in range(2)]
    largest = 0.0
    for step in range(steps):
        given = draw(rows, generator)
        restart = (torch.rand(rows, generator=generator) < RESTART) | (step == 0)
        given["first"] = restart.to(given["first"].device)
        said = [dict(run({**given, **memory})) for run, memory in zip((mine, theirs), memories, strict=True)]
        memories = [{name: each[name.removesuffix("_in") + "_out"] for name in carried} for each in said]
        for name, a in said[0].items():
            a, b = a.double().cpu(), said[1][name].double().cpu()
            apart = ((a - b).abs() / a.abs().clamp(min=1)).nan_to_num(nan=float("inf"), posinf=float("inf"))
            largest = max(largest, float(apart.max())) if apart.numel() else largest
    return largest


def open_exported(file: Path) -> Run:
    """Open an exported file as a step by names."""
    if file.suffix == ".onnx":
        return _open_onnx(file)
    module = torch.export.load(file, extra_files={FACTS: ""}).module()
    return lambda given: module(dict(given))


def facts_in(file: Path) -> dict[str, Any]:
    """Read what is told with an exported torch file."""
    told = {FACTS: ""}
    torch.export.load(file, extra_files=told)
    return json.loads(told[FACTS])


def require_onnx() -> None:
    """Refuse what needs ONNX where its packages are not."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"ONNX needs {', '.join(missing)}: pip install 'holdfast[export]'.")


def _open_onnx(file: Path) -> Run:
    require_onnx()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Only what is wrong: warnings are about how fast it could be.
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    outputs = [each.name for each in session.get_outputs()]

    def run(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        said = session.run(outputs, {name: tensor.cpu().numpy() for name, tensor in given.items()})
        return {name: torch.from_numpy(np.asarray(each)) for name, each in zip(outputs, said, strict=True)}

    return run
