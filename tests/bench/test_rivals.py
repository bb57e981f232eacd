"""Who is measured gets the same numbers, and whoever is wrong is seen to be."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.bench import Bench, Case, judge, measure, memory, rivals
from holdfast.bench.cases import HUGE, cases_of, draw, dtype_of, multiplying
from holdfast.bench.judge import Said, answers, errors_of, fate_of, truth_of
from holdfast.bench.timing import Ready
from holdfast.errors import ContractError
from holdfast.report.speed import lines_of

CPU = torch.device("cpu")
SMALL = Case("lstm", hidden=8, batch=5, steps=9, layers=2, starts=0.3)
GRU = Case("gru", hidden=8, batch=5, steps=9, layers=2, starts=0.3)


def bench_of(*names):
    return Bench(CPU, names, ["float32"], rounds=2, say=lambda line: None)


def error_of(rival, numbers):
    return max(errors_of(answers(rival, numbers), truth_of(numbers, clears=rival.clears)))


@pytest.mark.parametrize("case", [SMALL, GRU], ids=str)
@pytest.mark.parametrize("name", ["holdfast", "dense", "blank steps", "step by step"])
def test_every_rival_is_right_by_the_reference_it_claims(case, name):
    numbers = draw(case, CPU)
    rival = rivals.RIVALS[name](case, numbers, "float32")
    assert error_of(rival, numbers) < 1e-6
    other = truth_of(numbers, clears=not rival.clears)
    assert min(errors_of(answers(rival, numbers), other)) > 1e-3


@pytest.mark.parametrize(
    ("name", "kernel"), [("holdfast", "auto"), ("triton", "triton"), ("blank steps", "torch")]
)
def test_ours_use_the_kernel_they_are_named_after(monkeypatch, name, kernel):
    used = []
    monkeypatch.setattr(rivals, "use_kernel", lambda cell, kernel: used.append(kernel))
    rival = rivals.RIVALS[name](SMALL, draw(SMALL, CPU), "float32")
    assert used == [kernel]
    assert rival.ours is (kernel != "torch")


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 99))
def test_the_numbers_of_a_case_are_drawn_once_and_fit_in_every_precision(batch, steps, starts, seed):
    case = Case("gru", 4, batch, steps, starts=starts)
    before = torch.random.get_rng_state()
    one, again = draw(case, CPU, seed), draw(case, CPU, seed)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one.x_BTH, again.x_BTH)
    assert torch.equal(one.clear_BT, again.clear_BT)
    weights = list(one.cell.parameters())
    for each in (one.x_BTH, one.huge_BTH, one.asked_BTH, *one.state.values(), *weights):
        assert torch.equal(each.to(torch.bfloat16).float(), each)
    assert one.huge_BTH.abs().max() <= HUGE
    assert starts == 0.5 or one.clear_BT.float().mean() == starts


def test_a_reference_in_parts_is_the_reference(monkeypatch):
    numbers = draw(SMALL, CPU)
    whole = truth_of(numbers, clears=True)
    monkeypatch.setitem(judge.AT_ONCE, "cpu", 2)
    assert max(errors_of(truth_of(numbers, clears=True), whole)) < 1e-14


def said(y=1.0, x_grad=1.0, weight_grad=1.0):
    y, x_grad = torch.tensor([[[4.0, y]]]), torch.tensor([[[8.0, x_grad]]])
    return Said(y, x_grad, (torch.tensor([2.0, weight_grad]),))


def test_errors_are_relative_to_the_largest_entry_of_each_tensor():
    assert errors_of(said(y=2.0), said()) == (0.25, 0.0)
    assert errors_of(said(x_grad=2.0), said()) == (0.0, 0.125)
    assert errors_of(said(x_grad=2.0, weight_grad=2.0), said()) == (0.0, 0.5)
    output, gradient = errors_of(said(y=float("nan"), x_grad=float("nan"), weight_grad=9.0), said())
    assert output != output
    assert gradient != gradient


def test_where_the_reference_is_zero_throughout_only_zero_is_right():
    none = Said(torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), (torch.zeros(2),))
    assert errors_of(none, none) == (0.0, 0.0)
    assert errors_of(said(), none) == (float("inf"), float("inf"))
    output, gradient = errors_of(said(y=float("nan")), none)
    assert output != output
    assert gradient == float("inf")


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_steps_that_are_all_starts_are_judged(cell):
    outcome = measure(bench_of("holdfast", "dense", "step by step"), Case(cell, 8, 5, 9, starts=1.0))
    assert outcome.good
    assert all(each.right for each in outcome.measured)


def test_the_call_that_is_timed_is_the_one_that_is_judged(monkeypatch):
    def recorded_wrong(run, device, *, records):
        y, *grads = run()
        return Ready(lambda: (1.1 * y, *grads), "graph", 0.0)

    monkeypatch.setattr(memory, "prepare", recorded_wrong)
    outcome = measure(bench_of("holdfast", "dense"), SMALL)
    assert [each.right for each in outcome.measured] == [False, False]
    assert all(0.05 < each.output_error < 0.11 for each in outcome.measured)
    assert not outcome.good


@pytest.mark.parametrize("where", ["y", "x_grad", "weight_grad"])
def test_what_becomes_of_huge_inputs_is_told_wherever_it_shows(where):
    assert fate_of(said()) == "ok"
    assert fate_of(said(**{where: float("inf")})) == "inf"
    assert fate_of(said(**{where: float("nan")})) == "NaN"


def wrong(change):
    def make(case, numbers, precision):
        right = rivals.holdfast(case, numbers, precision)
        forward = lambda x: change(right.forward(x), x)  # noqa: E731
        return rivals.Rival("holdfast", precision, forward, right.weights)

    return make


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda y, x: 1.1 * y, "errors 1e-01 1e-01"),
        (lambda y, x: y + float("nan"), "errors nan"),
        (lambda y, x: y + 1e-3 * (x - x.detach()), "errors"),
        (lambda y, x: y.masked_fill(x.abs() > 100, float("nan")), "1e4 NaN"),
    ],
    ids=["wrong", "nan", "wrong gradient", "nan at 1e4"],
)
def test_a_wrong_rival_is_told_and_makes_the_outcome_bad(monkeypatch, change, told):
    monkeypatch.setitem(rivals.RIVALS, "holdfast", wrong(change))
    outcome = measure(bench_of("holdfast", "dense"), SMALL)
    (ours, dense) = lines_of(outcome)
    assert told in ours
    assert ours.endswith("✗")
    assert "✗" not in dense
    assert not outcome.good
    assert outcome.as_json()["results"][0]["right"] is False
    assert "nan" not in ours or "errors nan" in told


@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-5), ("tf32", 1e-2), ("bfloat16", 1e-2)])
def test_outputs_and_gradients_have_the_bound_of_their_precision(precision, bound):
    one = replace(measure(bench_of("dense"), SMALL).measured[0], precision=precision)
    assert replace(one, output_error=bound, gradient_error=bound).right
    assert not replace(one, output_error=1.01 * bound, gradient_error=0.0).right
    assert not replace(one, output_error=0.0, gradient_error=1.01 * bound).right
    beside = replace(one, output_error=0.0, dense_gradient_error=bound)
    assert replace(beside, gradient_error=1.5 * bound).right
    assert not replace(beside, gradient_error=1.51 * bound).right
    assert not replace(one, at_huge="NaN").right


def test_only_what_is_ours_makes_an_outcome_bad(monkeypatch):
    def broken(case, numbers, precision):
        right = rivals.dense(case, numbers, precision)
        return rivals.Rival(
            "dense", precision, lambda x: 2 * right.forward(x), right.weights, clears=False, time_major=True
        )

    monkeypatch.setitem(rivals.RIVALS, "dense", broken)
    outcome = measure(bench_of("holdfast", "dense"), SMALL)
    assert [each.right for each in outcome.measured] == [True, False]
    assert outcome.good


@pytest.mark.parametrize(("name", "good"), [("holdfast", False), ("step by step", True)])
def test_who_fails_is_left_out_with_a_line_and_ours_must_not(monkeypatch, name, good):
    def fails(case, numbers, precision):
        raise RuntimeError("it broke\nin two lines")

    monkeypatch.setitem(rivals.RIVALS, name, fails)
    outcome = measure(bench_of(name, "dense"), SMALL)
    assert [each.name for each in outcome.measured] == ["dense"]
    assert outcome.left_out[0].line() == f"{name} float32 is left out: it broke"
    assert outcome.good is good
    assert outcome.as_json()["left_out"] == [{"rival": name, "precision": "float32", "why": "it broke"}]


def test_step_by_step_is_measured_where_it_does_not_take_minutes():
    numbers = draw(SMALL, CPU)
    assert rivals.step_by_step(Case("lstm", hidden=128, batch=256), numbers, "float32").name == "step by step"
    with pytest.raises(ContractError, match="beyond it takes minutes"):
        rivals.step_by_step(Case("lstm", hidden=128, batch=257), numbers, "float32")


def test_torchrl_that_is_absent_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, rivals.TORCHRL, None)
    monkeypatch.setattr(memory, "ON_GPU_ONLY", ())
    outcome = measure(bench_of("torchrl", "dense"), SMALL)
    (absent,) = outcome.left_out
    told = "torchrl float32 is left out: it is not to be had here: ModuleNotFoundError"
    assert absent.line().startswith(told)
    assert outcome.good


def lstm_of_others(x, hidden, cell, w_ih, w_hh, b_ih, b_hh, is_init, *, compute_dtype, input_precision):
    return of_others(torch.lstm_cell, x, [hidden, cell], (w_ih, w_hh, b_ih, b_hh), is_init)


def gru_of_others(x, hidden, w_ih, w_hh, b_ih, b_hh, is_init, *, compute_dtype, input_precision):
    one = lambda x, before, *weights: (torch.gru_cell(x, before[0], *weights),)  # noqa: E731
    return of_others(one, x, [hidden], (w_ih, w_hh, b_ih, b_hh), is_init)


def of_others(cell, x, begun, weights, is_init):
    """Begin anew with `begun[:, t]` at step 0 and wherever `is_init` says so, as theirs does."""
    state, said = [leaf[:, 0] for leaf in begun], []
    for t in range(x.shape[1]):
        anew = is_init[:, t, None]
        state = [torch.where(anew, leaf[:, t], now) for leaf, now in zip(begun, state, strict=True)]
        state = cell(x[:, t], state, *weights)
        said.append(state[0])
    return torch.stack(said, 1), state


@pytest.mark.parametrize("case", [SMALL, GRU], ids=str)
def test_torchrl_is_handed_entry_states_and_starts_as_it_reads_them(monkeypatch, case):
    theirs = SimpleNamespace(lstm_triton=lstm_of_others, gru_triton=gru_of_others)
    monkeypatch.setitem(sys.modules, rivals.TORCHRL, theirs)
    numbers = draw(case, CPU)
    assert numbers.clear_BT[:, 0].any()
    rival = rivals.torchrl(case, numbers, "bfloat16")
    assert error_of(rival, numbers) < 1e-6
    assert not rival.ours
    with pytest.raises(ContractError, match="float32 and bfloat16 only"):
        rivals.torchrl(case, numbers, "float16")


def test_the_usual_sizes_are_those_of_the_device():
    def sizes(device, hidden=(), batch=()):
        return [
            (case.hidden, case.batch)
            for case in cases_of(torch.device(device), ["lstm"], hidden, batch, [64], 1, [0.0])
        ]

    on_gpu = [(H, B) for H in (128, 256) for B in (256, 1024, 4096)] + [(512, 256), (512, 1024)]
    assert sizes("cuda") == on_gpu
    assert sizes("cpu") == [(128, 32), (128, 64), (128, 256), (128, 1024)]
    assert sizes("cpu", hidden=[16]) == [(16, 32), (16, 64), (16, 256), (16, 1024)]
    assert sizes("cuda", batch=[7]) == [(128, 7), (256, 7), (512, 7)]
    assert sizes("cpu", hidden=[16, 32], batch=[7]) == [(16, 7), (32, 7)]


def test_on_a_gpu_dense_is_measured_in_float16_whatever_is_asked_for():
    on_gpu = Bench(torch.device("cuda"), ["holdfast", "dense", "torchrl"], ["bfloat16"], 1, print)
    asked = [("holdfast", "bfloat16"), ("dense", "bfloat16"), ("torchrl", "bfloat16"), ("dense", "float16")]
    assert on_gpu.entrants() == asked
    on_cpu = Bench(CPU, list(rivals.RIVALS), ["float32"], 1, print)
    assert [name for name, _ in on_cpu.entrants()] == ["holdfast", "dense", "step by step"]


@pytest.mark.parametrize("precision", ["float32", "tf32", "float16", "bfloat16"])
def test_tf32_is_on_where_it_is_asked_for_and_nowhere_else(precision):
    flags = lambda: (  # noqa: E731
        torch.backends.cudnn.rnn.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.cuda.matmul.fp32_precision,
    )
    before = flags()
    with multiplying(precision):
        assert flags() == ("tf32" if precision == "tf32" else "ieee",) * 3
    assert flags() == before
    assert dtype_of(precision) == getattr(torch, precision.replace("tf32", "float32"))
