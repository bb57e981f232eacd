"""The pytest plugin, in a project of its own."""

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import holdfast_pytest
from helpers.law_results import WRITE, make_laws
from holdfast.check.laws import LAWS
from holdfast.report.check_report import as_text

pytest_plugins = ["pytester"]

# A policy is given as the set of laws that it breaks.
CONFTEST = """
import holdfast, pytest
from helpers.law_results import make_laws

def check(policy, world=None, **options):
    if policy == "refused":
        raise holdfast.ContractError("it has no encode; write one.")
    laws = make_laws(*policy)
    laws.inputs = (world, options)
    return laws

@pytest.fixture(autouse=True)
def fake_check(monkeypatch):
    monkeypatch.setattr(holdfast, "check", check)
"""


@pytest.fixture(autouse=True)
def without_importnb(pytester, monkeypatch):
    """mettagrid installs a plugin that this pytest cannot load."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:importnb")


@pytest.fixture
def project(pytester):
    """A project whose policies break the given laws."""
    pytester.makeconftest(CONFTEST)
    return pytester


def run(project, body, *words):
    project.makepyfile(f"import pytest\n\n{body}")
    return project.runpytest_inprocess("--strict-markers", "-Wdefault", "-p", "no:cacheprovider", *words)


def test_plugin_is_registered():
    (plugin,) = entry_points(group="pytest11", name="holdfast")
    assert plugin.value == "holdfast_pytest"
    assert tuple(LAWS) == holdfast_pytest.LAWS


def test_plugin_imports_nothing_heavy():
    code = "import sys, pytest; old = set(sys.modules); import holdfast_pytest; print(set(sys.modules) - old)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    ).stdout
    assert output == "{'holdfast_pytest'}\n"


def test_check_returns_the_laws(project):
    body = """def test_good(memory_laws):
        laws = memory_laws.check((), "world", depth=3)
        assert laws.ok and laws.inputs == ("world", {"depth": 3})
    """
    result = run(project, body)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*= memory laws =*")


def test_broken_law_fails_the_test(project):
    result = run(project, 'def test_bad(memory_laws):\n    memory_laws.check(["clear", "pure"])')
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "2 of 10 laws of memory are broken: clear, pure.",
            "law *measured *bound *what was measured",
            "cut *✓*",
            "clear *✗ *clear, rollout",
            "clear: clear, rollout: agent 3, step 5, values: 1.5e-02, must be 0 (2 more like it)",
            "pure: *",
            "pattern (clear, pure): state never reset",
            f"  write: {WRITE}",
        ]
    )
    output = result.stdout.str()
    assert as_text(make_laws("clear", "pure")) in output
    assert "Traceback" not in output
    assert "def test_bad" not in output


def test_unmeasurable_policy_fails_on_one_line(project):
    result = run(project, 'def test_bad(memory_laws):\n    memory_laws.check("refused")')
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["The memory laws cannot be measured: it has no encode; write one."])
    result.stdout.no_fnmatch_line("*ContractError*")


RELAXED = """@pytest.mark.relax_law("restore", reason="it is never saved")
def test_relaxed(memory_laws):
    assert not memory_laws.check({broken}).ok
"""


def test_relaxed_law_passes_and_is_reported(project):
    result = run(project, RELAXED.format(broken=["restore"]), "-rP")
    result.assert_outcomes(passed=1)
    line = "relaxed on purpose: restore, because it is never saved"
    result.stdout.fnmatch_lines(["*memory laws*", line, "restore: restore, rollout: *"])
    result.stdout.fnmatch_lines(["*= memory laws =*", f"*::test_relaxed: {line}"])
    assert result.stdout.str().count(line) == 2


def test_law_that_is_not_relaxed_fails(project):
    result = run(project, RELAXED.format(broken=["restore", "cut"]))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*::test_relaxed: relaxed on purpose: restore, because it is never saved"])


def test_needlessly_relaxed_law_warns(project):
    body = '@pytest.mark.relax_law("restore", reason="old")\ndef test_x(memory_laws):\n    memory_laws.check(())'
    result = run(project, body)
    result.assert_outcomes(passed=1, warnings=1)
    warning = "*restore is relaxed and holds: remove @pytest.mark.relax_law('restore', *) from this test."
    result.stdout.fnmatch_lines([warning])
    result.stdout.no_fnmatch_line("*relaxed on purpose*")


def test_relaxed_law_broken_once_does_not_warn(project):
    body = """@pytest.mark.relax_law("restore", "cut", reason="x")
