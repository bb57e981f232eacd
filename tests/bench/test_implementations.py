"""Implementations get the same inputs, and a wrong one is detected."""

import sys
from types import SimpleNamespace

import pytest
import torch

from holdfast.bench import implementations
from holdfast.bench.cases import Case, draw
from holdfast.bench.implementations import IMPLEMENTATIONS, OURS, CellOutputs, errors_of, outcome_of, reference_outputs
from holdfast.errors import ContractError

CPU = torch.device("cpu")
SMALL = Case("lstm", hidden=8, batch=5, steps=9, layers=2, starts=0.3)
GRU = Case("gru", hidden=8, batch=5, steps=9, layers=2, starts=0.3)


def run_once(implementation, inputs):
    return implementation.timed_call(inputs.x_BTH, inputs.grad_BTH)()


def error_of(implementation, inputs):
    return max(errors_of(run_once(implementation, inputs), reference_outputs(inputs, clears=implementation.clears)))


@pytest.mark.parametrize("case", [SMALL, GRU], ids=str)
@pytest.mark.parametrize("name", ["holdfast", "dense", "reset slots", "step by step"])
def test_every_implementation_equals_its_reference(case, name):
    inputs = draw(case, CPU)
    implementation = IMPLEMENTATIONS[name](case, inputs, "float32")
    assert error_of(implementation, inputs) < 1e-6
    other = reference_outputs(inputs, clears=not implementation.clears)
    assert min(errors_of(run_once(implementation, inputs), other)) > 1e-3


@pytest.mark.parametrize(("name", "kernel"), [("holdfast", "auto"), ("triton", "triton"), ("reset slots", "torch")])
def test_our_implementations_use_their_kernel(monkeypatch, name, kernel):
    used = []
    monkeypatch.setattr(implementations, "use_kernel", lambda cell, kernel: used.append(kernel))
    IMPLEMENTATIONS[name](SMALL, draw(SMALL, CPU), "float32")
    assert used == [kernel]
    assert (name in OURS) is (kernel != "torch")


def test_step_by_step_has_a_size_limit():
    inputs = draw(SMALL, CPU)
    assert implementations.step_by_step(Case("lstm", hidden=128, batch=256), inputs, "float32").clears
    with pytest.raises(ContractError, match="beyond it takes minutes"):
        implementations.step_by_step(Case("lstm", hidden=128, batch=257), inputs, "float32")


def fake_lstm_triton(x, hidden, cell, w_ih, w_hh, b_ih, b_hh, is_init, *, compute_dtype, input_precision):
    return run_with_resets(torch.lstm_cell, x, [hidden, cell], (w_ih, w_hh, b_ih, b_hh), is_init)


def fake_gru_triton(x, hidden, w_ih, w_hh, b_ih, b_hh, is_init, *, compute_dtype, input_precision):
    one = lambda x, before, *weights: (torch.gru_cell(x, before[0], *weights),)  # noqa: E731
    return run_with_resets(one, x, [hidden], (w_ih, w_hh, b_ih, b_hh), is_init)


def run_with_resets(cell, x, start_states, weights, is_init):
    """Start from `start_states[:, t]` at step 0 and wherever `is_init` is true, as TorchRL does."""
    state, outputs = [leaf[:, 0] for leaf in start_states], []
    for t in range(x.shape[1]):
        reset = is_init[:, t, None]
        state = [torch.where(reset, leaf[:, t], now) for leaf, now in zip(start_states, state, strict=True)]
        state = cell(x[:, t], state, *weights)
        outputs.append(state[0])
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("case", [SMALL, GRU], ids=str)
def test_torchrl_gets_entry_states_and_resets(monkeypatch, case):
    module = SimpleNamespace(lstm_triton=fake_lstm_triton, gru_triton=fake_gru_triton)
    monkeypatch.setitem(sys.modules, implementations.TORCHRL, module)
    inputs = draw(case, CPU)
    assert inputs.clear_BT[:, 0].any()
    implementation = implementations.torchrl(case, inputs, "bfloat16")
    assert error_of(implementation, inputs) < 1e-6
    with pytest.raises(ContractError, match="float32 and bfloat16 only"):
        implementations.torchrl(case, inputs, "float16")


