"""Parity: an exported file lives some random lives beside the policy, and must think the same."""

import json
import math
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
from holdfast.worlds import Step, World, WorldSpec
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
    """Draw tokens: features that there are, and now and then any byte, which policies must not see.

    Values are of the sizes that features have: what is far larger is rounded more coarsely by everybody.
    """
    obs = torch.randint(0, 256, (rows, *spec.obs_shape), generator=generator, dtype=torch.uint8)
    known = torch.tensor(spec.feature_ids, dtype=torch.uint8)
    which = torch.randint(0, len(known), obs.shape[:-1], generator=generator)
    strange = torch.rand(obs.shape[:-1], generator=generator) < RESTART
    sizes = torch.tensor([min(255, math.ceil(feature.normalization)) for feature in spec.features])
    share = torch.rand(which.shape, generator=generator)
    obs[..., 2] = (share * (sizes[which] + 1)).floor().clamp(max=255).to(torch.uint8)
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
    carry: bool = True,
) -> float:
    """Live `steps` random steps with both, and say how far they ever were apart.

    Each has its own memory, or without `carry` both go on from mine at every step: what is random is like
    nothing a policy was trained on, and there it may make much of the last digit of what it remembers.
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
        memories = [_carried(carried, each) for each in (said if carry else [said[0]] * 2)]
        largest = max(largest, _apart(*said))
    return largest


@torch.no_grad()
def difference_in_world(
    mine: Run,
    theirs: Run,
    ask: Callable[[Step, Mapping[str, Tensor]], dict[str, Tensor]],
    act: Callable[[Tensor], Tensor],
    world: World,
    *,
    steps: int,
) -> float:
    """Live in a world with both, each with its own memory, and say how far they ever were apart.

    `ask` names what goes in, from a step and a memory; `act` takes scores for an action.
    """
    step, largest, memories = world.reset(), 0.0, [dict[str, Tensor](), dict[str, Tensor]()]
    for _ in range(steps):
        given = [ask(step, memory) for memory in memories]
        said = [dict(run(each)) for run, each in zip((mine, theirs), given, strict=True)]
        carried = [name for name in given[0] if name.endswith("_in")]
        memories = [_carried(carried, each) for each in said]
        largest = max(largest, _apart(*said))
        step = world.step(act(said[0]["logits"]))
    return largest


def _carried(names: list[str], said: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: said[name.removesuffix("_in") + "_out"] for name in names}


def _apart(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    largest = 0.0
    for name, a in mine.items():
        a, b = a.double().cpu(), theirs[name].double().cpu()
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
