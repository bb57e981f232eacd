"""Restarted jobs: a launcher that starts the same command again continues the run that it had started."""

import os
import socket
from pathlib import Path

import psutil

from holdfast import ranks
from holdfast.config.run import Config
from holdfast.launcher import launched_ranks

LAUNCH = ".launch"
"""File of a run's folder: the launch that created it."""
COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def launch_id() -> str:
    """Name the launch of this process: the same after a restart, of this machine's ranks or of the job."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if name != "none":
        return name
    # Without --rdzv-id: the launcher itself, which goes on when ranks end.
    launcher = psutil.Process(os.getppid())
    return f"{socket.gethostname()}-{launcher.pid}-{launcher.create_time()}"


def mark_launch(folder: Path) -> None:
    """Write down which launch created a run."""
    if launched_ranks() > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        (folder / LAUNCH).write_text(launch_id())


def find_restarted_run(config: Config) -> Path | None:
    """Find the run that this launch created before it restarted its ranks; None: it is the first time."""
    # On several machines, the launcher of one may not count a restart that another began.
    if not ranks.any_of(any(os.environ.get(name, "0") not in ("", "0") for name in COUNTS)):
        return None
    path = None
    if ranks.is_main():
        files = sorted(Path(config.runs_dir).glob(f"*/{LAUNCH}"), key=lambda file: file.stat().st_mtime)
        folders = [file.parent for file in files if file.read_bytes() == launch_id().encode()]
        # A run that was ended before its first checkpoint is started again.
        path = next((folder for folder in reversed(folders) if (folder / "checkpoints" / "latest").exists()), None)
    return ranks.broadcast(path)
