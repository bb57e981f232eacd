import base64
import re
from html.parser import HTMLParser

import pytest

from holdfast.check.laws import LAWS
from holdfast.check.results import Law, Laws, Measurement, Pattern
from holdfast.report.check_page import check_page
from holdfast.report.verdict import IN_WORDS
from verdicts import make_laws, make_reach

EMPTY = {"meta", "img", "br"}


class Reader(HTMLParser):
    """Reads a page as a browser does, and insists that everything opened is closed."""

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


def test_the_verdict_comes_first(broken):
    assert "✗ 2 of 9 laws of memory are broken: clear, pure." in Reader(broken).words
    words = Reader(check_page(make_laws(), "x")).words
    assert "✓ All 9 laws of memory hold." in words
    assert "What is wrong" not in words


def test_every_law_has_a_row_in_words(broken):
    rows = re.findall(r"<tr><td>.*?</tr>", broken, re.DOTALL)
    assert len(rows) == len(LAWS)
    for name, row in zip(LAWS, rows, strict=True):
        words = Reader(row).words
        assert words.startswith(f"{name} {IN_WORDS[name]}")
        mark = re.search(r"<td class=['\"]mark['\"]>(.*?)</td>", row)[1]
        assert ("✗" in mark, "✓" in mark) == (name in ("clear", "pure"), name not in ("clear", "pure"))


def test_a_broken_law_is_told_in_parts(broken):
    cards = re.findall(r'<section class="card">.*?</section>', broken, re.DOTALL)
    assert len(cards) == 2
    terms = re.findall(r"<dt>(.*?)</dt><dd[^>]*>(.*?)</dd>", cards[0], re.DOTALL)
    told = {term: Reader(text).words for term, text in terms}
    assert list(told) == ["measured", "where", "size", "pattern", "write"]
    assert told["where"] == "agent 3, step 5, values"
    assert told["size"] == "1.5e-02, must be 0"
    assert told["pattern"] == "memory is never cleared"
    assert told["write"].startswith("state = torch.where(first, initial, state) <before>")


def test_all_measurements_are_there_on_demand(broken):
    for how in ("in general", "lived", "replayed", "evaluated"):
        assert re.search(rf"<details>.*clear,? {how}: ", broken, re.DOTALL)
    assert "agent 1 is no number" in broken


def test_text_cannot_become_markup():
    bad = "<script>alert('x')</script>"
    part = Measurement(bad, 1.0, 0.0, finding=bad)
    laws = Laws([Law("cut", [part, part], Pattern(bad, bad))], notes=[bad])
    page = check_page(laws, bad)
    assert "<script" not in page
    assert Reader(page).words.count(bad) >= 8


def test_notes_are_shown_only_if_there_are_any(broken):
    assert "a <note>" in Reader(broken).words
    assert "Notes" not in Reader(check_page(make_laws(), "x")).words


def test_the_picture_is_inside_and_nothing_is_fetched(broken):
    (link,) = Reader(broken).links
    kind, _, data = link.partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data).startswith(b"\x89PNG")
    assert "//" not in broken.replace(data, "")
    assert "@import" not in broken
    assert "Red is felt and must not be" in Reader(broken).words


def test_without_a_reach_there_is_no_picture():
    assert "img" not in Reader(check_page(make_laws("cut"), "x")).tags


def test_there_are_colours_for_light_and_dark(broken):
    assert "color-scheme: light dark" in broken
    light, dark = broken.split("@media (prefers-color-scheme: dark)")
    names = set(re.findall(r"(--[a-z-]+):", light))
    assert names
    assert names == set(re.findall(r"(--[a-z-]+):", dark))
