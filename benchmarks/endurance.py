"""What a long run holds and how fast it is, at its end against soon after its start, in one run.

MALLOC_TRIM_THRESHOLD_=0 python benchmarks/endurance.py [STEPS]
"""

import statistics
import sys
import time

import torch

from holdfast.build import build_policy, build_world
from holdfast.config import change
from holdfast.life import iterations
from holdfast.recipes import find_recipe

KEYS = {
    "world.agents": 512,
    "trainer.batch_size": 8192,
    "trainer.minibatch_size": 8192,
    "trainer.bptt_horizon": 16,
    "trainer.update_epochs": 1,
    "policy.hidden_size": 16,
    "policy.num_layers": 1,
}


def yardstick(layer=torch.nn.LSTM(64, 64), x=torch.zeros(32, 64, 64)):  # noqa: B008
    """Time a fixed piece of work: how fast this machine is just now."""
    begun = time.process_time()
    for _ in range(4):
        layer(x)[0].sum().backward()
    return time.process_time() - begun


def main():
    torch.set_num_threads(1)
    steps = int(float(sys.argv[1])) if len(sys.argv) > 1 else 3_000_000
    config = change(find_recipe("recall"), {**KEYS, "trainer.total_timesteps": steps})
    device = torch.device("cpu")
    world = build_world(config, device, agents=config.world.agents, seed=0)
    policy = build_policy(config, world, device)
    held, spent, pieces, before = [], [], [], time.process_time()
    for metrics in iterations(config, world, policy):
        now = time.process_time()
        held.append(metrics["machine/process_bytes"])
        spent.append(now - before)
        pieces.append(spent[-1] / yardstick())
        before = time.process_time()
    part = max(1, len(held) // 20)
    early, late = held[part], held[-1]
    print(f"{config.steps:,} steps, {len(held)} iterations, {sum(spent):.0f} CPU-seconds")
    print(
        f"process: {early / 2**20:.1f} MiB after 5 %, {late / 2**20:.1f} at the end: {late / early - 1:+.2%}"
    )
    # CPU-seconds, and against a fixed piece of work: other programs slow this machine down now and then.
    for name, times in (("CPU-second", spent), ("piece of fixed work", pieces)):
        first, last = (statistics.median(some) for some in (times[part : 3 * part], times[-2 * part :]))
        then, now = (config.trainer.batch_size / each for each in (first, last))
        print(f"steps a {name}: {then:,.0f} after 5 %, {now:,.0f} at the end: {now / then - 1:+.1%}")


if __name__ == "__main__":
    main()
