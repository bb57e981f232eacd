"""Each tracker is the real package, offline; its files are read back. A tracker of another package; its process."""

import json
import os
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from holdfast import train
from holdfast.errors import ConfigError
from holdfast.report import trackers
from holdfast.report.trackers import PROGRAM, open_trackers, require_trackers

LINES = [
    {"global_step": 256, "losses/entropy": 0.5, "charts/scheduled@trainer.ppo.ent_coef": 0.25},
    {"global_step": 512, "losses/entropy": 0.125, "charts/episodes": 7},
    {"global_step": 512, "eval/return_mean": 1.0},
]
EXPECTED = {
    "global_step": [(256, 256), (512, 512), (512, 512)],
    "losses/entropy": [(256, 0.5), (512, 0.125)],
    "charts/scheduled/trainer.ppo.ent_coef": [(256, 0.25)],
    "charts/episodes": [(512, 7)],
    "eval/return_mean": [(512, 1.0)],
}
CONFIG = {"seed": 3, "trainer": {"batch_size": 256}}


def track(folder, lines=LINES, **modes):
    with open_trackers(folder, "my_run", CONFIG, **modes) as open_tracker:
        for line in lines:
            open_tracker.write(line)


def in_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def in_trackio(folder):
    (file,) = (folder / "trackio").glob("*.db")
    logged = {}
    for run, step, metrics in sqlite3.connect(file).execute("select run_name, step, metrics from metrics"):
        assert run == "my_run"
        for name, value in json.loads(metrics).items():
            logged.setdefault(name, []).append((step, value))
    return logged


def records_of(text):
    """Yield the records of a W&B log: blocks of 32 KiB; checksum, length and type before each record."""
    offset, record_bytes = 7, b""
    while offset + 7 <= len(text):
        block_left = 32768 - offset % 32768
        if block_left < 7:
            offset += block_left
            continue
        _, length, kind = struct.unpack("<IHB", text[offset : offset + 7])
        record_bytes += text[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):
            yield record_bytes
            record_bytes = b""


def in_wandb(folder):
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    logged, config = {}, {}
    for text in records_of(file.read_bytes()):
        record = Record.FromString(text)
        config |= {entry.key: json.loads(entry.value_json) for entry in record.run.config.update}
        items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
        for name, value in items.items():
            if not name.startswith("_"):
                logged.setdefault(name, []).append((items["_step"], value))
    assert {key: config[key] for key in CONFIG} == CONFIG
    return logged


def test_tensorboard_logs_every_metric_at_its_step(tmp_path):
    track(tmp_path, tensorboard="on")
    assert in_tensorboard(tmp_path) == EXPECTED


def test_trackio_logs_every_metric_in_the_run_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "elsewhere"))
    track(tmp_path, trackio="on")
    assert in_trackio(tmp_path) == EXPECTED
    assert not (tmp_path / "elsewhere").exists()


def test_wandb_offline_logs_every_metric_and_the_config(tmp_path):
    track(tmp_path, wandb="offline")
    # W&B has one row per step: metrics logged twice appear once.
    assert in_wandb(tmp_path) == EXPECTED | {"global_step": [(256, 256), (512, 512)]}


def test_resumed_run_continues_the_same_wandb_run(tmp_path):
    (tmp_path / "wandb.id").write_text("0123456789ab")
    track(tmp_path, wandb="offline")
    assert len(list((tmp_path / "wandb").glob("offline-run-*-0123456789ab"))) == 1


def test_all_trackers_leave_no_threads_processes_or_output(tmp_path, capfd):
    threads, children = threading.active_count(), children_of(os.getpid())
    track(tmp_path, tensorboard="on", trackio="on", wandb="offline")
    assert in_tensorboard(tmp_path).keys() == in_trackio(tmp_path).keys() == in_wandb(tmp_path).keys()
    assert threading.active_count() == threads
    assert children_of(os.getpid()) == children
    assert capfd.readouterr() == ("", "")


