from io import StringIO

import pytest
from rich.console import Console

from holdfast.config import change
from holdfast.recipes import find_recipe
from holdfast.report import RunConsole, console, difference, lookup

RECIPE = find_recipe("recall")


def numbers(step, error=1e-7, value_error=0.0, **more):
    errors = {"memory/replay_error": error, "memory/replay_value_error": value_error}
    return {"iteration": step // 100, "global_step": float(step), "charts/SPS": 1234.0} | errors | more


@pytest.fixture
def screen():
    return Console(file=StringIO(), width=100, highlight=False, soft_wrap=True)


def test_plain_lines_tell_speed_return_and_time_left(screen, monkeypatch):
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(console.time, "perf_counter", lambda: next(clock))
    shown = RunConsole(40, screen)
    shown.show(numbers(1000, **{"charts/episodic_return": 0.5}))
    assert screen.file.getvalue() == (
        "iteration 10 of 40 · step 1,000 · 1,234 steps/s · return 0.500 · replay error 1e-07 ✓ · 30 s left\n"
    )


def test_lines_come_every_few_seconds_and_at_the_end(screen, monkeypatch):
    clock = iter([0.0, 1.0, 6.0, 7.0, 8.0])
    monkeypatch.setattr(console.time, "perf_counter", lambda: next(clock))
    shown = RunConsole(4, screen)
    for step in (100, 200, 300, 400):
        shown.show(numbers(step))
    lines = screen.file.getvalue().splitlines()
    assert [line.split(" · ")[0] for line in lines] == ["iteration 2 of 4", "iteration 4 of 4"]


def test_a_replay_that_differs_raises_the_alarm_once(screen):
    with RunConsole(10**9, screen) as shown:
        for error in (1e-5, 2e-4, 3e-4):
            shown.show(numbers(100, error))
    lines = screen.file.getvalue().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("ALARM: replaying a segment differs from living it by 2.0e-04.")
    assert "holdfast check" in lines[0]


def test_values_that_differ_raise_the_alarm_too(screen):
    with RunConsole(10**9, screen) as shown:
        shown.show(numbers(100, value_error=2e-4))
    assert "differs from living it by 2.0e-04." in screen.file.getvalue()


def test_only_what_differs_from_the_recipe_is_listed(screen):
    assert difference(RECIPE, RECIPE) is None
    table = difference(RECIPE, change(RECIPE, {"seed": 5, "world.delay": "2..9"}))
    assert table is not None
    screen.print(table)
    rows = [line.split(maxsplit=2) for line in screen.file.getvalue().splitlines()]
    assert [row[0] for row in rows] == ["key", "seed", "world.delay"]
    assert [cell.strip() for cell in rows[2]] == ["world.delay", "8", "(2, 9)"]


def test_a_dotted_key_is_looked_up():
    assert lookup(RECIPE, "trainer.ppo.gamma") == 0.9


def test_values_are_written_as_they_are_typed():
    config = change(RECIPE, {"world": "mixture", "world.parts": "recall delay=4..8 weight=3 + n_back"})
    assert console.typed(config.world.parts) == "recall(delay=4..8) weight=3 + n_back weight=1"
    assert console.typed(None) == console.typed(()) == "none"
    assert console.typed(0.5) == "0.5"
