"""Long runs hold no more at their end than soon after their start."""

import json
import os
import subprocess
import sys

import pytest

# Freed memory goes back at once: what is read is what is held, not what the allocator keeps for later.
PLAIN = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "0", "OMP_NUM_THREADS": "1"}
KEYS = (
    "trainer.bptt_horizon=16",
    "trainer.update_epochs=1",
    "policy.hidden_size=16",
    "policy.num_layers=1",
    "trainer.eval_episodes=64",
)


@pytest.mark.parametrize(
    "keys",
    [
        ("trainer.total_timesteps=100_000", "world.agents=64", "trainer.batch_size=1024"),
        pytest.param(
            ("trainer.total_timesteps=3_000_000", "world.agents=512", "trainer.batch_size=8192"),
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
