"""The HTML page of a check and its plot of reach."""

import base64
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from io import BytesIO

import matplotlib.image
import pytest
import torch
from matplotlib.colors import to_rgba

from helpers.law_results import AGENTS, HORIZON, STARTS, STEPS, make_laws, make_reach
from holdfast.check.laws import LAWS
from holdfast.check.results import Law, Laws, Measurement, Pattern
from holdfast.report.check_page import (
    IN_WORDS,
    MISSING_WITHIN,
    PANELS,
    WRONG,
    agent_with_most_leaks,
    check_page,
    leaks,
    missing,
    reach_picture,
    reach_png,
)

EMPTY = {"meta", "img", "br"}


class Reader(HTMLParser):
    """Parses a page and asserts that all tags are closed."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.text, self.links = [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for key, value in attributes if key in ("src", "href")]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module")
def broken():
    return check_page(make_laws("clear", "pure", notes=["a <note>"], reach=make_reach()), "The memory of x")


def test_page_starts_with_the_summary(broken):
    assert "✗ 2 of 10 laws of memory are broken: clear, pure." in Reader(broken).words
    words = Reader(check_page(make_laws(), "x")).words
    assert "✓ All 10 laws of memory hold." in words
    assert "Broken laws" not in words


def test_page_has_a_row_for_each_law(broken):
    rows = re.findall(r"<tr><td>.*?</tr>", broken, re.DOTALL)
    assert len(rows) == len(LAWS)
    for name, row in zip(LAWS, rows, strict=True):
        words = Reader(row).words
        assert words.startswith(f"{name} {IN_WORDS[name]}")
        mark = re.search(r"<td class=['\"]mark['\"]>(.*?)</td>", row)[1]
        assert ("✗" in mark, "✓" in mark) == (name in ("clear", "pure"), name not in ("clear", "pure"))


def test_page_has_a_card_for_each_broken_law(broken):
    cards = re.findall(r'<section class="card">.*?</section>', broken, re.DOTALL)
    assert len(cards) == 2
    terms = re.findall(r"<dt>(.*?)</dt><dd[^>]*>(.*?)</dd>", cards[0], re.DOTALL)
    card = {term: Reader(text).words for term, text in terms}
    assert list(card) == ["measured", "where", "size", "pattern", "write"]
    assert card["where"] == "agent 3, step 5, values"
    assert card["size"] == "1.5e-02, must be 0"
    assert card["pattern"] == "state never reset"
    assert card["write"].startswith("state = torch.where(first, initial, state) <before>")


def test_page_lists_all_measurements_in_details(broken):
    for phase in ("in general", "rollout", "replay", "evaluation"):
        assert re.search(rf"<details>.*clear,? {phase}: ", broken, re.DOTALL)
    assert "agent 1 is NaN" in broken


def test_page_escapes_html():
    bad = "<script>alert('x')</script>"
    part = Measurement(bad, 1.0, 0.0, finding=bad)
    laws = Laws([Law("cut", [part, part], Pattern(bad, bad))], notes=[bad])
    page = check_page(laws, bad)
    assert "<script" not in page
    assert Reader(page).words.count(bad) >= 8


def test_page_shows_notes_only_if_there_are_any(broken):
    assert "a <note>" in Reader(broken).words
    assert "Notes" not in Reader(check_page(make_laws(), "x")).words


def test_page_embeds_the_plot_and_fetches_nothing(broken):
    (link,) = Reader(broken).links
    kind, _, data = link.partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data).startswith(b"\x89PNG")
    assert "//" not in broken.replace(data, "")
    assert "@import" not in broken
    assert "Red is a change that is not allowed" in Reader(broken).words


def test_page_without_reach_has_no_plot():
    assert "img" not in Reader(check_page(make_laws("cut"), "x")).tags


def test_page_has_light_and_dark_colours(broken):
    assert "color-scheme: light dark" in broken
    light, dark = broken.split("@media (prefers-color-scheme: dark)")
    names = set(re.findall(r"(--[a-z-]+):", light))
    assert names
    assert names == set(re.findall(r"(--[a-z-]+):", dark))


def test_every_law_has_a_sentence():
    assert list(IN_WORDS) == list(LAWS)
    assert all(re.fullmatch(r"[A-Z].{20,}\.", sentence) for sentence in IN_WORDS.values())


def places(cells):
    return [tuple(at) for at in cells.nonzero().tolist()]


def changed(panel, at, value):
    reach = make_reach()
    getattr(reach, panel)[at] = value
    return reach


def axes_of(reach, agent=None):
    return dict(zip(PANELS, reach_picture(reach, agent).axes, strict=False))


def outlines(axes, colour):
    """The end points of all lines of a colour."""
    collections = [lines for lines in axes.collections if tuple(lines.get_colors()[0]) == to_rgba(colour)]
    return {tuple(end) for lines in collections for line in lines.get_segments() for end in line.tolist()}


@pytest.mark.parametrize("panel", PANELS)
def test_correct_reach_has_no_leaks_and_nothing_missing(panel):
    assert places(leaks(make_reach(), panel)) == []
    assert places(missing(make_reach(), panel)) == []


@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize(
    "at", [(5, 0, 6), (2, 2, 3), (4, 1, 3)], ids=["start", "other start", "before the observation"]
)
def test_leaks_finds_tiny_changes(panel, at):
    assert places(leaks(changed(panel, at, 1e-30), panel)) == [at]


def test_gradient_across_a_segment_edge_is_a_leak():
    at = (3, 1, 4)
    assert make_reach().rollout[at] > 0
    assert places(leaks(changed("gradient", at, 1e-30), "gradient")) == [at]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_are_leaks(value):
    assert places(leaks(changed("rollout", (1, 1, 2), value), "rollout")) == [(1, 1, 2)]


@pytest.mark.parametrize("panel", PANELS)
def test_missing_finds_zero_changes(panel):
    assert places(missing(changed(panel, (0, 1, 2), 0.0), panel)) == [(0, 1, 2)]


def test_missing_ignores_invalid_steps_and_long_distances():
    reach = make_reach()
    for panel in PANELS:
        getattr(reach, panel)[5, 1], getattr(reach, panel)[:, 1, 5] = 0.0, 0.0
    reach.valid[1, 5] = False
    assert all(places(missing(reach, panel)) == [] for panel in PANELS)
    assert places(missing(changed("rollout", (0, 1, MISSING_WITHIN), 0.0), "rollout")) == [(0, 1, MISSING_WITHIN)]
    assert places(missing(changed("rollout", (0, 1, MISSING_WITHIN + 1), 0.0), "rollout")) == []


def test_missing_is_empty_without_memory_or_measurement():
    same_step = torch.eye(STEPS)[:, None].expand(-1, AGENTS, -1)
    reach = make_reach()
    memoryless = replace(reach, rollout=same_step.double(), replay=same_step.double(), gradient=same_step)
    assert all(places(missing(memoryless, panel)) == [] for panel in PANELS)
    unmeasured = replace(reach, gradient=torch.zeros_like(reach.gradient))
    assert places(missing(unmeasured, "gradient")) == []
    assert len(places(missing(replace(reach, rollout=same_step.double()), "rollout"))) > 50


def test_telling_agent_orders_by_leaks_missing_and_starts():
    assert agent_with_most_leaks(make_reach()) == 2
    assert agent_with_most_leaks(changed("replay", (0, 1, 2), 0.0)) == 1
    reach = changed("replay", (0, 1, 2), 0.0)
    reach.gradient[5, 0, 6] = 1.0
    assert agent_with_most_leaks(reach) == 0


def test_titles_count_leaks_and_missing_changes():
    reach = changed("replay", (5, 0, 6), 1e-3)
    reach.replay[0, 0, 1] = 0.0
    titles = {panel: axes.get_title() for panel, axes in axes_of(reach).items()}
    assert titles["rollout"] == "information, rollout\n✓ changes where they must be, nowhere else"
    assert titles["replay"] == "information, replay\n✗ 1 not allowed, 1 missing"
    empty = replace(reach, gradient=torch.zeros_like(reach.gradient))
    assert axes_of(empty)["gradient"].get_title().endswith("no change at all, or not measured")


def test_leak_is_filled_and_outlined_in_red():
    axes = axes_of(changed("rollout", (5, 0, 6), 1e-3))
    corners = {(5.5, 4.5), (6.5, 4.5), (5.5, 5.5), (6.5, 5.5)}
    assert outlines(axes["rollout"], WRONG) == corners
    assert outlines(axes["replay"], WRONG) == set()
    red, _, blue, _ = axes["rollout"].images[0].get_array()[5, 6]
    assert red > 1.2 * blue


def test_only_exact_zero_is_white():
    axes = axes_of(changed("rollout", (0, 1, 3), 1e-30), agent=1)
    colours = axes["rollout"].images[0].get_array()
    assert colours[4, 3].tolist() == [1, 1, 1, 1]
    assert colours[0, 3].tolist() != [1, 1, 1, 1]
    assert colours[0, 1].sum() < colours[0, 3].sum()


def test_segment_edges_and_episode_starts_are_marked():
    for axes in axes_of(make_reach(), agent=2).values():
        (starts,) = (line for line in axes.lines if line.get_marker() == "v")
        assert tuple(starts.get_xdata()) == STARTS[2]
        upright = {line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"}
        assert upright >= {HORIZON - 0.5, 2 * HORIZON - 0.5}


def test_legend_lists_the_marks_that_occur():
    def legend(reach):
        return [text.get_text() for text in reach_picture(reach).legends[0].get_texts()]

    usual = ["no change: exactly 0", "change; allowed inside the line", "segment edge", "episode start"]
    assert legend(make_reach()) == usual
    broken = changed("rollout", (5, 0, 6), float("nan"))
    broken.rollout[0, 0, 1] = 0.0
    assert {"not allowed", "missing", "not finite"} < set(legend(broken))


@pytest.mark.parametrize("value", [0.0, float("nan"), 1.0, 1e-300])
def test_png_size_with_any_values(value):
    reach = make_reach()
    for panel in PANELS:
        getattr(reach, panel).fill_(value)
    png = reach_png(reach)
    height, width, _ = matplotlib.image.imread(BytesIO(png), format="png").shape
    assert (width, height) == (1200, 490)


def test_page_does_not_import_pyplot():
    code = "import sys, holdfast.report.check_page; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
