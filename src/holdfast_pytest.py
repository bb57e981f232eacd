"""A pytest plugin: the fixture `memory_laws` fails a test whose policy's memory is not right.

It lies beside the package, because importing the package imports torch, and every pytest on the machine
imports its plugins.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from holdfast.check import Laws
    from holdfast.worlds import World

LAWS = ("cut", "carry", "clear", "replay", "isolate", "pure", "bounded", "restore", "agree")
RELAXED = "relaxed_law"
HOW = '@pytest.mark.relax_law("restore", reason="why it may be broken here")'


class MemoryLaws:
    """Measures the laws of memory on a policy, and fails the test where one is broken that is not relaxed."""

    def __init__(self, node: pytest.Item, relaxed: dict[str, str]) -> None:
        self._node = node
        self._relaxed = relaxed
        self._held: dict[str, bool] = {}

    def check(self, policy: Any, world: "World | None" = None, **options: Any) -> "Laws":
        """Measure every law as `holdfast.check` does, and return the verdicts if none is broken."""
        __tracebackhide__ = True
        import holdfast
        from holdfast.report.verdict import as_text, summary

        laws, refused = None, ""
        try:
            with _quiet_compiler():
                laws = holdfast.check(policy, world, **options)
        except holdfast.HoldfastError as error:
            refused = str(error)
        if laws is None:
            pytest.fail(f"The laws of memory cannot be measured: {refused}", pytrace=False)
        told = as_text(laws)
        for name, reason in self._relaxed.items():
            self._held[name] = self._held.get(name, True) and laws[name].ok
            if not laws[name].ok:
                self._tell(f"relaxed on purpose: {name}, because {reason}")
        broken = [name for name, law in laws.items() if not law.ok and name not in self._relaxed]
        if broken:
            held = [name for name in self._relaxed if not laws[name].ok]
            rest = f" Relaxed: {', '.join(held)}; not relaxed: {', '.join(broken)}." if held else ""
            pytest.fail(f"{summary(laws)}{rest}\n\n{told}", pytrace=False)
        if not laws.ok:
            self._node.add_report_section("call", "memory laws", told)
        return laws

    def _tell(self, line: str) -> None:
        """Put what is relaxed into the test's report."""
        self._node.add_report_section("call", "memory laws", line)
        # A property travels from xdist's workers to the summary, and into JUnit's file.
        if (RELAXED, line) not in self._node.user_properties:
            self._node.user_properties.append((RELAXED, line))

    def idle(self) -> list[str]:
        """Name the relaxed laws that were measured and held every time."""
        return [name for name, held in self._held.items() if held]


@contextmanager
def _quiet_compiler() -> Iterator[None]:
    """Keep the hundred empty lines that torch.compile logs for its own tools out of the test's report."""
    trace = logging.getLogger("torch.__trace")
    listening = [each for each in trace.handlers if type(each).__module__.startswith("_pytest.")]
    for handler in listening:
        trace.removeHandler(handler)
    try:
        yield
    finally:
        for handler in listening:
            trace.addHandler(handler)


@pytest.fixture
def memory_laws(request: pytest.FixtureRequest) -> Iterator[MemoryLaws]:
    """Measure the laws of memory: `memory_laws.check(policy, world)` fails the test where one is broken."""
    laws = MemoryLaws(request.node, relaxed_by(request.node))
    yield laws
    for name in laws.idle():
        told = f"{name} is relaxed and holds: remove @pytest.mark.relax_law({name!r}, …) from this test."
        request.node.warn(pytest.PytestWarning(told))


def relaxed_by(item: pytest.Item) -> dict[str, str]:
    """Read which laws a test relaxes, and why; refuse a marker that does not say both."""
    relaxed: dict[str, str] = {}
    for mark in item.iter_markers("relax_law"):
        reason = mark.kwargs.get("reason")
        if not mark.args or set(mark.kwargs) - {"reason"}:
            raise pytest.UsageError(f"{item.nodeid}: relax_law names a law and gives a reason; write {HOW}.")
        for name in mark.args:
            if name not in LAWS:
                known = f"there are {', '.join(LAWS)}; write {HOW}"
                raise pytest.UsageError(f"{item.nodeid}: there is no law {name!r} to relax; {known}.")
        if not isinstance(reason, str) or not reason.strip():
            says = f"relax_law({mark.args[0]!r}) gives no reason"
            raise pytest.UsageError(f"{item.nodeid}: {says}; write {HOW.replace('restore', mark.args[0])}.")
        # Markers come nearest first: a test's own reason counts before its class's.
        relaxed = dict.fromkeys(mark.args, reason) | relaxed
    return relaxed


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known, so that --strict-markers lets it pass."""
    told = (
        "relax_law(name, ..., reason): let a test's policy break laws of memory, on purpose and for a reason"
    )
    config.addinivalue_line("markers", told)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a wrong marker before its test runs."""
    try:
        relaxed_by(item)
        return
    except pytest.UsageError as error:
        told = str(error)
    pytest.fail(told, pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what was relaxed, so that nobody forgets."""
    lines = {
        f"{report.nodeid}: {told}": None
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport)
        for name, told in report.user_properties
        if name == RELAXED
    }
    if lines:
        terminalreporter.write_sep("=", "laws of memory")
        for line in lines:
            terminalreporter.write_line(line)
