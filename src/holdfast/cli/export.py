"""`holdfast export`: write a policy as one step that any program can run, and check the file."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from holdfast.cli.parser import Parser
from holdfast.cli.target import to_stderr
from holdfast.config import Config
from holdfast.errors import ConfigError
from holdfast.keep.export import SUFFIX, OneStep, one_step, write_exported
from holdfast.keep.parity import difference_in_world, largest_difference, open_exported
from holdfast.player import load
from holdfast.shapes import Tensor
from holdfast.unseen import unseen_seed, unseen_world

BOUND = 1e-5
"""How far an exported file may be from its policy: |a - b| / max(1, |a|)."""
ROWS = (1, 3, 17)
STEPS = 200


def run_export(words: Sequence[str]) -> int:
    """Export, check the file against the policy, and say what goes in and out; 0 if they are the same."""
    asked = _parser().parse_intermixed_args(words)
    out = _file_for(asked.run, asked.out, asked.to)
    player = load(asked.run, _device(asked.device), say=to_stderr, trust_code=asked.trust_code or None)
    step = one_step(player.policy)
    screen = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=out.parent) as folder:
        # Under its name only when it was checked: what is there already stays until then.
        part = Path(folder) / f"policy{SUFFIX[asked.to]}"
        write_exported(step, part, asked.to, player.config.world.name)
        apart, lived = measure(step, part), measure_in_world(step, part, player.config)
        good = max(*apart.values(), lived) <= BOUND
        if good:
            part.replace(out)
    _show(screen, step)
    if player.config.policy.precision != "float32":
        screen.print(f"the run computes in {player.config.policy.precision}, the file in float32")
    told = ", ".join(f"batch {rows}: {each:.1e}" for rows, each in apart.items())
    screen.print(
        f"largest difference from the policy in {STEPS} steps with restarts: in its world {lived:.1e}; of "
        f"random inputs {told} (at most {BOUND:.0e}) {'✓' if good else '✗'}"
    )
    screen.print(
        f"{asked.to} {out}" if good else f"{out} was not written: it would not think what the policy thinks."
    )
    return 0 if good else 1


def measure(step: OneStep, file: Path) -> dict[int, float]:
    """Say how far an exported file is from its policy with random inputs, for each number of rows."""
    theirs = open_exported(file)
    return {
        rows: largest_difference(step, theirs, step.draw, rows=rows, steps=STEPS, carry=False)
        for rows in ROWS
    }


def measure_in_world(step: OneStep, file: Path, config: Config) -> float:
    """Say how far they are apart in the world of the run, each with its own memory."""
    device = next(step.policy.parameters()).device
    with unseen_world(config.world, device, config.world.agents, unseen_seed(config, 0)) as world:
        theirs, act = open_exported(file), step.policy.actions.greedy
        return difference_in_world(step, theirs, step.ask, act, world, steps=STEPS)


def _show(screen: Console, step: OneStep) -> None:
    given = step.draw(1, torch.Generator())
    with torch.no_grad():
        said = step(given)
    for word, tensors in (("in", given), ("out", said)):
        for name, tensor in tensors.items():
            screen.print(f"{word:<4}{name:<12} {_kind(tensor)}")


def _kind(tensor: Tensor) -> str:
    sizes = ", ".join(["batch", *map(str, tensor.shape[1:])])
    return f"[{sizes}] {str(tensor.dtype).removeprefix('torch.')}"


def _parser() -> Parser:
    parser = Parser(
        prog="holdfast export",
        usage="holdfast export RUN --to onnx|torch [--out FILE] [--device cpu] [--trust-code]",
        description="Write a policy as one step: observation, memory and first in, scores, value and memory "
        "out. The file is checked against the policy over random steps before it gets its name.",
    )
    parser.add_argument("run", metavar="RUN", help="runs/NAME, one of its checkpoints, or hub:owner/name")
    parser.add_argument("--to", required=True, choices=list(SUFFIX), help="the format: ONNX, or torch.export")
    parser.add_argument(
        "--out", metavar="FILE", help="where to; else policy.onnx or policy.pt2 in the folder"
    )
    parser.add_argument("--device", default="cpu", help="where to compute: cpu or cuda")
    parser.add_argument(
        "--trust-code", action="store_true", help="import classes that a config from the Hub names"
    )
    return parser


def _device(name: str) -> str:
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: there is cpu and cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch finds no GPU here; leave it out.")
    return name


def _file_for(run: str, out: str | None, to: str) -> Path:
    """Say where the file goes, before anything takes time."""
    suffix = SUFFIX[to]
    if out is None:
        return (Path(run) if Path(run).is_dir() else Path()) / f"policy{suffix}"
    file = Path(out)
    if file.suffix != suffix:
        raise ConfigError(
            f"--out {out}: a file for --to {to} ends in {suffix}; try {file.with_suffix(suffix)}."
        )
    if not file.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {file.parent}.")
    return file
