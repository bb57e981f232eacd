"""Measure the replay check inside a run: its time against the time of an iteration.

python benchmarks/watch.py
"""

import statistics
import time

import torch

from holdfast.build import build_policy, build_world
from holdfast.config.run import override
from holdfast.learn import Learner
from holdfast.monitor.replay_check import check_segments
from holdfast.recipes import find_recipe
from holdfast.rollout import Collector

ITERATIONS = 8


def main():
    torch.set_num_threads(1)
    config, device = override(find_recipe("recall"), {}), torch.device("cpu")
    trainer = config.trainer
    world = build_world(config, device, agents=config.world.agents, seed=0)
    policy = build_policy(config, world, device)
    horizon = trainer.bptt_horizon
    collector = Collector(world, policy, length=config.rollout_length, horizon=horizon, seed=0)
    learner = Learner(policy, trainer, seed=0)
    checks, rests = [], []
    for iteration in range(ITERATIONS):
        started = time.process_time()
        segments = collector.rollout(iteration)
        collected = time.process_time()
        check_segments(policy, segments)
        checked = time.process_time()
        learner.update(segments)
        checks.append(checked - collected)
        rests.append(time.process_time() - checked + collected - started)
    share = statistics.median(checks) / statistics.median(rests)
    print(f"check {statistics.median(checks) * 1e3:.1f} ms, iteration {statistics.median(rests) * 1e3:.0f} ms")
    print(f"a check costs {share:.2%} of an iteration, {2 * share / config.iterations:.4%} of a run (first)")


if __name__ == "__main__":
    main()
