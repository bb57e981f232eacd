"""Long runs use no more memory at their end than soon after their start; runs resumed often leave nothing behind.

`python tests/helpers/soak.py` trains longer.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from helpers.soak import soak
from holdfast.policies import PolicyOutput
from holdfast.worlds.workers.spawn import fork_server

# Freed memory goes back to the system at once, so that the readings are of memory in use.
ENV = {
    **os.environ,
    "MALLOC_TRIM_THRESHOLD_": "0",
    "OMP_NUM_THREADS": "1",
    # This folder has the policy; it imports from helpers.
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
}
KEYS = (
    "trainer.bptt_horizon=16",
    "trainer.update_epochs=1",
    "policy.hidden_size=16",
    "policy.num_layers=1",
    "trainer.eval_episodes=64",
    "report=off",
)


class Plain(holdfast.RecurrentPolicy):
    """A small, fast policy, so that the memory in use is the trainer's."""

    def __init__(self, spec, hidden_size=16, num_layers=1, **memory):
        super().__init__(16, hidden_size, num_layers, **memory)
        self.encoder = nn.Linear(spec.obs_shape[0] * spec.obs_shape[1], 16)
        self.head = nn.Linear(hidden_size, len(spec.action_names) + 1)

    def encode(self, obs):
        return torch.relu(self.encoder(obs.flatten(1) / 255))

    def decode(self, features):
        out = self.head(features)
        return PolicyOutput(out[:, :-1], out[:, -1])


@pytest.mark.parametrize(
    "keys",
    [
        ("trainer.total_timesteps=40_000", "world.agents=64", "trainer.batch_size=1024"),
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
    ids=["40k", "3M"],
)
def test_process_memory_does_not_grow(tmp_path, keys):
    size = keys[-1].replace("batch_size", "minibatch_size")
    args = ["train", "recall", f"runs_dir={tmp_path}", "run=long", *KEYS, *keys, size]
    result = subprocess.run(
        [sys.executable, "-c", "import sys; from holdfast.cli import main; sys.exit(main())", *args],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert "memory grows" not in result.stdout
    lines = (tmp_path / "long" / "machine.jsonl").read_text().splitlines()
    process_bytes = [json.loads(line)["machine/process_bytes"] for line in lines]
    # Allocators and caches fill in the first iterations.
    settled = max(4, len(process_bytes) // 20)
    early, late = process_bytes[settled], process_bytes[-1]
    assert abs(late - early) <= 0.02 * early, f"{early} bytes after {settled} iterations, {late} at the end"


@pytest.mark.slow
@pytest.mark.usefixtures("annotations_asleep")
def test_resumed_runs_with_workers_leave_nothing_behind(tmp_path):
    with fork_server():
        _, early, *_, late = soak(tmp_path, iterations=60, resumes=3)
    for name in ("descriptors", "threads", "processes"):
        assert late[name] == early[name]
    assert late["bytes"] <= 1.03 * early["bytes"]
