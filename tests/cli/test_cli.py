import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast import __version__
from holdfast.cli import main
from holdfast.config import keys_of

ROOT = Path(__file__).parents[2]
TINY = [
    "world.agents=4",
    "trainer.bptt_horizon=8",
    "trainer.batch_size=64",
    "trainer.minibatch_size=32",
    "trainer.total_timesteps=64",
    "trainer.eval_episodes=4",
    "policy.hidden_size=8",
    "policy.num_layers=1",
]


@pytest.fixture
def runs(tmp_path):
    return tmp_path / "runs"


@pytest.fixture
def refused(capsys, runs):
    """Give a wrong call to `holdfast train`, and return the one line it is answered with."""

    def give(*words):
        assert main(["train", f"runs_dir={runs}", *words]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("holdfast: ")
        assert said.err.endswith(".\n") or said.err.endswith("?\n")
        assert said.err.count("\n") == 1
        assert not runs.exists()
        return said.err.removeprefix("holdfast: ").rstrip()

    return give


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("trainer.total_timestep=5000", "trainer.total_timesteps"),
        ("trainer.minibach_size=512", "trainer.minibatch_size"),
        ("sed=1", "seed"),
        ("world.dealy=8", "world.delay"),
        ("batch_size=4096", "trainer.batch_size"),
    ],
)
def test_a_misspelt_key_is_told_the_right_one(refused, word, key):
    wrong = word.partition("=")[0]
    assert refused(word) == f"There is no key {wrong!r}; did you mean {key}?"


def test_a_minibatch_of_a_thousand_is_told_what_to_type(refused):
    line = refused("trainer.minibatch_size=1000")
    assert line == (
        "trainer.minibatch_size=1000 is not a multiple of trainer.bptt_horizon=64; "
        "try trainer.minibatch_size=256 or 512 or 1024."
    )


def test_a_minibatch_that_was_proposed_can_be_trained_with(runs, capsys):
    words = [*TINY[:3], "trainer.minibatch_size=33"]
    assert main(["train", f"runs_dir={runs}", *words]) == 2
    line = capsys.readouterr().err
    assert (
        "trainer.minibatch_size=33 is not a multiple of trainer.bptt_horizon=8; "
        "try trainer.minibatch_size=8 or 16 or 32." in line
    )
    assert main(["train", f"runs_dir={runs}", *TINY]) == 0


def test_an_unknown_policy_is_told_the_one_that_was_meant(refused):
    assert "did you mean fast?" in refused("policy=fats")
    assert "there is fast" in refused("py_agent=nothing_like_it")


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("no_such_package.module:Class", "No module named 'no_such_package'; is it on the Python path?"),
        ("holdfast.policies:Zzz", "holdfast.policies has no class Zzz"),
        ("holdfast.policies:make_policy", "make_policy is not a subclass of holdfast.LSTMWrapper"),
        ("torch.nn:Linear", "Linear is not a subclass of holdfast.LSTMWrapper"),
        ("holdfast:LSTMWrapper", "LSTMWrapper is a base to build on; give a class of your own"),
        ("holdfast:RecurrentPolicy", "RecurrentPolicy is a base to build on; give a class of your own"),
        (":Class", "write package.module:Class"),
        (".x:Class", "write package.module:Class"),
        ("x:", "write package.module:Class"),
    ],
)
def test_a_policy_class_that_cannot_be_used_is_told_why(refused, policy, reason):
    assert (
        refused(f"policy={policy}")
        == f"policy={policy}: {reason.rstrip('?')}{'?' if reason[-1] == '?' else '.'}"
    )


def test_an_unknown_world_is_refused_with_those_there_are(refused):
    told = refused("world=chess")
    assert told.startswith("world.name=chess: there is no such world; there is recall, repeat_first, n_back")


def test_an_unknown_recipe_is_told_the_one_that_was_meant(refused):
    assert refused("recal") == "There is no recipe 'recal'; did you mean recall?"


@pytest.mark.parametrize("word", ["--verbose", "--seed=1", "-v"])
def test_an_unknown_option_is_told_how_keys_look(refused, word):
    assert refused(word) == f"There is no option {word!r}; keys are given as key=value, see --help."


def test_a_key_given_twice_is_refused(refused):
    assert refused("seed=1", "seed=2") == "seed is given twice, as 1 and as 2; which one is meant?"


def test_an_empty_word_is_not_a_recipe(refused):
    assert refused("", *TINY) == "'' is not key=value; write for example seed=1."


def test_a_batch_that_cannot_be_is_told_the_arithmetic(refused):
    line = refused("world.agents=48")
    assert "world.agents * trainer.bptt_horizon = 48 * 64 = 3072" in line
    assert line.endswith("try trainer.batch_size=3072 or 6144 or 9216.")
    assert all(size % 512 == size % (48 * 64) == 0 for size in (3072, 6144, 9216))


