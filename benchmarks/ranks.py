"""Data-parallel training: two ranks on two cores against one on one, by turns.

Weak: twice the agents on two ranks; strong: the same agents. Iterations after the first two count. Two figures:

- steps per second by wall time, for an idle machine;
- the critical path, for a busy one: from one collective call to the next, the CPU-seconds of the rank that needs most.
  That is the wall time on idle cores, but for the latency of the calls.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from torch import distributed

import holdfast

KEYS = {
    "trainer.bptt_horizon": 32,
    "trainer.eval_episodes": 1,
    "trainer.check": "off",
    "trainer.monitor": "off",
    "trainer.checkpoint_interval": 0,
    "report": "off",
    "device": "cpu",
    "threads": 1,
}
CALLS = ("all_reduce", "all_gather_object", "gather_object", "broadcast_object_list")
SKIPPED = 2
"""Iterations."""


def train(folder: Path, agents: int, iterations: int) -> None:
    """Train as one rank; write when each collective call began and ended, in CPU-seconds, and each iteration."""
    calls, ends = [], []

    def timed(function):
        def call(*args, **options):
            start = time.process_time()
            result = function(*args, **options)
            calls.append((start, time.process_time()))
            return result

        return call

    for name in CALLS:
        setattr(distributed, name, timed(getattr(distributed, name)))
    batch = 64 * agents
    sizes = {"world.agents": agents, "trainer.batch_size": batch, "trainer.minibatch_size": batch // 4}
    total = {"trainer.total_timesteps": batch * iterations, "runs_dir": str(folder), "run": "x"}
    on_end = lambda iteration: ends.append((len(calls), time.process_time()))  # noqa: E731
    holdfast.train("recall", {**KEYS, **sizes, **total}, callbacks=[on_end], quiet=True)
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps([calls, ends]))


def critical_path(times: list[tuple[list, list]]) -> float:
    """Sum the CPU-seconds of the slowest rank between the collective calls, and in them."""
    points = []
    for calls, ends in times:
        (first, start), (last, end) = ends[SKIPPED - 1], ends[-1]
        points.append([start, *(number for call in calls[first:last] for number in call), end])
    steps = [[after - before for before, after in pairwise(p)] for p in points]
    return sum(map(max, zip(*steps, strict=True)))


def measure(ranks: int, agents: int, iterations: int) -> tuple[float, float]:
    """Train on some ranks; return steps per second by wall time (the median), and on the critical path."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*launcher, __file__, "--folder", name, "--agents", str(agents), "--iterations", str(iterations)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        cores = ",".join(map(str, range(ranks)))
        subprocess.run(
            ["taskset", "-c", cores, *command], check=True, capture_output=True, timeout=900, env=environment
        )
        times = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
        lines = (folder / "x" / "metrics.jsonl").read_text().splitlines()
    speeds = [json.loads(line)["charts/SPS"] for line in lines if "charts/SPS" in line]
    steps = 64 * agents * (iterations - SKIPPED)
    return statistics.median(speeds[SKIPPED:]), steps / critical_path(times)


def main() -> None:
    """Print the ratios of several turns, or train as one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        train(options.folder, options.agents, options.iterations)
        return
    print(f"{options.agents} agents, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for turn in range(options.turns):
        one, strong, weak = (
            measure(ranks, agents, options.iterations)
            for ranks, agents in ((1, options.agents), (2, options.agents), (2, 2 * options.agents))
        )
        wall, path = (f"strong {strong[n] / one[n]:.2f}x weak {weak[n] / one[n]:.2f}x" for n in (0, 1))
        print(f"turn {turn + 1}: wall {one[0]:,.0f} steps/s, {wall}; critical path {one[1]:,.0f}, {path}", flush=True)


if __name__ == "__main__":
    main()
