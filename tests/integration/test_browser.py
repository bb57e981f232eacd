"""The report, the viewer of replays and the live page in a real Chromium."""

import csv
import io
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.law_results import make_reach
from helpers.recall_by_hand import recall_player
from helpers.report_runs import data_of, write_run
from helpers.small_replays import content_of, small_replay, write_content
from holdfast.play.live import LivePlay
from holdfast.play.live_server import LiveServer
from holdfast.play.play_loop import PlayLoop
from holdfast.play.record import record_replay
from holdfast.report.policy_measurements import PolicyMeasurements
from holdfast.report.report_page import write_report
from holdfast.report.viewer import viewer_section

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[dev]'")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
PAGE = '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>x</title></head><body>{}</body></html>'
EVIL = "<img src=x onerror=alert(1)><script>alert(1)</script>"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        # Its sandbox needs rights that containers lack.
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=120_000)
        yield browser
        browser.close()


class Visit:
    """A page, with all that it requests, logs and raises."""

    def __init__(self, browser, address, **options):
        self.page = browser.new_page(**options)
        self.page.set_default_timeout(60_000)
        self.requests, self.problems = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.problems.append(dialog.message), dialog.dismiss()))
        self.page.goto(address)
        self.root = self.page.locator(".hf-viewer")
        self.page.wait_for_selector(".hf-viewer[data-step]")

    def data(self, name):
        return self.root.get_attribute(f"data-{name}")

    def wait(self, name, value):
        self.page.wait_for_selector(f'.hf-viewer[data-{name}="{value}"]')

    def seek(self, step):
        self.page.locator(".hf-range").evaluate("(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }", step)
        self.wait("step", step)


@pytest.fixture(scope="module")
def maze():
    return small_replay("tmaze", steps=40)


@pytest.fixture
def show(browser, tmp_path):
    """Open a replay from disk; at the end the page has requested nothing but itself, and raised nothing."""
    visits = []

    def open_page(replay, **options):
        file = tmp_path / "page.html"
        file.write_text(PAGE.format(viewer_section(replay)))
        visits.append(Visit(browser, file.as_uri(), **options))
        return visits[-1]

    yield open_page
    for visit in visits:
        assert visit.requests == [(tmp_path / "page.html").as_uri()]
        assert visit.problems == []
        visit.page.close()


def place(replay, step, agent):
    return ",".join(map(str, replay.arrays["places"][step, agent]))


def test_the_scrubber_moves_the_agents(show, maze):
    visit = show(maze)
    positions = {visit.data("position")}
    for step in (0, 7, 39, 20, 3):
        visit.seek(step)
        assert visit.data("position") == place(maze, step, 0)
        positions.add(visit.data("position"))
    assert len(positions) > 1
    assert visit.page.locator("output").text_content() == "step 3 of 39 · 8/s"


def test_the_keys_of_a_replay(show, maze):
    visit = show(maze)
    visit.page.locator(".hf-world").click()
    for key, step in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 39), ("Home", 0)):
        visit.page.keyboard.press(key)
        assert visit.data("step") == str(step)
    for key, agent in (("]", 1), ("]", 2), ("]", 0), ("[", 2)):
        visit.page.keyboard.press(key)
        assert visit.data("agent") == str(agent)
        assert visit.data("position") == place(maze, 0, agent)
    for key, speed in (("=", 16), ("=", 32), ("-", 16)):
        visit.page.keyboard.press(key)
        assert f"{speed}/s" in visit.page.locator("output").text_content()
    visit.seek(36)
    visit.root.focus()
    visit.page.keyboard.press(" ")
    visit.wait("step", 39)
    visit.wait("playing", "false")


@pytest.mark.slow
def test_a_click_on_the_timeline_goes_there(show, maze):
    visit = show(maze, viewport={"width": 1000, "height": 900})
    box = visit.page.locator(".hf-rows").bounding_box()
    x = 62 + (box["width"] - 63) * 20.5 / 40
    visit.page.locator(".hf-rows").click(position={"x": x, "y": 4 + 18 + 8})
    assert (visit.data("step"), visit.data("agent")) == ("20", "1")


@pytest.mark.slow
@pytest.mark.parametrize("world", ["recall", "gym:CartPole-v1"])
def test_worlds_without_a_grid(show, world):
    replay = small_replay(world, steps=10)
    visit = show(replay, color_scheme="dark", viewport={"width": 390, "height": 800})
    visit.seek(9)
    # It fits a phone.
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390
    text = visit.root.inner_text()
    assert ("the environment of agent 0" if replay.frames else "what each agent sees") in text
    assert visit.page.locator(".hf-world").evaluate(
        "e => new Set(e.getContext('2d').getImageData(0, 0, e.width, e.height).data).size"
    ) > 3  # fmt: skip


def test_markup_in_names_is_text(show, maze, tmp_path):
    file = maze.save(tmp_path / "evil.json.gz")
    content = content_of(file)
    names = [f"{EVIL}{number}" for number in range(5)]
    features = [{**feature, "name": EVIL} for feature in content["header"]["features"]]
    content["header"].update(run=EVIL, world=EVIL, policy=EVIL, actions=names[:4], kinds=names, features=features)
    visit = show(write_content(file, content))
    visit.seek(5)
    assert EVIL in visit.root.inner_text()
    assert visit.page.locator("img").count() == 0