def test_a_tracker_whose_package_is_missing_names_its_extra(refused, monkeypatch):
    monkeypatch.setattr("holdfast.report.trackers.find_spec", lambda name: None)
    assert "pip install 'holdfast[wandb]'" in refused("wandb=offline")
    assert "pip install 'holdfast[track]'" in refused("tensorboard=on")


def test_a_graph_that_is_not_there_is_told(refused):
    line = refused("agent=fats")
    assert (
        line == "There is no component graph 'fats'; did you mean fast? Your own goes by its file, NAME.yaml."
    )
    assert "No such file" in refused("agent=configs/agent/mine.yaml")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told(refused):
    line = refused("device=cuda")
    assert line == "device=cuda, but torch finds no GPU here; use device=cpu or device=auto."


@pytest.mark.parametrize("name", ["a/b", "..", "/tmp/x", "-x", "."])
def test_a_run_name_that_is_a_path_is_refused(refused, name):
    assert refused(f"run={name}").startswith(f"run={name}: ")


@pytest.mark.parametrize(
    ("word", "start"),
    [
        ("world.delay=-1", "world.delay=-1: give a number from 0 to 1000000, or a range such as 4..24."),
        ("world.delay=9..2", "world.delay=9..2: give a number from 0 to 1000000, or a range such as 4..24."),
        ("world.truncate=maybe", "world.truncate=maybe: "),
        ("trainer.ppo.gamma=high", "trainer.ppo.gamma=high: "),
        ("trainer.total_timesteps=many", "trainer.total_timesteps=many: give a whole number such as"),
        ("trainer.optimizer.learning_rate=inf", "trainer.optimizer.learning_rate=inf: "),
        ("seed=-1", "seed=-1: "),
        ("seed=1e30", "seed=1000000000000000019884624838656: "),
        ("seed=99999999999999999999", "seed=99999999999999999999: "),
        ("seed=", "'seed=' is not key=value; "),
    ],
)
def test_a_bad_value_is_one_line(refused, word, start):
    assert refused(word).startswith(start)


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_folder_that_cannot_be_written_is_told_with_the_key_to_set(tmp_path, capsys, below):
    (tmp_path / "file").write_text("not a folder")
    assert main(["train", *TINY, "run=x", f"runs_dir={tmp_path}/file{below}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"holdfast: Cannot write the run's folder {tmp_path}/file{below}/x: ")
    assert said.endswith("; set runs_dir=DIR.\n")
    assert (tmp_path / "file").read_text() == "not a folder"


def test_an_unknown_verb_is_told_the_one_that_was_meant(capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "holdfast: There is no verb 'trian'; did you mean train?\n"
    assert main(["fly"]) == 2
    assert "there is train, eval, check, export" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_the_verbs(words, capsys):
    assert main(words) == 0
    said = capsys.readouterr()
    assert re.search(r"^ +train ", said.out, re.MULTILINE)
    assert re.search(r"^ +check ", said.out, re.MULTILINE)
    assert said.err == ""


def test_the_version_is_told(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"holdfast {__version__}\n"


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["recall", "seed=1", "--help"]])
def test_help_for_train_lists_every_key_with_its_meaning(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", *words]) == 0
    lines = {line.split(" ")[0]: line for line in capsys.readouterr().out.splitlines() if line}
    for key, field in keys_of().items():
        assert key in lines
        assert field.description in lines[key]


@pytest.mark.parametrize(
    ("words", "world", "recipe"),
    [
        (["world=tmaze"], "tmaze", "tmaze"),
        (["world=gym:CartPole-v1"], "gym:CartPole-v1", "general"),
        (["cartpole"], "gym:CartPole-v1", "cartpole"),
    ],
)
def test_help_for_train_tells_the_keys_of_a_world_that_is_named(words, world, recipe, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "--help", *words]) == 0
    told = capsys.readouterr().out
    assert f" in {recipe} " in told
    for key, field in keys_of(world).items():
        assert re.search(rf"^{key} .* {re.escape(field.description)} *$", told, re.MULTILINE), key


def test_help_for_train_leaves_nothing_out_on_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (header,) = (line for line in lines if line.startswith("key "))
    meanings, key = {}, ""
    for line in lines[lines.index(header) + 1 :]:
        key = line.split(" ")[0] or key
        meanings.setdefault(key, []).append(line[header.index("meaning") :].strip())
    told = {key: " ".join(parts) for key, parts in meanings.items()}
    assert told == {key: field.description for key, field in keys_of().items()}


@pytest.mark.parametrize("words", [[], ["fast", "--what"], ["fast", "other"]])
def test_a_wrong_call_of_check_is_one_line(words, capsys):
    assert main(["check", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("holdfast: ")
    assert "holdfast check" in said
    assert said.count("\n") == 1


def test_a_target_that_is_not_there_is_told(capsys, tmp_path):
    assert main(["check", "fats"]) == 2
    assert "did you mean fast?" in capsys.readouterr().err
    assert main(["check", str(tmp_path)]) == 2
    assert "is a folder without config.json, so it is no run." in capsys.readouterr().err


def test_a_run_without_weights_is_told(capsys, tmp_path):
    from holdfast.config import Config

    (tmp_path / "config.json").write_text(Config().model_dump_json())
    assert main(["check", str(tmp_path)]) == 2
    assert "holds no checkpoint; has the run saved one?" in capsys.readouterr().err


def old_checkpoint(folder, config):
    """One without checksums, so that only its config can be found broken."""
    (folder / "config.json").write_text("{}")
    saved = folder / "checkpoints" / "000001"
    saved.mkdir(parents=True)
    (saved / "config.json").write_bytes(config)
    (saved / "model.safetensors").write_bytes(b"")
    return saved


@pytest.mark.parametrize("text", ["{", "", "[]", '{"seed": -1}'])
def test_a_run_whose_config_is_broken_is_told_in_one_line(capsys, tmp_path, text):
    saved = old_checkpoint(tmp_path, text.encode())
    assert main(["check", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"holdfast: {saved}/config.json: this is not a config of this version: ")
    assert said.count("\n") == 1


def test_a_run_whose_config_is_no_text_is_told_in_one_line(capsys, tmp_path):
    saved = old_checkpoint(tmp_path, b"\xff\xfe")
    assert main(["check", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"holdfast: {saved}/config.json: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", ["[red]x", "a[/b]x"])
def test_brackets_in_a_path_are_brackets(capsys, tmp_path, name):
    assert main(["train", *TINY, "run=r", f"runs_dir={tmp_path}/{name}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"run {tmp_path}/{name}/r · ")
    assert lines[-2] == f"weights {tmp_path}/{name}/r/checkpoints/000001/model.safetensors"
    assert lines[-1] == f"results {tmp_path}/{name}/r"


def test_a_good_call_trains_and_says_where_the_results_are(capsys, runs):
    assert main(["train", "recall", *TINY, "py_agent=fast", "run=good", f"runs_dir={runs}"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    assert lines[0].startswith(f"run {runs}/good · recall · 4 agents · 1 iteration of 64 steps")
    assert re.fullmatch(r"greedy return \d\.\d{3} · with its memory cleared every step \d\.\d{3}", lines[-4])
    assert lines[-3] == "the best there is 1.000 · the best without memory 0.250"
    assert lines[-2] == f"weights {runs}/good/checkpoints/000001/model.safetensors"
    assert lines[-1] == f"results {runs}/good"
    assert Path(lines[-2].removeprefix("weights ")).exists()
    assert "\x1b" not in said.out
    # What differs from the recipe is shown, and nothing else.
    assert any(line.split() == ["world.agents", "64", "4"] for line in lines)
    assert not any(line.startswith("world.cues") for line in lines)


def test_workers_are_told_of_and_agents_that_cannot_be_shared_out_are_refused(capsys, runs):
    assert main(["train", *TINY, "trainer.num_workers=1", f"runs_dir={runs}"]) == 0
    assert "4 agents in 1 worker ·" in capsys.readouterr().out
    assert main(["train", *TINY, "trainer.num_workers=3", f"runs_dir={runs}"]) == 2
    assert "world.agents=4 cannot be shared out evenly" in capsys.readouterr().err


def test_a_real_command_line_answers_a_misspelt_key_in_one_line(tmp_path):
    holdfast = Path(sys.executable).with_name("holdfast")
    told = subprocess.run(
        [holdfast, "train", "trainer.batchsize=4096"], capture_output=True, text=True, cwd=tmp_path
    )
    assert told.returncode == 2
    assert told.stdout == ""
    assert told.stderr == "holdfast: There is no key 'trainer.batchsize'; did you mean trainer.batch_size?\n"
    assert not list(tmp_path.iterdir())


def test_the_seeds_command_answers_a_bad_size_in_one_line(tmp_path):
    told = subprocess.run(
        [sys.executable, ROOT / "tools" / "train.py", "py_agent=fast", "trainer.minibatch_size=1000"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert told.returncode == 2
    assert "Traceback" not in told.stderr
    assert told.stderr.startswith("holdfast: trainer.minibatch_size=1000 is not a multiple of")
    assert told.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_reader_that_goes_away_is_no_fault_and_hears_no_traceback():
    command = [sys.executable, "-c", "import sys; from holdfast.cli import main; sys.exit(main(['--help']))"]
    reads, writes = os.pipe()
    os.close(reads)
    ended = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (141, "")
