import json

from holdfast.keep import checkpoint_of, steps_trained


def written(folder, *iterations, latest, rest=""):
    """A run's folder with a line for each iteration of ten steps, and a checkpoint."""
    (folder / "checkpoints" / latest).mkdir(parents=True)
    (folder / "checkpoints" / "latest").symlink_to(latest)
    lines = [json.dumps({"iteration": each, "global_step": 10 * each}) + "\n" for each in iterations]
    (folder / "metrics.jsonl").write_text("".join(lines) + rest)
    return folder


def test_steps_are_those_until_the_checkpoint(tmp_path):
    assert steps_trained(written(tmp_path / "whole", 1, 2, 3, 3, latest="000003")) == 30
    assert steps_trained(written(tmp_path / "older", 1, 2, 3, latest="000002")) == 20
    assert steps_trained(written(tmp_path / "again", 1, 2, 3, latest="000002-2")) == 20


def test_half_a_line_of_a_run_that_was_killed_is_no_step(tmp_path):
    assert steps_trained(written(tmp_path, 1, 2, latest="000002", rest='{"iteration": 3, "glob')) == 20


def test_what_nobody_wrote_down_is_not_known(tmp_path):
    assert steps_trained(tmp_path) is None
    assert steps_trained(written(tmp_path / "new", latest="000001")) is None


def test_the_checkpoint_is_the_one_that_latest_names(tmp_path):
    written(tmp_path, 1, latest="000001")
    assert checkpoint_of(tmp_path) == tmp_path / "checkpoints" / "000001"
