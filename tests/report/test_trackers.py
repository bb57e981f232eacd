"""Each tracker is the real package, offline, and what it wrote is read back."""

import json
import os
import signal
import socket
import sqlite3
import struct
import sys
import threading
import time
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.report import open_trackers, require_trackers, trackers

LINES = [
    {"global_step": 256, "losses/entropy": 0.5, "charts/scheduled@trainer.ppo.ent_coef": 0.25},
    {"global_step": 512, "losses/entropy": 0.125, "charts/episodes": 7},
    {"global_step": 512, "eval/return_mean": 1.0},
]
WRITTEN = {
    "global_step": [(256, 256), (512, 512), (512, 512)],
    "losses/entropy": [(256, 0.5), (512, 0.125)],
    "charts/scheduled/trainer.ppo.ent_coef": [(256, 0.25)],
    "charts/episodes": [(512, 7)],
    "eval/return_mean": [(512, 1.0)],
}
CONFIG = {"seed": 3, "trainer": {"batch_size": 256}}


def mirrored(folder, lines=LINES, **which):
    with open_trackers(folder, "mine", CONFIG, **which) as opened:
        for line in lines:
            opened.write(line)


def in_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in tags}


def in_trackio(folder):
    (file,) = (folder / "trackio").glob("*.db")
    found = {}
    for run, step, metrics in sqlite3.connect(file).execute("select run_name, step, metrics from metrics"):
        assert run == "mine"
        for name, number in json.loads(metrics).items():
            found.setdefault(name, []).append((step, number))
    return found


def records_of(text):
    """Take the records out of W&B's log: blocks of 32 KiB; checksum, length and kind before each."""
    place, whole = 7, b""
    while place + 7 <= len(text):
        room = 32768 - place % 32768
        if room < 7:
            place += room
            continue
        _, length, kind = struct.unpack("<IHB", text[place : place + 7])
        whole += text[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def in_wandb(folder):
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    found, config = {}, {}
    for text in records_of(file.read_bytes()):
        record = Record.FromString(text)
        config |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
        items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
        for name, number in items.items():
            if not name.startswith("_"):
                found.setdefault(name, []).append((items["_step"], number))
    assert {key: config[key] for key in CONFIG} == CONFIG
    return found


def test_tensorboard_has_every_number_at_its_step(tmp_path):
    mirrored(tmp_path, tensorboard="on")
    assert in_tensorboard(tmp_path) == WRITTEN


def test_trackio_has_every_number_at_its_step_in_the_runs_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "elsewhere"))
    mirrored(tmp_path, trackio="on")
    assert in_trackio(tmp_path) == WRITTEN
    assert not (tmp_path / "elsewhere").exists()


def test_wandb_offline_has_every_number_at_its_step_and_the_config(tmp_path):
    mirrored(tmp_path, wandb="offline")
    # W&B keeps one row a step: what comes twice is there once.
    assert in_wandb(tmp_path) == WRITTEN | {"global_step": [(256, 256), (512, 512)]}


def test_all_three_at_once_leave_nothing_behind_but_files(tmp_path, capfd):
    threads, children = threading.active_count(), children_of(os.getpid())
    mirrored(tmp_path, tensorboard="on", trackio="on", wandb="offline")
    assert in_tensorboard(tmp_path).keys() == in_trackio(tmp_path).keys() == in_wandb(tmp_path).keys()
    assert threading.active_count() == threads
    assert children_of(os.getpid()) == children
    assert capfd.readouterr() == ("", "")


def children_of(pid):
    return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


