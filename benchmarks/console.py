"""What the dashboard costs: the time of showing in that of a training with the default recipe.

python benchmarks/console.py
"""

import os
import time

import torch
from rich.console import Console

from holdfast.build import build_policy, build_world
from holdfast.config import change
from holdfast.life import iterations
from holdfast.recipes import find_recipe
from holdfast.report import RunConsole, title_of

STEPS = 100_000


def main():
    torch.set_num_threads(1)
    config, device = change(find_recipe("recall"), {"trainer.total_timesteps": STEPS}), torch.device("cpu")
    world = build_world(config, device, agents=config.world.agents, seed=0)
    policy = build_policy(config, world, device)
    shown, drawn, begun = 0.0, [], time.perf_counter()
    with open(os.devnull, "w") as nowhere:
        screen = Console(file=nowhere, force_terminal=True, width=100, height=40, emoji=False)
        title = title_of(config, "benchmark", policy, device)
        console = RunConsole(config.iterations, screen, title=title, horizon=config.trainer.bptt_horizon)
        with console:
            for metrics in iterations(config, world, policy):
                before = time.perf_counter()
                console.show(metrics)
                took = time.perf_counter() - before
                shown += took
                drawn += [took] if took > 1e-3 else []
    whole = time.perf_counter() - begun
    print(f"{config.iterations} iterations in {whole:.1f} s, {len(drawn)} drawings")
    print(f"a drawing takes {1e3 * sum(drawn) / max(1, len(drawn)):.1f} ms")
    print(f"showing costs {shown / whole:.2%} of the run")


if __name__ == "__main__":
    main()
