"""Sizes and inputs of benchmark cases."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.bench.cases import HUGE, Case, cases_of, draw, dtype_of

CPU = torch.device("cpu")


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 99))
def test_inputs_are_reproducible_and_exact_in_every_precision(batch, steps, starts, seed):
    case = Case("gru", 4, batch, steps, starts=starts)
    before = torch.random.get_rng_state()
    one, again = draw(case, CPU, seed), draw(case, CPU, seed)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one.x_BTH, again.x_BTH)
    assert torch.equal(one.clear_BT, again.clear_BT)
    weights = list(one.cell.parameters())
    for tensor in (one.x_BTH, one.huge_BTH, one.grad_BTH, *one.state.values(), *weights):
        assert torch.equal(tensor.to(torch.bfloat16).float(), tensor)
    assert one.huge_BTH.abs().max() <= HUGE
    assert starts == 0.5 or one.clear_BT.float().mean() == starts


def test_default_sizes_depend_on_the_device():
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


@pytest.mark.parametrize("precision", ["float32", "tf32", "float16", "bfloat16"])
def test_tf32_is_stored_as_float32(precision):
    assert dtype_of(precision) == getattr(torch, precision.replace("tf32", "float32"))


def test_case_name_has_all_sizes():
    assert str(Case("gru", 8, 4)) == "gru H=8 B=4 T=64 2 % starts"
    assert str(Case("lstm", 8, 4, 5, layers=2, starts=0.125)) == "lstm H=8 B=4 T=5 L=2 12.5 % starts"


def test_cases_are_all_combinations():
    cases = cases_of(CPU, ["lstm", "gru"], [8], [4, 6], [5, 7], 2, [0.0, 0.5])
    assert len(set(cases)) == len(cases) == 16
    assert (cases[0], cases[-1]) == (Case("lstm", 8, 4, 5, 2, 0.0), Case("gru", 8, 6, 7, 2, 0.5))


def test_biases_of_the_cell_are_not_zero():
    biases = [weight for weight in draw(Case("lstm", 4, 2), CPU).cell.parameters() if weight.dim() == 1]
    assert biases
    assert all(bool((bias != 0).all()) for bias in biases)
