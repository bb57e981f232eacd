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

from holdfast.bench import processes
from holdfast.bench.cases import Case
from holdfast.bench.memory import CaseResult, ImplementationResult
from holdfast.bench.processes import combined
from holdfast.bench.report import speed_table
from holdfast.bench.timing import Times
from holdfast.cli import bench, main
from holdfast.errors import ContractError

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


def test_bench_prints_each_case_and_a_table(capsys, tmp_path):
    file = tmp_path / "figures.json"
    assert main([*TINY, "--cell", "lstm,gru", "--starts", "0,0.5", "--json", str(file)]) == 0
    captured = capsys.readouterr()
    first, *lines = captured.err.splitlines()
    assert "8 cases" in first
    assert len(lines) == 8 * 3
    assert lines[0].startswith("lstm H=8 B=4 T=5 0 % starts: holdfast · float32 · ")
    assert all("ms (cpu)" in line and "of dense" in line and "errors" in line for line in lines)
    header, *rows = captured.out.splitlines()
    assert header.split()[:5] == ["case", "implementation", "in", "ms", "timed"]
    assert sum(" ✓" in row for row in rows) == 24
    assert "float16" not in captured.out, "there is none on a CPU"
    text = json.loads(file.read_text())
    assert {"date", "device", "versions", "threads", "good", "cases"} == set(text)
    assert text["versions"]["torch"] == torch.__version__
    assert (text["good"], len(text["cases"]), text["threads"]) == (True, 8, 1)
    sizes = {"cell": "gru", "hidden": 8, "batch": 6, "steps": 5, "layers": 1, "starts": 0.5}
    case = text["cases"][-1]
    assert {key: case[key] for key in sizes} == sizes
    assert [result["implementation"] for result in case["results"]] == ["holdfast", "dense", "step by step"]
    for result in case["results"]:
        assert 0 < result["ms_p10"] <= result["ms_median"] <= result["ms_p90"]
        assert 0 < result["gradient_error"] < 1e-5
        assert (result["inputs_of_1e4"], result["right"], result["rounds"]) == ("ok", True, 5)
        assert result["first_call_seconds"] > 0
    ours, dense, _ = case["results"]
    assert ours["of_dense"] == ours["ms_median"] / dense["ms_median"]


