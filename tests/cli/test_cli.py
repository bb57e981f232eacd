import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast import __version__
from holdfast.checkpoint.format import TrainingSnapshot, write_checkpoint
from holdfast.cli import main
from holdfast.config.run import all_keys

ROOT = Path(__file__).parents[2]
TINY = [
    "world.agents=4",
    "trainer.bptt_horizon=8",
    "trainer.batch_size=64",
    "trainer.minibatch_size=32",
    "trainer.total_timesteps=64",
    "trainer.eval_episodes=4",
    "report=off",
    "policy.hidden_size=8",
    "policy.num_layers=1",
]


@pytest.fixture
def runs(tmp_path):
    return tmp_path / "runs"


@pytest.fixture
def refused(capsys, runs):
    """Call `holdfast train` with wrong arguments, and return its one-line error."""

    def call(*args):
        assert main(["train", f"runs_dir={runs}", *args]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("holdfast: ")
        assert captured.err.endswith(".\n") or captured.err.endswith("?\n")
        assert captured.err.count("\n") == 1
        assert not runs.exists()
        return captured.err.removeprefix("holdfast: ").rstrip()

    return call


@pytest.mark.parametrize(
    ("arg", "key"),
    [
        ("trainer.total_timestep=5000", "trainer.total_timesteps"),
        ("trainer.minibach_size=512", "trainer.minibatch_size"),
        ("sed=1", "seed"),
        ("world.dealy=8", "world.delay"),
        ("batch_size=4096", "trainer.batch_size"),
    ],
)
def test_misspelt_key_suggests_the_right_one(refused, arg, key):
    wrong = arg.partition("=")[0]
    assert refused(arg) == f"There is no key {wrong!r}; did you mean {key}?"


def test_invalid_minibatch_size_suggests_valid_ones(refused):
    line = refused("trainer.minibatch_size=1000")
    assert line == (
        "trainer.minibatch_size=1000 is not a multiple of trainer.bptt_horizon=64; "
        "try trainer.minibatch_size=256 or 512 or 1024."
    )


def test_suggested_minibatch_size_trains(runs, capsys):
    args = [*TINY[:3], "trainer.minibatch_size=33"]
    assert main(["train", f"runs_dir={runs}", *args]) == 2
    line = capsys.readouterr().err
    assert (
        "trainer.minibatch_size=33 is not a multiple of trainer.bptt_horizon=8; "
        "try trainer.minibatch_size=8 or 16 or 32." in line
    )
    assert main(["train", f"runs_dir={runs}", *TINY]) == 0


def test_unknown_policy_suggests_one(refused):
    assert "did you mean fast?" in refused("policy=fats")
    assert "choose from example, fast" in refused("py_agent=nothing_like_it")


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("no_such_package.module:Class", "No module named 'no_such_package'; is it on the Python path?"),
        ("holdfast.policies:Zzz", "holdfast.policies has no class Zzz"),
        ("holdfast.policies:make_policy", "is not a subclass of holdfast.policies.lstm_wrapper.LSTMWrapper"),
        ("torch.nn:Linear", "Linear'> is not a subclass of holdfast.policies.lstm_wrapper.LSTMWrapper"),
        ("holdfast:LSTMWrapper", "LSTMWrapper is a base class; give a subclass of your own"),
        ("holdfast:RecurrentPolicy", "RecurrentPolicy is a base class; give a subclass of your own"),
        (":Class", "write package.module:Class"),
        (".x:Class", "write package.module:Class"),
        ("x:", "write package.module:Class"),
    ],
)
def test_invalid_policy_class_error_gives_the_reason(refused, policy, reason):
    line = refused(f"policy={policy}")
    assert line.startswith(f"policy={policy}: ")
    assert line.rstrip(".").endswith(reason)


def test_unknown_world_lists_the_worlds(refused):
    line = refused("world=chess")
    assert line.startswith("world.name=chess: there is no such world; choose from recall, repeat_first, n_back")


def test_unknown_recipe_suggests_one(refused):
    assert refused("recal") == "There is no recipe 'recal'; did you mean recall?"


@pytest.mark.parametrize("arg", ["--verbose", "--seed=1", "-v"])
def test_unknown_option_is_refused(refused, arg):
    assert refused(arg) == f"There is no option {arg!r}; write keys as key=value, see --help."


def test_duplicate_key_is_refused(refused):
    assert refused("seed=1", "seed=2") == "seed is given twice, as 1 and as 2; keep one."


def test_empty_argument_is_refused(refused):
    assert refused("", *TINY) == "'' is not key=value; write for example seed=1."


def test_invalid_batch_size_shows_the_arithmetic(refused):
    line = refused("world.agents=48")
    assert "world.agents * trainer.bptt_horizon = 48 * 64 = 3072" in line
    assert line.endswith("try trainer.batch_size=3072 or 6144 or 9216.")
    assert all(size % 512 == size % (48 * 64) == 0 for size in (3072, 6144, 9216))


def test_missing_tracker_package_names_its_extra(refused, monkeypatch):
    monkeypatch.setattr("holdfast.report.trackers.find_spec", lambda name: None)
    assert "[wandb]'" in refused("wandb=offline")
    assert "[track]'" in refused("tensorboard=on")


