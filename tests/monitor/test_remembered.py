"""How large, how old and how near its bounds a memory is."""

import pytest
import torch
from tensordict import TensorDict

from holdfast.memory import GRU, LSTM, Bundle, MinLSTM, NoMemory, saturation
from holdfast.monitor import remembered
from monitor.lives import POLICIES, graph, stored
from small import make_small


@pytest.mark.parametrize("kind", POLICIES)
def test_a_states_length_is_that_of_all_its_numbers(kind):
    policy = POLICIES[kind]()
    stored(policy)
    found = remembered(policy)
    tree = policy.store.snapshot().tree
    rows = torch.stack([torch.cat([leaf[a].flatten() for leaf in tree.values()]) for a in range(len(tree))])
    assert found["memory/state_norm"] == pytest.approx(float(rows.norm(dim=1).mean()), rel=1e-6)
    assert found["memory/state_norm_max"] == pytest.approx(float(rows.norm(dim=1).max()), rel=1e-6)
    assert found["memory/state_norm_max"] > found["memory/state_norm"] > 0
    assert ("memory/saturation" in found) == (kind != "minlstm")


def test_all_slices_are_looked_at():
    policy = make_small(num_layers=1)
    policy.store.open({0: 2, 2: 3})
    policy.store.live(2)["h"][:] = 1.0
    found = remembered(policy)
    assert found["memory/state_norm_max"] == pytest.approx(4.0)
    assert found["memory/state_norm"] == pytest.approx(3 / 5 * 4.0)


def test_where_nothing_is_remembered_or_nobody_lives_nothing_is_told():
    policy = make_small(memory="none")
    stored(policy)
    assert remembered(policy) == {}
    assert remembered(make_small()) == {}


def test_looking_changes_nothing():
    policy = graph()
    stored(policy)
    before = policy.store.snapshot().tree
    remembered(policy)
    assert (policy.store.snapshot().tree == before).all()


def state(cell, **leaves):
    found = cell.initial(2)
    for name, numbers in leaves.items():
        found[name] = torch.tensor(numbers).reshape(found[name].shape)
    return found


def test_an_lstm_is_saturated_where_its_cell_is_far_out():
    # tanh(2.09) is 0.9698, tanh(2.10) is 0.9705
    cell = LSTM(3, 4)
    far = state(cell, h=[1.0] * 8, c=[0.0, 2.09, 2.1, -2.1, 5.0, -9.0, 0.1, -2.09])
    assert saturation(cell, far) == 4 / 8


def test_a_gru_is_saturated_where_it_is_near_one():
    cell = GRU(3, 4)
    assert saturation(cell, state(cell, h=[0.96, 0.98, -0.98, -0.96, 0.0, 0.0, 0.0, 0.0])) == 2 / 8


def test_what_has_no_bounds_is_not_saturated():
    for cell in (MinLSTM(3, 4), NoMemory(3, 4)):
        assert saturation(cell, cell.initial(2)) is None


def test_in_a_bundle_every_unit_counts_that_has_bounds():
    bundle = Bundle({"a": LSTM(3, 4), "b": MinLSTM(2, 5), "c": Bundle({"d": GRU(2, 1)})})
    states = bundle.initial(2)
    states["a.c"][0, 0, :3] = 7.0
    states["b.h"][:] = 50.0
    states["c.d.h"][1] = 0.99
    assert saturation(bundle, states) == pytest.approx(4 / 10)


def test_a_cell_of_ones_own_needs_to_say_nothing_of_bounds():
    class Mine(NoMemory.__base__):
        def initial(self, batch):
            return TensorDict({"sum": torch.full((batch, 3), 9.0)}, batch_size=[batch])

        def forward(self, x, state, clear, valid=None): ...

        def plain(self, x, state, clear, valid=None): ...

    assert saturation(Mine(2, 3), Mine(2, 3).initial(2)) is None
