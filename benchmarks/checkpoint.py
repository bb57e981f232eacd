"""Cost of checkpoints: seconds and bytes, and how long training waits for them.

Trains as `holdfast train` does: a snapshot after each iteration, and a checkpoint written in the background
every `trainer.checkpoint_interval` iterations. Training waits for the snapshots, for the hand-over to the
writer, and for iterations that are slower while a checkpoint is being written.

    python benchmarks/checkpoint.py --agents 8192 --iterations 60
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from holdfast.build import build_policy, build_world, select_device
from holdfast.checkpoint.format import environment, open_checkpoint, write_checkpoint
from holdfast.checkpoint.run_dir import CheckpointManager, RunDir, policy_files
from holdfast.config.run import Config, override
from holdfast.recipes import find_recipe
from holdfast.training.trainer import Trainer


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def make_trainer(config: Config, device: torch.device) -> tuple[Trainer, torch.nn.Module]:
    world = build_world(config, device, agents=config.world.agents, seed=config.seed)
    policy = build_policy(config, world, device)
    return Trainer(config, world, policy), policy


def run_iteration(trainer: Trainer) -> None:
    segments = trainer.collect()
    trainer.check_replay(segments)
    trainer.update(segments)


def measure(trainer: Trainer, checkpoints: CheckpointManager, count: int, device: torch.device) -> dict[str, float]:
    """Train for some iterations; return the seconds that checkpoints take."""
    iterations, copies, handovers, overlapped = [], [], [], []
    for _ in range(count):
        writing = checkpoints._pending is not None and not checkpoints._pending.done()
        start = now(device)
        run_iteration(trainer)
        trained = now(device)
        snapshot = trainer.snapshot(None, {})
        copied = now(device)
        checkpoints.save_if_due(snapshot)
        iterations.append(trained - start)
        copies.append(copied - trained)
        handovers.append(now(device) - copied)
        if writing:
            overlapped.append(iterations[-1])
    median = statistics.median(iterations)
    slower = sum(max(0.0, seconds - median) for seconds in overlapped)
    total = sum(iterations) + sum(copies) + sum(handovers)
    return {
        "iteration_s": median,
        "copy_s": statistics.median(copies),
        "handing_over_s": sum(handovers),
        "slower_while_writing_s": slower,
        "stall_percent": 100 * (sum(copies) + sum(handovers) + slower) / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=8192)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--world", default="arena")
    parser.add_argument("--batch", type=int, default=524288)
    parser.add_argument("--minibatch", type=int, default=16384)
    args = parser.parse_args()
    keys = {"world": args.world, "world.agents": args.agents, "policy": "fast", "trainer.monitor": "off"}
    keys |= {"trainer.batch_size": args.batch, "trainer.minibatch_size": args.minibatch}
    keys |= {"trainer.total_timesteps": args.batch * args.iterations, "trainer.checkpoint_interval": 50}
    config = override(find_recipe("general"), keys)
    device = select_device(config)
    trainer, policy = make_trainer(config, device)
    run_iteration(trainer)
    with tempfile.TemporaryDirectory() as path:
        folder, files = RunDir(Path(path)), policy_files(config, policy)
        seconds = []
        for number in range(5):
            snapshot = trainer.snapshot(None, {})
            start = now(device)
            saved = write_checkpoint(folder.checkpoints / str(number), snapshot, files, environment(device))
            seconds.append(now(device) - start)
        sizes = {file.name: file.stat().st_size for file in saved.iterdir()}
        print(
            json.dumps({"bytes": sum(sizes.values()), **sizes, "write_s": statistics.median(seconds)}),
            flush=True,
        )
        restored, _ = make_trainer(config, device)
        start = now(device)
        restored.restore(open_checkpoint(saved))
        print(json.dumps({"verify_and_restore_s": now(device) - start}), flush=True)
        del restored
        interval = config.trainer.checkpoint_interval
        checkpoints = CheckpointManager(folder, files, environment(device), interval=interval, keep=3, alarm=print)
        result = measure(trainer, checkpoints, args.iterations, device)
        checkpoints.save_final()
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