def test_wrong_result_is_marked_and_exits_with_1(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("holdfast.bench.memory.errors_of", lambda outputs, truth: (float("nan"), 0.5))
    file = tmp_path / "figures.json"
    assert main([*TINY, "--starts", "0", "--implementations", "holdfast", "--json", str(file)]) == 1
    rows = capsys.readouterr().out.splitlines()[1:3]
    assert all("nan" in row and "5e-01" in row and "✗" in row for row in rows)
    text = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert (text["good"], text["cases"][0]["results"][0]["output_error"]) == (False, "nan")


def test_skipped_implementations_are_logged_once_per_reason(capsys, monkeypatch):
    def fails(case, inputs, precision):
        raise RuntimeError("no room" if case.batch < 8 else "no such size")

    monkeypatch.setitem(bench.IMPLEMENTATIONS, "step by step", fails)
    args = ["--starts", "0", "--implementations", "dense,step by step", "--batch", "4,6,8"]
    assert main([*TINY, *args]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
    assert lines == [f"step by step float32 is skipped: {why}" for why in ("no room", "no such size")]


def test_interrupted_bench_has_written_its_results(capsys, monkeypatch, tmp_path):
    real = bench.measure

    def second_fails(settings, case):
        if case.batch == 6:
            raise KeyboardInterrupt
        return real(settings, case)

    monkeypatch.setattr(bench, "measure", second_fails)
    file = tmp_path / "figures.json"
    assert main([*TINY, "--starts", "0", "--json", str(file)]) == 1
    assert [case["batch"] for case in json.loads(file.read_text())["cases"]] == [4]
    assert "B=4" in capsys.readouterr().err


def test_quick_measures_the_first_default_size(capsys, monkeypatch):
    measured = []
    monkeypatch.setattr(
        bench, "measure", lambda settings, case: measured.append((settings, case)) or pytest.fail("enough")
    )
    with pytest.raises(pytest.fail.Exception):
        main(["bench", "memory", "--quick", "--device", "cpu", "--implementations", "reset-slots,dense"])
    ((settings, case),) = measured
    skipped, first = capsys.readouterr().err.splitlines()
    assert skipped == "reset slots is skipped: on a CPU it is the same as holdfast."
    assert first.endswith("1 case")
    assert (list(settings.implementations), settings.rounds) == (["reset slots", "dense"], 5)
    assert (case.cell, case.hidden, case.batch, case.steps, case.starts) == ("lstm", 128, 32, 64, 0.02)


def test_quick_measures_the_first_of_each_list(monkeypatch):
    measured = []
    monkeypatch.setattr(bench, "measure", lambda settings, case: measured.append(case) or CaseResult(case, [], []))
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
    assert measured == [Case("gru", 8, 4, 5, 1, 0.5)]


def test_help_names_the_defaults_of_both_devices(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(128; on a GPU 128,256,512)" in text
    assert "(32,64,256,1024; on a GPU 256,1024,4096," in text
    assert "(0,0.02,0.1; on a GPU 0.02)" in text
    assert "replaces that default" in text
    assert "a CPU runs float32 only" in text
    assert "after every case or process" in text


@pytest.mark.parametrize(("on_gpu", "width"), [(False, 80), (False, 100), (True, 80), (True, 120), (True, 200)])
def test_narrow_table_keeps_ratios_errors_and_marks(on_gpu, width):
    case = Case("lstm", 128, 1024, starts=0.02)
    one = ImplementationResult(
        name="step by step",
        precision="bfloat16",
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
    out.print(speed_table([CaseResult(case, [one], [])], width))
    text = out.file.getvalue()
    header = text.splitlines()[0]
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    assert "…" not in text
    for cell in ("step by step", "bfloat16", "1,020", "1.25", "3e-04", "5e-01", "✗", "B=1024"):
        assert cell in text
    assert ("x float16" in header) is (on_gpu and width > 80)
    assert ("first" in header and "1e4" in header and "timed" in header) is (width == 200)
    assert ("2 % starts" in text and "1,020 [1,015 - 1,123]" in text) or width < 200


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "holdfast bench: nothing to measure is named; type: holdfast bench memory, or train, rollout or update."),
        (["--quick"], "holdfast bench: nothing to measure is named"),
        (
            ["memory", "--device", "cpu", "--implementations", "triton,torchrl"],
            "--implementations triton,torchrl: none runs on a CPU. triton: its kernels run on a GPU.",
        ),
        (
            ["memory", "--device", "cpu", "--implementations", "reset-slots", "--processes", "2"],
            "none runs on a CPU",
        ),
        (["memori"], "argument memory: memori: did you mean memory?; see holdfast bench --help."),
        (
            ["memory", "--cell", "lstn"],
            "argument --cell: lstn: did you mean lstm?; see holdfast bench --help.",
        ),
        (["memory", "--implementations", "dens"], "did you mean dense?"),
        (["memory", "--hidden", "0"], "0: give an integer above 0"),
        (["memory", "--batch", "8,x"], "x: give an integer above 0"),
        (["memory", "--starts", "2"], "2: give a fraction from 0 to 1, such as 0.02"),
        (["memory", "--starts", "few"], "few: give a fraction from 0 to 1"),
        (["memory", "--precision", "float8"], "did you mean float"),
        (["memory", "--device", "cpu", "--precision", "bfloat16"], "a CPU measures float32 only"),
        (["memory", "--json", "nowhere/x.json"], "nowhere/x.json cannot be written"),
        (["memory", "--nothing"], "unrecognized arguments: --nothing"),
    ],
)
def test_wrong_option_is_a_one_line_error(capsys, args, text):
    assert main(["bench", *args]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


@pytest.mark.slow
def test_processes_option_combines_fresh_processes(capfd, tmp_path):
    file = tmp_path / "figures.json"
    args = [*TINY, "--starts", "0.5", "--implementations", "holdfast,dense", "--processes", "2"]
    assert main([*args, "--json", str(file)]) == 0
    captured = capfd.readouterr()
    lines = captured.err.splitlines()
    assert [line for line in lines if line.startswith("process")] == ["process 1 of 2", "process 2 of 2"]
    assert sum("ms (cpu)" in line for line in lines) == 8
    assert len(captured.out.splitlines()) == 1 + 4
    assert captured.out.count("✓") == 4
    text = json.loads(file.read_text())
    assert (len(text["runs"]), len(text["processes"])) == (2, 4)
    assert {case["results"][0]["rounds"] for run in text["runs"] for case in run["cases"]} == {5}
    assert {row["processes"] for row in text["processes"]} == {2}


WRITES = "import json, sys; open(sys.argv[-1], 'w').write({text!r}); sys.exit({code})"
ONE_CASE, NO_CASE = json.dumps({"good": True, "cases": [{}]}), json.dumps({"good": True, "cases": []})


@pytest.mark.parametrize(
    ("start", "code", "text"),
    [
        ("raise SystemExit(3)", 1, "exited with 3 after 0 of 1 cases"),
        ("import os; os.kill(os.getpid(), 9)", 1, "exited with -9 after 0 of 1 cases"),
        (WRITES.format(text=ONE_CASE, code=3), 1, "exited with 3 after 1 of 1 cases"),
        (WRITES.format(text=NO_CASE, code=0), 1, "exited with 0 after 0 of 1 cases"),
        (WRITES.format(text=ONE_CASE[:9], code=1), 1, "exited with 1 after 0 of 1 cases"),
        (WRITES.format(text=NO_CASE, code=2), 2, "exited with 2 after 0 of 1 cases"),
    ],
)
def test_incomplete_process_is_an_error(capsys, monkeypatch, start, code, text):
    monkeypatch.setattr(processes, "START", start)
    assert main([*TINY, "--batch", "4", "--starts", "0", "--processes", "2"]) == code
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith(f"holdfast: Process 1 of 2 {text}; it is not counted.")
    assert captured.out == ""


def test_results_are_written_after_each_process(monkeypatch, tmp_path):
    one = {"good": True, "cases": []}

    def second_crashes(args, count, cases, log):
        yield one
        raise ContractError("it died")

    monkeypatch.setattr(bench, "in_processes", second_crashes)
    file = tmp_path / "figures.json"
    assert main([*TINY, "--processes", "2", "--json", str(file)]) == 1
    assert json.loads(file.read_text())["runs"] == [one]


def test_ctrl_c_with_several_processes_prints_one_line():
    args = [*TINY, "--processes", "2", "--rounds", "1000000"]
    start = "import sys; from holdfast.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, *args]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as parent:
        assert parent.stderr is not None
        assert parent.stderr.readline() == "process 1 of 2\n"
        assert "torch" in parent.stderr.readline(), "the process it started measures"
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.communicate(timeout=120)[1] == "holdfast: stopped.\n"
    assert parent.returncode == 1


def test_no_runnable_implementation_is_a_usage_error(capsys, monkeypatch):
    def missing(case, inputs, precision):
        raise ContractError("it is not installed")

    monkeypatch.setitem(bench.IMPLEMENTATIONS, "step by step", missing)
    assert main([*TINY, "--implementations", "step-by-step"]) == 2
    captured = capsys.readouterr()
    *_, why, last = captured.err.splitlines()
    assert why == "step by step float32 is skipped: it is not installed"
    assert last.startswith("holdfast: Nothing could be measured, for the reasons above")
    assert captured.out == ""
    monkeypatch.setitem(bench.IMPLEMENTATIONS, "holdfast", missing)
    assert main([*TINY, "--implementations", "holdfast"]) == 1, "ours must run"


def test_combined_processes_have_median_minimum_and_maximum():
    def run(ms, ratio, right):
        result = {
            "implementation": "dense",
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
