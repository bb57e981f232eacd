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

from holdfast.report import RunConsole, console


def numbers(step, error=1e-7, value_error=0.0, **more):
    errors = {"memory/replay_error": error, "memory/replay_value_error": value_error}
    return {"iteration": step // 100, "global_step": float(step), "charts/SPS": 1234.0} | errors | more


@pytest.fixture
def screen():
    return Console(file=StringIO(), width=100, highlight=False, soft_wrap=True, emoji=False)


@pytest.fixture
def terminal():
    options = {"force_terminal": True, "highlight": False, "soft_wrap": True, "emoji": False}
    return Console(file=StringIO(), width=100, height=40, color_system=None, **options)


def test_plain_lines_tell_speed_return_memory_and_time_left(screen, monkeypatch):
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(console.time, "perf_counter", lambda: next(clock))
    shown = RunConsole(40, screen, horizon=64)
    shown.show(numbers(1000, **{"charts/episodic_return": 0.5, "memory/gradient_reach": 19}))
    assert screen.file.getvalue() == (
        "iteration 10 of 40 · step 1,000 · 1,234 steps/s · return 0.500 · replay error 1e-7 ✓ · "
        "grad reach 19/64 · 30 s left\n"
    )


def test_lines_come_every_few_seconds_and_at_the_end(screen, monkeypatch):
    clock = iter([0.0, 1.0, 6.0, 7.0, 8.0])
    monkeypatch.setattr(console.time, "perf_counter", lambda: next(clock))
    shown = RunConsole(4, screen)
    for step in (100, 200, 300, 400):
        shown.show(numbers(step))
    lines = screen.file.getvalue().splitlines()
    assert [line.split(" · ")[0] for line in lines] == ["iteration 2 of 4", "iteration 4 of 4"]


def test_a_number_that_is_not_measured_each_time_stays_in_sight(screen, monkeypatch):
    clock = iter([0.0, 1.0, 6.0])
    monkeypatch.setattr(console.time, "perf_counter", lambda: next(clock))
    shown = RunConsole(4, screen)
    shown.show(numbers(100, **{"memory/drift": 0.25}))
    shown.show(numbers(200))
    assert "drift 0.25" in screen.file.getvalue()


def test_a_replay_that_differs_raises_the_alarm_once(screen):
    with RunConsole(10**9, screen) as shown:
        for error in (1e-5, 2e-4, 3e-4):
            shown.show(numbers(100, error))
    *lines, last = screen.file.getvalue().splitlines()
    assert last.startswith("iteration 1 of "), "who ends early is told where it stood"
    assert len(lines) == 1
    assert lines[0].startswith("ALARM: replaying a segment differs from living it by 2.0e-04.")
    assert "holdfast check" in lines[0]


def test_what_is_rounded_to_bfloat16_may_differ_by_more(screen):
    with RunConsole(10**9, screen, precision="bfloat16") as shown:
        shown.show(numbers(100, 4e-2))
        assert "replay error 0.04 ✓" in shown._line()
        assert "ALARM" not in screen.file.getvalue()
        shown.show(numbers(100, 6e-2))
    assert "ALARM: replaying a segment differs from living it by 6.0e-02." in screen.file.getvalue()


def test_values_that_differ_raise_the_alarm_too(screen):
    with RunConsole(10**9, screen) as shown:
        shown.show(numbers(100, value_error=2e-4))
    assert "differs from living it by 2.0e-04." in screen.file.getvalue()


def test_alarms_of_two_kinds_are_both_raised_and_so_are_those_of_others(screen):
    with RunConsole(10**9, screen) as shown:
        shown.show(numbers(100, 2e-4, **{"losses/grad_norm": 0.0}))
        for _ in range(2):
            shown.alarm("this process has grown by 2 GiB.")
    *lines, _ = screen.file.getvalue().splitlines()
    assert [line[:19] for line in lines] == [
        "ALARM: replaying a ",
        "ALARM: the gradient",
        "ALARM: this process",
    ]


def drawings(terminal):
    return terminal.file.getvalue().split("╭")[1:]


def test_on_a_terminal_nothing_but_the_dashboard_is_drawn(terminal):
    with RunConsole(4, terminal, title={"run": "mine", "world": "recall"}, horizon=64) as shown:
        shown.show(numbers(200, **{"charts/episodic_return": 0.5}))
    last = drawings(terminal)[-1]
    for told in ("mine", "recall", "50 %", "200 of 400 steps", "1,234 steps/s", "replay error 1e-7"):
        assert told in last
    assert "iteration 2 of 4" not in last


def test_a_terminal_that_can_do_nothing_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    dumb = Console(file=StringIO(), width=100, force_terminal=True, soft_wrap=True, emoji=False)
    with RunConsole(2, dumb) as shown:
        shown.show(numbers(200))
    assert dumb.file.getvalue().startswith("iteration 2 of 2 · ")
    assert "\x1b" not in dumb.file.getvalue()


def test_it_is_drawn_at_most_four_times_a_second(terminal, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(console.time, "perf_counter", lambda: now[0])
    with RunConsole(1000, terminal) as shown:
        before = len(drawings(terminal))
        for step in range(1, 101):
            now[0] = step / 50
            shown.show(numbers(100 * step))
        drawn = len(drawings(terminal)) - before
    # Two seconds, fifty updates in each.
    assert drawn == 8


def test_a_dear_drawing_waits_longer_for_the_next(terminal, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(console.time, "perf_counter", lambda: now[0])
    with RunConsole(10**6, terminal) as shown:
        refresh, drawn = shown._live.refresh, []

        def dear():
            now[0] += 0.1
            drawn.append(now[0])
            refresh()

        monkeypatch.setattr(shown._live, "refresh", dear)
        for step in range(1, 2001):
            now[0] += 0.05
            shown.show(numbers(100 * step))
            begun = now[0]
    assert 0.1 * len(drawn) / begun < 0.01
    assert len(drawn) >= 5


def test_nothing_is_drawn_where_nothing_came(terminal):
    with RunConsole(10, terminal):
        count = len(drawings(terminal))
        time.sleep(0.6)
        assert len(drawings(terminal)) == count


def test_what_came_last_is_drawn_at_the_end(terminal, monkeypatch):
    monkeypatch.setattr(console, "DRAW_EVERY_S", 1e9)
    with RunConsole(1000, terminal) as shown:
        for step in (100, 200, 300):
            shown.show(numbers(step))
        assert "300 of" not in drawings(terminal)[-1]
    assert "300 of" in drawings(terminal)[-1]


def test_an_alarm_stays_on_the_dashboard_and_is_drawn_at_once(terminal, monkeypatch):
    monkeypatch.setattr(console, "DRAW_EVERY_S", 1e9)
    with RunConsole(1000, terminal) as shown:
        shown.show(numbers(100))
        shown.show(numbers(200, 2e-4))
        assert "ALARM replaying" in drawings(terminal)[-1]
        shown.show(numbers(300))
    assert drawings(terminal)[-1].count("ALARM replaying") == 1
    assert "ALARM: " not in terminal.file.getvalue()


def test_what_is_said_stands_above_the_dashboard(terminal):
    with RunConsole(1000, terminal) as shown:
        shown.show(numbers(100))
        shown.say("the [world] is :smile: slow")
    *_, above, beneath = terminal.file.getvalue().split("the [world] is :smile: slow")
    assert "100 of" in above
    assert "100 of" in beneath


def test_a_terminal_that_became_narrower_is_drawn_anew(terminal):
    with RunConsole(1000, terminal) as shown:
        shown.show(numbers(100))
        assert "\x1b[2J" not in terminal.file.getvalue()
        terminal.width = 70
        shown._next_drawing = 0.0
        shown.show(numbers(200))
        assert terminal.file.getvalue().count("\x1b[2J") == 1
        terminal.width = 90
        shown._next_drawing = 0.0
        shown.show(numbers(300))
    assert terminal.file.getvalue().count("\x1b[2J") == 1
    assert drawings(terminal)[-1].splitlines()[0].index("╮") == 88


SCRIPT = """
import sys, time
from holdfast.report import RunConsole
with RunConsole(1000) as shown:
    for step in range(1, 1000):
        shown.show({"iteration": step, "global_step": step, "charts/SPS": 1.0})
        time.sleep(0.05)
"""


def read_until(file, text, patience=60.0):
    seen, until = b"", time.monotonic() + patience
    while text not in seen and time.monotonic() < until:
        if select([file], [], [], 0.5)[0]:
            try:
                seen += os.read(file, 65536)
            except OSError:
                break
    return seen


def test_ctrl_c_leaves_the_terminal_as_it_was_and_a_resize_is_followed():
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    before = termios.tcgetattr(theirs)
    words = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=words | {"TERM": "xterm"},
    )
    try:
        seen = read_until(ours, "─".encode() * 60)
        assert b"\x1b[?25l" in seen
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 60, 0, 0))
        assert b"\x1b[2J" in read_until(ours, b"\x1b[2J")
        os.kill(child.pid, signal.SIGINT)
        last = read_until(ours, b"KeyboardInterrupt")
        assert child.wait(60) != 0
    finally:
        child.kill()
        child.wait()
        after = termios.tcgetattr(theirs)
        os.close(theirs)
        os.close(ours)
    assert b"\x1b[?25h" in last
    assert b"\x1b[?25l" not in last.rpartition(b"\x1b[?25h")[2]
    assert after == before
