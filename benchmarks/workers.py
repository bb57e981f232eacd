"""Measure rollouts of a world that costs more than its policy, by number of worker processes.

COST=4000 PYTHONPATH=benchmarks python benchmarks/workers.py [WORLD] [ROUNDS]
"""

import os
import statistics
import sys
import time

import torch

from holdfast.policies import make_policy
from holdfast.rollout import Collector
from holdfast.worlds import Recall, make_world
from holdfast.worlds.workers import WorkerPool, WorldFactory

AGENTS, LENGTH, COST = 64, 32, int(os.environ.get("COST", "4000"))


class Costly(Recall):
    """Recall with Python work for each agent in every step, like a simulator."""

    def step(self, actions):
        """Do the extra work, then step."""
        for _ in range(self.agents):
            sum(number * number for number in range(COST))
        return super().step(actions)


KINDS = {"this process": (0, 1), "1 worker": (1, 2), "2 workers": (2, 2), "2 workers, 1 share": (2, 1)}


def build(name, workers, shares):
    if not workers:
        return make_world(name, AGENTS, seed=0)
    return WorkerPool(WorldFactory(name, {}), AGENTS, workers=workers, groups=shares, seed=0)


def main():
    torch.set_num_threads(1)
    name = sys.argv[1] if len(sys.argv) > 1 else "workers:Costly"
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    rates = {kind: [] for kind in KINDS}
    parts = {}
    # Interleaved rounds: other programs may slow the machine down at any time.
    worlds = {kind: build(name, *sizes) for kind, sizes in KINDS.items()}
    collectors = {}
    for kind, world in worlds.items():
        policy = make_policy("auto", world, seed=0, hidden_size=32)
        collectors[kind] = Collector(world, policy, length=LENGTH, horizon=16, seed=0)
        collectors[kind].rollout(0)
        collectors[kind].timer.pop()
    for _ in range(rounds):
        for kind, collector in collectors.items():
            started = time.perf_counter()
            collector.rollout(0)
            rates[kind].append(AGENTS * LENGTH / (time.perf_counter() - started))
            parts[kind] = collector.timer.pop()
    for world in worlds.values():
        if isinstance(world, WorkerPool):
            world.close()
    print(f"{name}, {AGENTS} agents, {os.cpu_count()} cores, medians of {rounds} rounds")
    baseline = rates["1 worker"]
    for kind, kind_rates in rates.items():
        ratio = statistics.median(rate / base for rate, base in zip(kind_rates, baseline, strict=True))
        seconds = ", ".join(f"{part} {1e3 * parts[kind].get(part, 0.0):.0f} ms" for part in ("world", "forward"))
        print(f"{kind:20} {statistics.median(kind_rates):8,.0f} steps/s   {ratio:.2f} of 1 worker   ({seconds})")


if __name__ == "__main__":
    main()
