import base64

import numpy as np
import pytest

from helpers.small_replays import content_of, small_replay, write_content
from holdfast.errors import ConfigError, ContractError
from holdfast.report import replay as replay_module
from holdfast.report.replay import Replay, encode_arrays


@pytest.fixture(scope="module")
def replay():
    return small_replay("forage")


@pytest.fixture
def file(replay, tmp_path):
    return replay.save(tmp_path / "x.json.gz")


def test_a_saved_replay_is_loaded_bit_for_bit(replay, file):
    loaded = Replay.load(file)
    assert loaded.header == replay.header
    assert loaded.arrays.keys() == replay.arrays.keys()
    for name, array in replay.arrays.items():
        assert loaded.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded.arrays[name], array)
    assert loaded.to_bytes() == file.read_bytes()
    assert sorted(path.name for path in file.parent.iterdir()) == ["x.json.gz"]


def encoded(array):
    return encode_arrays({"x": np.asarray(array)})["x"]


def with_array(name, array):
    return lambda content: content["arrays"].update({name: encoded(array)})


def set_header(**fields):
    return lambda content: content["header"].update(fields)


def set_array(**fields):
    return lambda content: content["arrays"]["reward"].update(fields)


NAN = np.full((12, 3), np.nan, np.float32)
HOSTILE = {
    "another file": (lambda content: content.update(kind="holdfast live memories"), "is not a replay"),
    "later version": (lambda content: content.update(format=2), "has the format '2'; this version of Holdfast reads 1"),
    "huge version": (lambda content: content.update(format=10**400), "has the format '10000000"),
    "version as text": (lambda content: content.update(format="<script>"), "has the format '<script>'"),
    "unknown key": (lambda content: content.update(code="alert(1)"), "code=alert"),
    "no header": (lambda content: content.pop("header"), "header must be given"),
    "huge number": (set_header(steps_trained=10**400), "steps_trained"),
    "number as text": (set_header(horizon="64"), "horizon=64"),
    "long name": (set_header(run="x" * 1000), "header.run="),
    "many names": (set_header(actions=["x"] * 5000), "header.actions="),
    "many agents": (set_header(agents=list(range(3000))), "header.agents="),
    "other agents": (set_header(agents=[0]), "its axis A must be 1"),
    "unknown array": (with_array("code", np.zeros((12, 3), np.uint8)), "has no array 'code'"),
    "missing array": (lambda content: content["arrays"].pop("norm"), "lacks the array norm"),
    "part of a grid": (lambda content: content["arrays"].pop("places"), "lacks the array grid or places or changes"),
    "not base64": (set_array(data="<script>alert(1)</script>"), "'reward' is not base64"),
    "too few bytes": (set_array(data=""), "'reward' has 0 bytes"),
    "huge shape": (set_array(shape=[10**30, 10**30], data=""), "'reward' has 0 bytes"),
    "negative shape": (set_array(shape=[-1, 3]), "shape"),
    "deep shape": (set_array(shape=[1] * 50), "shape"),
    "dtype": (set_array(dtype="object"), "dtype"),
    "other dtype": (with_array("reward", np.zeros((12, 3), np.uint8)), "'reward' is uint8"),
    "NaN": (with_array("value", NAN), "'value' is not finite"),
    "wrong steps": (with_array("value", np.zeros((13, 3), np.float32)), "must be"),
    "flag": (with_array("first", np.full((12, 3), 7, np.uint8)), "'first' has 7 to 7; must be 0 to 1"),
    "action": (with_array("action", np.full((12, 3, 1), 99, np.float32)), "'action' has 99 to 99; must be 0 to 3"),
    "cell": (with_array("grid", np.full((3, 7, 7), 200, np.uint8)), "'grid' has 200 to 200; must be 0 to 2"),
    "change outside": (with_array("changes", np.array([[1, 10**6, 0]], np.int32)), r"changes \(cell\)"),
    "place outside": (with_array("places", np.full((12, 3, 2), 999, np.int16)), "'places' has 999"),
    "frame that is no image": (
        lambda content: content.update(frames=[base64.b64encode(b"<svg onload=alert(1)>").decode()]),
        "has 1 frames, at 0 steps",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_replay_is_one_line(case, file):
    change, message = HOSTILE[case]
    content = content_of(file)
    change(content)
    # Python writes integers of any length; readers limit them.
    with pytest.raises(ContractError, match=f"x.json.gz cannot be shown: .*{message}") as raised:
        Replay.load(write_content(file, content))
    assert len(str(raised.value).splitlines()) == 1
    assert len(str(raised.value)) < 1000


def test_a_frame_must_be_webp(replay):
    steps = {**replay.arrays, "frame_steps": np.array([0], np.int32)}
    with pytest.raises(ContractError, match="a frame that is not WebP"):
        Replay(replay.header, steps, (b"<svg onload=alert(1)>",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is damaged, or not a replay"),
        (b"null", "is not a replay"),
        (b"[" * 100_000, "is damaged, or not a replay"),
        (b'{"kind": "holdfast replay", "format": ' + b"9" * 5000 + b"}", "is damaged, or not a replay"),
        (b"\xff\xfe", "is damaged, or not a replay"),
    ],
    ids=["empty", "null", "deep", "digits", "encoding"],
)
def test_text_that_is_no_replay_is_one_line(text, message, tmp_path):
    with pytest.raises(ContractError, match=message) as raised:
        Replay.load(write_content(tmp_path / "x.json.gz", text))
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("size", [0, 1, 15, 200, -1])
def test_a_truncated_file_is_one_line(size, file):
    data = file.read_bytes()
    file.write_bytes(data[:size])
    with pytest.raises(ContractError, match="is damaged, or not a replay"):
        Replay.load(file)


def test_sizes_are_limited_before_anything_is_unpacked(file, monkeypatch):
    write_content(file, b" " * 100_000)
    monkeypatch.setattr(replay_module, "LARGEST_TEXT", 10_000)
    with pytest.raises(ContractError, match="unpacks to more than 10,000 bytes"):
        Replay.load(file)
    monkeypatch.setattr(replay_module, "LARGEST_FILE", 50)
    with pytest.raises(ContractError, match="a replay has at most 50"):
        Replay.load(file)


def test_names_of_files(replay, tmp_path):
    with pytest.raises(ConfigError, match=r"a replay ends in \.json\.gz; try x\.mp4\.json\.gz"):
        replay.save(tmp_path / "x.mp4")
    with pytest.raises(ConfigError, match="does not exist"):
        Replay.load(tmp_path / "none.json.gz")
