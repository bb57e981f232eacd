"""The report: its sections, what it says, what it refuses to draw, and that it runs nothing of what it shows."""

import base64
import io
import json
import math
import re
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from helpers.law_results import make_reach
from helpers.report_runs import Page, data_of, line, write_run
from helpers.small_replays import small_replay
from holdfast.config.run import override
from holdfast.errors import ConfigError
from holdfast.recipes import find_recipe
from holdfast.report import report_page as report_page_module
from holdfast.report.frames import webp
from holdfast.report.policy_measurements import PolicyMeasurements
from holdfast.report.recipe_difference import recipe_difference
from holdfast.report.report_page import MAX_BYTES, report_page, write_report
from holdfast.report.run_data import read_run
from holdfast.report.theme import RED

SECTIONS = ["run", "learned", "right", "used", "fresh", "gradients", "time", "life", "watch", "reproduce"]
MEASURED = PolicyMeasurements(
    reach=make_reach(),
    returns={"intact": 0.75, "cleared": 0.25, "frozen": 0.5, "shuffled": 0.25},
    delays=((1, 0.9), (8, 0.75), (16, 0.5)),
    best=1.0,
    best_without_memory=0.25,
)
RED_PIXEL = [int(RED[i : i + 2], 16) for i in (1, 3, 5)]
HOSTILE = ["</script><script>alert(1)</script>", '<img src=x onerror="alert(1)">', "$\\frac{", "=1+1", "a\nb\0c"]


def page_of(*folders, measured=MEASURED):
    return report_page([read_run(folder) for folder in folders], [measured] * len(folders))


def test_keys_of_a_world_without_a_recipe_are_compared_with_their_defaults(tmp_path):
    config = override(find_recipe("general"), {"world": "gym:CartPole-v1", "world.frame_stack": 4, "seed": 3})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    (tmp_path / "command.txt").write_text("command: holdfast train world=gym:CartPole-v1 world.frame_stack=4 seed=3\n")
    rows = [["seed", "0", "3"], ["world.frame_stack", "1", "4"]]
    assert recipe_difference([read_run(tmp_path)]) == ("general", rows)


def lead_of(page, section):
    return re.search(rf'<section id="{section}">.*?<p class="lead">(.*?)</p>', page, re.DOTALL)[1]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    final = {"iteration": 10, "global_step": 640, "eval/return_mean": 0.75, "eval/sampled_return_mean": 0.5}
    lines = [*(line(i) for i in range(1, 11)), final | {"eval/return_mean_memory_cleared": 0.25}]
    return page_of(write_run(tmp_path_factory.mktemp("runs"), lines=lines))


def test_sections_are_in_order_and_the_page_is_well_formed(page):
    assert re.findall(r'<section id="(\w+)"', page) == SECTIONS
    parsed = Page(page)
    assert (parsed.loads, parsed.handlers) == ([], [])
    assert parsed.tags.count("script") == 2
    assert len(page) < 500_000


def test_each_section_begins_with_a_conclusion(page):
    assert lead_of(page, "learned") == (
        "The return rose from 0.3 to 0.75. Evaluation: 0.75 greedy, 0.5 sampled; the best possible is 1."
    )
    assert lead_of(page, "right") == (
        "Memory is right as far as it was measured: nothing crosses an episode start, and no gradient crosses a "
        "segment edge; 60 resets for 60 episode starts; replay error 1e-7."
    )
    assert lead_of(page, "used") == "Memory is used: 0.75 intact, 0.25 cleared."
    assert "10 % away" in lead_of(page, "fresh")
    assert lead_of(page, "gradients") == "80 % of the gradient lies within 4 of 8 steps."
    assert 'role="alert"' not in page


def test_data_of_every_plot_is_in_the_page(page):
    data = data_of(page)
    assert set(re.findall(r'<figure data-name="(\w+)"', page)) == set(data)
    assert data["return_over_steps"]["agent steps"] == [64 * i for i in range(1, 11)]
    assert data["memory_use"] == {"memory": [*MEASURED.returns], "return": [0.75, 0.25, 0.5, 0.25]}


def test_reach_data_is_the_array_that_the_laws_assert_on(page):
    reach, columns = MEASURED.reach, data_of(page)["reach_gradient"]
    agent = int((reach.clears.sum(-1) == 2).nonzero()[0])
    for source, target, change in zip(columns["observation"], columns["output"], columns["change"], strict=True):
        assert change == pytest.approx(float(reach.gradient[source, agent, target]), rel=1e-5)


