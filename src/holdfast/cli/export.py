"""`holdfast export`: write a policy to ONNX or torch.export, and check the file."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from holdfast.cli.arguments import Parser, add_trust_code
from holdfast.cli.check import to_stderr
from holdfast.config.run import Config
from holdfast.errors import ConfigError
from holdfast.evaluation.held_out import held_out_seed, held_out_world
from holdfast.play import load
from holdfast.play.export import (
    SUFFIX,
    ExportModule,
    difference_in_world,
    export_module,
    max_difference,
    open_exported,
    write_exported,
)

BOUND = 1e-5
"""Largest difference of an exported file from its policy: |a - b| / max(1, |a|)."""
ROWS = (1, 3, 17)
STEPS = 200


def run_export(args: Sequence[str]) -> int:
    """Export a policy, check the file against it, and print inputs and outputs; 0 if they agree."""
    options = _parser().parse_intermixed_args(args)
    out = _file_for(options.run, options.out, options.to)
    player = load(options.run, options.device, log=to_stderr, trust_code=options.trust_code)
    step = export_module(player.policy)
    screen = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=out.parent) as folder:
        # Checked before it replaces a file that exists.
        file = Path(folder) / f"policy{SUFFIX[options.to]}"
        write_exported(step, file, options.to, player.config.world.name)
        random, in_world = measure(step, file), measure_in_world(step, file, player.config)
        good = max(*random.values(), in_world) <= BOUND
        if good:
            file.replace(out)
    _print_signature(screen, step)
    if player.config.policy.precision != "float32":
        screen.print(f"the run computes in {player.config.policy.precision}, the file in float32")
    by_batch = ", ".join(f"batch {rows}: {error:.1e}" for rows, error in random.items())
    screen.print(
        f"largest difference from the policy in {STEPS} steps with restarts: in its world {in_world:.1e}; of "
        f"random inputs {by_batch} (at most {BOUND:.0e}) {'✓' if good else '✗'}"
    )
    screen.print(f"{options.to} {out}" if good else f"{out} was not written: it differs from the policy.")
    return 0 if good else 1


def measure(step: ExportModule, file: Path) -> dict[int, float]:
    """Return the largest difference of an exported file from its policy on random inputs, by batch size."""
    exported = open_exported(file)
    return {rows: max_difference(step, exported, rows=rows, steps=STEPS, carry=False) for rows in ROWS}


def measure_in_world(step: ExportModule, file: Path, config: Config) -> float:
    """Return the largest difference in the world of the run, each with its own memory."""
    device = next(step.policy.parameters()).device
    with held_out_world(config.world, device, config.world.agents, held_out_seed(config, 0)) as world:
        return difference_in_world(step, open_exported(file), world, steps=STEPS)


def _print_signature(screen: Console, step: ExportModule) -> None:
    inputs = step.random_inputs(1, torch.Generator())
    with torch.no_grad():
        outputs = step(inputs)
    for word, tensors in (("in", inputs), ("out", outputs)):
        for name, tensor in tensors.items():
            sizes = ", ".join(["batch", *map(str, tensor.shape[1:])])
            screen.print(f"{word:<4}{name:<12} [{sizes}] {str(tensor.dtype).removeprefix('torch.')}")


def _parser() -> Parser:
    parser = Parser(
        prog="holdfast export",
        usage="holdfast export RUN --to onnx|torch [--out FILE] [--device cpu] [--trust-code]",
        description="Export a policy as one step: observation, state and first in, logits, value and state "
        "out. The file is checked against the policy over random steps before it is written.",
    )
    parser.add_argument("run", metavar="RUN", help="runs/NAME, one of its checkpoints, or hub:owner/name")
    parser.add_argument("--to", required=True, choices=list(SUFFIX), help="format: ONNX or torch.export")
    parser.add_argument("--out", metavar="FILE", help="output file (default: policy.onnx or policy.pt2 in RUN)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where to check it")
    add_trust_code(parser)
    return parser


def _file_for(run: str, out: str | None, to: str) -> Path:
    """Return the output file, checking it before anything takes time."""
    suffix = SUFFIX[to]
    if out is None:
        return (Path(run) if Path(run).is_dir() else Path()) / f"policy{suffix}"
    file = Path(out)
    if file.suffix != suffix:
        raise ConfigError(f"--out {out}: a file for --to {to} ends in {suffix}; try {file.with_suffix(suffix)}.")
    if not file.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {file.parent}.")
    return file
