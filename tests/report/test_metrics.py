import json
import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ContractError
from holdfast.monitor.replay_check import REPLAY_ALARM
from holdfast.report.metrics import GRADIENT_ALARM, METRICS, MetricsFile, alarms, find_metric, read_lines


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_metric_has_a_meaning():
    assert all(metric.meaning for metric in METRICS.values())


def test_names_of_metrics():
    assert all(re.fullmatch(r"([a-z]+/)?[A-Za-z0-9_]+", name) for name in METRICS)


def test_kind_of_every_metric():
    kinds = {name: metric.kind for name, metric in METRICS.items()}
    times = {name for name in METRICS if name.startswith("time/")} | {"seconds", "charts/SPS"}
    assert {name for name, kind in kinds.items() if kind == "time"} == times
    machine = {name for name in METRICS if name.startswith("machine/")}
    assert {name for name, kind in kinds.items() if kind == "machine"} == machine
    assert len(machine) == 5


def test_labelled_metric_has_the_same_description():
    assert find_metric("gradients/norm@lstm") is METRICS["gradients/norm"]
    assert find_metric("charts/luck@lstm") is None


def test_line_is_flushed_at_once(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"losses/entropy": 0.5})
    assert lines_of(tmp_path / "metrics.jsonl") == [{"losses/entropy": 0.5}]
    file.write({"losses/entropy": 0.25})
    assert len(lines_of(tmp_path / "metrics.jsonl")) == 2
    file.close()


def test_machine_metrics_go_to_machine_jsonl(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    progress = {"iteration": 3, "global_step": 300}
    file.write(progress | {"losses/entropy": 0.5})
    assert not (tmp_path / "machine.jsonl").exists()
    file.write(progress | {"seconds": 1.5, "machine/process_bytes": 7, "machine/growth": 0.5})
    # On disk at once, like the other.
    assert lines_of(tmp_path / "machine.jsonl") == [progress | {"machine/process_bytes": 7, "machine/growth": 0.5}]
    assert lines_of(tmp_path / "metrics.jsonl") == [
        progress | {"losses/entropy": 0.5},
        progress | {"seconds": 1.5},
    ]
    file.close()


def test_lines_that_hold_no_metrics_are_left_out(tmp_path):
    good = {"iteration": 1, "losses/entropy": 0.5}
    lines = [json.dumps(good), "{", "[1]", "[" * 100_000, f'{{"iteration": 2, "x": {"9" * 400}}}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert list(read_lines(tmp_path / "metrics.jsonl")) == [good, {"iteration": 2}]


def test_unknown_metric_is_an_error(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(ContractError, match=r"\['charts/luck'\] are not in METRICS"):
        file.write({"charts/luck": 7.0})
    file.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["losses/entropy", "gradients/norm@lstm", "machine/growth"])
def test_non_finite_metric_is_an_error(tmp_path, name, number):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(ContractError, match=rf"^{name} is {number} at iteration 4; it must be a finite number"):
        file.write({"iteration": 4, name: number})
    file.close()
    assert [path.read_text() for path in tmp_path.iterdir()] == [""]


@given(
    line=st.dictionaries(
        st.sampled_from(sorted(METRICS)),
        st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False),
    )
)
def test_both_files_together_have_every_metric(tmp_path_factory, line):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(line)
    file.close()
    (line_on_disk,) = lines_of(path)
    machine = path.with_name("machine.jsonl")
    assert line_on_disk | (lines_of(machine)[0] if machine.exists() else {}) == line


MEMORY = {
    "memory/resets": 1204,
    "memory/resets_due": 1204,
    "memory/replay_error": 3.1e-7,
    "memory/replay_value_error": 1e-7,
}


def test_healthy_run_raises_no_alarm():
    assert list(alarms({})) == list(alarms(MEMORY | {"losses/grad_norm": 0.5})) == []
    edge = {"memory/replay_error": REPLAY_ALARM, "losses/grad_norm": GRADIENT_ALARM}
    assert list(alarms(edge)) == []


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"memory/replay_error": 2e-4}, "replay", "replay differs from the rollout by 2.0e-04"),
        ({"memory/replay_value_error": 2e-4}, "replay", "replay differs from the rollout by 2.0e-04"),
        ({"memory/resets": 1203}, "resets", "reset 1,203 times for 1,204 episode starts"),
        ({"losses/grad_norm": 0.0}, "gradient", "exactly 0"),
        ({"losses/grad_norm": 12345.0}, "gradient", "before clipping is 12,345; below 1,000 is healthy"),
    ],
)
def test_alarms_name_the_value_and_what_to_do(wrong, kind, message):
    ((of, text),) = alarms(MEMORY | wrong)
    assert of == kind
    assert message in text
    assert "`holdfast check`" in text or "Look for" in text or "lower trainer." in text


def test_a_full_disk_names_the_file_once():
    file = MetricsFile(Path("/dev/full"))
    with pytest.raises(
        OSError, match=r"^Could not write /dev/full: No space left on device; free some space on its di"
    ):
        file.write({"iteration": 1})
    file.close()


def test_lines_are_read_one_by_one(tmp_path):
    """A resume reads those of a whole run."""
    line = json.dumps({"iteration": 1} | {f"x/{number}": number / 7 for number in range(100)})
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n" * 1000)
    tracemalloc.start()
    count = sum(1 for _ in read_lines(tmp_path / "metrics.jsonl"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 1000
    assert peak < 100 * len(line)
