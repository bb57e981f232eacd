"""`holdfast bench memory`, small."""

import io
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from holdfast.bench import Case, Measured, Outcome, processes
from holdfast.bench.processes import combined
from holdfast.bench.timing import Times
from holdfast.cli import bench, main
from holdfast.errors import ContractError
from holdfast.report.speed import speed_table

TINY = [
    "bench",
    "memory",
    "--device",
    "cpu",
    "--hidden",
    "8",
    "--batch",
    "4,6",
    "--steps",
    "5",
    "--rounds",
    "5",
]


@pytest.fixture(autouse=True)
def as_many_threads_after():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_it_tells_each_case_as_it_comes_and_all_in_a_table(capsys, tmp_path):
    file = tmp_path / "figures.json"
    assert main([*TINY, "--cell", "lstm,gru", "--starts", "0,0.5", "--json", str(file)]) == 0
    said = capsys.readouterr()
    first, *lines = said.err.splitlines()
    assert "8 cases" in first
    assert len(lines) == 8 * 3
    assert lines[0].startswith("lstm H=8 B=4 T=5 0 % starts: holdfast · float32 · ")
    assert all("ms (cpu)" in line and "of dense" in line and "errors" in line for line in lines)
    header, *rows = said.out.splitlines()
    assert header.split()[:5] == ["case", "rival", "in", "ms", "timed"]
    assert sum(" ✓" in row for row in rows) == 24
    assert "float16" not in said.out, "there is none on a CPU"
    told = json.loads(file.read_text())
    assert {"date", "device", "versions", "threads", "good", "cases"} == set(told)
    assert told["versions"]["torch"] == torch.__version__
    assert (told["good"], len(told["cases"]), told["threads"]) == (True, 8, 1)
    sizes = {"cell": "gru", "hidden": 8, "batch": 6, "steps": 5, "layers": 1, "starts": 0.5}
    case = told["cases"][-1]
    assert {key: case[key] for key in sizes} == sizes
    assert [result["rival"] for result in case["results"]] == ["holdfast", "dense", "step by step"]
    for result in case["results"]:
        assert 0 < result["ms_p10"] <= result["ms_median"] <= result["ms_p90"]
        assert 0 < result["gradient_error"] < 1e-5
        assert (result["inputs_of_1e4"], result["right"], result["rounds"]) == ("ok", True, 5)
        assert result["first_call_seconds"] > 0
    ours, dense, _ = case["results"]
    assert ours["of_dense"] == ours["ms_median"] / dense["ms_median"]


