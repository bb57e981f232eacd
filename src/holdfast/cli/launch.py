"""Start the ranks of a run on this machine, with torch's elastic launcher: the short form of torchrun."""

import logging
import signal
import sys
import uuid
from collections.abc import Sequence

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from holdfast.errors import ConfigError

STOP_S = 45
"""Seconds for the other ranks to end when one has ended, or on a signal."""


def launch(ranks: int, args: Sequence[str], *, max_restarts: int = 0) -> int:
    """Run `holdfast train` on some ranks; return the exit code."""
    # Its messages are tables; ours is one line.
    logging.disable(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=max_restarts,
        shutdown_timeout=STOP_S,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "holdfast", "train", *args)
    except SignalException:
        return 1
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            # It has printed its error.
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        print(f"holdfast: rank {rank} (process {failure.pid}) of {ranks} was ended by {name}.", file=sys.stderr)
        return 1
    return 0


def require_gpus(count: int) -> None:
    """Require so many GPUs."""
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count > present:
        raise ConfigError(
            f"--gpus {count}, but torch finds {present} here; type --gpus {present}, or --ranks {count} to share them."
            if present
            else f"--gpus {count}, but torch finds no GPU here; type --ranks {count} device=cpu."
        )