@pytest.mark.slow
def test_a_replay_without_memory(show):
    replay = record_replay(recall_player(), 12, agents=2, greedy=True)
    header = replay.header.model_copy(update={"memory": False})
    arrays = {**replay.arrays, "units": np.zeros((12, 2, 0), np.int8)}
    visit = show(type(replay)(header, arrays))
    assert "no memory" in visit.root.inner_text()


@pytest.fixture(scope="module")
def report(tmp_path_factory, maze):
    """The report of a run whose names are markup, with a replay."""
    folder = write_run(tmp_path_factory.mktemp("runs"), EVIL.replace("/", ""), run=EVIL, world={"name": EVIL})
    maze.save(folder / "replays" / "x.json.gz")
    measured = PolicyMeasurements(
        reach=make_reach(), returns={"intact": 0.75, "cleared": 0.25}, delays=((1, 0.9), (8, 0.7), (16, 0.5))
    )
    return write_report([folder], folder.parent / "report.html", lambda run: measured)


def test_the_report_shows_saves_and_runs_nothing_of_its_names(browser, report, maze):
    visit = Visit(browser, report.as_uri(), accept_downloads=True, color_scheme="dark")
    page = visit.page
    figures = page.locator("figure[data-name]")
    names = figures.evaluate_all("all => all.map((e) => e.dataset.name)")
    assert {"return_over_steps", "reach_rollout", "reach_gradient", "replay_error", "memory_use"} < {*names}
    assert page.locator(".save button").count() == 2 * len(names)
    columns = data_of(report.read_text())
    for label, name in (("CSV", "return_over_steps"), ("PNG", "reach_gradient")):
        with page.expect_download() as download:
            page.locator(f'figure[data-name="{name}"]').get_by_role("button", name=label).click()
        assert download.value.suggested_filename == f"{name}.{label.lower()}"
        content = Path(download.value.path()).read_bytes()
        if label == "CSV":
            rows = list(csv.DictReader(io.StringIO(content.decode())))
            assert [float(row["return"]) for row in rows] == columns[name]["return"]
        else:
            with Image.open(io.BytesIO(content)) as image:
                # Dark paper, and the cells, edges and episode starts on it.
                assert image.convert("RGB").getpixel((2, 2)) == (0x16, 0x1B, 0x21)
                assert len(image.convert("RGB").resize((200, 200)).getcolors(40_000)) > 50
    visit.seek(7)
    assert visit.data("position") == place(maze, 7, 0)
    page.set_viewport_size({"width": 390, "height": 800})
    page.emulate_media(color_scheme="light")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator("h1").text_content() == EVIL.replace("/", "")
    assert page.locator("img").count() == 0
    assert [address for address in visit.requests if not address.startswith("blob:")] == [report.as_uri()]
    assert visit.problems == []
    page.close()


@pytest.fixture
def live(browser):
    with PlayLoop(recall_player(), 4, follow=4) as loop:
        server = LiveServer(LivePlay(loop, loop.header("recall", 0)))
        with server.serving() as url:
            visit = Visit(browser, url, viewport={"width": 1000, "height": 900})
            yield visit
            visit.page.close()
        assert {address.removeprefix(url).partition("?")[0] for address in visit.requests} <= {"", "state", "command"}
        assert visit.problems == []


def percents(visit):
    return [int(text.rstrip(" %")) for text in visit.page.locator(".hf-probs > span:nth-child(3n)").all_text_contents()]


def test_an_agent_whose_memory_is_cleared_answers_by_chance(live):
    for step in range(1, 10):
        live.page.keyboard.press("ArrowRight")
        live.wait("total", step)
    # The query: the agent knows its cue, until its memory is cleared.
    assert max(percents(live)) >= 99
    assert "state norm\n1.00" in live.root.inner_text()
    live.page.keyboard.press("c")
    live.page.wait_for_selector('.hf-facts b:text-is("0.00")')
    assert percents(live) == [25] * 4
    # Red lines at the probabilities before.
    assert live.page.locator(".hf-bar u").count() == 4
    assert "before step 9: memory of agent 0 cleared" in live.root.inner_text()
    for _ in range(4):
        live.page.get_by_role("button", name="cleared").click()
        live.page.wait_for_selector('button[aria-pressed="true"]:text("cleared")')
        live.page.keyboard.press("]")
    for step in range(19, 220, 10):
        live.page.get_by_role("button", name="10 steps").click()
        live.wait("total", step)
    text = live.page.locator(".hf-tally").inner_text()
    (changed, episodes) = re.search(r"memory changed: (\S+) in (\d+) episodes", text).groups()
    assert int(episodes) >= 75
    assert 0.1 <= float(changed) <= 0.45


@pytest.mark.slow
def test_the_controls_of_the_live_page(live):
    live.page.keyboard.press(" ")
    live.wait("playing", "true")
    playwright.expect(live.root).not_to_have_attribute("data-total", "0", timeout=20_000)
    live.page.get_by_role("button", name="pause").click()
    live.wait("playing", "false")
    assert "memory left alone" in live.root.inner_text()
    live.page.keyboard.press("=")
    live.page.wait_for_selector('output:text("16/s")')
    assert live.page.get_by_role("button", name="restore").is_disabled()
    live.page.keyboard.press("m")
    live.page.wait_for_selector('button:text("restore"):not(:disabled)')
    live.page.keyboard.press("r")
    live.page.wait_for_selector('.hf-message:has-text("restored")')
    live.page.keyboard.press("s")
    live.page.wait_for_selector('.hf-message:has-text("swapped with agent 1")')
    live.page.locator(".hf-select").select_option("2")
    assert live.data("agent") == "2"
    assert "memory of agent 2" in live.root.inner_text()
