"""benchmarks/fast.py, small."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fast.py"


def test_an_update_and_a_rollout_of_fast_are_timed_and_taken_apart(tmp_path):
    file = tmp_path / "figures.json"
    words = ["--device", "cpu", "--quick", "--rows", "2", "--agents", "6", "--json", str(file)]
    said = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True)
    assert (said.returncode, said.stderr) == (0, "")
    told = json.loads(file.read_text())
    assert [each["policy"] for each in told["update"]] == ["policy=fast", "component:fast"]
    for what, steps in (("update", 2 * 64), ("rollout", 6), ("learner", 2 * 64)):
        first = told[what][0]
        assert 0 < first["ms_p10"] <= first["ms"] <= first["ms_p90"]
        assert round(first["steps_a_second"] * first["ms"]) == 1000 * steps
    ratios = {each["what"]: each["ratio"] for each in told["component_over_class"]}
    class_, graph = (each["ms"] for each in told["rollout"])
    assert ratios["rollout"] == graph / class_
    parts = {each["part"]: each["both"] for each in told["parts_0"]}
    assert list(parts) == ["encoder", "memory", "heads", "loss", "optimizer", "rest", "whole"]
    assert abs(2 * parts["whole"] - sum(parts.values())) < 1e-6
