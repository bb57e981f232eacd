"""The steps of action.yml, run by bash with a stand-in for GitHub's environment."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
LAW = {"measured": 0.0, "bound": 0.0, "sense": "at most", "ok": True, "finding": ""}


@pytest.fixture
def step(tmp_path):
    """Run a step with its inputs, and `python` as given; return the process, the summary, the outputs, the folder."""

    def run(name, python=sys.executable, **inputs):
        values = {key: each.get("default", "") for key, each in ACTION["inputs"].items()} | inputs
        values |= {"python": str(python)}
        names = {"${{ github.action_path }}": str(ROOT)}
        names |= {f"${{{{ inputs.{key} }}}}": value for key, value in values.items()}
        env = {key: names[value] for key, value in STEPS[name]["env"].items()}
        files = {key: str(tmp_path / key) for key in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
        # As GitHub runs `shell: bash`.
        process = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS[name]["run"]],
            env=os.environ | files | env | {"RUNNER_TEMP": str(tmp_path), "PYTHONPATH": str(ROOT / "src")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        summary, output = (Path(file).read_text() if Path(file).exists() else "" for file in files.values())
        return process, summary, dict(line.split("=", 1) for line in output.splitlines())

    return run


@pytest.fixture
def recorder(tmp_path):
    """Make a `python` that records its arguments, prints a report for the check, and runs everything else."""

    def make(report="", code=0):
        (tmp_path / "report.json").write_text(report)
        script = tmp_path / "python"
        script.write_text(
            f"#!/bin/bash\nprintf '%s\\n' \"$@\" >> {tmp_path}/arguments\n"
            f'if [[ "$1" == -m ]]; then cat {tmp_path}/report.json; exit {code}; fi\nexec {sys.executable} "$@"\n'
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        return script

    return make


def test_scripts_contain_no_expressions():
    for each in STEPS.values():
        assert "${{" not in each["run"]
    # Every input reaches a step, and nothing else does.
    used = {value for each in STEPS.values() for value in each["env"].values()} - {"${{ github.action_path }}"}
    assert used == {f"${{{{ inputs.{name} }}}}" for name in ACTION["inputs"]}


def test_a_correct_world_passes(step, tmp_path):
    process, summary, outputs = step("Check", target="world:recall", arguments="world.delay=2\n")
    assert process.returncode == 0, process.stderr
    assert re.search(r"### holdfast check world:recall\n\n\d+ of \d+ hold", summary)
    badge = json.loads((tmp_path / "holdfast-badge.json").read_text())
    assert badge["color"] == "brightgreen"
    assert outputs["ok"] == "true"
    assert json.loads(Path(outputs["report"]).read_text())["ok"]


def test_a_broken_law_fails_the_step_after_summary_and_badge(step, recorder, tmp_path):
    broken = LAW | {"measured": None, "ok": False, "finding": "carry|clear: `x` <b>\n[a](b)"}
    away = LAW | {"measured": None, "finding": "without a memory"}
    laws = {"cut": LAW, "clear": broken, "carry": away}
    python = recorder(json.dumps({"ok": False, "notes": ["a *note*"], "laws": laws}), code=1)
    process, summary, outputs = step("Check", python, target="a:B", badge="badges/memory.json")
    assert process.returncode == 1
    badge = json.loads((tmp_path / "badges" / "memory.json").read_text())
    message = "1 of 2 hold, 1 n/a"
    assert badge == {"schemaVersion": 1, "label": "memory laws", "message": message, "color": "red"}
    assert summary.splitlines()[2:] == [
        message,
        "",
        "| law | | measured | must be | finding |",
        "|---|---|---|---|---|",
        "| cut | ✅ | 0 | at most 0 |  |",
        r"| clear | ❌ | not finite | at most 0 | carry\|clear: \`x\` \<b\> \[a\](b) |",
        "| carry | n/a |  | at most 0 | without a memory |",
        "",
        r"- a \*note\*",
    ]
    assert outputs["ok"] == "false"


def test_a_call_that_is_wrong_fails_with_a_grey_badge(step, tmp_path):
    process, summary, outputs = step("Check", target="world:recal")
    assert process.returncode == 2
    assert "did you mean recall?" in process.stderr
    assert "The check did not run" in summary
    assert json.loads((tmp_path / "holdfast-badge.json").read_text())["color"] == "lightgrey"
    assert outputs["ok"] == "false"


def test_inputs_are_arguments_and_never_code(step, recorder, tmp_path):
    evil = "$(touch evil) `touch evil`; touch evil \" ' *"
    python = recorder(json.dumps({"ok": True, "notes": [], "laws": {"cut": LAW}}))
    process, _, _ = step("Check", python, target=f"--trust-code {evil}", arguments=f"--obs\n{evil}", badge="")
    assert process.returncode == 0, process.stderr
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[:7] == ["-m", "holdfast", "check", f"--policy=--trust-code {evil}", "--json", "--obs", evil]
    process, _, _ = step("Install", python, install=f"--quiet\n\n{evil}")
    assert (tmp_path / "arguments").read_text().splitlines()[-5:] == ["-m", "pip", "install", "--quiet", evil]
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path / "holdfast-badge.json").exists()


def test_an_empty_list_installs_nothing(step, recorder, tmp_path):
    assert step("Install", recorder(), install="")[0].returncode == 0
    assert not (tmp_path / "arguments").exists()
