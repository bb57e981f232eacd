import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from io import StringIO
from select import select

import pytest
from rich.console import Console

from holdfast.report import console
from holdfast.report.console import RunConsole


def metrics_at(step, error=1e-7, value_error=0.0, **more):
    errors = {"memory/replay_error": error, "memory/replay_value_error": value_error}
    return {"iteration": step // 100, "global_step": float(step), "charts/SPS": 1234.0} | errors | more


@pytest.fixture
def screen():
    return Console(file=StringIO(), width=100, highlight=False, soft_wrap=True, emoji=False)


@pytest.fixture
def terminal():
    options = {"force_terminal": True, "highlight": False, "soft_wrap": True, "emoji": False}
    return Console(file=StringIO(), width=100, height=40, color_system=None, **options)


def test_plain_line_has_speed_return_memory_and_time_left(screen, monkeypatch):
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(console.time, "perf_counter", lambda: next(clock))
    run_console = RunConsole(40, screen, horizon=64)
    run_console.show(metrics_at(1000, **{"charts/episodic_return": 0.5, "memory/gradient_reach": 19}))
    assert screen.file.getvalue() == (
        "iteration 10 of 40 · step 1,000 · 1,234 steps/s · return 0.500 · replay error 1e-7 ✓ · "
        "grad reach 19/64 · 30 s left\n"
    )


def test_lines_are_printed_every_few_seconds_and_at_the_end(screen, monkeypatch):
    clock = iter([0.0, 1.0, 6.0, 7.0, 8.0])
    monkeypatch.setattr(console.time, "perf_counter", lambda: next(clock))
    run_console = RunConsole(4, screen)
    for step in (100, 200, 300, 400):
        run_console.show(metrics_at(step))
    lines = screen.file.getvalue().splitlines()
    assert [line.split(" · ")[0] for line in lines] == ["iteration 2 of 4", "iteration 4 of 4"]


def test_last_value_of_a_metric_stays_in_the_line(screen, monkeypatch):
    clock = iter([0.0, 1.0, 6.0])
    monkeypatch.setattr(console.time, "perf_counter", lambda: next(clock))
    run_console = RunConsole(4, screen)
    run_console.show(metrics_at(100, **{"memory/drift": 0.25}))
    run_console.show(metrics_at(200))
    assert "drift 0.25" in screen.file.getvalue()


def test_replay_error_raises_one_alarm(screen):
    with RunConsole(10**9, screen) as run_console:
        for error in (1e-5, 2e-4, 3e-4):
            run_console.show(metrics_at(100, error))
    *lines, last = screen.file.getvalue().splitlines()
    assert last.startswith("iteration 1 of "), "a run that ends early prints its last iteration"
    assert len(lines) == 1
    assert lines[0].startswith("ALARM: replay differs from the rollout by 2.0e-04; up to 1e-04 is healthy.")
    assert "holdfast check" in lines[0]


def test_replay_alarm_threshold_in_bfloat16(screen):
    with RunConsole(10**9, screen, precision="bfloat16") as run_console:
        run_console.show(metrics_at(100, 4e-2))
        assert "replay error 0.04 ✓" in run_console._line()
        assert "ALARM" not in screen.file.getvalue()
        run_console.show(metrics_at(100, 6e-2))
    assert "ALARM: replay differs from the rollout by 6.0e-02; up to 5e-02 is healthy." in screen.file.getvalue()


def test_replay_value_error_raises_an_alarm(screen):
    with RunConsole(10**9, screen) as run_console:
        run_console.show(metrics_at(100, value_error=2e-4))
    assert "differs from the rollout by 2.0e-04;" in screen.file.getvalue()


def test_alarms_of_different_kinds_are_all_raised(screen):
    with RunConsole(10**9, screen) as run_console:
        run_console.show(metrics_at(100, 2e-4, **{"losses/grad_norm": 0.0}))
        for _ in range(2):
            run_console.alarm("this process has grown by 2 GiB.")
    *lines, _ = screen.file.getvalue().splitlines()
    assert [line[:19] for line in lines] == [
        "ALARM: replay diffe",
        "ALARM: the gradient",
        "ALARM: this process",
    ]


def drawings(terminal):
    return terminal.file.getvalue().split("╭")[1:]


def test_terminal_shows_only_the_dashboard(terminal):
    with RunConsole(4, terminal, title={"run": "my_run", "world": "recall"}, horizon=64) as run_console:
        run_console.show(metrics_at(200, **{"charts/episodic_return": 0.5}))
    last = drawings(terminal)[-1]
    for text in ("my_run", "recall", "50 %", "200 of 400 steps", "1,234 steps/s", "replay error 1e-7"):
        assert text in last
    assert "iteration 2 of 4" not in last


def test_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    dumb = Console(file=StringIO(), width=100, force_terminal=True, soft_wrap=True, emoji=False)
    with RunConsole(2, dumb) as run_console:
        run_console.show(metrics_at(200))
    assert dumb.file.getvalue().startswith("iteration 2 of 2 · ")
    assert "\x1b" not in dumb.file.getvalue()


def test_a_notebook_gets_plain_lines(monkeypatch, capsys):
    # In a notebook rich would display every line as HTML.
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    RunConsole(1).print("a [line] of text")
    assert capsys.readouterr().out == "a [line] of text\n"


def test_dashboard_is_drawn_at_most_four_times_a_second(terminal, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(console.time, "perf_counter", lambda: now[0])
    with RunConsole(1000, terminal) as run_console:
        before = len(drawings(terminal))
        for step in range(1, 101):
            now[0] = step / 50
            run_console.show(metrics_at(100 * step))
        drawn = len(drawings(terminal)) - before
    # Two seconds, fifty updates in each.
    assert drawn == 8


def test_slow_drawing_delays_the_next(terminal, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(console.time, "perf_counter", lambda: now[0])
    with RunConsole(10**6, terminal) as run_console:
        refresh, drawn = run_console._live.refresh, []

        def slow_refresh():
            now[0] += 0.1
            drawn.append(now[0])
            refresh()

        monkeypatch.setattr(run_console._live, "refresh", slow_refresh)
        for step in range(1, 2001):
            now[0] += 0.05
            run_console.show(metrics_at(100 * step))
            end = now[0]
    assert 0.1 * len(drawn) / end < 0.01
    assert len(drawn) >= 5


def test_nothing_is_drawn_without_new_metrics(terminal):
    with RunConsole(10, terminal):
        count = len(drawings(terminal))
        time.sleep(0.6)
        assert len(drawings(terminal)) == count


def test_last_metrics_are_drawn_at_the_end(terminal, monkeypatch):
    monkeypatch.setattr(console, "DRAW_EVERY_S", 1e9)
    with RunConsole(1000, terminal) as run_console:
        for step in (100, 200, 300):
            run_console.show(metrics_at(step))
        assert "300 of" not in drawings(terminal)[-1]
    assert "300 of" in drawings(terminal)[-1]


def test_alarm_is_drawn_at_once_and_stays_on_the_dashboard(terminal, monkeypatch):
    monkeypatch.setattr(console, "DRAW_EVERY_S", 1e9)
    with RunConsole(1000, terminal) as run_console:
        run_console.show(metrics_at(100))
        run_console.show(metrics_at(200, 2e-4))
        assert "ALARM replay differs" in drawings(terminal)[-1]
        run_console.show(metrics_at(300))
    assert drawings(terminal)[-1].count("ALARM replay differs") == 1
    assert "ALARM: " not in terminal.file.getvalue()


def test_printed_lines_are_above_the_dashboard(terminal):
    with RunConsole(1000, terminal) as run_console:
        run_console.show(metrics_at(100))
        run_console.print("the [world] is :smile: slow")
    *_, above, beneath = terminal.file.getvalue().split("the [world] is :smile: slow")
    assert "100 of" in above
    assert "100 of" in beneath


def test_narrower_terminal_is_cleared_and_redrawn(terminal):
    with RunConsole(1000, terminal) as run_console:
        run_console.show(metrics_at(100))
        assert "\x1b[2J" not in terminal.file.getvalue()
        terminal.width = 70
        run_console._next_drawing = 0.0
        run_console.show(metrics_at(200))
        assert terminal.file.getvalue().count("\x1b[2J") == 1
        terminal.width = 90
        run_console._next_drawing = 0.0
        run_console.show(metrics_at(300))
    assert terminal.file.getvalue().count("\x1b[2J") == 1
    assert drawings(terminal)[-1].splitlines()[0].index("╮") == 88


SCRIPT = """
import sys, time
from holdfast.report.console import RunConsole
with RunConsole(1000) as run_console:
    for step in range(1, 1000):
        run_console.show({"iteration": step, "global_step": step, "charts/SPS": 1.0})
        time.sleep(0.05)
"""


def read_until(file, text, timeout=60.0):
    output, until = b"", time.monotonic() + timeout
    while text not in output and time.monotonic() < until:
        if select([file], [], [], 0.5)[0]:
            try:
                output += os.read(file, 65536)
            except OSError:
                break
    return output


def test_ctrl_c_restores_the_terminal_and_resize_redraws():
    parent, child_tty = pty.openpty()
    ioctl(child_tty, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    before = termios.tcgetattr(child_tty)
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=child_tty,
        stdout=child_tty,
        stderr=child_tty,
        env=env | {"TERM": "xterm"},
    )
    try:
        output = read_until(parent, "─".encode() * 60)
        assert b"\x1b[?25l" in output
        ioctl(child_tty, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 60, 0, 0))
        assert b"\x1b[2J" in read_until(parent, b"\x1b[2J")
        os.kill(child.pid, signal.SIGINT)
        last = read_until(parent, b"KeyboardInterrupt")
        assert child.wait(60) != 0
    finally:
        child.kill()
        child.wait(timeout=120)
        after = termios.tcgetattr(child_tty)
        os.close(child_tty)
        os.close(parent)
    assert b"\x1b[?25h" in last
    assert b"\x1b[?25l" not in last.rpartition(b"\x1b[?25h")[2]
    assert after == before


def test_a_resumed_run_goes_on_with_its_clock_and_curve(terminal, monkeypatch):
    clock = iter([0.0, 10.0, 10.0, 10.0, 10.0, 10.0])
    monkeypatch.setattr(console.time, "perf_counter", lambda: next(clock, 10.0))
    run_console = RunConsole(40, terminal, first_iteration=20)
    lines = [{"iteration": number, "charts/episodic_return": float(number)} for number in range(3)]
    run_console.restore(600.0, lines)
    with run_console:
        run_console.show(metrics_at(3000, **{"charts/episodic_return": 3.0}))
    text = terminal.file.getvalue()
    assert "10:10 elapsed" in text
    # By the pace of this process: ten iterations in ten seconds.
    assert "0:10 left" in text
    assert "▁▃▆█" in text
