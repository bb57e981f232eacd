"""Train the recipe `general` on environments of other packages, nothing changed but the world and the steps.

python benchmarks/general_recipe.py                        # every task whose package is installed, 5 seeds
python benchmarks/general_recipe.py acrobot pendulum --seeds 3 --results general.jsonl trainer.ppo.ent_coef=0.01

A task is one line of the table: the return of each seed over its evaluation episodes, their interquartile mean, and
the figure published for a tuned PPO. Results are appended to a file as they come; what is there is not run again.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from scipy.stats import trim_mean


class Task(NamedTuple):
    """An environment, the steps to train, and what is published for a tuned PPO."""

    world: str
    steps: int
    published: str
    keys: tuple[str, ...] = ()


TASKS = {
    "cartpole": Task("gym:CartPole-v1", 100_000, "500 (100 k)"),
    "cartpole, no velocities": Task("gym:CartPole-v1", 200_000, "-", ("world.keep=0,2",)),
    "acrobot": Task("gym:Acrobot-v1", 200_000, "-73.5 (1 M)"),
    "mountain car": Task("gym:MountainCar-v0", 300_000, "-110 (1 M)"),
    "mountain car, continuous": Task("gym:MountainCarContinuous-v0", 200_000, "88.3 (20 k)"),
    "pendulum": Task("gym:Pendulum-v1", 200_000, "-172 (100 k)"),
    "pendulum, no velocity": Task("gym:Pendulum-v1", 300_000, "-", ("world.keep=0,1",)),
    "lunar lander": Task("gym:LunarLander-v3", 500_000, "242 (v2, 1 M)"),
    "hopper": Task("gym:Hopper-v5", 1_000_000, "2410 (v3, 1 M)"),
    "half cheetah": Task("gym:HalfCheetah-v5", 1_000_000, "5819 (v3, 1 M)"),
    "minigrid door key": Task("gym:MiniGrid-DoorKey-5x5-v0", 300_000, "-"),
    "minatar breakout": Task("gym:MinAtar/Breakout-v1", 500_000, "-"),
    "popgym repeat previous": Task("popgym:RepeatPreviousEasy", 500_000, "-"),
    "popgym pendulum, position": Task("popgym:PositionOnlyPendulumEasy", 400_000, "-"),
}
"""Published: the benchmark of rl-baselines3-zoo, PPO tuned for each task, one run, with its number of steps."""


def train(task: Task, seed: int, folder: str, keys: list[str]) -> dict[str, float]:
    """Train one seed in a process of its own; return its scores and CPU-seconds."""
    words = [f"world={task.world}", f"trainer.total_timesteps={task.steps}", f"seed={seed}", *task.keys, *keys]
    command = [sys.executable, "-m", "holdfast", "train", "general", *words, f"runs_dir={folder}", "run=x"]
    started, before = time.time(), os.times()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = os.times()
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = next(Path(folder).glob("x*/metrics.jsonl")).read_text().splitlines()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    scores = {name: number for name, number in json.loads(lines[-1]).items() if name.startswith("eval/")}
    alarms = [line for line in done.stdout.splitlines() if line.startswith("ALARM")]
    return {**scores, "cpu_s": round(cpu, 1), "seconds": round(time.time() - started, 1), "alarms": alarms}


def row(name: str, task: Task, results: list[dict[str, float]]) -> str:
    returns = [result["eval/return_mean"] for result in results]
    cleared = [result["eval/return_mean_memory_cleared"] for result in results]
    seeds = " ".join(f"{number:.4g}" for number in returns)
    cpu = sum(result["cpu_s"] for result in results) / len(results)
    return (
        f"| {name} | {task.steps:,} | {cpu:.0f} | {seeds} | **{trim_mean(returns, 0.25):.4g}** | "
        f"{trim_mean(cleared, 0.25):.4g} | {task.published} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="tasks (default: all), and keys of holdfast train")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=Path("general_recipe.jsonl"))
    args = parser.parse_intermixed_args()
    keys = [word for word in args.words if "=" in word]
    names = [word for word in args.words if "=" not in word] or list(TASKS)
    if unknown := set(names) - set(TASKS):
        parser.error(f"unknown {', '.join(unknown)}; tasks are {', '.join(TASKS)}")
    earlier = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    print("| task | steps | CPU-s | greedy return per seed | IQM | memory cleared | published |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in names:
        results = []
        for seed in range(args.seeds):
            case = {"task": name, "seed": seed, "keys": keys}
            result = next((line for line in earlier if line.items() >= case.items()), None)
            if result is None:
                with tempfile.TemporaryDirectory() as folder:
                    result = case | train(TASKS[name], seed, folder, keys)
                with args.results.open("a") as file:
                    file.write(json.dumps(result) + "\n")
            results.append(result)
        print(row(name, TASKS[name], results), flush=True)


if __name__ == "__main__":
    main()
