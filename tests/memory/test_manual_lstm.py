"""The LSTM for hand-written policies: time-major, resets set beforehand, states as pairs."""

import pytest
import torch

from holdfast.errors import ContractError
from holdfast.memory import GRU, LSTM
from holdfast.memory.manual_lstm import ManualLSTM, StateView, from_pair, to_pair
from holdfast.memory.state_store import StateStore


def make_lstm(num_layers=2):
    torch.manual_seed(0)
    lstm = ManualLSTM(LSTM(3, 4, num_layers))
    return lstm, to_pair(lstm.cell.initial(5).apply(torch.randn_like))


def no_resets(T):
    return torch.zeros(5, T, dtype=torch.bool)


@pytest.mark.parametrize("T", [1, 6])
def test_manual_lstm_equals_torch_lstm(T):
    lstm, (h, c) = make_lstm()
    torch_lstm = torch.nn.LSTM(3, 4, 2)
    torch_lstm.load_state_dict(dict(zip(torch_lstm.state_dict(), lstm.cell.parameters(), strict=True)))
    x = torch.randn(T, 5, 3)
    lstm.set_resets(no_resets(T), None)
    y, (h_after, c_after) = lstm(x, (h, c))
    expected, (h_torch, c_torch) = torch_lstm(x, (h, c))
    for actual, truth in ((y, expected), (h_after, h_torch), (c_after, c_torch)):
        torch.testing.assert_close(actual, truth, atol=1e-6, rtol=0)


def test_resets_clear_the_state_of_their_rows():
    lstm, (h, c) = make_lstm()
    x = torch.randn(1, 5, 3)
    lstm.set_resets(torch.tensor([[True], [False], [False], [False], [False]]), None)
    y, _ = lstm(x, (h, c))
    lstm.mark_stored()
    lstm.set_resets(no_resets(1), None)
    unreset, _ = lstm(x, (h, c))
    lstm.mark_stored()
    lstm.set_resets(no_resets(1), None)
    zeros, _ = lstm(x, (torch.zeros_like(h), torch.zeros_like(c)))
    assert y[:, 0].equal(zeros[:, 0])
    assert y[:, 1:].equal(unreset[:, 1:])
    assert not y[:, 0].equal(unreset[:, 0])


def test_each_call_needs_resets_and_a_stored_state():
    lstm, pair = make_lstm()
    x = torch.randn(1, 5, 3)
    with pytest.raises(ContractError, match="without episode starts"):
        lstm(x, pair)
    lstm.set_resets(no_resets(1), None)
    with pytest.raises(ContractError, match=r"^_manage_lstm_state was called twice .* the first call's episode starts"):
        lstm.set_resets(no_resets(1), None)
    lstm.set_resets(no_resets(1), None)
    with pytest.raises(ContractError, match=r"_store_lstm_state was called before self\.lstm"):
        lstm.mark_stored()
    lstm.set_resets(no_resets(1), None)
    lstm(x, pair)
    with pytest.raises(ContractError, match="never stored"):
        lstm.set_resets(no_resets(1), None)


def test_resets_of_another_shape_raise():
    lstm, pair = make_lstm()
    lstm.set_resets(no_resets(2), None)
    with pytest.raises(ContractError, match=r"T=1, B=5, but the resets are of B=5 rows of T=2 steps"):
        lstm(torch.randn(1, 5, 3), pair)


def test_another_memory_raises():
    lstm = ManualLSTM(GRU(3, 4))
    lstm.set_resets(no_resets(1), None)
    with pytest.raises(ContractError, match=r"this memory is a GRU\. Inherit RecurrentPolicy"):
        lstm(torch.randn(1, 5, 3), (torch.zeros(1, 5, 4), torch.zeros(1, 5, 4)))


def test_pairs_have_the_layers_first_and_no_graph():
    h, c = torch.randn(2, 5, 4, requires_grad=True), torch.randn(2, 5, 4)
    state = from_pair(h, c)
    assert state.batch_size == (5,)
    assert state["h"].shape == (5, 2, 4)
    assert not state["h"].requires_grad
    assert all(one.equal(other) for one, other in zip(to_pair(state), (h, c), strict=True))


def test_state_view_is_a_mapping_of_one_leaf():
    store = StateStore(LSTM(3, 4, 2))
    store.allocate({0: 3, 3: 2})
    h, c = StateView(store, "h"), StateView(store, "c")
    assert (list(h), len(h)) == ([0, 3], 2)
    h[3] = torch.arange(16.0).reshape(2, 2, 4)
    assert store.view(3)["h"][1, 0].tolist() == [4, 5, 6, 7]
    assert not c[3].any()
    assert not h[0].any()
    with pytest.raises(KeyError):
        h[1]
    with pytest.raises(ContractError, match="This memory has no c; it has h"):
        StateView(StateStore(GRU(3, 4)), "c")


def test_setting_an_unknown_slice_adds_it():
    store = StateStore(LSTM(3, 4, 2))
    StateView(store, "h")[5] = torch.ones(2, 3, 4)
    assert store.slices == {5: 3}
    assert (store.read(5, 3)["h"] == 1).all()