def children_of(pid):
    return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


@pytest.fixture
def proxy(monkeypatch):
    """A proxy for all outgoing connections that records whether there was one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, address)
            monkeypatch.setenv(name.upper(), address)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield server


def was_contacted(server):
    try:
        server.accept()[0].close()
    except TimeoutError:
        return False
    return True


def test_no_network_connection_whatever_the_environment(tmp_path, monkeypatch, proxy):
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_DATASET_ID", "HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "another/account")
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://example.invalid?write_token=x")
    monkeypatch.setenv("TRACKIO_WEBHOOK_URL", "http://example.invalid")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    track(tmp_path, tensorboard="on", trackio="on", wandb="offline")
    assert not was_contacted(proxy)
    assert in_trackio(tmp_path) == in_tensorboard(tmp_path) == EXPECTED
    assert in_wandb(tmp_path).keys() == EXPECTED.keys()


def test_wandb_online_without_a_key_is_a_one_line_error(tmp_path, monkeypatch, proxy):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^wandb failed to open: .* Type wandb=off to train without it\.$") as caught:
        open_trackers(tmp_path, "my_run", {}, wandb="online")
    assert "\n" not in str(caught.value)
    assert "key" in str(caught.value)


def test_two_runs_of_one_process_have_separate_folders(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        track(tmp_path / name, trackio="on")
        assert in_trackio(tmp_path / name) == EXPECTED


def test_trackers_off_open_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "TrackerProcess", None)
    track(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("tracker", "mode"), [("wandb", "offline"), ("tensorboard", "on"), ("trackio", "on")])
def test_missing_package_names_the_extra(tmp_path, monkeypatch, tracker, mode):
    monkeypatch.setitem(sys.modules, tracker, None)
    extra = "wandb" if tracker == "wandb" else "track"
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"^{tracker}={mode} needs .* pip install .*\[{extra}\]'\.$"):
        open_trackers(tmp_path, "my_run", {}, **{tracker: mode})


def test_folder_named_like_a_package_does_not_count(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match="which is missing"):
        require_trackers(wandb="online")


@pytest.mark.parametrize(("name", "write"), [("wandb", "wandb=offline"), ("trackio", "trackio=on")])
def test_builtin_tracker_has_its_own_key(name, write):
    with pytest.raises(ConfigError, match=rf"^tracker={name} is built in; write {write}\.$"):
        require_trackers(tracker=name)


def test_tracker_that_fails_to_open_is_a_one_line_error(tmp_path):
    (tmp_path / "tensorboard").write_text("a file where a folder must be")
    children = children_of(os.getpid())
    with pytest.raises(ConfigError, match=r"^tensorboard failed to open: .*Type tensorboard=off") as caught:
        open_trackers(tmp_path, "my_run", {}, tensorboard="on", trackio="on")
    assert "\n" not in str(caught.value)
    assert children_of(os.getpid()) == children


def test_tracker_process_that_exits_is_a_one_line_error(tmp_path, monkeypatch):
    (tmp_path / "tracker.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.setattr(trackers, "PROGRAM", [str(tmp_path / "tracker.py")])
    with pytest.raises(ConfigError, match="tensorboard failed to open: its process exited unexpectedly"):
        open_trackers(tmp_path, "my_run", {}, tensorboard="on")


def test_tracker_that_does_not_answer_times_out(tmp_path, monkeypatch):
    (tmp_path / "tracker.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(trackers, "PROGRAM", [str(tmp_path / "tracker.py")])
    monkeypatch.setattr(trackers, "OPENING_S", 0.1)
    with pytest.raises(ConfigError, match="no answer after 0 s"):
        open_trackers(tmp_path, "my_run", {}, tensorboard="on")


def write_until_message(open_tracker, messages):
    for step in range(200):
        open_tracker.write({"global_step": step, "losses/entropy": 0.5})
        if messages:
            return
        time.sleep(0.05)


def test_crashed_tracker_is_logged_once_and_others_continue(tmp_path):
    messages = []
    with open_trackers(tmp_path, "my_run", {}, tensorboard="on", trackio="on", log=messages.append) as open_tracker:
        (killed,) = [process for process in open_tracker._processes if process.name == "trackio"]
        os.killpg(killed._process.pid, signal.SIGKILL)
        write_until_message(open_tracker, messages)
        open_tracker.write({"global_step": 1000, "losses/entropy": 0.25})
    assert messages == [
        "trackio stopped: its process exited unexpectedly. Training continues; metrics.jsonl has every metric."
    ]
    assert in_tensorboard(tmp_path)["losses/entropy"][-1] == (1000, 0.25)


def test_trackio_warnings_are_logged(tmp_path):
    messages = []
    with open_trackers(tmp_path, "my_run", {}, trackio="on", log=messages.append) as open_tracker:
        open_tracker.write(LINES[0])
        time.sleep(2)
        (file,) = (tmp_path / "trackio").glob("*.db")
        for path in (tmp_path / "trackio").iterdir():
            path.unlink()
        file.mkdir()
        write_until_message(open_tracker, messages)
    assert len(messages) == 1
    assert messages[0].startswith("trackio stopped: trackio failed to flush metric logs")


SLOW = """import sys, time
print(flush=True)
time.sleep({pause})
for line in sys.stdin:
    pass
