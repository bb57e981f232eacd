"""A tracker in a process of its own: reads numbers from its standard input and gives them to one package.

It is started by `trackers.py` as a script and imports nothing of ours. So the trainer gets no threads,
prompts, printing or signal handlers of other people's packages, and what breaks here breaks here only.
The first line in tells what to open; each further one is a step and its numbers. The first line out is empty
if it is open; every other line out is what went wrong.
"""

import json
import os
import sys
import time
import uuid
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

Open = tuple[Callable[[int, dict[str, float]], object], Callable[[], object]]
"""How to write numbers, and how to close."""


def open_tensorboard(told: dict[str, Any]) -> Open:
    """Write TensorBoard's event files, by the writer that torch's is a face of."""
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    # Their classes are made while they are imported.
    event = import_module("tensorboard.compat.proto.event_pb2").Event
    summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
    writer = EventFileWriter(str(Path(told["folder"]) / "tensorboard"), flush_secs=5)
    if told["begun"] is not None:
        # What was told of steps after this one is told again, and the first telling does not count.
        log = import_module("tensorboard.compat.proto.event_pb2").SessionLog
        start = log(status=log.START)
        writer.add_event(event(wall_time=time.time(), step=told["begun"] + 1, session_log=start))

    def write(step: int, numbers: dict[str, float]) -> None:
        values = [summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        writer.add_event(event(wall_time=time.time(), step=step, summary=summary(value=values)))

    return write, writer.close


def open_wandb(told: dict[str, Any]) -> Open:
    """Open a run of W&B that logs what it is given and nothing else; offline, nothing leaves the machine."""
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
    )
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "holdfast"),
        name=told["run"],
        dir=told["folder"],
        config=told["config"],
        mode=told["mode"],
        settings=settings,
        id=_id_of(told["folder"]),
        resume="allow",
    )
    return (lambda step, numbers: run.log(numbers, step=step)), run.finish


def _id_of(folder: str) -> str:
    """Name a run for good, so that one that goes on is the same."""
    note = Path(folder) / "wandb.id"
    if not note.exists():
        note.write_text(uuid.uuid4().hex[:12])
    return note.read_text().strip()


def open_trackio(told: dict[str, Any]) -> Open:
    """Open a run of Trackio in the folder that TRACKIO_DIR names."""
    import trackio

    run = trackio.init(
        project="holdfast",
        name=told["run"],
        config=told["config"],
        resume="allow",
        auto_log_cpu=False,
        auto_log_gpu=False,
        embed=False,
    )
    return (lambda step, numbers: run.log(numbers, step=step)), run.finish


OPENERS = {"tensorboard": open_tensorboard, "wandb": open_wandb, "trackio": open_trackio}


def main() -> int:
    """Mirror until the input ends."""
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    # From here on nothing that a package prints is seen by anybody.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    def tell(error: object) -> None:
        answer.write(" ".join(str(error).split()) + "\n")

    def heed(message: Warning | str, *place: Any, **more: Any) -> None:
        # Trackio goes on without a word when a disk is full, but for a warning.
        if "trackio" in str(message).lower():
            tell(message)

    warnings.simplefilter("always")
    warnings.showwarning = heed
    try:
        told = json.loads(sys.stdin.readline())
        write, close = OPENERS[told["tracker"]](told)
        answer.write("\n")
        for line in sys.stdin:
            step, numbers = json.loads(line)
            write(step, numbers)
        close()
    except Exception as error:
        tell(f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
