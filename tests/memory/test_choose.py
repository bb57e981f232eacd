from importlib.metadata import EntryPoint

import pytest
import torch

import holdfast
from holdfast import named
from holdfast.build import build_policy
from holdfast.config import Config, change
from holdfast.errors import ConfigError, ContractError
from holdfast.memory import CELLS, GRU, LSTM, Bundle, MinLSTM, find_cell, make_cell, register_cell, use_kernel
from small import OnlySpec, make_small


def test_cells_are_found_by_name_and_by_path():
    assert type(make_cell("lstm", 3, 4, 1)) is LSTM
    assert type(make_cell("gru", 3, 4, 2)) is GRU
    assert find_cell("holdfast.memory.gru:GRU") is GRU


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gruu", "did you mean gru"),
        ("holdfast.memory.slots:plan_slots", "not a subclass of holdfast.memory.cell.Cell"),
        ("holdfast.nowhere:GRU", "policy.memory=holdfast.nowhere:GRU"),
    ],
)
def test_what_is_no_cell_is_one_line(name, told):
    with pytest.raises(ConfigError) as caught:
        find_cell(name)
    assert told in str(caught.value).replace("Did", "did")


def test_the_original_start_is_the_lstms_alone():
    assert (make_cell("lstm", 3, 4, 1, "original").rnn.bias_ih_l0 == 1).all()
    with pytest.raises(ConfigError, match="is for an LSTM"):
        make_cell("gru", 3, 4, 1, "original")


def test_a_cell_of_ones_own_registers_and_gets_everything(monkeypatch, annotations_asleep):
    monkeypatch.setattr(CELLS, "_known", dict(CELLS))

    class Mine(holdfast.memory.Cell):
        """A decaying sum."""

        def __init__(self, input_size, hidden_size, num_layers=1):
            super().__init__(input_size, hidden_size, num_layers)
            self.inwards = torch.nn.Linear(input_size, hidden_size)

        def initial(self, batch):
            zeros = self.inwards.weight.new_zeros(batch, self.hidden_size)
            return holdfast.memory.cell.TensorDict({"sum": zeros}, batch_size=[batch])

        def forward(self, x, state, clear, valid=None):
            if x.dim() == 2:
                valid = None if valid is None else valid[:, None]
                y, after = self(x[:, None], state, clear[:, None], valid)
                return y[:, 0], after
            return self.plain(x, state, clear, valid)

        def plain(self, x, state, clear, valid=None):
            total, said = state["sum"], []
            for t in range(x.shape[1]):
                total = torch.where(clear[:, t, None], 0.0, total)
                read = torch.ones_like(clear[:, t]) if valid is None else valid[:, t]
                total = torch.where(read[:, None], 0.9 * total + torch.tanh(self.inwards(x[:, t])), total)
                said.append(torch.where(read[:, None], total, 0.0))
            after = holdfast.memory.cell.TensorDict({"sum": total.detach()}, batch_size=[len(x)])
            return torch.stack(said, 1), after

    register_cell("mine", Mine)
    with pytest.raises(ConfigError, match="called mine already"):
        register_cell("mine", GRU)
    laws = holdfast.check(make_small(memory="mine"), OnlySpec())
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}


def test_other_packages_add_cells_by_entry_points(monkeypatch):
    points = [EntryPoint(name, f"holdfast.memory.gru:{name}", CELLS.group) for name in ("GRU", "LOST")]
    points.append(EntryPoint("theirs", "holdfast.memory.gru:GRU", CELLS.group))
    monkeypatch.setattr(named, "entry_points", lambda group: points if group == CELLS.group else [])
    assert find_cell("theirs") is GRU
    with pytest.raises(ConfigError, match="theirs"):
        find_cell("their")
    with pytest.raises(ConfigError, match=r"policy.memory=LOST: holdfast.memory.gru:LOST cannot be loaded"):
        find_cell("LOST")


@pytest.mark.parametrize("memory", ["gru", "minlstm", "none"])
def test_every_memory_obeys_the_laws(memory, annotations_asleep):
    laws = holdfast.check(make_small(memory=memory), OnlySpec())
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}
    assert (laws["carry"].worst.about == "n/a") == (memory == "none")


def test_a_memory_that_is_no_lstm_has_its_own_leaves():
    policy = make_small(memory="gru")
    policy.store.open({0: 3})
    (h,) = policy.get_memory()
    policy.set_memory(({0: h[0] + 1},))
    assert (policy.lstm_h[0] == 1).all()
    with pytest.raises(ContractError, match="has no c"):
        _ = policy.lstm_c
    with pytest.raises(ContractError, match="remembers h; 2 came"):
        policy.set_memory((h, h))
    assert not make_small(memory="none").has_memory()
    assert make_small(memory="none").get_memory() == ()


def test_a_kernel_is_chosen_for_every_lstm_and_gru_inside_a_module():
    bundle = Bundle({"a": LSTM(3, 4), "b": GRU(3, 4), "c": MinLSTM(3, 4)})
    assert [bundle.parts[name].kernel for name in "ab"] == ["auto", "auto"]
    use_kernel(bundle, "torch")
    assert [bundle.parts[name].kernel for name in "ab"] == ["torch", "torch"]
    assert LSTM(3, 4).kernel == "auto", "a choice is that of one module"


def test_our_kernels_are_refused_where_nothing_could_use_them():
    with pytest.raises(ConfigError, match="is for LSTM and GRU"):
        use_kernel(MinLSTM(3, 4), "triton")
    use_kernel(MinLSTM(3, 4), "torch")


def test_a_config_chooses_the_kernel_of_a_policy():
    config = change(Config(), {"policy": "example", "policy.hidden_size": 16, "policy.kernel": "torch"})
    world = holdfast.make_world("recall", agents=1)
    assert build_policy(config, world, torch.device("cpu")).lstm.cell.kernel == "torch"
