import base64
import gzip
import json
import re

import pytest

from helpers.small_replays import content_of, small_replay, write_content
from holdfast.errors import ContractError
from holdfast.report.replay import Replay
from holdfast.report.viewer import viewer_section


@pytest.fixture(scope="module")
def replay():
    return small_replay("forage")


def data_of(section):
    (data,) = re.findall(r'<script type="application/octet-stream" class="hf-data">([^<]*)</script>', section)
    return json.loads(gzip.decompress(base64.b64decode(data, validate=True)))


def test_the_section_holds_the_replay_and_loads_nothing(replay, tmp_path):
    section = viewer_section(replay.save(tmp_path / "x.json.gz"))
    assert data_of(section)["header"]["run"] == "small"
    assert not re.search(r"""https?:|src=|href=|url\(|@import|fetch\(|XMLHttp|eval\(|innerHTML|\bon\w+=["']""", section)


def test_names_are_never_markup(replay, tmp_path):
    file = replay.save(tmp_path / "x.json.gz")
    content = content_of(file)
    evil = '"><script>alert(1)</script>'
    content["header"].update(run=evil, world=evil, actions=[evil] * 4, kinds=[evil] * 3)
    section = viewer_section(write_content(file, content))
    assert evil not in section
    assert "<script>alert" not in section
    assert data_of(section)["header"]["actions"] == [evil] * 4
    assert section.count("<script") == section.count("</script>") == 2


def test_a_replay_is_validated_before_it_is_shown(replay, tmp_path):
    file = replay.save(tmp_path / "x.json.gz")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ContractError, match="cannot be shown"):
        viewer_section(file)
    assert viewer_section(replay).count("hf-data") == 2
    assert isinstance(replay, Replay)
