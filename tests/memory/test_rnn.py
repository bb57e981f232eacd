import pytest
import torch

from helpers.triton_interpreter import needs_kernels
from holdfast import kernel_support
from holdfast.errors import ConfigError, ContractError
from holdfast.memory import GRU, LSTM, kernels, require_kernel, use_kernel
from holdfast.memory.layers import FEW_ROWS

lstm_and_gru = pytest.mark.parametrize("kind", [LSTM, GRU])
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_initial_weights_are_orthogonal_with_forget_bias_one():
    cell = LSTM(16, 16, 2)
    for number in range(2):
        weight_ih, weight_hh, bias_ih, bias_hh = cell.layer(number)
        torch.testing.assert_close(weight_hh.T @ weight_hh, torch.eye(16), atol=1e-5, rtol=0)
        torch.testing.assert_close(weight_ih.T @ weight_ih, torch.eye(16), atol=1e-5, rtol=0)
        total = bias_ih + bias_hh
        assert (total[16:32] == 1).all()
        assert (total[:16] == 0).all()
        assert (total[32:] == 0).all()


def test_original_init_sets_all_biases_to_one():
    cell = LSTM(8, 8, 2, init="original")
    assert all((weight == 1).all() for name, weight in cell.named_parameters() if "bias" in name)


def test_gate_bias_is_not_in_the_state_dict():
    assert set(LSTM(4, 4, 1).state_dict()) == {
        "rnn.weight_ih_l0",
        "rnn.weight_hh_l0",
        "rnn.bias_ih_l0",
        "rnn.bias_hh_l0",
    }


def test_triton_kernel_that_cannot_run_is_an_error(monkeypatch):
    odd = LSTM(4, 24)
    use_kernel(odd, "triton")
    with pytest.raises(ContractError, match=r"hidden sizes of 16 to 512 in steps of 16, not 24. Use auto"):
        odd(torch.randn(2, 4), odd.initial(2), torch.zeros(2, dtype=torch.bool))
    with pytest.raises(ConfigError, match=r"policy.kernel=triton: .* not 24. Use auto"):
        require_kernel(odd, DEVICE)
    double = LSTM(4, 32).double().to(DEVICE)
    use_kernel(double, "triton")
    with pytest.raises(ContractError, match=r"32 bits and fewer, not torch.float64"):
        double(
            torch.randn(2, 4, device=DEVICE).double(),
            double.initial(2),
            torch.zeros(2, dtype=torch.bool, device=DEVICE),
        )
    monkeypatch.setattr(kernel_support, "find_spec", lambda name: None)
    kernel_support._refused_on.cache_clear()
    assert kernels.refusal(DEVICE, 32) == "Triton is not installed"
    kernel_support._refused_on.cache_clear()


def test_kernels_refuse_an_old_triton_and_log_it_once(monkeypatch, caplog):
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton, "__version__", "3.2.0")
    kernel_support._refused_on.cache_clear()
    cell, x = LSTM(4, 32), torch.randn(2, 4)
    use_kernel(cell, "triton")
    for _ in range(2):
        with pytest.raises(ContractError, match=r"they need Triton 3\.6 or newer, not 3\.2\.0\. Use auto\."):
            cell(x, cell.initial(2), torch.zeros(2, dtype=torch.bool))
    kernel_support._refused_on.cache_clear()
    words = "Without Triton kernels, torch's own run on cpu: they need Triton 3.6 or newer, not 3.2.0."
    assert caplog.messages == [words]


@needs_kernels
def test_auto_uses_torch_on_cpu_and_in_float64():
    cell = LSTM(4, 32)
    assert not cell._has_kernel(torch.device("cpu"), torch.float32)
    assert not cell._has_kernel(torch.device("cuda"), torch.float64)
    use_kernel(cell, "triton")
    assert cell._has_kernel(DEVICE, torch.float32)


@lstm_and_gru
def test_state_keeps_its_dtype_under_autocast(kind):
    torch.manual_seed(0)
    cell = kind(4, 6)
    state = cell.initial(3).apply(torch.randn_like)
    clear, valid = torch.zeros(2, 3, 8, dtype=torch.bool).unbind(0)
    clear[0, 4] = True
    valid[:2] = True
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, after = cell(torch.randn(3, 8, 4), state, clear, valid)
    for key, leaf in after.items():
        assert leaf.dtype == torch.float32
        # The last row has no valid step: its state is not even rounded.
        assert torch.equal(leaf[2], state[key][2])


@lstm_and_gru
@pytest.mark.parametrize("rows", [FEW_ROWS, FEW_ROWS + 1])
def test_a_step_of_few_and_of_many_rows_equals_the_reference(kind, rows):
    torch.manual_seed(0)
    cell = kind(4, 6, 2)
    state = cell.initial(rows).apply(torch.randn_like)
    clear, valid = torch.rand(2, rows) < torch.tensor([[0.3], [0.7]])
    x = torch.randn(rows, 4)
    y, after = cell(x, state, clear, valid)
    y_reference, after_reference = cell.reference_forward(x[:, None], state, clear[:, None], valid[:, None])
    torch.testing.assert_close(y, y_reference[:, 0])
    for key, leaf in after.items():
        torch.testing.assert_close(leaf, after_reference[key])