def test_colours_follow_light_dark_and_print(page):
    style = page.partition("</style>")[0]
    light, dark, printed = (style.count(f"--plot0: {colour}") for colour in ("#1b1f24", "#e8ebef", "#1b1f24"))
    assert (light, dark, printed) == (2, 1, 2)
    assert "prefers-color-scheme: dark" in style
    assert "@media print" in style
    assert "#1b1f24" not in page.partition("</style>")[2]


def pixels_of(page, figure):
    """The cells of a plot `[rows, columns, 3]`."""
    (image,) = re.findall(rf'data-name="{figure}".*?data:image/png;base64,([^"]+)"', page, re.DOTALL)[:1]
    with Image.open(io.BytesIO(base64.b64decode(image))) as opened:
        return np.asarray(opened.convert("RGB"))


@pytest.mark.parametrize("panel", ["rollout", "gradient"])
def test_leak_is_a_red_line_and_red_cells(tmp_path, panel):
    reach = make_reach()
    assert not reach.rollout[5, 0, 6]
    getattr(reach, panel)[5, 0, 6] = 1e-3
    page = page_of(write_run(tmp_path), measured=PolicyMeasurements(reach=reach))
    alarm = re.search(r'<div class="alarm" role="alert">(.*?)</div>', page, re.DOTALL)[1]
    assert "Memory is not right." in alarm
    assert "agent 0, observation of step 5, output of step 6; largest 0.001" in alarm
    assert lead_of(page, "right").startswith("Memory is not right.")
    data = data_of(page)[f"reach_{panel}"]
    assert 0.001 in data["change"]
    # The leak, and nothing else, is drawn in red.
    assert (pixels_of(page, f"reach_{panel}") == RED_PIXEL).all(-1).any()
    clean = page_of(write_run(tmp_path, "clean"), measured=PolicyMeasurements(reach=make_reach()))
    assert not (pixels_of(clean, f"reach_{panel}") == RED_PIXEL).all(-1).any()


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"memory/replay_error": 0.02}, "largest 0.02 in 1 updates, must be at most 1e-4"),
        ({"memory/resets": 5, "memory/resets_due": 6}, "6 episode starts, 5 resets, different in 1 of 1 iterations"),
        ({"memory/check_clear": 0.5}, "largest 0.5 in 1 check, must be at most 1e-6"),
    ],
)
def test_faults_of_the_training_are_a_red_line(tmp_path, metrics, text):
    page = page_of(write_run(tmp_path, lines=[line(1, **metrics)]), measured=PolicyMeasurements())
    assert text in re.search(r'role="alert">(.*?)</div>', page, re.DOTALL)[1]


def test_what_was_not_measured_says_how_to_measure_it(tmp_path):
    page = page_of(write_run(tmp_path, lines=[]), measured=PolicyMeasurements())
    assert "metrics.jsonl" in lead_of(page, "fresh")
    assert "trainer.monitor=every:10" in lead_of(page, "gradients")
    assert "report=on" in lead_of(page, "life")
    words = Page(page).words
    for command in ("holdfast check", "holdfast eval", "holdfast play"):
        assert command in words


def test_seeds_are_one_curve_and_other_configs_are_another(tmp_path):
    folders = [write_run(tmp_path, f"seed-{seed}", [line(i, seed) for i in range(1, 6)], seed) for seed in range(5)]
    other = write_run(tmp_path, "gru", policy={"name": "fast", "memory": "gru"})
    data = data_of(page_of(*folders, other))["return_over_steps"]
    assert [name for name in data if name.endswith("return")] == ["seed · 5 seeds return", "gru return"]
    # The mean of the middle three of five seeds.
    assert data["seed · 5 seeds return"][0] == pytest.approx(0.25 + 0.05 + 0.02)
    assert data["seed · 5 seeds low"][0] < 0.32 < data["seed · 5 seeds high"][0]
    assert "5 seeds" in Page(page_of(*folders)).words


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_shown_and_not_run(tmp_path, name):
    lines = [line(1), json.dumps({"iteration": 1, name: 3, f"eval/return_mean@{name}": 1.0})]
    folder = write_run(tmp_path, "x" + name.replace("/", "").replace("\0", ""), lines, run=name, world={"name": name})
    (folder / "command.txt").write_text(f"command: {name}\nholdfast: {name}\n")
    page = page_of(folder)
    parsed = Page(page)
    assert (parsed.loads, parsed.handlers, parsed.tags.count("script")) == ([], [], 2)
    assert "alert(1)" not in re.sub(r"<script type=.*?</script>", "", page) or "&lt;" in page


