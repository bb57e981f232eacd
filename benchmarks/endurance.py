"""Memory usage and speed of a long run, at its end compared with soon after its start.

MALLOC_TRIM_THRESHOLD_=0 python benchmarks/endurance.py [STEPS]
"""

import statistics
import sys
import time

import torch

from holdfast.build import build_policy, build_world
from holdfast.config.run import override
from holdfast.recipes import find_recipe
from holdfast.training.trainer import Trainer

KEYS = {
    "world.agents": 512,
    "trainer.batch_size": 8192,
    "trainer.minibatch_size": 8192,
    "trainer.bptt_horizon": 16,
    "trainer.update_epochs": 1,
    "policy.hidden_size": 16,
    "policy.num_layers": 1,
}


def reference_seconds(layer=torch.nn.LSTM(64, 64), x=torch.zeros(32, 64, 64)):  # noqa: B008
    """Time a fixed workload: how fast this machine is right now."""
    start = time.process_time()
    for _ in range(4):
        layer(x)[0].sum().backward()
    return time.process_time() - start


def main():
    torch.set_num_threads(1)
    steps = int(float(sys.argv[1])) if len(sys.argv) > 1 else 3_000_000
    config = override(find_recipe("recall"), {**KEYS, "trainer.total_timesteps": steps})
    device = torch.device("cpu")
    world = build_world(config, device, agents=config.world.agents, seed=0)
    trainer = Trainer(config, world, build_policy(config, world, device))
    process_bytes, seconds, relative, start = [], [], [], time.process_time()
    for _ in range(config.iterations):
        segments = trainer.collect()
        trainer.check_replay(segments)
        metrics = trainer.update(segments)
        process_bytes.append(metrics["machine/process_bytes"])
        seconds.append(time.process_time() - start)
        relative.append(seconds[-1] / reference_seconds())
        start = time.process_time()
    share = max(1, len(seconds) // 20)
    early, late = process_bytes[share], process_bytes[-1]
    print(f"{config.steps:,} steps, {len(seconds)} iterations, {sum(seconds):.0f} CPU-seconds")
    print(f"process: {early / 2**20:.1f} MiB after 5 %, {late / 2**20:.1f} at the end: {late / early - 1:+.2%}")
    # CPU-seconds, and relative to a fixed workload: other programs may slow this machine down.
    for name, times in (("CPU-second", seconds), ("reference workload", relative)):
        first, last = (statistics.median(part) for part in (times[share : 3 * share], times[-2 * share :]))
        before, after = (config.trainer.batch_size / median for median in (first, last))
        print(f"steps per {name}: {before:,.0f} after 5 %, {after:,.0f} at the end: {after / before - 1:+.1%}")


if __name__ == "__main__":
    main()
