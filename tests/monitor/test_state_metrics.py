"""State norm, state age and saturation."""

import pytest
import torch
from tensordict import TensorDict

from helpers.monitored_policies import POLICIES, graph, stored
from helpers.small_policy import make_small
from holdfast.memory import GRU, LSTM, MinLSTM, MultiCell, NoMemory, saturation
from holdfast.monitor.state_audit import state_metrics


@pytest.mark.parametrize("kind", POLICIES)
def test_state_norm_of_all_leaves(kind):
    policy = POLICIES[kind]()
    stored(policy)
    metrics = state_metrics(policy)
    tree = policy.store.snapshot().tree
    rows = torch.stack([torch.cat([leaf[a].flatten() for leaf in tree.values()]) for a in range(len(tree))])
    assert metrics["memory/state_norm"] == pytest.approx(float(rows.norm(dim=1).mean()), rel=1e-6)
    assert metrics["memory/state_norm_max"] == pytest.approx(float(rows.norm(dim=1).max()), rel=1e-6)
    assert metrics["memory/state_norm_max"] > metrics["memory/state_norm"] > 0
    assert ("memory/saturation" in metrics) == (kind != "minlstm")


def test_state_metrics_cover_all_slices():
    policy = make_small(num_layers=1)
    policy.store.allocate({0: 2, 2: 3})
    policy.store.view(2)["h"][:] = 1.0
    metrics = state_metrics(policy)
    assert metrics["memory/state_norm_max"] == pytest.approx(4.0)
    assert metrics["memory/state_norm"] == pytest.approx(3 / 5 * 4.0)


def test_state_metrics_without_memory_or_agents():
    policy = make_small(memory="none")
    stored(policy)
    assert state_metrics(policy) == {}
    assert state_metrics(make_small()) == {}


def test_state_metrics_change_nothing():
    policy = graph()
    stored(policy)
    before = policy.store.snapshot().tree
    state_metrics(policy)
    assert (policy.store.snapshot().tree == before).all()


def state(cell, **leaves):
    tree = cell.initial(2)
    for name, numbers in leaves.items():
        tree[name] = torch.tensor(numbers).reshape(tree[name].shape)
    return tree


def test_an_lstm_is_saturated_where_its_cell_is_far_out():
    # tanh(2.09) is 0.9698, tanh(2.10) is 0.9705
    cell = LSTM(3, 4)
    far = state(cell, h=[1.0] * 8, c=[0.0, 2.09, 2.1, -2.1, 5.0, -9.0, 0.1, -2.09])
    assert saturation(cell, far) == 4 / 8


def test_a_gru_is_saturated_where_it_is_near_one():
    cell = GRU(3, 4)
    assert saturation(cell, state(cell, h=[0.96, 0.98, -0.98, -0.96, 0.0, 0.0, 0.0, 0.0])) == 2 / 8


def test_unbounded_state_has_no_saturation():
    for cell in (MinLSTM(3, 4), NoMemory(3, 4)):
        assert saturation(cell, cell.initial(2)) is None


def test_multi_cell_saturation_counts_bounded_units():
    bundle = MultiCell({"a": LSTM(3, 4), "b": MinLSTM(2, 5), "c": MultiCell({"d": GRU(2, 1)})})
    states = bundle.initial(2)
    states["a.c"][0, 0, :3] = 7.0
    states["b.h"][:] = 50.0
    states["c.d.h"][1] = 0.99
    assert saturation(bundle, states) == pytest.approx(4 / 10)


def test_custom_cell_without_bounded_state_has_no_saturation():
    class CustomCell(NoMemory.__base__):
        def initial(self, batch):
            return TensorDict({"sum": torch.full((batch, 3), 9.0)}, batch_size=[batch])

        def forward(self, x, state, clear, valid=None): ...

        def reference_forward(self, x, state, clear, valid=None): ...

    assert saturation(CustomCell(2, 3), CustomCell(2, 3).initial(2)) is None
