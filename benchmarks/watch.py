"""What the check inside a run costs: the time of a look against the time of an iteration, in one run.

python benchmarks/watch.py
"""

import statistics
import time

import torch

from holdfast.build import build_policy, build_world
from holdfast.check.watch import look
from holdfast.config import change
from holdfast.experience import Collector
from holdfast.learn import Learner
from holdfast.recipes import find_recipe

ITERATIONS = 8


def main():
    torch.set_num_threads(1)
    config, device = change(find_recipe("recall"), {}), torch.device("cpu")
    trainer = config.trainer
    world = build_world(config, device, agents=config.world.agents, seed=0)
    policy = build_policy(config, world, device)
    horizon = trainer.bptt_horizon
    collector = Collector(world, policy, length=config.rollout_length, horizon=horizon, seed=0)
    learner = Learner(policy, trainer, seed=0)
    looks, rests = [], []
    for iteration in range(ITERATIONS):
        begun = time.process_time()
        segments = collector.rollout(iteration)
        lived = time.process_time()
        look(policy, segments, world.agents)
        looked = time.process_time()
        learner.update(segments)
        looks.append(looked - lived)
        rests.append(time.process_time() - looked + lived - begun)
    share = statistics.median(looks) / statistics.median(rests)
    print(f"look {statistics.median(looks) * 1e3:.1f} ms, iteration {statistics.median(rests) * 1e3:.0f} ms")
    print(f"a look costs {share:.2%} of an iteration, {2 * share / config.iterations:.4%} of a run (first)")


if __name__ == "__main__":
    main()