@pytest.fixture
def doorway(monkeypatch):
    """A door through which everything would go that goes out; it knows whether anybody knocked."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(0.2)
        address = f"http://127.0.0.1:{door.getsockname()[1]}"
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, address)
            monkeypatch.setenv(name.upper(), address)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield door


def knocked(door):
    try:
        door.accept()[0].close()
    except TimeoutError:
        return False
    return True


def test_nothing_goes_out_whatever_the_environment_says(tmp_path, monkeypatch, doorway):
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_DATASET_ID", "HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "somebody/else")
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://example.invalid?write_token=x")
    monkeypatch.setenv("TRACKIO_WEBHOOK_URL", "http://example.invalid")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    mirrored(tmp_path, tensorboard="on", trackio="on", wandb="offline")
    assert not knocked(doorway)
    assert in_trackio(tmp_path) == in_tensorboard(tmp_path) == WRITTEN
    assert in_wandb(tmp_path).keys() == WRITTEN.keys()


def test_wandb_online_without_a_key_asks_nothing_and_is_refused_in_one_line(tmp_path, monkeypatch, doorway):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"^wandb does not open: .* Type wandb=off to go without it\.$"
    ) as told:
        open_trackers(tmp_path, "mine", {}, wandb="online")
    assert "\n" not in str(told.value)
    assert "key" in str(told.value)


def test_two_runs_of_one_process_have_a_folder_each(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        mirrored(tmp_path / name, trackio="on")
        assert in_trackio(tmp_path / name) == WRITTEN


def test_nothing_is_opened_where_nothing_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "Mirror", None)
    mirrored(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tracker", "mode"), [("wandb", "offline"), ("tensorboard", "on"), ("trackio", "on")]
)
def test_a_missing_package_is_one_line_that_names_the_extra(tmp_path, monkeypatch, tracker, mode):
    monkeypatch.setitem(sys.modules, tracker, None)
    extra = "wandb" if tracker == "wandb" else "track"
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=rf"^{tracker}={mode} needs .* pip install 'holdfast\[{extra}\]'\.$"
    ):
        open_trackers(tmp_path, "mine", {}, **{tracker: mode})


def test_a_folder_of_a_packages_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match="not installed"):
        require_trackers(wandb="online")
    require_trackers(wandb="off")


def test_a_tracker_that_does_not_open_is_one_line_before_anything_trains(tmp_path):
    (tmp_path / "tensorboard").write_text("a file where a folder must be")
    children = children_of(os.getpid())
    with pytest.raises(ConfigError, match=r"^tensorboard does not open: .*Type tensorboard=off") as told:
        open_trackers(tmp_path, "mine", {}, tensorboard="on", trackio="on")
    assert "\n" not in str(told.value)
    assert children_of(os.getpid()) == children


def test_a_tracker_whose_script_is_broken_is_one_line_too(tmp_path, monkeypatch):
    (tmp_path / "mirror.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.setattr(trackers, "SCRIPT", tmp_path / "mirror.py")
    with pytest.raises(ConfigError, match="tensorboard does not open: its process ended too early"):
        open_trackers(tmp_path, "mine", {}, tensorboard="on")


def test_one_that_gives_no_answer_is_not_waited_for_forever(tmp_path, monkeypatch):
    (tmp_path / "mirror.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(trackers, "SCRIPT", tmp_path / "mirror.py")
    monkeypatch.setattr(trackers, "OPENING_S", 0.1)
    with pytest.raises(ConfigError, match="it gives no answer"):
        open_trackers(tmp_path, "mine", {}, tensorboard="on")


def write_until_told(opened, said):
    for step in range(200):
        opened.write({"global_step": step, "losses/entropy": 0.5})
        if said:
            return
        time.sleep(0.05)


def test_a_tracker_that_dies_is_told_once_and_the_others_go_on(tmp_path):
    said = []
    with open_trackers(tmp_path, "mine", {}, tensorboard="on", trackio="on", say=said.append) as opened:
        (victim,) = [mirror for mirror in opened._mirrors if mirror.name == "trackio"]
        os.killpg(victim._process.pid, signal.SIGKILL)
        write_until_told(opened, said)
        opened.write({"global_step": 1000, "losses/entropy": 0.25})
    assert said == [
        "trackio stopped: its process ended too early. The run goes on; metrics.jsonl has every number."
    ]
    assert in_tensorboard(tmp_path)["losses/entropy"][-1] == (1000, 0.25)


def test_what_trackio_only_warns_of_is_told(tmp_path):
    said = []
    with open_trackers(tmp_path, "mine", {}, trackio="on", say=said.append) as opened:
        opened.write(LINES[0])
        time.sleep(2)
        (file,) = (tmp_path / "trackio").glob("*.db")
        for each in (tmp_path / "trackio").iterdir():
            each.unlink()
        file.mkdir()
        write_until_told(opened, said)
    assert len(said) == 1
    assert said[0].startswith("trackio stopped: trackio failed to flush metric logs")


SLOW = """import sys, time
print(flush=True)
time.sleep({pause})
for line in sys.stdin:
    pass
"""


def test_training_does_not_wait_for_a_slow_tracker_and_nothing_is_lost(tmp_path, monkeypatch):
    (tmp_path / "mirror.py").write_text(
        "import sys, time\nprint(flush=True)\nsys.stdin.readline()\ntime.sleep(1)\n"
        f"open({str(tmp_path / 'lines')!r}, 'w').write(sys.stdin.read())\n"
    )
    monkeypatch.setattr(trackers, "SCRIPT", tmp_path / "mirror.py")
    with open_trackers(tmp_path, "mine", {}, tensorboard="on") as opened:
        for step in range(1000):
            opened.write({"global_step": step} | {f"weights/norm@{layer}": 0.5 for layer in range(20)})
        assert opened._mirrors[0]._waiting
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [step for step, _ in lines] == list(range(1000))


def test_one_that_is_too_far_behind_is_given_up(tmp_path, monkeypatch):
    (tmp_path / "mirror.py").write_text(SLOW.format(pause=60))
    monkeypatch.setattr(trackers, "SCRIPT", tmp_path / "mirror.py")
    monkeypatch.setattr(trackers, "BACKLOG", 100_000)
    said = []
    with open_trackers(tmp_path, "mine", {}, tensorboard="on", say=said.append) as opened:
        for step in range(10_000):
            opened.write({"global_step": step, "losses/entropy": 0.5})
    assert said == [
        "tensorboard stopped: it is 0 MiB behind. The run goes on; metrics.jsonl has every number."
    ]


def test_one_that_does_not_end_is_ended(tmp_path, monkeypatch):
    (tmp_path / "mirror.py").write_text(SLOW.format(pause=60))
    monkeypatch.setattr(trackers, "SCRIPT", tmp_path / "mirror.py")
    monkeypatch.setattr(trackers, "CLOSING_S", 0.1)
    said = []
    with open_trackers(tmp_path, "mine", {}, tensorboard="on", say=said.append) as opened:
        opened.write(LINES[0])
    assert said[0].startswith("tensorboard stopped: it had not written everything after 0 s.")
    assert len(said) == 1


def test_ctrl_c_is_not_for_the_trackers(tmp_path):
    with open_trackers(tmp_path, "mine", {}, tensorboard="on") as opened:
        assert os.getpgid(opened._mirrors[0]._process.pid) != os.getpgid(0)
