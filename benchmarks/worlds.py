"""How fast each world is alone: agent steps a second, with random actions made beforehand.

On the CPU by CPU-seconds of one thread, best of several passes, since others may use the machine; on a GPU by
the clock on the wall, the device waited for at the end of each pass. Agents are rounded to whole crowds of
24 for `arena`:

    python benchmarks/worlds.py [--device cuda] [--agents 64 1024 8192] [--worlds arena tmaze] [--json FILE]
"""

import argparse
import json
import time

import torch

from holdfast.worlds import WORLDS, make_world
from holdfast.worlds.arena import CROWD


def seconds(world, actions: list[torch.Tensor], device: str) -> float:
    """Time one pass over the actions."""
    on_gpu = device != "cpu"
    clock = time.perf_counter if on_gpu else time.process_time
    if on_gpu:
        torch.cuda.synchronize()
    begun = clock()
    for each in actions:
        world.step(each)
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - begun


def measure(name: str, agents: int, device: str, passes: int, steps: int) -> float:
    """Give the agent steps a second of the fastest pass."""
    if name == "arena":
        agents = max(1, round(agents / CROWD)) * CROWD
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
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), choices=list(WORLDS))
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", help="write all figures to this file")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {asked.device}, steps a second, best of {asked.passes} passes")
    print(f"{'world':14}" + "".join(f"{agents:>14,}" for agents in asked.agents))
    found = {}
    for name in asked.worlds:
        found[name] = [
            measure(name, agents, asked.device, asked.passes, asked.steps) for agents in asked.agents
        ]
        print(f"{name:14}" + "".join(f"{speed:14,.0f}" for speed in found[name]), flush=True)
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump({"agents": asked.agents, "steps_a_second": found}, file, indent=2)


if __name__ == "__main__":
    main()
