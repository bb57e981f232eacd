import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.errors import ContractError
from holdfast.memory import GRU, LSTM, MinLSTM, NoMemory
from holdfast.memory.cell import MultiCell, saturation

INPUT, HIDDEN = 6, 10
CELLS = [LSTM, GRU, MinLSTM, NoMemory]
REMEMBER = [cell for cell in CELLS if cell is not NoMemory]

every_cell = pytest.mark.parametrize("kind", CELLS)
every_memory = pytest.mark.parametrize("kind", REMEMBER)


def case(B, T, L, starts, invalid, dtype, seed, hidden=HIDDEN, inputs=INPUT, kind=LSTM):
    """Random weights, inputs, state, clears and invalid steps."""
    torch.manual_seed(seed)
    cell = kind(inputs, hidden, L).to(dtype)
    for weight in cell.parameters():
        nn.init.normal_(weight, std=0.4)
    x = torch.randn(B, T, inputs, dtype=dtype)
    state = cell.initial(B)
    for key, leaf in state.items():
        state[key] = torch.randn_like(leaf)
    clear = torch.rand(B, T) < starts
    valid = None if invalid == 0 else torch.rand(B, T) >= invalid
    return cell, x, state, clear, valid


def outputs_and_gradients(run, cell, x, grad):
    x = x.clone().requires_grad_()
    y, state = run(x)
    grads = torch.autograd.grad((y * grad).sum(), [x, *cell.parameters()])
    return y.detach(), state, grads


def compare(cell, x, state, clear, valid, bound, gradient_bound):
    truth = copy.deepcopy(cell).double()
    grad = torch.randn(*clear.shape, cell.hidden_size, dtype=x.dtype)
    y, after, grads = outputs_and_gradients(lambda x: cell(x, state, clear, valid), cell, x, grad)
    y0, after0, grads0 = outputs_and_gradients(
        lambda x: truth.reference_forward(x, state.double(), clear, valid), truth, x.double(), grad.double()
    )
    assert ((y.double() - y0).abs() / y0.abs().clamp(min=1)).max() <= bound
    for key, leaf in after.items():
        assert ((leaf.double() - after0[key]).abs() / after0[key].abs().clamp(min=1)).max() <= bound
    for actual, expected in zip(grads, grads0, strict=True):
        # An entry far below the largest one of the layer is noise whatever computes it.
        assert (actual.double() - expected).abs().max() <= gradient_bound * max(expected.abs().max(), 1e-3)


@settings(max_examples=80, deadline=None)
@given(
    B=st.integers(1, 300),
    T=st.integers(1, 257),
    L=st.integers(1, 3),
    starts=st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]),
    invalid=st.sampled_from([0.0, 0.1, 0.7, 1.0]),
    double=st.booleans(),
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(CELLS),
)
def test_segments_equal_the_reference_for_any_clears_and_invalid_steps(B, T, L, starts, invalid, double, seed, kind):
    dtype, bound, gradient_bound = (torch.float64, 1e-10, 1e-10) if double else (torch.float32, 1e-5, 2e-5)
    compare(*case(B, T, L, starts, invalid, dtype, seed, kind=kind), bound, gradient_bound)