def test_unknown_component_graph_suggests_one(refused):
    line = refused("agent=fats")
    assert (
        line == "There is no component graph 'fats'; did you mean fast? For your own graph, write its file: NAME.yaml."
    )
    assert "No such file" in refused("agent=configs/agent/mine.yaml")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_refused(refused):
    line = refused("device=cuda")
    assert line == "device=cuda, but torch finds no GPU here; use device=cpu or device=auto."


@pytest.mark.parametrize("name", ["a/b", "..", "/tmp/x", "-x", "."])
def test_run_name_must_not_be_a_path(refused, name):
    assert refused(f"run={name}").startswith(f"run={name}: ")


@pytest.mark.parametrize(
    ("arg", "start"),
    [
        ("world.delay=-1", "world.delay=-1: give a number from 0 to 1000000, or a range such as 4..24."),
        ("world.delay=9..2", "world.delay=9..2: give a number from 0 to 1000000, or a range such as 4..24."),
        ("world.truncate=maybe", "world.truncate=maybe: "),
        ("trainer.ppo.gamma=high", "trainer.ppo.gamma=high: "),
        ("trainer.total_timesteps=many", "trainer.total_timesteps=many: give an integer such as"),
        ("trainer.optimizer.learning_rate=inf", "trainer.optimizer.learning_rate=inf: "),
        ("seed=-1", "seed=-1: "),
        ("seed=1e30", "seed=1000000000000000019884624838656: "),
        ("seed=99999999999999999999", "seed=99999999999999999999: "),
        ("seed=", "'seed=' is not key=value; "),
    ],
)
def test_invalid_value_is_one_line(refused, arg, start):
    assert refused(arg).startswith(start)


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_unwritable_runs_dir_names_the_key_to_set(tmp_path, capsys, below):
    (tmp_path / "file").write_text("not a folder")
    assert main(["train", *TINY, "run=x", f"runs_dir={tmp_path}/file{below}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"holdfast: Cannot write the run's folder {tmp_path}/file{below}/x: ")
    assert error.endswith("; set runs_dir=DIR.\n")
    assert (tmp_path / "file").read_text() == "not a folder"


def test_unknown_verb_suggests_one(capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "holdfast: There is no verb 'trian'; did you mean train?\n"
    assert main(["--versoin"]) == 2
    assert "did you mean --version?" in capsys.readouterr().err
    assert main(["zzz"]) == 2
    assert "choose from train, eval, check, export" in capsys.readouterr().err


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_the_verbs(args, capsys):
    assert main(args) == 0
    captured = capsys.readouterr()
    assert re.search(r"^ +train ", captured.out, re.MULTILINE)
    assert re.search(r"^ +check ", captured.out, re.MULTILINE)
    assert captured.err == ""


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"holdfast {__version__}\n"


@pytest.mark.parametrize("args", [["--help"], ["-h"], ["recall", "seed=1", "--help"]])
def test_train_help_lists_every_key(args, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", *args]) == 0
    lines = {line.split(" ")[0]: line for line in capsys.readouterr().out.splitlines() if line}
    for key, field in all_keys().items():
        assert key in lines
        assert field.description in lines[key]


@pytest.mark.parametrize(
    ("args", "world", "recipe"),
    [
        (["world=tmaze"], "tmaze", "tmaze"),
        (["world=gym:CartPole-v1"], "gym:CartPole-v1", "general"),
        (["cartpole"], "gym:CartPole-v1", "cartpole"),
    ],
)
def test_train_help_lists_the_keys_of_a_named_world(args, world, recipe, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "--help", *args]) == 0
    output = capsys.readouterr().out
    assert f" in {recipe} " in output
    for key, field in all_keys(world).items():
        assert re.search(rf"^{key} .* {re.escape(field.description)} *$", output, re.MULTILINE), key


def test_train_help_is_complete_on_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (header,) = (line for line in lines if line.startswith("key "))
    meanings, key = {}, ""
    for line in lines[lines.index(header) + 1 :]:
        if re.fullmatch(r"([\w.]+:)? *", line):
            # The line above a section.
            continue
        key = line.split(" ")[0] or key
        meanings.setdefault(key, []).append(line[header.index("meaning") :].strip())
    joined = {key: " ".join(lines) for key, lines in meanings.items()}
    assert joined == {key: field.description for key, field in all_keys().items()}


@pytest.mark.parametrize(("section", "count"), [("trainer.ppo", 15), ("trainer", 50), ("run", 11), ("memory", 1)])
def test_train_help_shows_one_section(section, count, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "--help", section]) == 0
    shown = {line.split(" ")[0] for line in capsys.readouterr().out.splitlines()} & set(all_keys())
    prefix = "" if section == "run" else f"{section}."
    assert shown == {key for key in all_keys() if key.startswith(prefix) and ("." in key or not prefix)} - (
        {key for key in all_keys() if "." in key} if section == "run" else set()
    )
    assert len(shown) >= count
    assert main(["train", "--help", "trainer.pop"]) == 2
    assert "did you mean trainer.ppo?" in capsys.readouterr().err


def test_help_version_and_typos_are_answered_without_importing_torch(tmp_path):
    code = (
        "import sys; from holdfast.cli import main\n"
        "codes = [main(words.split()) for words in ('--help', '--version', 'trian', 'train trainer.ppo.gama=1')]\n"
        "assert codes == [0, 0, 2, 2], codes\n"
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "did you mean trainer.ppo.gamma?" in result.stderr


@pytest.mark.parametrize("args", [[], ["fast", "--what"], ["fast", "other"]])
def test_check_usage_error_is_one_line(args, capsys):
    assert main(["check", *args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("holdfast: ")
    assert "holdfast check" in error
    assert error.count("\n") == 1


def test_check_of_a_missing_target_is_refused(capsys, tmp_path):
    assert main(["check", "fats"]) == 2
    assert "did you mean fast?" in capsys.readouterr().err
    assert main(["check", str(tmp_path)]) == 2
    assert "is a folder without config.json, so it is not a run." in capsys.readouterr().err


def test_check_of_a_run_without_checkpoint_is_refused(capsys, tmp_path):
    from holdfast.config.run import Config

    (tmp_path / "config.json").write_text(Config().model_dump_json())
    assert main(["check", str(tmp_path)]) == 2
    assert "holds no checkpoint; has the run saved one?" in capsys.readouterr().err


def run_with_config(folder, config):
    """Write a run whose only checkpoint has valid checksums and this config."""
    (folder / "config.json").write_text("{}")
    snapshot = TrainingSnapshot(1, 64, {}, {}, {}, None)
    return write_checkpoint(folder / "checkpoints", snapshot, {"config.json": config}, {})


@pytest.mark.parametrize("text", ["{", "", "[]", '{"seed": -1}'])
def test_invalid_config_json_is_one_line(capsys, tmp_path, text):
    saved = run_with_config(tmp_path, text.encode())
    assert main(["check", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"holdfast: {saved}/config.json: this is not a config of this version: ")
    assert error.count("\n") == 1


def test_undecodable_config_is_one_line(capsys, tmp_path):
    saved = run_with_config(tmp_path, b"\xff\xfe")
    assert main(["check", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"holdfast: {saved}/config.json: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["[red]x", "a[/b]x"])
def test_brackets_in_a_path_are_printed_as_they_are(capsys, tmp_path, name):
    assert main(["train", *TINY, "run=r", f"runs_dir={tmp_path}/{name}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"run {tmp_path}/{name}/r · ")
    assert lines[-2] == f"weights {tmp_path}/{name}/r/checkpoints/000001/model.safetensors"
    assert lines[-1] == f"results {tmp_path}/{name}/r"


def test_train_prints_results_and_exits_with_0(capsys, runs):
    assert main(["train", "recall", *TINY, "py_agent=fast", "run=good", f"runs_dir={runs}"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0].startswith(f"run {runs}/good · recall · 4 agents · 1 iteration of 64 steps")
    assert re.fullmatch(
        r"greedy return \d\.\d{3} · sampled return \d\.\d{3} · greedy with memory cleared every step \d\.\d{3}",
        lines[-4],
    )
    assert lines[-3] == "best possible return 1.000 · without memory 0.250"
    assert lines[-2] == f"weights {runs}/good/checkpoints/000001/model.safetensors"
    assert lines[-1] == f"results {runs}/good"
    assert Path(lines[-2].removeprefix("weights ")).exists()
    assert "\x1b" not in captured.out
    # Only differences from the recipe are printed.
    assert any(line.split() == ["world.agents", "64", "4"] for line in lines)
    assert not any(line.startswith("world.cues") for line in lines)


def test_workers_are_printed_and_uneven_agents_refused(capsys, runs):
    assert main(["train", *TINY, "trainer.num_workers=1", f"runs_dir={runs}"]) == 0
    assert "4 agents in 1 worker ·" in capsys.readouterr().out
    assert main(["train", *TINY, "trainer.num_workers=3", f"runs_dir={runs}"]) == 2
    assert "world.agents=4 cannot be split evenly" in capsys.readouterr().err


def test_console_script_answers_a_misspelt_key_in_one_line(tmp_path):
    holdfast = Path(sys.executable).with_name("holdfast")
    result = subprocess.run(
        [holdfast, "train", "trainer.batchsize=4096"], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "holdfast: There is no key 'trainer.batchsize'; did you mean trainer.batch_size?\n"
    assert not list(tmp_path.iterdir())


def test_tools_train_script_answers_a_bad_size_in_one_line(tmp_path):
    result = subprocess.run(
        [
            sys.executable,
            ROOT / "tools" / "train.py",
            "py_agent=fast",
            "trainer.minibatch_size=1000",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("holdfast: trainer.minibatch_size=1000 is not a multiple of")
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_broken_pipe_exits_with_141_without_traceback():
    command = [sys.executable, "-c", "import sys; from holdfast.cli import main; sys.exit(main(['--help']))"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(write_end)
    assert (result.returncode, result.stderr) == (141, "")
