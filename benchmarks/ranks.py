"""Data-parallel training: steps per second of two ranks on two cores against one on one, by turns.

Each rank is pinned to a core. Weak: twice the agents on two ranks; strong: the same agents. Iterations after the first
two count, by wall time, because a rank that waits for the other uses no CPU time: run it on an idle machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

KEYS = ["trainer.bptt_horizon=32", "trainer.eval_episodes=1", "trainer.check=off", "trainer.monitor=off", "run=x"]


def measure(ranks: int, agents: int, iterations: int) -> float:
    """Train on some ranks; return steps per second, the median of the iterations."""
    with tempfile.TemporaryDirectory() as folder:
        batch = 64 * agents
        sizes = [f"world.agents={agents}", f"trainer.batch_size={batch}", f"trainer.minibatch_size={batch // 4}"]
        total = [f"trainer.total_timesteps={batch * iterations}", f"runs_dir={folder}", *KEYS]
        command = [sys.executable, "-m", "holdfast", "train", "recall", "--ranks", str(ranks), *sizes, *total]
        cores = ",".join(map(str, range(ranks)))
        subprocess.run(["taskset", "-c", cores, *command], check=True, capture_output=True, timeout=900)
        lines = (Path(folder) / "x" / "metrics.jsonl").read_text().splitlines()
    speeds = [json.loads(line)["charts/SPS"] for line in lines if "charts/SPS" in line]
    return statistics.median(speeds[2:])


def main() -> None:
    """Print the ratios of several turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    print(f"{options.agents} agents, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for turn in range(options.turns):
        one, strong, weak = (
            measure(ranks, agents, options.iterations)
            for ranks, agents in ((1, options.agents), (2, options.agents), (2, 2 * options.agents))
        )
        print(
            f"turn {turn + 1}: 1 rank {one:,.0f} steps/s, strong {strong / one:.2f}x, weak {weak / one:.2f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
