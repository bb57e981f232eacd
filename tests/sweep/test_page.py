"""Results of a sweep and its page: best, Pareto front, and one HTML file without network."""

import base64
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from holdfast.errors import ContractError
from holdfast.recipes import find_recipe
from holdfast.sweep.page import sweep_page
from holdfast.sweep.results import TrialResult, best_of, pareto_front, write_best
from holdfast.sweep.settings import new_settings

RATE = "trainer.optimizer.learning_rate"
SETTINGS = new_settings("recall", {"seed": "3"}, (f"{RATE}=log:1e-4..1e-2", "policy.memory=lstm,gru"), trials=5)


def result(index, score=None, cost=None, state="finished", **changes):
    values = {RATE: 1e-4 * 3**index, "policy.memory": ("lstm", "gru")[index % 2]}
    runs = {} if score is None else {f"trial-00{index}-seed-3": {"return": score, "seed": 3}}
    arguments = {"values": values, "progress": 1.0, "runs": runs, "attempts": 1, "error": "", **changes}
    return TrialResult(index, state, score=score, cost=cost, **arguments)


RESULTS = [
    result(0, 0.5, 10.0),
    result(1, 0.9, 20.0, attempts=2, error="worker 0 was killed by <SIGKILL>"),
    result(2, 0.4, 12.0),
    result(3, cost=2.0, state="pruned"),
    result(4, state="failed", error="ValueError: bad"),
    result(5, 0.9, 15.0),
    result(6, 0.3, 5.0),
]


def test_the_best_has_the_highest_return_and_of_equal_ones_the_least_cost():
    assert best_of(RESULTS).index == 5
    assert best_of(RESULTS[3:5]) is None


def test_the_front_has_every_trial_that_no_cheaper_one_reaches():
    front = pareto_front(RESULTS)
    assert [trial.index for trial in front] == [6, 0, 5]
    for trial in RESULTS:
        beaten = trial.score is not None and any(
            other.score >= trial.score
            and other.cost <= trial.cost
            and (other.score, other.cost) != (trial.score, trial.cost)
            for other in RESULTS
            if other.score is not None
        )
        assert (trial in front) == (trial.score is not None and not beaten)


class Reader(HTMLParser):
    """Collects text, and what is loaded from elsewhere."""

    def __init__(self, page):
        super().__init__()
        self.text, self.images, self.loaded, self.open = "", [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href"):
                (self.images if value.startswith("data:") else self.loaded).append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def page():
    return sweep_page("x", SETTINGS, RESULTS, {RATE: 0.7, "policy.memory": 0.3})


def test_the_page_is_complete_and_loads_nothing(page):
    reader = Reader(page)
    assert reader.open == []
    assert reader.loaded == []
    assert not re.search(r"@import|url\(|<script|<link", page)
    for title in ("History", "Return and cost", "Importances", RATE, "policy.memory", "Trials"):
        assert title in reader.text
    assert "Best is trial 5: return 0.9" in reader.text
    assert "killed by <SIGKILL>" in reader.text
    assert len(reader.images) == 5


def test_pictures_are_whole(page):
    for image in Reader(page).images:
        kind, _, data = image.partition(",")
        assert kind == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(base64.b64decode(data)).tag.endswith("svg")


def test_a_page_without_finished_trials_says_so():
    text = Reader(sweep_page("x", SETTINGS, RESULTS[3:5], {})).text
    assert "No trial is finished." in text
    assert "ValueError: bad" in text


def test_the_best_trial_becomes_a_recipe_file(tmp_path):
    file = write_best(tmp_path, SETTINGS, RESULTS[1])
    config = find_recipe(str(file))
    assert config.trainer.optimizer.learning_rate == RESULTS[1].values[RATE]
    assert (config.policy.memory, config.seed) == ("gru", 3)
    assert file.read_text().startswith(f"# Trial 1 of {tmp_path}: return 0.9 (one seed).\n")


def test_a_recipe_file_that_is_not_the_trained_config_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.sweep.results.write_recipe_file", lambda file, *rest: file.write_text("seed: 7"))
    with pytest.raises(ContractError, match="does not hold the config of trial 1"):
        write_best(tmp_path, SETTINGS, RESULTS[1])
