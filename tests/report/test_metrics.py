import json

import pytest

from holdfast.errors import ContractError
from holdfast.report import METRICS, MetricsFile


def test_every_metric_says_what_it_means():
    assert all(metric.meaning for metric in METRICS.values())


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"losses/entropy": 0.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"losses/entropy": 0.5}
    file.write({"losses/entropy": 0.25})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    file.close()


def test_a_number_nobody_described_is_refused_by_its_name(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(ContractError, match=r"\['charts/luck'\] are not in the metrics dictionary"):
        file.write({"charts/luck": 7.0})
    file.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
