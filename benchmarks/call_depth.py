"""Depth of the training loop: our frames between `train()` and `torch.lstm`; files one iteration enters.

python benchmarks/call_depth.py          # --list names the frames and the files
"""

import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import holdfast
from holdfast.report import console

SOURCE = str(Path(holdfast.__file__).parent)
PHASES = {"rollout": ("rollout/collector.py", "rollout"), "update": ("learn/ppo.py", "update")}
SETTINGS = {"trainer.total_timesteps": 3 * 4096, "trainer.checkpoint_interval": 0, "trainer.eval_episodes": 8}


class Depth:
    """A profile function that records the stack above each `torch.lstm` and every file entered."""

    def __init__(self) -> None:
        self.stacks: dict[str, list[str]] = {}
        self.files: dict[int, set[str]] = {}
        self._iteration = 0

    def __call__(self, frame: FrameType, event: str, function: Any) -> None:
        """Handle one event of `sys.setprofile`."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE):
            if code.co_name == "rollout" and code.co_filename.endswith("collector.py"):
                self._iteration += 1
            self.files.setdefault(self._iteration, set()).add(code.co_filename)
        elif event == "c_call" and function.__name__ == "lstm":
            self._record(frame)

    def _record(self, frame: FrameType | None) -> None:
        names = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(SOURCE):
                if code.co_name == "train" and code.co_filename.endswith("training/train.py"):
                    break
                names.append(f"{Path(code.co_filename).relative_to(SOURCE)}:{frame.f_lineno} {code.co_name}")
            frame = frame.f_back
        for phase, place in PHASES.items():
            if any(name.startswith(place[0]) and name.endswith(f" {place[1]}") for name in names):
                self.stacks.setdefault(phase, names)


def main() -> None:
    depth = Depth()
    # A line is printed every few seconds, not in every iteration.
    console.LINE_EVERY_S = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(depth)
        holdfast.train("recall", {**SETTINGS, "run": "depth", "runs_dir": folder})
        sys.setprofile(None)
    # The second iteration: the first makes buffers, the third is followed by the evaluation.
    files = sorted(Path(file).relative_to(SOURCE).as_posix() for file in depth.files[2])
    rollout, update = (len(depth.stacks[phase]) for phase in ("rollout", "update"))
    print(f"frames above torch.lstm: rollout {rollout}, update {update}")
    print(f"files entered by one iteration: {len(files)}")
    if "--list" in sys.argv:
        for phase, names in depth.stacks.items():
            print(phase, *reversed(names), sep="\n  ")
        print("files", *files, sep="\n  ")


if __name__ == "__main__":
    main()
