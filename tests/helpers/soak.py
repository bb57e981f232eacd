"""A soak: a run with workers, resumed many times in one process; memory, descriptors, threads, children stay flat.

`MALLOC_TRIM_THRESHOLD_=0 python tests/helpers/soak.py [ITERATIONS RESUMES]` prints them after each part.
"""

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

import psutil
import torch

import holdfast
from helpers.small_runs import TINY
from holdfast.report.console import RunConsole

KEYS = {
    "trainer.num_workers": 2,
    "trainer.checkpoint_interval": 10,
    "trainer.keep_checkpoints": 2,
    "report": "off",
    "trainer.eval_episodes": 2,
    "trainer.check": "off",
    "trainer.update_epochs": 1,
}


def soak(folder, iterations, resumes):
    """Train in parts; yield the resources in use in the last iteration of each."""
    samples, show, process = [], RunConsole.show, psutil.Process()

    def sample(console, metrics):
        show(console, metrics)
        family = [process, *process.children(recursive=True)]
        samples.append(
            {
                "iteration": metrics["iteration"],
                "bytes": process.memory_info().rss,
                "family bytes": sum(member.memory_info().rss for member in family),
                "descriptors": sum(member.num_fds() for member in family),
                "threads": sum(member.num_threads() for member in family),
                "processes": len(family),
            }
        )

    with mock.patch.object(RunConsole, "show", sample):
        for part in range(1, resumes + 2):
            steps = TINY["trainer.batch_size"] * (iterations * part // (resumes + 1))
            if part == 1:
                keys = {**TINY, **KEYS, "runs_dir": str(folder), "run": "soak"}
                run = holdfast.train("recall", {**keys, "trainer.total_timesteps": steps})
            else:
                run = holdfast.train(resume=run.folder, config={"trainer.total_timesteps": steps})
            assert run.finished
            yield samples[-1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    iterations, resumes = (int(word) for word in sys.argv[1:]) if len(sys.argv) > 1 else (2000, 20)
    screen = sys.stdout
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as void, contextlib.redirect_stdout(void):
        for number, sample in enumerate(soak(Path(folder), iterations, resumes)):
            if number == 0:
                print("".join(f"{name:>14}" for name in sample), file=screen)
            print("".join(f"{value:>14,}" for value in sample.values()), file=screen, flush=True)