def test_x(memory_laws):
    for broken in (["restore"], ["cut"], []):
        memory_laws.check(broken)
"""
    run(project, body).assert_outcomes(passed=1, warnings=0)


def test_nearest_marker_takes_precedence(project):
    of_all = 'pytestmark = pytest.mark.relax_law("restore", reason="of all")\n\n'
    result = run(project, of_all + RELAXED.format(broken=["restore"]))
    result.stdout.fnmatch_lines(["*because it is never saved"])
    result.stdout.no_fnmatch_line("*because of all")


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ('"clear"', "relax_law('clear') gives no reason; write @pytest.mark.relax_law(\"clear\", reason="),
        ('"clear", reason=" "', "relax_law('clear') gives no reason; write "),
        ('"claer", reason="x"', "there is no law 'claer'; choose from cut, carry, clear, "),
        ('reason="x"', "relax_law takes a law and a reason; write "),
        ('"clear", why="x"', "relax_law takes a law and a reason; write "),
    ],
)
def test_invalid_marker_fails_its_test(project, marker, message):
    body = f"@pytest.mark.relax_law({marker})\ndef test_x():\n    pass\n\ndef test_y():\n    pass"
    result = run(project, body)
    result.assert_outcomes(passed=1, errors=1)
    errors = [line for line in result.stdout.lines if "::test_x: " + message in line]
    assert errors  # Where CI is set, pytest prints it a second time, in its summary.
    assert all(line.endswith('reason="why it may be broken here").') for line in errors)


IN_WORKERS = """import holdfast, pytest, torch
from helpers.law_results import make_laws
from helpers.small_policy import OnlySpec, Small, make_small


class NoClear(Small):
    def unroll(self, obs, first, state, valid=None):
        return super().unroll(obs, torch.zeros_like(first), state, valid)


def test_broken(memory_laws):
    memory_laws.check(make_small(NoClear), OnlySpec())


@pytest.mark.relax_law("restore", reason="it is never saved")
def test_relaxed(memory_laws, monkeypatch):
    monkeypatch.setattr(holdfast, "check", lambda policy, world: make_laws("restore"))
    memory_laws.check(None)


@pytest.mark.relax_law("cut")
def test_wrong():
    pass
"""


@pytest.mark.slow
def test_real_policies_in_workers(pytester):
    # In a process of its own: an inner run unloads its imports, and torch.compile cannot be imported twice.
    pytester.makepyfile(IN_WORKERS)
    pytester.makeini(f"[pytest]\npythonpath = {Path(__file__).parent}")
    result = pytester.runpytest_subprocess("-n1", "--strict-markers")
    result.assert_outcomes(passed=1, failed=1, errors=1)
    result.stdout.fnmatch_lines(["*::test_wrong: relax_law('cut') gives no reason; write *"])
    lines = ["1 of 10 laws of memory is broken: clear.", "clear: *must be 0*", "pattern (*", "  write: *"]
    result.stdout.fnmatch_lines(lines)
    result.stdout.fnmatch_lines(["*::test_relaxed: relaxed on purpose: restore, because it is never saved"])
    result.stdout.no_fnmatch_line("*torch.__trace*")


def test_pytest_runs_in_a_folder_without_a_config(tmp_path, monkeypatch):
    # The options of this repository, which leave out plugins that cannot be loaded, do not apply there.
    monkeypatch.delenv("PYTEST_ADDOPTS")
    (tmp_path / "test_one.py").write_text("def test_one():\n    assert True\n")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout
