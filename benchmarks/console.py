"""Measure the dashboard: its share of the time of a training run with the default recipe.

python benchmarks/console.py
"""

import os
import time

import torch
from rich.console import Console

from holdfast.build import build_policy, build_world
from holdfast.config.run import override
from holdfast.recipes import find_recipe
from holdfast.report.console import RunConsole
from holdfast.report.text import title_of
from holdfast.training.trainer import Trainer

STEPS = 100_000


def main():
    torch.set_num_threads(1)
    config, device = override(find_recipe("recall"), {"trainer.total_timesteps": STEPS}), torch.device("cpu")
    world = build_world(config, device, agents=config.world.agents, seed=0)
    policy = build_policy(config, world, device)
    show_s, draws, started = 0.0, [], time.perf_counter()
    with open(os.devnull, "w") as devnull:
        screen = Console(file=devnull, force_terminal=True, width=100, height=40, emoji=False)
        title = title_of(config, "benchmark", policy, device)
        console = RunConsole(config.iterations, screen, title=title, horizon=config.trainer.bptt_horizon)
        with console:
            trainer = Trainer(config, world, policy)
            for _ in range(config.iterations):
                metrics = trainer.update(trainer.collect())
                before = time.perf_counter()
                console.show(metrics)
                elapsed = time.perf_counter() - before
                show_s += elapsed
                draws += [elapsed] if elapsed > 1e-3 else []
    total = time.perf_counter() - started
    print(f"{config.iterations} iterations in {total:.1f} s, {len(draws)} draws")
    print(f"a draw takes {1e3 * sum(draws) / max(1, len(draws)):.1f} ms")
    print(f"the dashboard costs {show_s / total:.2%} of the run")


if __name__ == "__main__":
    main()