"""


def test_slow_tracker_does_not_block_training_or_lose_metrics(tmp_path, monkeypatch):
    (tmp_path / "tracker.py").write_text(
        "import sys, time\nprint(flush=True)\nsys.stdin.readline()\ntime.sleep(1)\n"
        f"open({str(tmp_path / 'lines')!r}, 'w').write(sys.stdin.read())\n"
    )
    monkeypatch.setattr(trackers, "PROGRAM", [str(tmp_path / "tracker.py")])
    with open_trackers(tmp_path, "my_run", {}, tensorboard="on") as open_tracker:
        for step in range(1000):
            open_tracker.write({"global_step": step} | {f"weights/norm@{layer}": 0.5 for layer in range(20)})
        assert open_tracker._processes[0]._queue
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [step for step, _ in lines] == list(range(1000))


def test_tracker_with_a_full_queue_is_dropped(tmp_path, monkeypatch):
    (tmp_path / "tracker.py").write_text(SLOW.format(pause=60))
    monkeypatch.setattr(trackers, "PROGRAM", [str(tmp_path / "tracker.py")])
    monkeypatch.setattr(trackers, "BACKLOG", 100_000)
    messages = []
    with open_trackers(tmp_path, "my_run", {}, tensorboard="on", log=messages.append) as open_tracker:
        for step in range(10_000):
            open_tracker.write({"global_step": step, "losses/entropy": 0.5})
    assert messages == ["tensorboard stopped: it is 0 MiB behind. Training continues; metrics.jsonl has every metric."]


def test_tracker_that_does_not_close_is_killed(tmp_path, monkeypatch):
    (tmp_path / "tracker.py").write_text(SLOW.format(pause=60))
    monkeypatch.setattr(trackers, "PROGRAM", [str(tmp_path / "tracker.py")])
    monkeypatch.setattr(trackers, "CLOSING_S", 0.1)
    messages = []
    with open_trackers(tmp_path, "my_run", {}, tensorboard="on", log=messages.append) as open_tracker:
        open_tracker.write(LINES[0])
    assert messages[0].startswith("tensorboard stopped: it had not written everything after 0 s.")
    assert len(messages) == 1


def test_trackers_do_not_receive_ctrl_c(tmp_path):
    with open_trackers(tmp_path, "my_run", {}, tensorboard="on") as open_tracker:
        assert os.getpgid(open_tracker._processes[0]._process.pid) != os.getpgid(0)


OWN = """
import sys
from holdfast.report.trackers import Tracker

class TextFile(Tracker):
    def __init__(self, settings):
        self.file = open(f"{settings.folder}/own.txt", "w")
        print(sorted({"torch", "numpy"} & {*sys.modules}), settings.mode, settings.run, file=self.file)

    def write(self, step, metrics):
        if step == 3:
            raise ValueError("no\\nspace")
        print(step, metrics, file=self.file)

    def close(self):
        print("closed", file=self.file)

class Other:
    pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The path of a module with a tracker, as another package would have it."""
    (tmp_path / "own_tracker.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_tracker:TextFile"


def install(folder):
    """Write the metadata that makes `own_tracker` an installed package with an entry point."""
    info = folder / "own_tracker-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own_tracker\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[holdfast.trackers]\ntext_file = own_tracker:TextFile\n")


def test_tracker_from_an_entry_point_is_imported_by_its_process_only(tmp_path, own):
    install(tmp_path)
    track(tmp_path, [{"global_step": 256, "losses/entropy": 0.5}], tracker="text_file")
    assert (tmp_path / "own.txt").read_text().splitlines() == [
        "[] on my_run",
        "256 {'global_step': 256, 'losses/entropy': 0.5}",
        "closed",
    ]
    assert "own_tracker" not in sys.modules
    assert "text_file" in trackers.TRACKERS


def test_tracker_by_path_in_a_run(tmp_path, own):
    keys = {"world.agents": 4, "trainer.bptt_horizon": 8, "trainer.batch_size": 64, "trainer.minibatch_size": 32}
    keys |= {
        "trainer.total_timesteps": 128,
        "report": "off",
        "trainer.eval_episodes": 4,
        "runs_dir": str(tmp_path / "runs"),
    }
    folder = train("recall", keys | {"run": "x", "tracker": own}).folder
    _, *steps, last = (folder / "own.txt").read_text().splitlines()
    assert [line.split()[0] for line in steps] == ["64", "128", "128"]
    assert last == "closed"
    install(tmp_path)
    with pytest.raises(ConfigError, match="There is no tracker 'text_fiel'; did you mean"):
        train("recall", keys | {"run": "y", "tracker": "text_fiel"})
    with pytest.raises(ConfigError, match=r"not a subclass of holdfast\.report\.trackers\.Tracker.*Type tracker=off"):
        train("recall", keys | {"run": "y", "tracker": "own_tracker:Other"})
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["x"]


def run_process(folder, *steps, tracker="own_tracker:TextFile"):
    settings = {"tracker": tracker, "folder": str(folder), "run": "x", "config": {}}
    text = "".join(json.dumps(line) + "\n" for line in (settings, *([step, {"loss": 0.5}] for step in steps)))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, *PROGRAM], input=text, capture_output=True, text=True, env=env, timeout=300)


def test_process_writes_metrics_and_closes_the_tracker(tmp_path, own):
    process = run_process(tmp_path, 1, 2)
    assert (process.returncode, process.stdout, process.stderr) == (0, "\n", "")
    assert (tmp_path / "own.txt").read_text().splitlines()[1:] == ["1 {'loss': 0.5}", "2 {'loss': 0.5}", "closed"]


def test_error_of_the_package_is_one_line(tmp_path, own):
    process = run_process(tmp_path, 1, 3, 4)
    assert (process.returncode, process.stdout) == (1, "\nValueError: no space\n")
    assert (tmp_path / "own.txt").read_text().splitlines()[1:] == ["1 {'loss': 0.5}"]


def test_tracker_that_does_not_open_has_no_empty_first_line(tmp_path):
    process = run_process(tmp_path, tracker="missing")
    assert process.returncode == 1
    assert process.stdout.startswith(
        "ConfigError: There is no tracker 'missing'; choose from tensorboard, trackio, wandb."
    )
