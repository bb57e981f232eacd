from importlib.metadata import EntryPoint

import pytest
import torch

import holdfast
from helpers.small_policy import OnlySpec, make_small
from holdfast import registry
from holdfast.build import build_policy
from holdfast.config.run import Config, override
from holdfast.errors import ConfigError, ContractError
from holdfast.memory import (
    CELLS,
    GRU,
    LSTM,
    MinLSTM,
    MultiCell,
    find_cell,
    make_cell,
    register_cell,
    use_kernel,
)


def test_cells_are_found_by_name_and_by_path():
    assert type(make_cell("lstm", 3, 4, 1)) is LSTM
    assert type(make_cell("gru", 3, 4, 2)) is GRU
    assert find_cell("holdfast.memory.rnn:GRU") is GRU


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gruu", "did you mean gru"),
        ("holdfast.memory.packing:plan_packing", "not a subclass of holdfast.memory.cell.Cell"),
        ("holdfast.nowhere:GRU", "policy.memory=holdfast.nowhere:GRU"),
    ],
)
def test_unknown_cell_is_a_one_line_error(name, message):
    with pytest.raises(ConfigError) as caught:
        find_cell(name)
    assert message in str(caught.value).replace("Did", "did")


def test_original_init_is_for_the_lstm_only():
    assert (make_cell("lstm", 3, 4, 1, "original").rnn.bias_ih_l0 == 1).all()
    with pytest.raises(ConfigError, match="is for an LSTM"):
        make_cell("gru", 3, 4, 1, "original")


def test_registered_custom_cell_obeys_the_laws(monkeypatch, annotations_asleep):
    monkeypatch.setattr(CELLS, "_entries", dict(CELLS))

    class DecayingSum(holdfast.memory.Cell):
        """An exponentially decaying sum."""

        def __init__(self, input_size, hidden_size, num_layers=1):
            super().__init__(input_size, hidden_size, num_layers)
            self.linear = torch.nn.Linear(input_size, hidden_size)

        def initial(self, batch):
            zeros = self.linear.weight.new_zeros(batch, self.hidden_size)
            return holdfast.memory.cell.TensorDict({"sum": zeros}, batch_size=[batch])

        def forward(self, x, state, clear, valid=None):
            if x.dim() == 2:
                valid = None if valid is None else valid[:, None]
                y, after = self(x[:, None], state, clear[:, None], valid)
                return y[:, 0], after
            return self.reference_forward(x, state, clear, valid)

        def reference_forward(self, x, state, clear, valid=None):
            total, outputs = state["sum"], []
            for t in range(x.shape[1]):
                total = torch.where(clear[:, t, None], 0.0, total)
                valid_B = torch.ones_like(clear[:, t]) if valid is None else valid[:, t]
                total = torch.where(valid_B[:, None], 0.9 * total + torch.tanh(self.linear(x[:, t])), total)
                outputs.append(torch.where(valid_B[:, None], total, 0.0))
            after = holdfast.memory.cell.TensorDict({"sum": total.detach()}, batch_size=[len(x)])
            return torch.stack(outputs, 1), after

    register_cell("mine", DecayingSum)
    with pytest.raises(ConfigError, match="called mine already"):
        register_cell("mine", GRU)
    laws = holdfast.check(make_small(memory="mine"), OnlySpec())
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}


def test_other_packages_add_cells_by_entry_points(monkeypatch):
    points = [EntryPoint(name, f"holdfast.memory.rnn:{name}", CELLS.group) for name in ("GRU", "LOST")]
    points.append(EntryPoint("theirs", "holdfast.memory.rnn:GRU", CELLS.group))
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == CELLS.group else [])
    assert find_cell("theirs") is GRU
    with pytest.raises(ConfigError, match="theirs"):
        find_cell("their")
    with pytest.raises(ConfigError, match=r"policy.memory=LOST: holdfast.memory.rnn:LOST cannot be loaded"):
        find_cell("LOST")


@pytest.mark.parametrize("memory", ["gru", "minlstm", "none"])
def test_every_cell_obeys_the_laws(memory, annotations_asleep):
    laws = holdfast.check(make_small(memory=memory), OnlySpec())
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}
    assert (laws["carry"].worst.path == "n/a") == (memory == "none")


def test_gru_policy_has_its_own_state_leaves():
    policy = make_small(memory="gru")
    policy.store.allocate({0: 3})
    (h,) = policy.get_memory()
    policy.set_memory(({0: h[0] + 1},))
    assert (policy.lstm_h[0] == 1).all()
    with pytest.raises(ContractError, match="has no c"):
        _ = policy.lstm_c
    with pytest.raises(ContractError, match="holds h; 2 came"):
        policy.set_memory((h, h))
    assert not make_small(memory="none").has_memory()
    assert make_small(memory="none").get_memory() == ()


def test_use_kernel_sets_every_lstm_and_gru_in_a_module():
    multi_cell = MultiCell({"a": LSTM(3, 4), "b": GRU(3, 4), "c": MinLSTM(3, 4)})
    assert [multi_cell.parts[name].kernel for name in "ab"] == ["auto", "auto"]
    use_kernel(multi_cell, "torch")
    assert [multi_cell.parts[name].kernel for name in "ab"] == ["torch", "torch"]
    assert LSTM(3, 4).kernel == "auto", "use_kernel changes one module only"


def test_triton_kernel_without_lstm_or_gru_is_an_error():
    with pytest.raises(ConfigError, match="is for LSTM and GRU"):
        use_kernel(MinLSTM(3, 4), "triton")
    use_kernel(MinLSTM(3, 4), "torch")


def test_config_sets_the_kernel_of_a_policy():
    config = override(Config(), {"policy": "example", "policy.hidden_size": 16, "policy.kernel": "torch"})
    world = holdfast.make_world("recall", agents=1)
    assert build_policy(config, world, torch.device("cpu")).lstm.cell.kernel == "torch"
