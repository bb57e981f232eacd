from dataclasses import replace
from io import BytesIO

import matplotlib.image
import pytest
import torch
from matplotlib.colors import to_rgba

from holdfast.check.flow import FELT_ACROSS
from holdfast.report import pictures
from holdfast.report.pictures import PANELS, absences, leaks, missing, reach_picture, reach_png, telling_agent
from verdicts import AGENTS, HORIZON, STARTS, STEPS, make_reach


def places(cells):
    return [tuple(at) for at in cells.nonzero().tolist()]


def changed(panel, at, value):
    reach = make_reach()
    getattr(reach, panel)[at] = value
    return reach


def axes_of(reach, agent=None):
    return dict(zip(PANELS, reach_picture(reach, agent).axes, strict=False))


def outlines(axes, colour):
    """The ends of all lines of a colour."""
    lines = [each for each in axes.collections if tuple(each.get_colors()[0]) == to_rgba(colour)]
    return {tuple(end) for each in lines for line in each.get_segments() for end in line.tolist()}


@pytest.mark.parametrize("panel", PANELS)
def test_what_is_right_is_neither_too_much_nor_too_little(panel):
    assert places(leaks(make_reach(), panel)) == []
    assert places(missing(make_reach(), panel)) == []


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize(
    "at", [(5, 0, 6), (2, 2, 3), (4, 1, 3)], ids=["start", "other start", "before it is seen"]
)
def test_the_smallest_leak_is_found(panel, at):
    assert places(leaks(changed(panel, at, 1e-30), panel)) == [at]


def test_gradients_must_stay_in_their_segment_and_information_need_not():
    at = (3, 1, 4)
    assert make_reach().lived[at] > 0
    assert places(leaks(changed("gradient", at, 1e-30), "gradient")) == [at]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_a_leak_wherever_it_is(value):
    assert places(leaks(changed("lived", (1, 1, 2), value), "lived")) == [(1, 1, 2)]


@pytest.mark.parametrize("panel", PANELS)
def test_what_is_lost_is_found(panel):
    assert places(missing(changed(panel, (0, 1, 2), 0.0), panel)) == [(0, 1, 2)]


def test_what_nobody_could_feel_is_not_lost():
    reach = make_reach()
    for panel in PANELS:
        getattr(reach, panel)[5, 1], getattr(reach, panel)[:, 1, 5] = 0.0, 0.0
    reach.valid[1, 5] = False
    assert places(absences(reach)) == [(1, 5)]
    assert all(places(missing(reach, panel)) == [] for panel in PANELS)
    assert places(missing(changed("lived", (0, 1, FELT_ACROSS), 0.0), "lived")) == [(0, 1, FELT_ACROSS)]
    assert places(missing(changed("lived", (0, 1, FELT_ACROSS + 1), 0.0), "lived")) == []


def test_nothing_is_lost_where_there_is_no_memory_or_nothing_was_measured():
    now = torch.eye(STEPS)[:, None].expand(-1, AGENTS, -1)
    reach = make_reach()
    forgetful = replace(reach, lived=now.double(), replayed=now.double(), gradient=now)
    assert all(places(missing(forgetful, panel)) == [] for panel in PANELS)
    unmeasured = replace(reach, gradient=torch.zeros_like(reach.gradient))
    assert places(missing(unmeasured, "gradient")) == []
    assert len(places(missing(replace(reach, lived=now.double()), "lived"))) > 50


def test_the_telling_agent_leaks_most_then_loses_most_then_starts_most():
    assert telling_agent(make_reach()) == 2
    assert telling_agent(changed("replayed", (0, 1, 2), 0.0)) == 1
    reach = changed("replayed", (0, 1, 2), 0.0)
    reach.gradient[5, 0, 6] = 1.0
    assert telling_agent(reach) == 0


def test_titles_say_what_is_wrong_in_which_panel():
    reach = changed("replayed", (5, 0, 6), 1e-3)
    reach.replayed[0, 0, 1] = 0.0
    titles = {panel: axes.get_title() for panel, axes in axes_of(reach).items()}
    assert titles["lived"] == "information, lived\n✓ felt where it must be, nowhere else"
    assert titles["replayed"] == "information, replayed\n✗ 1 must not be felt, 1 missing"
    nothing = replace(reach, gradient=torch.zeros_like(reach.gradient))
    assert axes_of(nothing)["gradient"].get_title().endswith("nothing at all, or not measured")


def test_a_leak_is_red_inside_and_outlined_in_red():
    axes = axes_of(changed("lived", (5, 0, 6), 1e-3))
    corners = {(5.5, 4.5), (6.5, 4.5), (5.5, 5.5), (6.5, 5.5)}
    assert outlines(axes["lived"], pictures.WRONG) == corners
    assert outlines(axes["replayed"], pictures.WRONG) == set()
    red, _, blue, _ = axes["lived"].images[0].get_array()[5, 6]
    assert red > 1.2 * blue


def test_exact_zero_is_white_and_the_smallest_number_is_not():
    axes = axes_of(changed("lived", (0, 1, 3), 1e-30), agent=1)
    shown = axes["lived"].images[0].get_array()
    assert shown[4, 3].tolist() == [1, 1, 1, 1]
    assert shown[0, 3].tolist() != [1, 1, 1, 1]
    assert shown[0, 1].sum() < shown[0, 3].sum()


def test_segment_edges_and_the_agents_own_starts_are_marked():
    for axes in axes_of(make_reach(), agent=2).values():
        (starts,) = (line for line in axes.lines if line.get_marker() == "v")
        assert tuple(starts.get_xdata()) == STARTS[2]
        upright = {line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"}
        assert upright >= {HORIZON - 0.5, 2 * HORIZON - 0.5}


def test_the_legend_explains_what_is_there():
    def legend(reach):
        return [text.get_text() for text in reach_picture(reach).legends[0].get_texts()]

    calm = ["not felt: exactly 0", "felt; inside the line it may be", "segment edge", "episode start"]
    assert legend(make_reach()) == calm
    broken = changed("lived", (5, 0, 6), float("nan"))
    broken.lived[0, 0, 1] = 0.0
    assert {"felt and must not be", "not felt and must be", "not a number"} < set(legend(broken))


@pytest.mark.parametrize("value", [0.0, float("nan"), 1.0, 1e-300])
def test_any_numbers_make_a_picture_of_the_promised_size(value):
    reach = make_reach()
    for panel in PANELS:
        getattr(reach, panel).fill_(value)
    png = reach_png(reach)
    height, width, _ = matplotlib.image.imread(BytesIO(png), format="png").shape
    assert (width, height) == (1200, 490)


def test_pyplot_is_left_alone():
    import subprocess
    import sys

    code = "import sys, holdfast.report.pictures; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