def test_what_is_wrong_shows_in_the_table_and_in_the_exit_code(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("holdfast.bench.memory.errors_of", lambda said, truth: (float("nan"), 0.5))
    file = tmp_path / "figures.json"
    assert main([*TINY, "--starts", "0", "--rivals", "holdfast", "--json", str(file)]) == 1
    rows = capsys.readouterr().out.splitlines()[1:3]
    assert all("nan" in row and "5e-01" in row and "✗" in row for row in rows)
    told = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert (told["good"], told["cases"][0]["results"][0]["output_error"]) == (False, "nan")


def test_who_is_left_out_is_told_once_for_each_reason(capsys, monkeypatch):
    def fails(case, numbers, precision):
        raise RuntimeError("no room" if case.batch < 8 else "no such size")

    monkeypatch.setitem(bench.RIVALS, "step by step", fails)
    words = ["--starts", "0", "--rivals", "dense,step by step", "--batch", "4,6,8"]
    assert main([*TINY, *words]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert told == [f"step by step float32 is left out: {why}" for why in ("no room", "no such size")]


def test_who_is_interrupted_has_the_figures_so_far(capsys, monkeypatch, tmp_path):
    real = bench.measure

    def second_fails(how, case):
        if case.batch == 6:
            raise KeyboardInterrupt
        return real(how, case)

    monkeypatch.setattr(bench, "measure", second_fails)
    file = tmp_path / "figures.json"
    assert main([*TINY, "--starts", "0", "--json", str(file)]) == 1
    assert [case["batch"] for case in json.loads(file.read_text())["cases"]] == [4]
    assert "B=4" in capsys.readouterr().err


def test_some_rivals_alone_and_quickly_the_first_of_the_usual_sizes(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(
        bench, "measure", lambda how, case: asked.append((how, case)) or pytest.fail("enough")
    )
    with pytest.raises(pytest.fail.Exception):
        main(["bench", "memory", "--quick", "--device", "cpu", "--rivals", "blank-steps,dense"])
    ((how, case),) = asked
    left_out, first = capsys.readouterr().err.splitlines()
    assert left_out == "blank steps is left out: on a CPU it is what holdfast is."
    assert first.endswith("1 case")
    assert (list(how.rivals), how.rounds) == (["blank steps", "dense"], 5)
    assert (case.cell, case.hidden, case.batch, case.steps, case.starts) == ("lstm", 128, 32, 64, 0.02)


def test_quickly_only_the_first_of_each_list_is_measured(monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "measure", lambda how, case: asked.append(case) or Outcome(case, [], []))
    lists = [
        "--cell",
        "gru,lstm",
        "--hidden",
        "8,16",
        "--batch",
        "4,6",
        "--steps",
        "5,7",
        "--starts",
        "0.5,0",
    ]
    main(["bench", "memory", "--device", "cpu", "--quick", *lists])
    assert asked == [Case("gru", 8, 4, 5, 1, 0.5)]


def test_help_names_what_is_usual_on_either_device(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "(128; on a GPU 128,256,512)" in told
    assert "(32,64,256,1024; on a GPU 256,1024,4096," in told
    assert "(0,0.02,0.1; on a GPU 0.02)" in told
    assert "replaces that list alone" in told
    assert "on a CPU there is float32 alone" in told
    assert "after every case or process" in told


@pytest.mark.parametrize(
    ("on_gpu", "width"), [(False, 80), (False, 100), (True, 80), (True, 120), (True, 200)]
)
def test_a_narrow_table_keeps_ratios_errors_and_marks(on_gpu, width):
    case = Case("lstm", 128, 1024, starts=0.02)
    one = Measured(
        name="step by step",
        precision="bfloat16",
        ours=False,
        clears=True,
        how="graph",
        why_eager="",
        times=Times([1015.4, 1020.0, 1123.0]),
        of_dense=1.25,
        faster=1.75 if on_gpu else None,
        output_error=3e-4,
        gradient_error=0.5,
        dense_gradient_error=0.0,
        at_huge="ok",
        first_seconds=7.5,
    )
    out = Console(width=width, file=io.StringIO(), emoji=False)
    out.print(speed_table([Outcome(case, [one], [])], width))
    said = out.file.getvalue()
    header = said.splitlines()[0]
    assert all(len(line.rstrip()) <= width for line in said.splitlines())
    assert "…" not in said
    for told in ("step by step", "bfloat16", "1,020", "1.25", "3e-04", "5e-01", "✗", "B=1024"):
        assert told in said
    assert ("x float16" in header) is (on_gpu and width > 80)
    assert ("first" in header and "1e4" in header and "timed" in header) is (width == 200)
    assert ("2 % starts" in said and "1,020 [1,015 - 1,123]" in said) or width < 200


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "holdfast bench: say what to measure; there is memory: holdfast bench memory."),
        (["--quick"], "holdfast bench: say what to measure"),
        (
            ["memory", "--device", "cpu", "--rivals", "triton,torchrl"],
            "--rivals triton,torchrl: none is measured here. triton: its kernels run on a GPU.",
        ),
        (
            ["memory", "--device", "cpu", "--rivals", "blank-steps", "--processes", "2"],
            "none is measured here",
        ),
        (["memori"], "holdfast bench memori: did you mean memory?"),
        (
            ["memory", "--cell", "lstn"],
            "argument --cell: lstn: did you mean lstm?; see holdfast bench --help.",
        ),
        (["memory", "--rivals", "dens"], "did you mean dense?"),
        (["memory", "--hidden", "0"], "0: give a whole number above 0"),
        (["memory", "--batch", "8,x"], "x: give a whole number above 0"),
        (["memory", "--starts", "2"], "2: give a share from 0 to 1, such as 0.02"),
        (["memory", "--starts", "few"], "few: give a share from 0 to 1"),
        (["memory", "--precision", "float8"], "did you mean float"),
        (["memory", "--device", "cpu", "--precision", "bfloat16"], "on a CPU float32 is measured"),
        (["memory", "--json", "nowhere/x.json"], "nowhere/x.json cannot be written"),
        (["memory", "--nothing"], "unrecognized arguments: --nothing"),
    ],
)
def test_a_wrong_option_is_one_line(capsys, words, told):
    assert main(["bench", *words]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


def test_fresh_processes_measure_the_same_and_are_put_side_by_side(capfd, tmp_path):
    file = tmp_path / "figures.json"
    words = [*TINY, "--starts", "0.5", "--rivals", "holdfast,dense", "--processes", "2"]
    assert main([*words, "--json", str(file)]) == 0
    said = capfd.readouterr()
    lines = said.err.splitlines()
    assert [line for line in lines if line.startswith("process")] == ["process 1 of 2", "process 2 of 2"]
    assert sum("ms (cpu)" in line for line in lines) == 8
    assert len(said.out.splitlines()) == 1 + 4
    assert said.out.count("✓") == 4
    told = json.loads(file.read_text())
    assert (len(told["runs"]), len(told["processes"])) == (2, 4)
    assert {case["results"][0]["rounds"] for run in told["runs"] for case in run["cases"]} == {5}
    assert {row["processes"] for row in told["processes"]} == {2}


WRITES = "import json, sys; open(sys.argv[-1], 'w').write({text!r}); sys.exit({code})"
ONE_CASE, NO_CASE = json.dumps({"good": True, "cases": [{}]}), json.dumps({"good": True, "cases": []})


@pytest.mark.parametrize(
    ("start", "code", "told"),
    [
        ("raise SystemExit(3)", 1, "ended with 3 after 0 of 1 cases"),
        ("import os; os.kill(os.getpid(), 9)", 1, "ended with -9 after 0 of 1 cases"),
        (WRITES.format(text=ONE_CASE, code=3), 1, "ended with 3 after 1 of 1 cases"),
        (WRITES.format(text=NO_CASE, code=0), 1, "ended with 0 after 0 of 1 cases"),
        (WRITES.format(text=ONE_CASE[:9], code=1), 1, "ended with 1 after 0 of 1 cases"),
        (WRITES.format(text=NO_CASE, code=2), 2, "ended with 2 after 0 of 1 cases"),
    ],
)
def test_a_process_that_does_not_measure_all_is_told(capsys, monkeypatch, start, code, told):
    monkeypatch.setattr(processes, "START", start)
    assert main([*TINY, "--batch", "4", "--starts", "0", "--processes", "2"]) == code
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith(f"holdfast: Process 1 of 2 {told}; it is not counted.")
    assert said.out == ""


def test_figures_of_several_processes_are_written_after_each(monkeypatch, tmp_path):
    one = {"good": True, "cases": []}

    def second_dies(words, number, cases, say):
        yield one
        raise ContractError("it died")

    monkeypatch.setattr(bench, "in_processes", second_dies)
    file = tmp_path / "figures.json"
    assert main([*TINY, "--processes", "2", "--json", str(file)]) == 1
    assert json.loads(file.read_text())["runs"] == [one]


def test_stopping_several_processes_is_told_once():
    words = [*TINY, "--processes", "2", "--rounds", "1000000"]
    start = "import sys; from holdfast.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as parent:
        assert parent.stderr is not None
        assert parent.stderr.readline() == "process 1 of 2\n"
        assert "torch" in parent.stderr.readline(), "the process it started measures"
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stderr.read() == "holdfast: stopped.\n"
    assert parent.returncode == 1


def test_who_was_named_and_is_not_to_be_had_is_a_wrong_call(capsys, monkeypatch):
    def absent(case, numbers, precision):
        raise ContractError("it is not to be had here")

    monkeypatch.setitem(bench.RIVALS, "step by step", absent)
    assert main([*TINY, "--rivals", "step-by-step"]) == 2
    said = capsys.readouterr()
    *_, why, last = said.err.splitlines()
    assert why == "step by step float32 is left out: it is not to be had here"
    assert last.startswith("holdfast: Nothing could be measured, for the reasons above")
    assert said.out == ""
    monkeypatch.setitem(bench.RIVALS, "holdfast", absent)
    assert main([*TINY, "--rivals", "holdfast"]) == 1, "ours must run"


def test_several_processes_are_told_by_median_least_and_most():
    def run(ms, ratio, right):
        result = {
            "rival": "dense",
            "precision": "float32",
            "ms_median": ms,
            "of_dense": ratio,
            "right": right,
        }
        sizes = {"cell": "gru", "hidden": 8, "batch": 4, "steps": 5, "layers": 1, "starts": 0.0}
        return {"cases": [{**sizes, "results": [result]}]}

    (row,) = combined([run(3.0, None, True), run(1.0, None, False), run(7.0, None, True)])
    assert (row["ms_median"], row["ms_median_least"], row["ms_median_most"]) == (3.0, 1.0, 7.0)
    assert (row["of_dense"], row["right"], row["processes"], row["batch"]) == (None, False, 3, 4)


def test_help_names_the_verb(capsys):
    assert main(["--help"]) == 0
    assert "bench memory" in capsys.readouterr().out
