"""The plugin, used as a stranger would: in a project of its own."""

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import holdfast_pytest
from holdfast.check.laws import LAWS
from holdfast.report.verdict import as_text
from verdicts import WRITE, make_laws

pytest_plugins = ["pytester"]

# What is given as a policy is the set of laws that it breaks.
CONFTEST = """
import holdfast, pytest
from verdicts import make_laws

def check(policy, world=None, **options):
    if policy == "refused":
        raise holdfast.ContractError("it has no encode; write one.")
    laws = make_laws(*policy)
    laws.given = (world, options)
    return laws

@pytest.fixture(autouse=True)
def told(monkeypatch):
    monkeypatch.setattr(holdfast, "check", check)
"""


@pytest.fixture(autouse=True)
def without_importnb(pytester, monkeypatch):
    """mettagrid brings a plugin along that this pytest refuses to load."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:importnb")


@pytest.fixture
def project(pytester):
    """A project whose policies break the laws they are told to."""
    pytester.makeconftest(CONFTEST)
    return pytester


def run(project, body, *words):
    project.makepyfile(f"import pytest\n\n{body}")
    return project.runpytest_inprocess("--strict-markers", "-Wdefault", "-p", "no:cacheprovider", *words)


def test_the_plugin_is_registered_and_knows_the_laws():
    (found,) = entry_points(group="pytest11", name="holdfast")
    assert found.value == "holdfast_pytest"
    assert tuple(LAWS) == holdfast_pytest.LAWS


def test_importing_it_imports_nothing_heavy():
    code = "import sys, pytest; old = set(sys.modules); import holdfast_pytest; print(set(sys.modules) - old)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told == "{'holdfast_pytest'}\n"


def test_laws_that_hold_are_returned_for_the_arguments_given(project):
    body = """def test_good(memory_laws):
        laws = memory_laws.check((), "world", depth=3)
        assert laws.ok and laws.given == ("world", {"depth": 3})
    """
    result = run(project, body)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*laws of memory*")


def test_a_broken_law_fails_the_test_and_says_what_to_write(project):
    result = run(project, 'def test_bad(memory_laws):\n    memory_laws.check(["clear", "pure"])')
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "2 of 9 laws of memory are broken: clear, pure.",
            "law *measured *bound *what was measured",
            "cut *✓*",
            "clear *✗ *clear, lived",
            "clear: clear, lived: agent 3, step 5, values: 1.5e-02, must be 0 (2 more like it)",
            "pure: *",
            "pattern (clear, pure): memory is never cleared",
            f"  write: {WRITE}",
        ]
    )
    told = result.stdout.str()
    assert as_text(make_laws("clear", "pure")) in told
    assert "Traceback" not in told
    assert "def test_bad" not in told


def test_a_policy_that_cannot_be_measured_fails_in_one_line(project):
    result = run(project, 'def test_bad(memory_laws):\n    memory_laws.check("refused")')
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["The laws of memory cannot be measured: it has no encode; write one."])
    result.stdout.no_fnmatch_line("*ContractError*")


RELAXED = """@pytest.mark.relax_law("restore", reason="it is never saved")
def test_relaxed(memory_laws):
    assert not memory_laws.check({broken}).ok
"""


def test_a_relaxed_law_passes_and_is_told(project):
    result = run(project, RELAXED.format(broken=["restore"]), "-rP")
    result.assert_outcomes(passed=1)
    told = "relaxed on purpose: restore, because it is never saved"
    result.stdout.fnmatch_lines(["*memory laws*", told, "restore: restore, lived: *"])
    result.stdout.fnmatch_lines(["*= laws of memory =*", f"*::test_relaxed: {told}"])
    assert result.stdout.str().count(told) == 2


def test_a_law_that_is_not_relaxed_still_fails(project):
    result = run(project, RELAXED.format(broken=["restore", "cut"]))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*::test_relaxed: relaxed on purpose: restore, because it is never saved"])


def test_a_relaxed_law_that_holds_warns(project):
    body = (
        '@pytest.mark.relax_law("restore", reason="old")\ndef test_x(memory_laws):\n    memory_laws.check(())'
    )
    result = run(project, body)
    result.assert_outcomes(passed=1, warnings=1)
    told = "*restore is relaxed and holds: remove @pytest.mark.relax_law('restore', *) from this test."
    result.stdout.fnmatch_lines([told])
    result.stdout.no_fnmatch_line("*relaxed on purpose*")


def test_a_relaxed_law_need_be_broken_once_only(project):
    body = """@pytest.mark.relax_law("restore", "cut", reason="x")
def test_x(memory_laws):
    for broken in (["restore"], ["cut"], []):
        memory_laws.check(broken)
"""
    run(project, body).assert_outcomes(passed=1, warnings=0)


def test_a_tests_own_reason_counts_before_its_modules(project):
    of_all = 'pytestmark = pytest.mark.relax_law("restore", reason="of all")\n\n'
    result = run(project, of_all + RELAXED.format(broken=["restore"]))
    result.stdout.fnmatch_lines(["*because it is never saved"])
    result.stdout.no_fnmatch_line("*because of all")


@pytest.mark.parametrize(
    ("marker", "told"),
    [
        ('"clear"', "relax_law('clear') gives no reason; write @pytest.mark.relax_law(\"clear\", reason="),
        ('"clear", reason=" "', "relax_law('clear') gives no reason; write "),
        ('"claer", reason="x"', "there is no law 'claer' to relax; there are cut, carry, clear, "),
        ('reason="x"', "relax_law names a law and gives a reason; write "),
        ('"clear", why="x"', "relax_law names a law and gives a reason; write "),
    ],
)
def test_a_wrong_marker_refuses_its_test_and_no_other(project, marker, told):
    body = f"@pytest.mark.relax_law({marker})\ndef test_x():\n    pass\n\ndef test_y():\n    pass"
    result = run(project, body)
    result.assert_outcomes(passed=1, errors=1)
    told_of_it = [line for line in result.stdout.lines if "::test_x: " + told in line]
    assert told_of_it  # Where CI is set, pytest says it a second time, in its summary.
    assert all(line.endswith('reason="why it may be broken here").') for line in told_of_it)


IN_WORKERS = """import holdfast, pytest, torch
from small import OnlySpec, Small, make_small
from verdicts import make_laws


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


def test_real_policies_in_workers(pytester):
    # In a process of its own: what an inner run imports is forgotten, and the compiler bears no twin.
    pytester.makepyfile(IN_WORKERS)
    pytester.makeini(f"[pytest]\npythonpath = {Path(__file__).parent}")
    result = pytester.runpytest_subprocess("-n1", "--strict-markers")
    result.assert_outcomes(passed=1, failed=1, errors=1)
    result.stdout.fnmatch_lines(["*::test_wrong: relax_law('cut') gives no reason; write *"])
    told = ["1 of 9 laws of memory is broken: clear.", "clear: *must be 0*", "pattern (*", "  write: *"]
    result.stdout.fnmatch_lines(told)
    result.stdout.fnmatch_lines(["*::test_relaxed: relaxed on purpose: restore, because it is never saved"])
    result.stdout.no_fnmatch_line("*torch.__trace*")