TEXT = st.text(max_size=40) | st.sampled_from(HOSTILE)
NUMBERS = st.floats(allow_nan=True) | st.integers() | st.just(10**400)
NAMES = st.sampled_from(["global_step", "seconds", "eval/return_mean", "gradients/within@4", "memory/resets"]) | TEXT
LINES = st.lists(
    st.builds(lambda i, more: json.dumps({**more, "iteration": i}), NUMBERS, st.dictionaries(NAMES, NUMBERS | TEXT))
    | st.binary(max_size=60).map(lambda data: data.decode(errors="replace"))
    | st.sampled_from(
        ["[" * 5000, '{"iteration": 1', "null", '{"iteration": true}', '{"iteration": 1, "seconds": 1e999}']
    ),
    max_size=6,
)


@settings(max_examples=6)
@given(lines=LINES, world=TEXT, seed=NUMBERS | TEXT, command=TEXT)
def test_any_metrics_and_config_give_a_page_that_runs_nothing(tmp_path_factory, lines, world, seed, command):
    folder = write_run(tmp_path_factory.mktemp("runs"), lines=[line(1), *lines], world={"name": world}, seed=str(seed))
    (folder / "command.txt").write_text(command, errors="replace")
    page = page_of(folder, measured=PolicyMeasurements())
    parsed = Page(page)
    assert (parsed.loads, parsed.handlers, parsed.tags.count("script")) == ([], [], 2)
    json.dumps(data_of(page), allow_nan=False)
    assert "This section cannot be shown" not in page


def test_gradients_of_another_horizon_are_left_out(tmp_path):
    within = {"memory/gradient_reach": 4, "gradients/within@1": 0.5, "gradients/within@4": 1.0}
    lines = [
        line(5),
        line(6, **within),
        {"iteration": 7, **within, "global_step": 1e3},
        {"iteration": 8, "gradients/within@8": 3},
    ]
    page = page_of(write_run(tmp_path, lines=lines[:3]))
    assert data_of(page)["gradient_by_age"] == {
        "agent steps": [384, 1000], "within 1 steps": [0.5, 0.5], "within 4 steps": [1, 1]
    }  # fmt: skip
    # A share without steps is nothing to draw.
    assert "Not measured" in lead_of(page_of(write_run(tmp_path, "b", lines=lines[1:])), "gradients")


def test_a_section_that_fails_leaves_the_others(tmp_path, monkeypatch):
    def what_was_run(report):
        raise ValueError("<b>no</b>")

    monkeypatch.setattr("holdfast.report.report_page.SECTIONS", (what_was_run, *report_page_module.SECTIONS[1:]))
    page = page_of(write_run(tmp_path))
    assert lead_of(page, "what_was_run") == "This section cannot be shown: ValueError: &lt;b&gt;no&lt;/b&gt;"
    assert lead_of(page, "learned").startswith("The return rose")


def test_lines_and_numbers_that_are_left_out_are_counted(tmp_path):
    lines = [line(1), "{torn", {"iteration": 2, "seconds": 1e300}, '{"iteration": 3, "seconds": NaN}', "[]"]
    run = read_run(write_run(tmp_path, lines=lines))
    assert run.problems == (
        "metrics.jsonl: 2 lines cannot be read and are left out",
        "metrics.jsonl: 2 numbers not finite or beyond 1e30 are left out",
    )
    assert run.metrics["iteration"].tolist() == [1, 2, 3]
    assert math.isnan(run.metrics["seconds"][1])


@pytest.mark.parametrize("config", ["", "[]", "null", "{" * 3000, '{"trainer": 3, "world": [], "seed": {"a": 1}}'])
def test_unreadable_config_is_named_on_the_page(tmp_path, config):
    folder = write_run(tmp_path)
    (folder / "config.json").write_text(config)
    words = Page(page_of(folder, measured=PolicyMeasurements())).words
    assert ("config.json cannot be read" in words or "config.json is no JSON" in words) == (not config.startswith('{"'))


@pytest.mark.parametrize("timeline", ["", "{}", '{"version": 2}', '{"version": 1, "agents": 1e9}'])
def test_timeline_of_another_version_is_named_and_not_drawn(tmp_path, timeline):
    folder = write_run(tmp_path)
    (folder / "timeline.json").write_text(timeline)
    page = page_of(folder)
    assert "timeline.json is not a timeline of version 1" in Page(page).words
    assert 'data-name="state_timeline"' not in page


def test_long_runs_are_binned(tmp_path):
    lines = [json.dumps({"iteration": i, "global_step": 64 * i, "charts/episodic_return": i % 2}) for i in range(3000)]
    page = page_of(write_run(tmp_path, lines=lines))
    columns = data_of(page)["return_over_steps"]
    assert len(columns["return"]) == 300
    assert set(columns["return"]) == {0.5}
    assert len(page) < MAX_BYTES


