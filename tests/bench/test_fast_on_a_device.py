"""benchmarks/fast.py, small."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fast.py"


def test_fast_policy_update_and_rollout_are_timed_by_part(tmp_path):
    file = tmp_path / "figures.json"
    args = ["--device", "cpu", "--quick", "--rows", "2", "--agents", "6", "--json", str(file)]
    process = subprocess.run([sys.executable, str(SCRIPT), *args], capture_output=True, text=True, timeout=300)
    assert (process.returncode, process.stderr) == (0, "")
    figures = json.loads(file.read_text())
    assert [row["policy"] for row in figures["update"]] == ["policy=fast", "component:fast"]
    for what, steps in (("update", 2 * 64), ("rollout", 6), ("learner", 2 * 64)):
        first = figures[what][0]
        assert 0 < first["ms_p10"] <= first["ms"] <= first["ms_p90"]
        assert round(first["steps_a_second"] * first["ms"]) == 1000 * steps
    ratios = {row["what"]: row["ratio"] for row in figures["component_over_class"]}
    class_, graph = (row["ms"] for row in figures["rollout"])
    assert ratios["rollout"] == graph / class_
    parts = {row["part"]: row["both"] for row in figures["parts_0"]}
    assert list(parts) == ["encoder", "memory", "heads", "loss", "optimizer", "rest", "whole"]
    assert abs(2 * parts["whole"] - sum(parts.values())) < 1e-6
