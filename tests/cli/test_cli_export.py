import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from helpers.small_runs import LEAST
from holdfast.cli import main

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.usefixtures("annotations_asleep")
EXAMPLE = Path(__file__).parents[2] / "examples" / "play_onnx.py"
TINY = {**LEAST, "policy": "example"}
SIGNATURE = """in  obs          [batch, 4, 3] uint8
in  h_in         [batch, 2, 8] float32
in  c_in         [batch, 2, 8] float32
in  first        [batch] bool
out action       [batch] int64
out logits       [batch, 4] float32
out value        [batch] float32
out h_out        [batch, 2, 8] float32
out c_out        [batch, 2, 8] float32
largest difference from the policy in 200 steps with restarts: in its world """


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return str(holdfast.train("recall", {**TINY, "runs_dir": str(tmp_path_factory.mktemp("runs"))}).folder)


@pytest.fixture(scope="module")
def file(run, tmp_path_factory):
    """Exported in a process of its own: exporters print their warnings once, when first used."""
    out = tmp_path_factory.mktemp("exported") / "it.onnx"
    words = ["export", run, "--to", "onnx", "--out", str(out)]
    code = f"import sys; from holdfast.cli import main; sys.exit(main({words}))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.startswith(SIGNATURE)
    assert process.stdout.endswith(f"(at most 1e-05) ✓\nonnx {out}\n")
    return out


def play_onnx(*args):
    code = (
        "import runpy, sys\n"
        "sys.modules['torch'] = sys.modules['holdfast'] = sys.modules['tensordict'] = None\n"
        f"sys.argv = ['play_onnx.py', {', '.join(map(repr, map(str, args)))}]\n"
        f"runpy.run_path({str(EXAMPLE)!r})\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_play_onnx_example_needs_neither_torch_nor_holdfast(file):
    process = play_onnx(file)
    assert process.returncode == 0, process.stderr
    assert len(process.stdout.splitlines()) == 20
    assert len(EXAMPLE.read_text().splitlines()) <= 25


def test_play_onnx_example_without_a_file_says_how_to_call_it():
    process = play_onnx()
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.startswith("usage: python play_onnx.py policy.onnx; holdfast export runs/NAME --to onnx")
    assert process.stderr.count("\n") == 1


BOX = {"world": "gym:Pendulum-v1", "world.options": {"max_episode_steps": 5}}


@pytest.mark.parametrize("keys", [{"world.previous_action": True}, {"memory.clear_on": "trial"}, BOX])
def test_play_onnx_example_reads_every_signature(tmp_path, capfd, keys):
    """A Dict observation is several inputs; `clear_on=trial` adds an input; actions of a Box are numbers."""
    base = {**LEAST, "policy": "fast", "world": "gym:CartPole-v1", "runs_dir": str(tmp_path)}
    run = holdfast.train(None, {**base, **keys})
    assert main(["export", str(run.folder), "--to", "onnx"]) == 0
    capfd.readouterr()
    process = play_onnx(run.folder / "policy.onnx")
    assert process.returncode == 0, process.stderr
    # Four actions of one number each, or four choices.
    assert process.stdout.count("]") == (20 * 6 if keys is BOX else 20 * 2)


def test_export_torch_into_the_run(run, capfd):
    assert main(["export", run, "--to", "torch"]) == 0
    out, errors = capfd.readouterr()
    assert out.startswith(SIGNATURE)
    assert out.endswith(f"(at most 1e-05) ✓\ntorch {run}/policy.pt2\n")
    assert errors == ""
    assert (Path(run) / "policy.pt2").stat().st_size > 1000


def test_differing_file_is_not_written(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "it.pt2").write_text("the old one")
    monkeypatch.setattr("holdfast.play.checked_export.measure", lambda step, file: {1: 1e-7, 3: 2e-5})
    assert main(["export", run, "--to", "torch", "--out", str(tmp_path / "it.pt2")]) == 1
    out = capsys.readouterr().out
    assert "batch 1: 1.0e-07, batch 3: 2.0e-05 (at most 1e-05) ✗" in out
    assert "it.pt2 was not written" in out
    assert [file.read_text() for file in tmp_path.iterdir()] == ["the old one"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN"], "--to; see holdfast export --help"),
        (["RUN", "--to", "tflite"], "invalid choice: 'tflite'"),
        (["--to", "onnx"], "required: TARGET"),
        (["nowhere", "--to", "onnx"], "nowhere is not a folder"),
        (["RUN", "--to", "onnx", "--out", "x.pt2"], "ends in .onnx; try x.onnx."),
        (["RUN", "--to", "onnx", "--out", "nowhere/x.onnx"], "there is no folder nowhere"),
        (["RUN", "--to", "onnx", "--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_invalid_export_arguments_are_one_line(run, capsys, words, message):
    assert main(["export", *[run if word == "RUN" else word for word in words]]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("holdfast: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_export_of_a_hand_written_policy_is_one_line(tmp_path, capsys):
    keys = {
        "policy": "helpers.manual_policy:NewLSTMPolicy",
        "world": "gym:CartPole-v1",
        "runs_dir": str(tmp_path),
    }
    run = holdfast.train(None, {**TINY, **keys})
    capsys.readouterr()
    assert main(["export", str(run.folder), "--to", "torch"]) == 2
    assert capsys.readouterr().err.startswith("holdfast: NewLSTMPolicy is written by hand around self.lstm")


def test_export_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["export", "--help"])
    assert ended.value.code == 0
    assert "--to {onnx,torch}" in capsys.readouterr().out


def test_export_from_the_hub_needs_trust_code(tmp_path, capsys):
    pytest.importorskip("huggingface_hub")
    keys = {
        "policy": "helpers.manual_policy:NewLSTMPolicy",
        "world": "gym:CartPole-v1",
        "runs_dir": str(tmp_path),
    }
    words = ["export", f"hub:{holdfast.train(None, {**TINY, **keys}).checkpoint}", "--to", "torch"]
    capsys.readouterr()
    assert main(words) == 2
    assert "names code that would be imported and run: helpers.manual_policy:NewLSTMPolicy" in capsys.readouterr().err
    assert main([*words, "--trust-code"]) == 2
    assert capsys.readouterr().err.startswith("holdfast: NewLSTMPolicy is written by hand around self.lstm")
