"""Whether the three ways to restart learn the same: CartPole with hidden speeds, several seeds each.

Prints for each way the greedy returns, their interquartile mean with a bootstrapped 95 % interval and the
largest replay error; and whether all intervals overlap. About a CPU-minute a run:

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
    """Average the middle half of the last axis."""
    ordered, cut = np.sort(returns, axis=-1), returns.shape[-1] // 4
    return ordered[..., cut : returns.shape[-1] - cut].mean(-1)


def interval(returns: list[float]) -> tuple[float, float]:
    """Draw seeds anew many times: where 95 % of the interquartile means lie."""
    drawn = np.random.default_rng(0).choice(returns, (10_000, len(returns)))
    low, high = np.quantile(iqm(drawn), [0.025, 0.975])
    return float(low), float(high)


def run(mode: str, seed: int, steps: int, folder: str) -> dict:
    """Train once, and read what was measured."""
    begun = time.process_time()
    keys = {"world.autoreset": mode, "seed": seed, "trainer.total_timesteps": steps, "runs_dir": folder}
    done = holdfast.train("cartpole", keys)
    lines = [json.loads(line) for line in (Path(done.folder) / "metrics.jsonl").read_text().splitlines()]
    errors = [line["memory/replay_error"] for line in lines if "memory/replay_error" in line]
    # Every step of this world pays 1: a return is the number of steps that counted.
    odd = [
        abs(line["charts/episodic_return"] - line["charts/episodic_length"])
        for line in lines
        if "charts/episodic_return" in line
    ]
    return {
        "mode": mode,
        "seed": seed,
        "return": done.metrics["eval/return_mean"],
        "cleared": done.metrics["eval/return_mean_memory_cleared"],
        "replay_error": max(errors),
        "steps": done.metrics["global_step"],
        "return_unlike_length": max(odd),
        "cpu_s": time.process_time() - begun,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=250_000)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--json", help="write all figures to this file")
    asked = parser.parse_args()
    found = []
    with TemporaryDirectory() as folder:
        for seed in range(asked.first, asked.first + asked.seeds):
            for mode in asked.modes:
                found.append(run(mode, seed, asked.steps, folder))
                print(found[-1], flush=True)
    report(found)
    if asked.json:
        Path(asked.json).write_text(json.dumps(found, indent=2))


def report(found: list[dict]) -> None:
    """Print a line a way, and whether their intervals overlap."""
    spans = []
    for mode in MODES:
        mine = [each for each in found if each["mode"] == mode]
        if not mine:
            continue
        returns = [each["return"] for each in mine]
        spans.append(interval(returns))
        print(
            f"{mode:10} returns {' '.join(f'{each:.0f}' for each in returns)} · "
            f"IQM {float(iqm(np.array(returns))):.0f} [{spans[-1][0]:.0f}, {spans[-1][1]:.0f}] · cleared "
            f"{np.mean([each['cleared'] for each in mine]):.0f} · replay error at most "
            f"{max(each['replay_error'] for each in mine):.0e} · return - length at most "
            f"{max(each['return_unlike_length'] for each in mine):.0e} · "
            f"{np.mean([each['cpu_s'] for each in mine]):.0f} CPU-s"
        )
    overlap = max(low for low, _ in spans) <= min(high for _, high in spans)
    print(f"intervals overlap: {'yes' if overlap else 'no'}")


if __name__ == "__main__":
    main()
