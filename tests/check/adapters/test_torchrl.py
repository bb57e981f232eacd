"""The TorchRL adapter without the library; test_libraries.py runs it with it."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from holdfast.check.adapters import TorchRL, adapt, torchrl
from holdfast.check.script import write_script
from holdfast.errors import ConfigError


class StubMemory(nn.Module):
    """A stub of `LSTMModule`: a state of four numbers, without a layer axis."""

    def make_tensordict_primer(self):
        spec = SimpleNamespace(shape=(4,))
        spec.expand = lambda *shape: SimpleNamespace(zero=lambda: torch.zeros(shape))
        return SimpleNamespace(primers={"h": spec})


class StubPolicy(nn.Module):
    """Adds the observation to its state; resets it where `is_init` is true."""

    in_keys, out_keys = ("observation", "is_init", "h"), ("logits", "state_value", ("next", "h"))

    def __init__(self, memory=True):
        super().__init__()
        self.memory = StubMemory() if memory else nn.Identity()

    def forward(self, td):
        h = torch.where(td["is_init"], 0.0, td["h"]) + td["observation"].sum(-1, keepdim=True)
        return td.update({"logits": h, "state_value": h[..., 0], "next": {"h": h}})


@pytest.fixture
def library(monkeypatch):
    modules = SimpleNamespace(LSTMModule=StubMemory, GRUModule=nn.GRU)
    monkeypatch.setattr(torchrl, "import_torchrl", lambda name: modules)


def make_script():
    return write_script(
        lambda size, generator: torch.randn(*size, 3, generator=generator),
        4,
        6,
        share_of_starts=0.3,
        absences=False,
        act=lambda size, generator: torch.randint(2, size, generator=generator),
    )


@pytest.mark.skipif(importlib.util.find_spec("torchrl") is not None, reason="torchrl is installed")
def test_torchrl_policy_without_torchrl_names_the_extra():
    policy = TensorDictModule(nn.Linear(4, 3), ["observation"], ["logits"])
    with pytest.raises(ConfigError, match=r"pip install .*\[torchrl\]"):
        adapt(policy)


def test_fits_tensordict_modules_only():
    assert TorchRL.fits(TensorDictModule(nn.Linear(4, 3), ["observation"], ["logits"]))
    assert not TorchRL.fits(nn.LSTM(4, 3))


@pytest.mark.parametrize(
    ("memory", "options", "message"),
    [
        (False, {}, "policies with an LSTMModule or GRUModule; StubPolicy has none"),
        (True, {"obs_key": "pixels"}, "does not read 'pixels'; choose obs_key= from"),
        (True, {"outputs": ["logits", "q"]}, r"does not write \['q'\]; choose outputs= from"),
    ],
)
def test_unsupported_policies_are_an_error(library, memory, options, message):
    with pytest.raises(ConfigError, match=message):
        TorchRL(StubPolicy(memory), 3, **options)


def test_act_reads_the_next_state(library):
    adapter, script = TorchRL(StubPolicy(), 3), make_script()
    state = adapter.initial(4)
    assert {key: leaf.shape for key, leaf in state.items()} == {"h": (4, 4)}
    outputs, after = adapter.act(script.at(0), state)
    assert list(outputs) == ["logits", "state_value"]
    assert outputs["state_value"].allclose(script.obs[:, 0].sum(-1))
    assert after["h"].equal(outputs["logits"])
    assert not state["h"].any()


def test_replay_stores_the_entry_state_first_and_zeros_at_starts(library):
    adapter = TorchRL(StubPolicy(), 3)
    first = torch.tensor([[True, False, False], [False, True, False]])
    stored = adapter._stored(first, {"h": torch.ones(2, 4)})["h"]
    assert stored.shape == (2, 3, 4)
    assert stored[..., 0].tolist() == [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


def test_policy_does_not_write_into_the_script(library):
    adapter, batch = TorchRL(StubPolicy(), 3), make_script().step_batches(0, 3)
    td = adapter._inputs(batch, {"h": torch.zeros(4, 3, 4)})
    assert isinstance(td, TensorDict)
    assert (td.batch_size, td["is_init"].shape) == ((4, 3), (4, 3, 1))
    td["observation"].zero_()
    assert batch.obs.any()
