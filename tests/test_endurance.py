"""Long runs hold no more at their end than soon after their start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.policies import Thoughts

# Freed memory goes back at once: what is read is what is held, not what the allocator keeps for later.
PLAIN = {
    **os.environ,
    "MALLOC_TRIM_THRESHOLD_": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
}
KEYS = (
    "trainer.bptt_horizon=16",
    "trainer.update_epochs=1",
    "policy.hidden_size=16",
    "policy.num_layers=1",
    "trainer.eval_episodes=64",
)


class Plain(holdfast.RecurrentPolicy):
    """Reads tokens as they are: what a long run holds is the trainer's, and quickly seen."""

    def __init__(self, spec, hidden_size=16, num_layers=1, **memory):
        super().__init__(16, hidden_size, num_layers, **memory)
        self.eyes = nn.Linear(spec.obs_shape[0] * spec.obs_shape[1], 16)
        self.mouth = nn.Linear(hidden_size, len(spec.action_names) + 1)

    def encode(self, obs):
        return torch.relu(self.eyes(obs.flatten(1) / 255))

    def decode(self, features):
        out = self.mouth(features)
        return Thoughts(out[:, :-1], out[:, -1])


@pytest.mark.parametrize(
    "keys",
    [
        ("trainer.total_timesteps=100_000", "world.agents=64", "trainer.batch_size=1024"),
        pytest.param(
            (
                "policy=test_endurance:Plain",
                "trainer.total_timesteps=3_000_000",
                "world.agents=512",
                "trainer.batch_size=8192",
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["100k", "3M"],
)
def test_a_run_holds_as_much_at_its_end_as_soon_after_its_start(tmp_path, keys):
    size = keys[-1].replace("batch_size", "minibatch_size")
    words = ["train", "recall", f"runs_dir={tmp_path}", "run=long", *KEYS, *keys, size]
    made = subprocess.run(
        [sys.executable, "-c", "import sys; from holdfast.cli import main; sys.exit(main())", *words],
        env=PLAIN,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    assert "ALARM" not in made.stdout
    lines = (tmp_path / "long" / "machine.jsonl").read_text().splitlines()
    held = [json.loads(line)["machine/process_bytes"] for line in lines]
    early = held[len(held) // 20]
    assert abs(held[-1] - early) <= 0.02 * early, f"{early} bytes after 5 %, {held[-1]} at the end"