def test_reference_in_chunks_equals_the_reference(monkeypatch):
    inputs = draw(SMALL, CPU)
    expected = reference_outputs(inputs, clears=True)
    monkeypatch.setitem(implementations.ROWS_PER_CHUNK, "cpu", 2)
    assert max(errors_of(reference_outputs(inputs, clears=True), expected)) < 1e-14


def outputs_with(y=1.0, x_grad=1.0, weight_grad=1.0):
    y, x_grad = torch.tensor([[[4.0, y]]]), torch.tensor([[[8.0, x_grad]]])
    return CellOutputs(y, x_grad, (torch.tensor([2.0, weight_grad]),))


def test_errors_are_relative_to_the_largest_entry_of_each_tensor():
    assert errors_of(outputs_with(y=2.0), outputs_with()) == (0.25, 0.0)
    assert errors_of(outputs_with(x_grad=2.0), outputs_with()) == (0.0, 0.125)
    assert errors_of(outputs_with(x_grad=2.0, weight_grad=2.0), outputs_with()) == (0.0, 0.5)
    output, gradient = errors_of(outputs_with(y=float("nan"), x_grad=float("nan"), weight_grad=9.0), outputs_with())
    assert output != output
    assert gradient != gradient


def test_zero_reference_accepts_only_zero():
    none = CellOutputs(torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), (torch.zeros(2),))
    assert errors_of(none, none) == (0.0, 0.0)
    assert errors_of(outputs_with(), none) == (float("inf"), float("inf"))
    output, gradient = errors_of(outputs_with(y=float("nan")), none)
    assert output != output
    assert gradient == float("inf")


@pytest.mark.parametrize("where", ["y", "x_grad", "weight_grad"])
def test_outcome_of_huge_inputs(where):
    assert outcome_of(outputs_with()) == "ok"
    assert outcome_of(outputs_with(**{where: float("inf")})) == "inf"
    assert outcome_of(outputs_with(**{where: float("nan")})) == "NaN"


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_tf32_is_enabled_only_for_tf32(precision):
    flags = lambda: (  # noqa: E731
        torch.backends.cudnn.rnn.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.cuda.matmul.fp32_precision,
    )
    before, inside = flags(), []
    layer = torch.nn.Linear(1, 1)
    forward = lambda x: inside.append(flags()) or layer(x)  # noqa: E731
    implementations.Implementation(precision, forward, layer).timed_call(torch.ones(1, 1, 1), torch.ones(1, 1, 1))()
    assert inside == [("tf32" if precision == "tf32" else "ieee",) * 3]
    assert flags() == before


@pytest.mark.parametrize("name", ["holdfast", "dense"])
def test_timed_call_can_be_repeated(name):
    inputs = draw(SMALL, CPU)
    call = IMPLEMENTATIONS[name](SMALL, inputs, "float32").timed_call(inputs.x_BTH, inputs.grad_BTH)
    outputs = call()
    assert outputs.y_BTH.shape == outputs.x_grad_BTH.shape == inputs.x_BTH.shape
    assert errors_of(call(), outputs) == (0.0, 0.0)


def test_reference_without_resets_ignores_them():
    inputs = draw(Case("lstm", hidden=8, batch=16, steps=9, starts=0.1), CPU)
    starts = inputs.clear_BT.any(1)
    assert 0 < starts.sum() < 16
    with_resets, without = (reference_outputs(inputs, clears=clears).y_BTH for clears in (True, False))
    assert with_resets[~starts].equal(without[~starts])
    assert ((with_resets - without).abs().flatten(1).amax(1) > 1e-3).equal(starts)
