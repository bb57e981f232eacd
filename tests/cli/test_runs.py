"""`holdfast runs`: the list of a folder's runs, and files that cannot be read."""

import json
import os
from datetime import datetime

import pytest

from holdfast.cli import main


def write_run(folder, name, world="recall", lines=(), total=128, **fields):
    path = folder / name
    path.mkdir()
    trainer = {"total_timesteps": total, "batch_size": 64}
    config = {"world": {"name": world}, "policy": {"name": "fast"}, "seed": 3, "trainer": trainer, **fields}
    (path / "config.json").write_text(json.dumps(config))
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def line(iteration, **metrics):
    return {"iteration": iteration, "global_step": 64 * iteration, **metrics}


@pytest.fixture
def folder(tmp_path):
    train, final = {"charts/episodic_return": 0.25}, {"eval/return_mean": 0.75}
    write_run(tmp_path, "a", lines=[line(1, **train), line(2, **train), line(2, **final)])
    write_run(tmp_path, "b", world="arena", lines=[line(1, **{"charts/episodic_return": 2.5})])
    write_run(tmp_path, "c")
    (tmp_path / "no-run").mkdir()
    return tmp_path


def listed(capsys, *args):
    assert main(["runs", *map(str, args), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_runs_are_listed_with_their_newest_numbers(folder, capsys):
    a, b, c = listed(capsys, folder)
    a.pop("updated")
    assert a == {
        "name": "a",
        "world": "recall",
        "policy": "fast",
        "seed": 3,
        "steps": 128,
        "episodic_return": 0.75,
        "finished": True,
    }
    assert (b["episodic_return"], b["steps"], b["finished"]) == (2.5, 64, False)
    assert (c["episodic_return"], c["steps"], c["finished"]) == (None, None, False)


@pytest.mark.parametrize(
    ("options", "order"),
    [
        (["--reverse"], "cba"),
        (["--sort", "return"], "abc"),
        (["--sort", "return", "--reverse"], "bac"),
        (["--sort", "world"], "bac"),
    ],
)
def test_runs_are_sorted_and_unknown_values_come_last(folder, capsys, options, order):
    assert [run["name"] for run in listed(capsys, folder, *options)] == list(order)


def test_the_table_has_a_row_per_run(folder, capsys):
    assert main(["runs", str(folder)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "world", "policy", "seed", "steps", "return", "updated", "finished"]
    assert [row.split()[0] for row in rows] == ["a", "b", "c"]
    assert rows[0].split()[4:6] == ["128", "0.75"]
    assert [row.split()[-1] for row in rows] == ["yes", "no", "no"]


def test_a_run_was_updated_when_its_newer_file_was(folder, capsys):
    os.utime(folder / "a" / "config.json", (0, 1_000_000))
    os.utime(folder / "a" / "metrics.jsonl", (0, 2_000_000))
    run = listed(capsys, folder, "--sort", "updated")[0]
    assert (run["name"], datetime.fromisoformat(run["updated"]).timestamp()) == ("a", 2_000_000)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"world": 3, "trainer": {"batch_size": 0}}'])
def test_a_damaged_config_leaves_fields_unknown(folder, capsys, text):
    (folder / "a" / "config.json").write_text(text)
    run = listed(capsys, folder)[0]
    assert (run["world"], run["finished"], run["steps"]) == (None, None, 128)


def test_damaged_metrics_are_left_out(folder, capsys):
    bad = '{"iteration": 2, "global_step": 1e999}\n{"iteration": NaN}\nnothing\n{"iteration": 1' + "0" * 400 + "}\n"
    file = folder / "b" / "metrics.jsonl"
    file.write_text(file.read_text() + bad)
    assert listed(capsys, folder)[1]["steps"] == 64


def test_names_are_printed_without_control_characters(folder, capsys):
    write_run(folder, "d", world="\x1b[31m<script>")
    assert main(["runs", str(folder)]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "<script>" in output


def test_a_wrong_call_says_what_to_type(tmp_path, capsys):
    assert main(["runs", str(tmp_path / "missing")]) == 2
    assert "holdfast runs runs" in capsys.readouterr().err
    assert main(["runs", str(tmp_path), "--sort", "retrun"]) == 2
    assert "return" in capsys.readouterr().err
    assert main(["runs", str(tmp_path)]) == 0
    assert "holds no runs" in capsys.readouterr().out
