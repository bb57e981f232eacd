""""""

import re
import sys
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from holdfast.report.dashboard import (
    MAX_WIDTH,
    Dashboard,
    TableCell,
    lines,
    memory_cells,
)
from holdfast.report.metrics import METRICS

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from dashboard import PICTURE, board_of, draw  # noqa: E402

TITLE = {"run": "recall-20261115-061500", "world": "recall, 64 agents", "policy": "fast", "device": "cpu"}
METRICS_SHOWN = {
    "iteration": 44,
    "global_step": 180224,
    "charts/SPS": 5432.1,
    "time/world": 0.1,
    "time/forward": 0.2,
    "time/copy": 0.1,
    "time/update": 0.5,
    "time/other": 0.1,
    "charts/episodes": 409,
    "charts/episodic_return": 0.9312,
    "charts/episodic_length": 10.0,
    "charts/learning_rate": 6.5e-4,
    "charts/scheduled@trainer.ppo.ent_coef": 0.0081,
    "losses/policy_loss": -0.0123,
    "losses/grad_norm": 0.512,
    "losses/teacher_action": 2.5,
    "losses/teacher_action@a": 2.5,
    "memory/replay_error": 3e-7,
    "memory/gradient_reach": 19,
    "machine/process_bytes": 391 * 2**20,
    "machine/process_peak_bytes": 410 * 2**20,
    "machine/growth": 1.5 * 2**20,
    "machine/gpu_bytes": 2 * 2**30,
}


def board(metrics=METRICS_SHOWN, **more):
    return Dashboard(74, TITLE, 64, dict(metrics), **more)


def drawn(board, width):
    paper = Console(file=StringIO(), width=width, color_system=None, emoji=False, soft_wrap=True)
    paper.print(board)
    return paper.file.getvalue().splitlines()


@pytest.mark.parametrize(
    "text",
    [
        "recall-20261115-061500",
        "recall, 64 agents · fast · cpu",
        "59 %",
        "180,224 of 303,104 steps · 5,432 steps/s · 0:33 elapsed · 0:23 left",
        "forward",
        "20 %",
        "50 %",
        "-0.0123",
        "teacher action",
        "return      0.931",
        "ended         409",
        "cpu 99 %",
        "process 391 MiB, peak 410 MiB",
        "gpu 2.0 GiB",
        "growth 1.5 MiB per million steps",
        "replay error 3e-7 ✓ · grad reach 19/64",
    ],
)
def test_dashboard_fits_eighty_columns(text):
    drawing = "\n".join(drawn(board(elapsed=33.1, cpu=0.99), 80))
    assert text in drawing
    assert "@" not in drawing


def test_wide_terminal_shows_more_up_to_the_maximum_width():
    text = "\n".join(drawn(board(), 120))
    assert "lr         6.5e-4" in text
    assert "ent_coef   0.0081" in text
    assert "lr  " not in "\n".join(drawn(board(), 80))
    assert {cell_len(line) for line in drawn(board(), 200)} == {MAX_WIDTH}


def test_dashboard_before_the_first_iteration():
    text = "\n".join(drawn(board({}), 80))
    assert "iteration 0 of 74 · first rollout in progress" in text
    assert "memory" not in text
    assert "machine" not in text


def test_return_curve_is_drawn():
    dashboard = board()
    for number in range(44):
        dashboard.returns.add(float(number))
    (line,) = [line for line in drawn(dashboard, 80) if "▁" in line]
    assert "▁▁▂" in line
    assert "██" in line


def test_worlds_of_a_mixture_are_listed_up_to_a_limit():
    per_world = {f"charts/episodic_return@world{i}": i / 10 for i in range(1, 9)}
    text = "\n".join(drawn(board(METRICS_SHOWN | per_world), 80))
    assert "world1" in text
    assert "world6" in text
    assert "world7" not in text
    assert "and 2 more" in text


def test_alarms_are_above_the_memory_row():
    rows = drawn(board(alarms=["something is wrong."]), 80)
    (alarm,) = [i for i, line in enumerate(rows) if "ALARM something is wrong." in line]
    assert "memory" in rows[alarm + 1]


def test_long_alarm_wraps():
    # The console that draws is set to leave lines as they are; a dashboard breaks its own.
    text = " ".join(row.strip("│ ") for row in drawn(board(alarms=["word " * 30 + "end."]), 80))
    assert "word " * 30 + "end." in text


