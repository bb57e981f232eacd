import torch

from holdfast.memory import LSTM


def test_initial_weights_are_orthogonal_with_an_open_forget_gate():
    cell = LSTM(16, 16, 2)
    for number in range(2):
        weight_ih, weight_hh, bias_ih, bias_hh = cell.layer(number)
        torch.testing.assert_close(weight_hh.T @ weight_hh, torch.eye(16), atol=1e-5, rtol=0)
        torch.testing.assert_close(weight_ih.T @ weight_ih, torch.eye(16), atol=1e-5, rtol=0)
        total = bias_ih + bias_hh
        assert (total[16:32] == 1).all()
        assert (total[:16] == 0).all()
        assert (total[32:] == 0).all()


def test_the_original_initialisation_is_all_ones():
    cell = LSTM(8, 8, 2, init="original")
    assert all((weight == 1).all() for name, weight in cell.named_parameters() if "bias" in name)


def test_the_drives_are_no_weights():
    assert set(LSTM(4, 4, 1).state_dict()) == {
        "rnn.weight_ih_l0",
        "rnn.weight_hh_l0",
        "rnn.bias_ih_l0",
        "rnn.bias_hh_l0",
    }
