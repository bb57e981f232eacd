"""Workers: rollouts of a world that costs more than its policy, by the number of processes it lives in.

COST=4000 PYTHONPATH=benchmarks python benchmarks/workers.py [WORLD] [ROUNDS]
"""

import os
import statistics
import sys
import time

import torch

from holdfast.experience import Collector
from holdfast.policies import make_policy
from holdfast.worlds import Recall, make_world
from holdfast.worlds.pool import Blueprint, Pool

AGENTS, LENGTH, COST = 64, 32, int(os.environ.get("COST", "4000"))


class Costly(Recall):
    """Recall, with some Python for each agent in every step, as simulators cost."""

    def step(self, actions):
        """Work, and step."""
        for _ in range(self.agents):
            sum(number * number for number in range(COST))
        return super().step(actions)


KINDS = {"this process": (0, 1), "1 worker": (1, 2), "2 workers": (2, 2), "2 workers, 1 share": (2, 1)}


def built(name, workers, shares):
    if not workers:
        return make_world(name, AGENTS, seed=0)
    return Pool(Blueprint(name, {}), AGENTS, workers=workers, shares=shares, seed=0)


def main():
    torch.set_num_threads(1)
    name = sys.argv[1] if len(sys.argv) > 1 else "workers:Costly"
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    rates = {kind: [] for kind in KINDS}
    parts = {}
    # Side by side, round by round: other programs slow this machine down now and then.
    worlds = {kind: built(name, *sizes) for kind, sizes in KINDS.items()}
    lives = {}
    for kind, world in worlds.items():
        policy = make_policy("auto", world, seed=0, hidden_size=32)
        lives[kind] = Collector(world, policy, length=LENGTH, horizon=16, seed=0)
        lives[kind].rollout(0)
        lives[kind].stopwatch.take()
    for _ in range(rounds):
        for kind, collector in lives.items():
            begun = time.perf_counter()
            collector.rollout(0)
            rates[kind].append(AGENTS * LENGTH / (time.perf_counter() - begun))
            parts[kind] = collector.stopwatch.take()
    for world in worlds.values():
        if isinstance(world, Pool):
            world.close()
    print(f"{name}, {AGENTS} agents, {os.cpu_count()} cores, medians of {rounds} rounds")
    one = rates["1 worker"]
    for kind, found in rates.items():
        ratio = statistics.median(mine / theirs for mine, theirs in zip(found, one, strict=True))
        seconds = ", ".join(
            f"{part} {1e3 * parts[kind].get(part, 0.0):.0f} ms" for part in ("world", "forward")
        )
        print(f"{kind:20} {statistics.median(found):8,.0f} steps/s   {ratio:.2f} of 1 worker   ({seconds})")


if __name__ == "__main__":
    main()