@settings(max_examples=50)
@given(
    metrics=st.dictionaries(st.sampled_from(sorted(METRICS)), st.floats(-1e12, 1e12)),
    labels=st.lists(st.text("abc=.()", min_size=1, max_size=40), max_size=8),
    width=st.integers(36, 160),
    alarms=st.lists(st.text("ab c", min_size=1, max_size=200), max_size=2),
)
def test_no_line_exceeds_the_frame(metrics, labels, width, alarms):
    # A run counts its iterations from one.
    metrics |= {"iteration": 3, "time/world": 1.0} | {f"charts/episodic_return@{label}": 0.5 for label in labels}
    dashboard = board(metrics, alarms=alarms, elapsed=5.0, cpu=1.0)
    dashboard.returns.add(1.0)
    rows = drawn(dashboard, width)
    assert {cell_len(row) for row in rows} == {min(width, MAX_WIDTH)}
    assert rows[0][0] + rows[-1][0] == "╭╰"
    assert all(row[0] == row[-1] == "│" for row in rows[1:-1])


def test_dashboard_fits_a_small_terminal():
    assert len(drawn(board(elapsed=33.1, cpu=0.99, alarms=["x" * 100]), 80)) <= 23


@given(words=st.lists(st.text("abc", min_size=1, max_size=12)), width=st.integers(12, 40))
def test_lines_break_between_cells_only(words, width):
    rows = [line.plain for line in lines([TableCell(word) for word in words], width)]
    assert [word for row in rows for word in row.split(" · ")] == words
    assert all(len(row) <= width for row in rows)


def fetched(svg):
    """Addresses that a browser would open to show a picture."""
    return re.findall(r"""(?:url\(|href=|src=)["'\s]*https?:[^"')]*""", svg)


def test_external_addresses_are_detected():
    paper = Console(file=StringIO(), record=True, width=40, emoji=False)
    paper.print("x")
    assert fetched(paper.export_svg()) != []


def test_picture_of_a_run_has_no_external_addresses(small_run):
    svg = draw(small_run)
    assert fetched(svg) == []
    dashboard = board_of(small_run)
    assert dashboard.metrics["iteration"] == max(1, int(0.8 * dashboard.iterations))
    assert dashboard.elapsed == dashboard.metrics["seconds"]


def test_picture_in_the_docs_has_no_external_addresses():
    text = PICTURE.read_text(encoding="utf-8")
    assert "replay" in text
    assert fetched(text) == []


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """A run as short as one can be, by the real trainer."""
    from holdfast import train

    keys = {"world.agents": 4, "trainer.bptt_horizon": 8, "trainer.batch_size": 64}
    keys |= {"trainer.minibatch_size": 32, "trainer.total_timesteps": 320, "report": "off", "trainer.eval_episodes": 4}
    return train("recall", keys | {"run": "small", "runs_dir": str(tmp_path_factory.mktemp("runs"))}).folder


ALL_MEMORY = {
    "memory/resets": 1204,
    "memory/resets_due": 1204,
    "memory/replay_error": 3.1e-7,
    "memory/replay_value_error": 1e-7,
    "memory/drift": 0.04,
    "memory/gradient_reach": 19,
    "memory/state_norm": 6.13,
    "memory/age_max": 903,
}


def row(metrics, horizon=64):
    return " · ".join(str(cell) for cell in memory_cells(metrics, horizon))


def test_memory_row_shows_all_metrics():
    assert row(ALL_MEMORY) == (
        "resets 1,204/1,204 ✓ · replay error 3e-7 ✓ · drift 0.04 · grad reach 19/64 · state norm 6.1 · age max 903"
    )


def test_memory_row_omits_missing_metrics():
    assert row({}) == row({"memory/resets": 4}) == ""
    assert row({"memory/replay_error": 1e-6}) == "replay error 1e-6 ✓"
    assert row({"memory/gradient_reach": 3}, horizon=0) == "grad reach 3"


@given(names=st.sets(st.sampled_from(sorted(ALL_MEMORY))))
def test_memory_row_keeps_its_order(names):
    partial_row = row({name: ALL_MEMORY[name] for name in names})
    full_row = row(ALL_MEMORY)
    places = [full_row.index(cell.split(" ")[0]) for cell in partial_row.split(" · ")]
    assert places == sorted(places)


def test_memory_row_shows_the_larger_replay_error():
    assert row({"memory/replay_error": 1e-7, "memory/replay_value_error": 2e-4}) == "replay error 2e-4 ✗"


def test_memory_row_marks_missing_resets():
    assert row({"memory/resets": 3, "memory/resets_due": 4}) == "resets 3/4 ✗"
