"""`holdfast report` and the report at the end of a training, of real runs."""

import re

import pytest
import torch

import holdfast
from helpers.report_runs import Page, data_of
from helpers.small_runs import TINY, run
from holdfast.cli import main
from holdfast.monitor.timeline import read_timeline
from holdfast.policies import Fast


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run(tmp_path_factory.mktemp("runs"), report="on", trainer__bptt_horizon=8)


def test_training_writes_its_report(trained):
    assert trained.report == trained.folder / "report.html"
    page = trained.report.read_text()
    parsed = Page(page)
    assert (parsed.loads, parsed.handlers) == ([], [])
    assert 'role="alert"' not in page
    assert {"reach_rollout", "reach_gradient", "memory_use", "state_timeline", "return_over_steps"} < data_of(
        page
    ).keys()
    assert "Memory is right as far as it was measured" in page
    assert (trained.folder / "pictures" / "learning_curve.png").exists()


def test_report_does_not_change_the_training(trained, tmp_path):
    other = run(tmp_path, report="off", trainer__bptt_horizon=8)
    weights, same = trained.policy.state_dict(), other.policy.state_dict()
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert other.report is None
    assert not (other.folder / "timeline.json").exists()


def test_timeline_is_that_of_the_last_two_rollouts(trained):
    timeline = read_timeline(trained.folder)
    # Six rollouts of eight steps each.
    assert (timeline.first_step, timeline.update, timeline.horizon) == (32, 8, 8)
    assert [agent.agent for agent in timeline.agents] == [0, 1, 2, 3, 4, 5]
    assert {len(agent.norms) for agent in timeline.agents} == {16}
    assert len(timeline.drift) == 8
    assert timeline.trace[0].startswith("Agent 0 · rollout 5 · steps 32-39")
    for agent in timeline.agents:
        for step, kind in agent.starts:
            assert kind == "terminated"
            # A cleared state has read one observation, so it is small.
            assert agent.norms[step] < max(agent.norms)


def test_report_verb_writes_again_and_compares(trained, tmp_path, capsys):
    first = trained.report.read_text()
    assert main(["report", str(trained.folder)]) == 0
    assert capsys.readouterr().out == f"report {trained.folder}/report.html\n"
    again = trained.report.read_text()
    assert data_of(again)["reach_rollout"] == data_of(first)["reach_rollout"]
    assert main(["report", str(trained.folder), str(trained.folder), "--output", str(tmp_path / "x.html")]) == 2
    assert "named twice" in capsys.readouterr().err


class Leaking(Fast):
    """Never clears its state."""

    def unroll(self, obs, first, state, valid=None):
        return super().unroll(obs, torch.zeros_like(first), state, valid)


def test_policy_that_leaks_has_a_red_line(tmp_path):
    keys = {**TINY, "report": "on", "trainer.check": "off", "trainer.total_timesteps": 64, "runs_dir": str(tmp_path)}
    result = holdfast.train("recall", keys, policy=Leaking)
    page = result.report.read_text()
    alarm = re.search(r'<div class="alarm" role="alert">(.*?)</div>', page, re.DOTALL)[1]
    assert "Memory is not right." in alarm
    assert "information crosses an episode start" in alarm
    assert re.search(r'<section id="right">.*?<p class="lead">Memory is not right', page, re.DOTALL)


@pytest.mark.parametrize("error", [ValueError("<b>no</b>"), OSError("disk full"), MemoryError()])
def test_report_that_fails_is_one_line(tmp_path, monkeypatch, capsys, error):
    def fail(*args, **keys):
        raise error

    monkeypatch.setattr("holdfast.report.policy_measurements.measure_policy", fail)
    result = run(tmp_path, report="on", trainer__total_timesteps=64)
    assert (result.finished, result.report) == (True, None)
    (text,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("no report"))
    assert type(error).__name__ in text
    assert text.endswith(f"try holdfast report {result.folder}")


def test_stopped_run_has_a_report_and_what_cannot_be_measured_is_named(tmp_path, monkeypatch):
    def fail(adapter):
        raise ValueError("<b>no</b>")

    monkeypatch.setattr("holdfast.report.policy_measurements.quick_reach", fail)
    result = holdfast.train(
        "recall",
        {"world.agents": 8, "trainer.bptt_horizon": 4, "trainer.batch_size": 64, "trainer.minibatch_size": 32}
        | {"trainer.total_timesteps": 384, "policy.hidden_size": 4, "runs_dir": str(tmp_path), "run": "x"},
        callbacks=[lambda iteration: iteration.stop()],
    )
    assert not result.finished
    words = Page(result.report.read_text()).words
    assert "Not recorded" in words
    assert "The reach cannot be measured: ValueError: <b>no</b>" in words


def test_report_of_a_damaged_run_says_so(trained, tmp_path, capsys):
    (tmp_path / "config.json").write_text((trained.folder / "config.json").read_text())
    assert main(["report", str(tmp_path)]) == 0
    words = Page((tmp_path / "report.html").read_text()).words
    assert "The policy cannot be loaded: " in words
    assert "metrics.jsonl does not exist" in words


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "required"),
        (["nowhere"], "nowhere does not exist"),
        (["{folder}", "--output", "nowhere/x.html"], "cannot be written"),
    ],
)
def test_wrong_calls_are_one_line(trained, words, text, capsys):
    words = [word.format(folder=trained.folder) for word in words]
    assert main(["report", *words]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert text in message


def test_plots_serve_notebooks(trained):
    assert holdfast.plots.learning_curve(trained).axes
    assert holdfast.plots.learning_curve([str(trained.folder)], x="time").axes
    assert holdfast.plots.timeline(trained).axes
    assert holdfast.plots.drift(trained.folder).axes
    # What a notebook shows of the last value of a cell.
    for figure in (holdfast.plots.time_split(trained), holdfast.plots.timeline(trained)):
        assert figure._repr_png_().startswith(b"\x89PNG")
