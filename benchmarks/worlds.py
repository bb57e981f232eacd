"""Measure each world without a policy: agent steps per second, with actions drawn in advance.

On the CPU in CPU-seconds of one thread, best of several passes, since other programs may use the machine; on
a GPU in wall time, synchronized at the end of each pass. For `arena` the number of agents is rounded to a
multiple of 24, one map:

    python benchmarks/worlds.py [--device cuda] [--agents 64 1024 8192] [--worlds arena tmaze] [--json FILE]
"""

import argparse
import json
import time

import torch

from holdfast.config.worlds import WORLD_CONFIGS
from holdfast.worlds import make_world
from holdfast.worlds.builtin.arena import AGENTS_PER_MAP


def seconds(world, actions: list[torch.Tensor], device: str) -> float:
    """Time one pass over the actions."""
    on_gpu = device != "cpu"
    clock = time.perf_counter if on_gpu else time.process_time
    if on_gpu:
        torch.cuda.synchronize()
    started = clock()
    for action in actions:
        world.step(action)
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - started


def measure(name: str, agents: int, device: str, passes: int, steps: int) -> float:
    """Return the agent steps per second of the fastest pass."""
    if name == "arena":
        agents = max(1, round(agents / AGENTS_PER_MAP)) * AGENTS_PER_MAP
    world = make_world(name, agents=agents, device=device)
    count = len(world.spec.action_names)
    actions = [torch.randint(count, (agents,), device=device) for _ in range(steps)]
    world.reset()
    seconds(world, actions, device)
    return agents * steps / min(seconds(world, actions, device) for _ in range(passes))


def main() -> None:
    """Print a table of worlds and numbers of agents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--agents", type=int, nargs="+", default=[64, 1024, 8192])
    parser.add_argument("--worlds", nargs="+", default=list(WORLD_CONFIGS), choices=list(WORLD_CONFIGS))
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", help="write all figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {args.device}, steps per second, best of {args.passes} passes")
    print(f"{'world':14}" + "".join(f"{agents:>14,}" for agents in args.agents))
    results = {}
    for name in args.worlds:
        results[name] = [measure(name, agents, args.device, args.passes, args.steps) for agents in args.agents]
        print(f"{name:14}" + "".join(f"{speed:14,.0f}" for speed in results[name]), flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"agents": args.agents, "steps_a_second": results}, file, indent=2)


if __name__ == "__main__":
    main()
