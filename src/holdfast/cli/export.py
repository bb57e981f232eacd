"""`holdfast export`: write a policy to ONNX or torch.export, and check the file."""

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from holdfast.cli.arguments import Parser, add_trust_code
from holdfast.cli.check import to_stderr
from holdfast.play import load
from holdfast.play.checked_export import BOUND, CARRIED_BOUND, STEPS, export_checked, require_output_file
from holdfast.play.export import SUFFIX, ExportModule, To
from holdfast.play.foreign import foreign_file, is_foreign


def run_export(args: Sequence[str]) -> int:
    """Export a policy, check the file against it, and print inputs and outputs; 0 if they agree."""
    options = _parser().parse_intermixed_args(args)
    out = _file_for(options.run, options.out, options.to)
    player = load(options.run, options.device, log=to_stderr, trust_code=options.trust_code)
    result = export_checked(player.policy, player.config, out, options.to, player.name)
    screen = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    _print_signature(screen, result.step)
    if player.config is not None and player.config.policy.precision != "float32":
        screen.print(f"the run computes in {player.config.policy.precision}, the file in float32")
    by_batch = ", ".join(f"batch {rows}: {error:.1e}" for rows, error in result.random.items())
    carried = "in its world" if player.config is not None else f"with its own memory (at most {CARRIED_BOUND:.0e})"
    screen.print(
        f"largest difference from the policy in {STEPS} steps with restarts: {carried} {result.carried:.1e}; of "
        f"random inputs {by_batch} (at most {BOUND:.0e}) {'✓' if result.ok else '✗'}"
    )
    screen.print(f"{options.to} {out}" if result.ok else f"{out} was not written: it differs from the policy.")
    return 0 if result.ok else 1


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
        usage="holdfast export TARGET --to onnx|torch [--out FILE] [--device cpu] [--trust-code]",
        description="Export a policy as one step: observation, state and first in, logits, value and state "
        "out. The file is checked against the policy over random steps before it is written.",
    )
    target = "runs/NAME, one of its checkpoints, hub:owner/name, sb3:MODEL.zip, or rsl_rl:MODEL.pt?activation=NAME"
    parser.add_argument("run", metavar="TARGET", help=target)
    parser.add_argument("--to", required=True, choices=list(SUFFIX), help="format: ONNX or torch.export")
    parser.add_argument(
        "--out", metavar="FILE", help="output file (default: policy.onnx or policy.pt2 in RUN, MODEL.onnx or MODEL.pt2)"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where to check it")
    add_trust_code(parser)
    return parser


def _file_for(run: str, out: str | None, to: To) -> Path:
    """Return the output file, checking it before anything takes time."""
    if out is None and is_foreign(run):
        return foreign_file(run).with_suffix(SUFFIX[to])
    if out is None:
        return (Path(run) if Path(run).is_dir() else Path()) / f"policy{SUFFIX[to]}"
    return require_output_file(out, to)
