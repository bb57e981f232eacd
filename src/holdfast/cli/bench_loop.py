"""`holdfast bench train|rollout|update`: steps a second of a whole training, after warm-up."""

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import holdfast
from holdfast.bench.timing import name_of, versions
from holdfast.build import select_device
from holdfast.cli.allocator import keep_freed_memory
from holdfast.cli.arguments import Parser, count, one_of, output_file, parse_overrides
from holdfast.config.run import Config, override
from holdfast.errors import ConfigError
from holdfast.recipes import find_recipe, recipe_for

PHASES = {
    "train": ("charts/SPS",),
    "rollout": ("time/world", "time/forward", "time/copy", "time/rollout"),
    "update": ("time/update",),
}
"""What each target measures: steps a second of everything, or the seconds of some phases."""
WARM_UP = 0.3
"""Share of the iterations that is not measured: kernels are chosen and CUDA graphs recorded in the first few."""
RIVAL = "jax_rival.py"
KEYS = {"report": "off", "trainer.eval_episodes": 1, "trainer.checkpoint_interval": 0}
"""Keys of every measured training, which end it without waiting."""


def run_loop(what: str, args: Sequence[str]) -> int:
    """Train, and print the median steps a second and their spread."""
    options, rest = _parser(what).parse_known_args(args)
    recipe, overrides = parse_overrides(rest)
    file = None if options.json is None else output_file(options.json, "--json")
    rival = _find_rival() if options.against else None
    base = find_recipe(recipe or recipe_for(overrides.get("world", overrides.get("world.name"))))
    config = override(base, overrides)
    if rival is not None and (config.trainer.bptt_horizon, config.trainer.batch_size) != (
        64,
        64 * config.world.agents,
    ):
        raise ConfigError(
            "--against jax measures rollouts of one segment of 64 steps; type trainer.bptt_horizon=64 "
            f"trainer.batch_size={64 * config.world.agents}."
        )
    keep_freed_memory()
    result = measure(what, recipe, overrides, config, options.iterations)
    if rival is not None:
        minibatches = config.trainer.batch_size // config.trainer.minibatch_size
        result["jax"] = _run_rival(rival, config.world.agents, minibatches, config.policy.precision)
        result["ratio"] = result["steps_per_second"] / result["jax"]["steps_per_second"]
    text = json.dumps(result, indent=2)
    if file is not None:
        file.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def measure(
    what: str, recipe: str | None, overrides: Mapping[str, Any], config: Config, iterations: int
) -> dict[str, Any]:
    """Train for some iterations; return the median steps a second, their spread, and the milliseconds of each phase."""
    steps = config.trainer.batch_size
    with tempfile.TemporaryDirectory() as folder:
        keys = (
            KEYS | dict(overrides) | {"runs_dir": folder, "run": "bench", "trainer.total_timesteps": steps * iterations}
        )
        metrics = holdfast.train(recipe, keys, quiet=True).metrics
    rows = [
        {name: float(numbers[row]) for name, numbers in metrics.items()}
        for row in range(int(WARM_UP * iterations), iterations)
    ]
    rates = sorted(
        row["charts/SPS"] if what == "train" else steps / sum(row[phase] for phase in PHASES[what]) for row in rows
    )
    last = rows[-1]
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": name_of(select_device(config)),
        "versions": versions(),
        "measured": what,
        "steps_per_second": statistics.median(rates),
        "spread": [rates[0], rates[-1]],
        "iterations": len(rows),
        "milliseconds": {
            name.removeprefix("time/"): 1e3 * statistics.median(row[name] for row in rows)
            for name in last
            if name.startswith("time/")
        },
        "agents": config.world.agents,
        "minibatches": config.trainer.batch_size // config.trainer.minibatch_size,
        "precision": config.policy.precision,
        "return": last.get("charts/episodic_return"),
        "replay_error": last.get("memory/replay_error"),
    }


def _find_rival() -> Path:
    """Return the JAX program, which is in a clone of the repository and not in the package."""
    if importlib.util.find_spec("jax") is None:
        raise ConfigError("--against jax needs JAX: pip install 'jax[cuda13]', or jax for a CPU.")
    file = Path(holdfast.__file__).parents[2] / "benchmarks" / RIVAL
    if not file.is_file():
        raise ConfigError(f"--against jax runs benchmarks/{RIVAL}, which is in a clone of the repository only.")
    return file


def _run_rival(program: Path, agents: int, minibatches: int, precision: str) -> dict[str, Any]:
    """Run the JAX program in a process of its own, in each precision that is allowed; return the faster result."""
    precisions = ("float32", "bfloat16") if precision == "bfloat16" else ("float32",)
    results = []
    for each in precisions:
        command = [sys.executable, str(program), str(agents), str(minibatches), each]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip() or "it ended without a word").splitlines()[-1]
            raise ConfigError(f"--against jax: the program failed: {reason}")
        results.append(json.loads(done.stdout.splitlines()[-1]))
    return max(results, key=lambda result: result["steps_per_second"])


def _parser(what: str) -> Parser:
    measured = {
        "train": "Train, and measure steps a second of everything: rollouts, updates, checks, metrics and snapshots.",
        "rollout": "Train, and measure steps a second of the rollouts alone.",
        "update": "Train, and measure steps a second of the updates alone.",
    }[what]
    parser = Parser(
        prog=f"holdfast bench {what}",
        usage=f"holdfast bench {what} [RECIPE] [key=value ...] [options]",
        description=f"{measured} Recipes and keys are those of holdfast train. The result is printed as JSON: "
        "the median and the spread over iterations after a warm-up.",
        allow_abbrev=False,
    )
    parser.add_argument("--iterations", type=count, default=30, metavar="N", help="iterations to train (30)")
    parser.add_argument("--json", metavar="FILE", help="also write the result to this file")
    text = "also run a program in JAX of the same algorithm and sizes on the world Echo (benchmarks/echo.py)"
    parser.add_argument("--against", type=one_of(("jax",)), metavar="jax", help=text)
    return parser