@pytest.mark.slow
def test_report_of_100_000_lines_is_fast_and_small(tmp_path):
    text = json.dumps(line(1))
    lines = [
        text.replace('"iteration": 1, "global_step": 64', f'"iteration": {i}, "global_step": {64 * i}')
        for i in range(100_000)
    ]
    folder = write_run(tmp_path, lines=lines)
    start = time.process_time()
    target = write_report([folder], folder / "report.html", lambda run: MEASURED)
    assert time.process_time() - start < 20
    assert target.stat().st_size < MAX_BYTES
    assert "6,399,936 steps in 99,999 iterations" in Page(target.read_text()).words


def test_report_of_five_seeds(tmp_path):
    folders = [write_run(tmp_path, f"seed{seed}", seed=seed) for seed in range(5)]
    runs = [read_run(folder) for folder in folders]
    returns = [{"intact": 0.5 + 0.1 * seed, "cleared": 0.25} for seed in range(5)]
    delays = [((1, 0.9), (8, 0.1 * seed), *([(16, 0.5)] if seed else [])) for seed in range(5)]
    measured = [replace(MEASURED, returns=r, delays=d) for r, d in zip(returns, delays, strict=True)]
    page = report_page(runs, measured)
    # The mean of the middle three.
    assert lead_of(page, "used") == "Memory is used: 0.7 intact, 0.25 cleared."
    data = data_of(page)
    assert data["memory_use"]["seed4"] == [0.9, 0.25]
    # Delays that one run was not measured at are left out.
    assert data["return_by_delay"]["delay"] == [1, 8]
    words = Page(page).words
    assert words.count("no leak") == 5
    assert "those of seed0" in words
    assert "Is memory fresh? seed0" in words


def test_runs_of_other_configs_are_compared_key_by_key(tmp_path):
    one, two = write_run(tmp_path, "one"), write_run(tmp_path, "two", world={"name": "recall", "delay": 16})
    page = page_of(one, two)
    assert "<tr><td>world.delay</td><td>8</td><td>8</td><td>16</td></tr>" in page
    gym = write_run(tmp_path, "three", world={"name": "gym:CartPole-v1", "previous_action": True, "vector": "sync"})
    page = page_of(gym)
    assert "<td>world.previous_action</td><td>false</td><td>true</td>" in page
    # Defaults of another world are no difference.
    assert "world.vector" not in page


def frames_replay(folder, *frames):
    """A replay of a few steps with these frames, in the folder of a run."""
    replay = small_replay("gym:CartPole-v1", steps=4, agents=2)
    frames = frames or replay.frames
    arrays = {**replay.arrays, "frame_steps": np.arange(len(frames), dtype=np.int32)}
    replace(replay, frames=frames, arrays=arrays).save(folder / "replays" / "x.json.gz")


def test_frames_are_a_strip_and_an_mp4(tmp_path, monkeypatch):
    folder = write_run(tmp_path)
    frames_replay(folder)
    page = page_of(folder)
    assert (
        lead_of(page, "watch")
        == "2 agents on held-out episodes for 4 steps, with sampled actions, after 0 steps of training."
    )
    assert Page(page).loads == []
    (strip,) = re.findall(r'src="data:image/webp;base64,([^"]+)"', page)
    with Image.open(io.BytesIO(base64.b64decode(strip))) as image:
        assert image.width > 4 * 200
    (video,) = re.findall(r'src="data:video/mp4;base64,([^"]+)"', page)
    assert base64.b64decode(video)[4:8] == b"ftyp"
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    page = page_of(folder)
    assert "A video needs a package" in Page(page).words
    assert "data:image/webp" in page


@pytest.mark.parametrize("pixels", [(2100, 2000), None])
def test_a_hostile_frame_is_refused(tmp_path, pixels):
    folder = write_run(tmp_path)
    frame = b"RIFF\0\0\0\0WEBPVP8 garbage" if pixels is None else webp(Image.new("RGB", pixels))
    frames_replay(folder, frame)
    page = page_of(folder)
    assert re.match(
        "The replay x.json.gz cannot be shown: a frame (has 2100 x|cannot be read)",
        lead_of(page, "watch"),
    )
    assert "hf-viewer" not in page.partition("</style>")[2]


def test_page_and_learning_curve_are_written(tmp_path):
    folder = write_run(tmp_path)
    target = write_report([folder], folder / "report.html", lambda run: MEASURED)
    assert target == folder / "report.html"
    assert Page(target.read_text()).words
    assert (folder / "pictures" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob(".*.part"))


def test_no_runs_or_too_many_are_refused(tmp_path):
    for folders in ([], [tmp_path] * 21):
        with pytest.raises(ConfigError, match="shows 1 to 20 runs, not"):
            write_report(folders, tmp_path / "x.html")
    with pytest.raises(ConfigError, match="is not a run; give for example runs/NAME"):
        write_report([tmp_path], tmp_path / "x.html")