@pytest.mark.parametrize(("B", "T", "L"), [(300, 3, 1), (1, 257, 3), (300, 257, 1), (17, 64, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_memory
def test_large_batches_and_long_segments_equal_the_reference(B, T, L, dtype, kind):
    bound, gradient_bound = (1e-10, 1e-10) if dtype == torch.float64 else (1e-5, 2e-5)
    compare(*case(B, T, L, 0.02, 0.0, dtype, seed=B + T, kind=kind), bound, gradient_bound)


@settings(max_examples=25, deadline=None)
@given(
    B=st.integers(1, 9),
    T=st.integers(1, 20),
    starts=st.sampled_from([0.0, 0.2, 1.0]),
    seed=st.integers(0, 999),
    kind=st.sampled_from(CELLS),
)
def test_segment_equals_its_steps(B, T, starts, seed, kind):
    cell, x, state, clear, valid = case(B, T, 2, starts, 0.2, torch.float64, seed, kind=kind)
    segment_y, end = cell(x, state, clear, valid)
    by_step = []
    for t in range(T):
        y, state = cell(x[:, t], state, clear[:, t], valid[:, t])
        by_step.append(y)
    torch.testing.assert_close(torch.stack(by_step, 1), segment_y, atol=1e-12, rtol=0)
    for key, leaf in end.items():
        torch.testing.assert_close(state[key], leaf, atol=1e-12, rtol=0)


@every_memory
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_crosses_a_clear(dtype, kind):
    cell, x, state, clear, _ = case(5, 30, 2, 0.0, 0.0, dtype, seed=1, kind=kind, hidden=128, inputs=128)
    clear[:, 11] = True
    x.requires_grad_()
    entry = state.apply(lambda leaf: leaf.requires_grad_())
    y, _ = cell(x, entry, clear)
    grads = torch.autograd.grad(y[:, 11:].sum(), [x, *entry.values()], allow_unused=True)
    assert (grads[0][:, :11] == 0).all()
    assert (grads[0][:, 11:] != 0).any()
    assert all(leaf_grad is None or (leaf_grad == 0).all() for leaf_grad in grads[1:])
    fresh, _ = cell(x[:, 11:], cell.initial(5), torch.zeros_like(clear[:, 11:]))
    other, _ = cell(torch.cat([1e3 * torch.randn_like(x[:, :11]), x[:, 11:]], 1), state, clear)
    assert other[:, 11:].equal(y[:, 11:])
    torch.testing.assert_close(fresh, y[:, 11:], atol=1e-6, rtol=0)


@every_memory
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_nan_or_inf_ends_with_its_episode(poison, kind):
    cell, x, state, clear, _ = case(4, 12, 2, 0.0, 0.0, torch.float32, seed=2, kind=kind)
    clear[0, 6] = True
    good, _ = cell(x, state, clear)
    x[0, 3] = poison
    y, after = cell(x, state, clear)
    if poison != poison:  # an infinity may saturate a gate, NaN must show
        assert y[0, 3:6].isnan().any()
    torch.testing.assert_close(y[0, 6:], good[0, 6:], atol=1e-6, rtol=0)
    assert all(torch.isfinite(leaf).all() for leaf in after.values())
    torch.testing.assert_close(y[1:], good[1:], atol=1e-6, rtol=0)


@every_memory
def test_nan_entry_state_is_cleared(kind):
    cell, x, state, clear, _ = case(3, 4, 1, 0.0, 0.0, torch.float32, seed=3, kind=kind)
    next(iter(state.values()))[1] = float("nan")
    clear[1, 0] = True
    y, _ = cell(x, state, clear)
    assert torch.isfinite(y).all()
    y, _ = cell(x[:, 0], state, clear[:, 0])
    assert torch.isfinite(y).all()


@every_memory
def test_large_weights_clear_exactly(kind):
    cell, x, state, clear, _ = case(3, 9, 2, 0.0, 0.0, torch.float32, seed=4, kind=kind)
    with torch.no_grad():
        for weight in cell.parameters():
            weight.mul_(100)
    clear[:, 5] = True
    y, _ = cell(x, state, clear)
    other, _ = cell(torch.cat([-x[:, :5], x[:, 5:]], 1), state, clear)
    assert other[:, 5:].equal(y[:, 5:])


@every_memory
def test_state_is_unchanged_at_invalid_steps(kind):
    cell, x, state, clear, _ = case(4, 8, 2, 0.0, 0.0, torch.float64, seed=5, kind=kind)
    valid = torch.ones_like(clear)
    valid[:, 3:6] = False
    y, after = cell(x, state, clear, valid)
    acted = [0, 1, 2, 6, 7]
    short, end = cell(x[:, acted], state, clear[:, acted])
    torch.testing.assert_close(y[:, acted], short, atol=1e-13, rtol=0)
    assert (y[:, 3:6] == 0).all()
    for key, leaf in after.items():
        torch.testing.assert_close(leaf, end[key], atol=1e-13, rtol=0)


@every_memory
def test_clear_at_an_invalid_step_applies(kind):
    cell, x, state, clear, _ = case(2, 5, 1, 0.0, 0.0, torch.float64, seed=6, kind=kind)
    valid = torch.ones_like(clear)
    valid[:, 2], clear[:, 2] = False, True
    y, _ = cell(x, state, clear, valid)
    fresh, _ = cell(x[:, 3:], cell.initial(2), torch.zeros_like(clear[:, 3:]))
    torch.testing.assert_close(y[:, 3:], fresh, atol=1e-13, rtol=0)


@every_memory
def test_segment_without_valid_steps_only_clears(kind):
    cell, x, state, clear, _ = case(3, 4, 2, 0.0, 0.0, torch.float32, seed=7, kind=kind)
    clear[2, 0] = True
    y, after = cell(x, state, clear, torch.zeros_like(clear))
    assert (y == 0).all()
    assert all(leaf[:2].equal(state[key][:2]) for key, leaf in after.items())
    assert all((leaf[2] == 0).all() for leaf in after.values())


@every_memory
def test_returned_state_is_detached(kind):
    cell, x, state, clear, valid = case(3, 6, 2, 0.3, 0.3, torch.float32, seed=8, kind=kind)
    for outputs in (cell(x, state, clear, valid), cell(x, state, clear), cell(x[:, 0], state, clear[:, 0])):
        assert outputs[0].requires_grad
        assert not any(leaf.requires_grad for leaf in outputs[1].values())
    no_starts, after = cell(x, state, torch.zeros_like(clear))
    assert no_starts.requires_grad
    assert not any(leaf.requires_grad for leaf in after.values())
    from_a_graph = state.apply(lambda leaf: leaf.requires_grad_())
    _, after = cell(x[:, 0], from_a_graph, clear[:, 0], valid[:, 0])
    assert not any(leaf.requires_grad for leaf in after.values())


@every_memory
def test_cell_does_not_modify_its_inputs(kind):
    cell, x, state, clear, valid = case(3, 6, 2, 0.3, 0.3, torch.float32, seed=9, kind=kind)
    before = x.clone(), state.clone(), clear.clone(), valid.clone()
    cell(x, state, clear, valid)
    cell(x[:, 0], state, clear[:, 0], valid[:, 0])
    assert x.equal(before[0])
    assert all(state[key].equal(before[1][key]) for key in sorted(state.keys()))
    assert clear.equal(before[2])
    assert valid.equal(before[3])


@every_cell
def test_wrong_shapes_are_an_error(kind, annotations_asleep):
    cell, x, state, clear, _ = case(3, 6, 2, 0.3, 0.3, torch.float32, seed=9, kind=kind)
    for inputs in ((x[..., :-1], state, clear), (x, state[:2], clear), (x, state, clear[:, 1:])):
        with pytest.raises(ContractError, match=rf"expects x \[\.\.\., {INPUT}\]"):
            cell(*inputs)


def test_multi_cell_runs_each_cell_on_its_slice():
    cells = {"a": LSTM(2, 3), "b": GRU(4, 5)}
    both = MultiCell(cells)
    assert (both.input_size, both.hidden_size) == (6, 8)
    state = both.initial(7).apply(torch.randn_like)
    assert set(state.keys()) == {"a.h", "a.c", "b.h"}
    x, clear = torch.randn(7, 4, 6), torch.rand(7, 4) < 0.3
    states, slices = both.split(state), {"a": x[..., :2], "b": x[..., 2:]}
    y, after = both(x, state, clear)
    for name, part in (("a", y[..., :3]), ("b", y[..., 3:])):
        expected, own = cells[name](slices[name], states[name], clear)
        assert torch.equal(part, expected)
        assert all(torch.equal(both.split(after)[name][key], own[key]) for key in own.keys())  # noqa: SIM118


def test_saturation_counts_bounded_units():
    lstm, gru, both = LSTM(2, 2), GRU(2, 2), MultiCell({"a": LSTM(2, 2), "b": GRU(2, 2)})
    h, c = torch.tensor([[[0.98, 0.5]]]), torch.tensor([[[-9.0, 9.0]]])
    state = gru.initial(1).update({"h": h})
    assert float(saturation(gru, state)) == 0.5
    assert float(saturation(lstm, lstm.initial(1).update({"h": h, "c": c}))) == 1.0
    assert float(saturation(both, both.initial(1).update({"a.h": h, "a.c": c, "b.h": h}))) == 0.75
    assert saturation(NoMemory(2, 2), NoMemory(2, 2).initial(1)) is None
