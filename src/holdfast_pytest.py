"""A pytest plugin: the fixture `memory_laws` fails a test whose policy breaks a memory law.

It is a module of its own, because pytest imports its plugins at every start: it must not import torch.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from holdfast.check import Laws
    from holdfast.worlds import World

LAWS = ("cut", "carry", "clear", "replay", "isolate", "pure", "bounded", "restore", "agree", "shard")
RELAXED = "relaxed_law"
USAGE = '@pytest.mark.relax_law("restore", reason="why it may be broken here")'


class MemoryLaws:
    """Measures the memory laws of a policy; fails the test if one is broken and not relaxed."""

    def __init__(self, node: pytest.Item, relaxed: dict[str, str]) -> None:
        self._node = node
        self._relaxed = relaxed
        self.always_ok: dict[str, bool] = {}
        """Whether each relaxed law held in every check so far."""

    def check(self, policy: Any, world: "World | None" = None, **options: Any) -> "Laws":
        """Run `holdfast.check`, and return its result if no law is broken."""
        __tracebackhide__ = True
        import holdfast
        from holdfast.report.check_report import as_text, summary

        try:
            with _quiet_compiler():
                laws = holdfast.check(policy, world, **options)
        except holdfast.HoldfastError as error:
            raise pytest.fail.Exception(f"The memory laws cannot be measured: {error}", pytrace=False) from None
        report = as_text(laws)
        for name, reason in self._relaxed.items():
            self.always_ok[name] = self.always_ok.get(name, True) and laws[name].ok
            if not laws[name].ok:
                line = f"relaxed on purpose: {name}, because {reason}"
                self._node.add_report_section("call", "memory laws", line)
                # User properties reach the summary from xdist's workers, and the JUnit file.
                if (RELAXED, line) not in self._node.user_properties:
                    self._node.user_properties.append((RELAXED, line))
        broken = [name for name, law in laws.items() if not law.ok and name not in self._relaxed]
        if broken:
            excused = [name for name in self._relaxed if not laws[name].ok]
            rest = f" Relaxed: {', '.join(excused)}; not relaxed: {', '.join(broken)}." if excused else ""
            pytest.fail(f"{summary(laws)}{rest}\n\n{report}", pytrace=False)
        if not laws.ok:
            self._node.add_report_section("call", "memory laws", report)
        return laws


@contextmanager
def _quiet_compiler() -> Iterator[None]:
    """Keep the empty lines that torch.compile logs for its own tools out of the test's report."""
    trace = logging.getLogger("torch.__trace")
    handlers = [handler for handler in trace.handlers if type(handler).__module__.startswith("_pytest.")]
    for handler in handlers:
        trace.removeHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            trace.addHandler(handler)


@pytest.fixture
def memory_laws(request: pytest.FixtureRequest) -> Iterator[MemoryLaws]:
    """Check the memory laws: `memory_laws.check(policy, world)` fails the test if one is broken."""
    laws = MemoryLaws(request.node, relaxed_by(request.node))
    yield laws
    for name in (name for name, ok in laws.always_ok.items() if ok):
        message = f"{name} is relaxed and holds: remove @pytest.mark.relax_law({name!r}, …) from this test."
        request.node.warn(pytest.PytestWarning(message))


def relaxed_by(item: pytest.Item) -> dict[str, str]:
    """Return the laws a test relaxes, with reasons; reject a marker without either."""
    relaxed: dict[str, str] = {}
    for mark in item.iter_markers("relax_law"):
        reason = mark.kwargs.get("reason")
        if not mark.args or set(mark.kwargs) - {"reason"}:
            raise pytest.UsageError(f"{item.nodeid}: relax_law takes a law and a reason; write {USAGE}.")
        for name in mark.args:
            if name not in LAWS:
                raise pytest.UsageError(
                    f"{item.nodeid}: there is no law {name!r}; choose from {', '.join(LAWS)}; write {USAGE}."
                )
        if not isinstance(reason, str) or not reason.strip():
            usage = USAGE.replace("restore", mark.args[0])
            raise pytest.UsageError(f"{item.nodeid}: relax_law({mark.args[0]!r}) gives no reason; write {usage}.")
        # Markers come nearest first: a test's own reason takes precedence over its class's.
        relaxed = dict.fromkeys(mark.args, reason) | relaxed
    return relaxed


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, for --strict-markers."""
    config.addinivalue_line(
        "markers", "relax_law(name, ..., reason): allow a test's policy to break memory laws, for a reason"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail on an invalid marker before its test runs."""
    try:
        relaxed_by(item)
    except pytest.UsageError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the relaxed laws at the end of the run."""
    lines = {
        f"{report.nodeid}: {line}": None
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport)
        for name, line in report.user_properties
        if name == RELAXED
    }
    if lines:
        terminalreporter.write_sep("=", "memory laws")
        for line in lines:
            terminalreporter.write_line(line)
