"""What keeping costs: seconds and bytes of a checkpoint, and how long training waits for them.

Training goes on as `holdfast train` lets it: a copy of everything after each iteration, a checkpoint written
beside the training after every `trainer.checkpoint_interval`. What training waits is what the copies and the
handing over take, and what iterations take longer while a checkpoint is being written.

    python benchmarks/checkpoint.py --agents 8192 --iterations 60
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from holdfast.build import build_policy, build_world, pick_device
from holdfast.config import Config, change
from holdfast.keep import Kept, RunFolder, described, made_with, open_checkpoint
from holdfast.keep.checkpoint import write_checkpoint
from holdfast.life import Life
from holdfast.recipes import find_recipe


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def alive(config: Config, device: torch.device) -> tuple[Life, torch.nn.Module]:
    world = build_world(config, device, agents=config.world.agents, seed=config.seed)
    policy = build_policy(config, world, device)
    return Life(config, world, policy), policy


def trained(life: Life, kept: Kept, folder: RunFolder, count: int, device: torch.device) -> dict[str, float]:
    """Train for some iterations, and say what keeping took of it."""
    lives, copies, handed, overlapped = [], [], [], []
    for _ in range(count):
        writing = kept.is_writing
        begun = now(device)
        life.go_on()
        lived = now(device)
        moment = life.moment(None, {})
        copied = now(device)
        kept.saw(moment)
        lives.append(lived - begun)
        copies.append(copied - lived)
        handed.append(now(device) - copied)
        if writing:
            overlapped.append(lives[-1])
    usual = statistics.median(lives)
    slower = sum(max(0.0, each - usual) for each in overlapped)
    whole = sum(lives) + sum(copies) + sum(handed)
    return {
        "iteration_s": usual,
        "copy_s": statistics.median(copies),
        "handing_over_s": sum(handed),
        "slower_while_writing_s": slower,
        "stall_percent": 100 * (sum(copies) + sum(handed) + slower) / whole,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=8192)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--world", default="arena")
    parser.add_argument("--batch", type=int, default=524288)
    parser.add_argument("--minibatch", type=int, default=16384)
    asked = parser.parse_args()
    keys = {"world": asked.world, "world.agents": asked.agents, "policy": "fast", "trainer.monitor": "off"}
    keys |= {"trainer.batch_size": asked.batch, "trainer.minibatch_size": asked.minibatch}
    keys |= {"trainer.total_timesteps": asked.batch * asked.iterations, "trainer.checkpoint_interval": 50}
    config = change(find_recipe("general"), keys)
    device = pick_device(config)
    life, policy = alive(config, device)
    life.go_on()
    with tempfile.TemporaryDirectory() as place:
        folder, about = RunFolder(Path(place)), described(config, policy)
        made = made_with(device)
        seconds = []
        for number in range(5):
            moment = life.moment(None, {})
            begun = now(device)
            path = write_checkpoint(folder.checkpoints / str(number), moment, about, made)
            seconds.append(now(device) - begun)
        sizes = {file.name: file.stat().st_size for file in path.iterdir()}
        print(
            json.dumps({"bytes": sum(sizes.values()), **sizes, "write_s": statistics.median(seconds)}),
            flush=True,
        )
        other, _ = alive(config, device)
        begun = now(device)
        other.restore(open_checkpoint(path))
        print(json.dumps({"verify_and_restore_s": now(device) - begun}), flush=True)
        del other
        interval = config.trainer.checkpoint_interval
        kept = Kept(folder, about, made, interval=interval, keep=3, alarm=print)
        found = trained(life, kept, folder, asked.iterations, device)
        kept.at_last()
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
