"""Compare the learning of the three autoreset modes: CartPole with hidden velocities, several seeds row.

Prints for row mode the greedy returns, their interquartile mean with a bootstrapped 95 % interval and the
largest replay error; then whether all intervals overlap. About one CPU-minute per run:

    python benchmarks/autoreset.py [--seeds 5] [--steps 250000] [--modes next_step] [--json FILE]
"""

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import holdfast

MODES = ("same_step", "next_step", "disabled")


def iqm(returns: np.ndarray) -> np.ndarray:
    """Return the interquartile mean over the last axis."""
    ordered, cut = np.sort(returns, axis=-1), returns.shape[-1] // 4
    return ordered[..., cut : returns.shape[-1] - cut].mean(-1)


def interval(returns: list[float]) -> tuple[float, float]:
    """Return the bootstrapped 95 % interval of the interquartile mean."""
    samples = np.random.default_rng(0).choice(returns, (10_000, len(returns)))
    low, high = np.quantile(iqm(samples), [0.025, 0.975])
    return float(low), float(high)


def run(mode: str, seed: int, steps: int, folder: str) -> dict:
    """Train once and return its metrics."""
    started = time.process_time()
    keys = {"world.autoreset": mode, "seed": seed, "trainer.total_timesteps": steps, "runs_dir": folder}
    result = holdfast.train("cartpole", keys)
    lines = [json.loads(line) for line in (Path(result.folder) / "metrics.jsonl").read_text().splitlines()]
    errors = [line["memory/replay_error"] for line in lines if "memory/replay_error" in line]
    # Every step of this world pays 1, so the return must equal the length.
    differences = [
        abs(line["charts/episodic_return"] - line["charts/episodic_length"])
        for line in lines
        if "charts/episodic_return" in line
    ]
    return {
        "mode": mode,
        "seed": seed,
        "return": result.summary["eval/return_mean"],
        "cleared": result.summary["eval/return_mean_memory_cleared"],
        "replay_error": max(errors),
        "steps": result.summary["global_step"],
        "return_unlike_length": max(differences),
        "cpu_s": time.process_time() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=250_000)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--json", help="write all figures to this file")
    args = parser.parse_args()
    results = []
    with TemporaryDirectory() as folder:
        for seed in range(args.first, args.first + args.seeds):
            for mode in args.modes:
                results.append(run(mode, seed, args.steps, folder))
                print(results[-1], flush=True)
    report(results)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2))


def report(results: list[dict]) -> None:
    """Print one line per mode, and whether the intervals overlap."""
    spans = []
    for mode in MODES:
        rows = [row for row in results if row["mode"] == mode]
        if not rows:
            continue
        returns = [row["return"] for row in rows]
        spans.append(interval(returns))
        print(
            f"{mode:10} returns {' '.join(f'{value:.0f}' for value in returns)} · "
            f"IQM {float(iqm(np.array(returns))):.0f} [{spans[-1][0]:.0f}, {spans[-1][1]:.0f}] · cleared "
            f"{np.mean([row['cleared'] for row in rows]):.0f} · replay error at most "
            f"{max(row['replay_error'] for row in rows):.0e} · return - length at most "
            f"{max(row['return_unlike_length'] for row in rows):.0e} · "
            f"{np.mean([row['cpu_s'] for row in rows]):.0f} CPU-s"
        )
    overlap = max(low for low, _ in spans) <= min(high for _, high in spans)
    print(f"intervals overlap: {'yes' if overlap else 'no'}")


if __name__ == "__main__":
    main()
