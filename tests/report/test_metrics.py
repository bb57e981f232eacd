import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ContractError
from holdfast.report import METRICS, MetricsFile
from holdfast.report.metrics import WHERE, described


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_metric_says_what_it_means():
    assert all(metric.meaning for metric in METRICS.values())


def test_every_name_lies_in_a_group_that_is_told():
    assert {name.rpartition("/")[0] for name in METRICS} == WHERE.keys()
    assert all(re.fullmatch(r"([a-z]+/)?[A-Za-z0-9_]+", name) for name in METRICS)


def test_what_decides_a_number_is_said():
    kinds = {name: metric.kind for name, metric in METRICS.items()}
    times = {name for name in METRICS if name.startswith("time/")} | {"seconds", "charts/SPS"}
    assert {name for name, kind in kinds.items() if kind == "time"} == times
    machine = {name for name in METRICS if name.startswith("machine/")}
    assert {name for name, kind in kinds.items() if kind == "machine"} == machine
    assert len(machine) == 5


def test_the_number_of_one_of_several_means_the_same():
    assert described("gradients/norm@lstm") is METRICS["gradients/norm"]
    assert described("charts/luck@lstm") is None


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"losses/entropy": 0.5})
    assert lines_of(tmp_path / "metrics.jsonl") == [{"losses/entropy": 0.5}]
    file.write({"losses/entropy": 0.25})
    assert len(lines_of(tmp_path / "metrics.jsonl")) == 2
    file.close()


def test_what_the_machine_decides_lies_in_a_file_of_its_own(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    when = {"iteration": 3, "global_step": 300}
    file.write(when | {"losses/entropy": 0.5})
    assert not (tmp_path / "machine.jsonl").exists()
    file.write(when | {"seconds": 1.5, "machine/process_bytes": 7, "machine/growth": 0.5})
    # On disk at once, like the other.
    assert lines_of(tmp_path / "machine.jsonl") == [
        when | {"machine/process_bytes": 7, "machine/growth": 0.5}
    ]
    assert lines_of(tmp_path / "metrics.jsonl") == [when | {"losses/entropy": 0.5}, when | {"seconds": 1.5}]
    file.close()


def test_a_number_nobody_described_is_refused_by_its_name(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(ContractError, match=r"\['charts/luck'\] are not in the metrics dictionary"):
        file.write({"charts/luck": 7.0})
    file.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["losses/entropy", "gradients/norm@lstm", "machine/growth"])
def test_what_is_no_finite_number_is_refused_by_its_name(tmp_path, name, number):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(
        ContractError, match=rf"^{name} is {number} at iteration 4; it must be a finite number"
    ):
        file.write({"iteration": 4, name: number})
    file.close()
    assert [path.read_text() for path in tmp_path.iterdir()] == [""]


@given(
    line=st.dictionaries(
        st.sampled_from(sorted(METRICS)),
        st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False),
    )
)
def test_both_files_together_say_what_was_measured(tmp_path_factory, line):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(line)
    file.close()
    (told,) = lines_of(path)
    machine = path.with_name("machine.jsonl")
    assert told | (lines_of(machine)[0] if machine.exists() else {}) == line
