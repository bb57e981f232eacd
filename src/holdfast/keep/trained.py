"""How far the policy of a run was trained, and where it was saved last."""

import json
from pathlib import Path

LATEST = Path("checkpoints") / "latest"


def checkpoint_of(folder: Path) -> Path:
    """Find the checkpoint that was saved last."""
    return folder / LATEST.parent / (folder / LATEST).resolve().name


def steps_trained(folder: Path) -> int | None:
    """Read how many steps were lived until the last checkpoint; None: nobody wrote it down."""
    iteration = checkpoint_of(folder).name.partition("-")[0]
    metrics, steps = folder / "metrics.jsonl", None
    if not iteration.isdigit() or not metrics.exists():
        return None
    for line in metrics.read_text().splitlines():
        # A run that was killed may have left half a line: the checkpoint is older than that.
        told = json.loads(line) if line.endswith("}") else {}
        if told.get("iteration", int(iteration) + 1) <= int(iteration):
            steps = int(told["global_step"])
    return steps
