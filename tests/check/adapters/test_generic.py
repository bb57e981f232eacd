"""Adapters of modules and functions: errors of policies that cannot be tested, and the choice of adapter."""

import importlib
import re
from types import SimpleNamespace

import pytest
import torch
from gymnasium import spaces
from torch import nn

import holdfast
from helpers import foreign_policies as foreign
from helpers.small_policy import OnlySpec, Small, make_small
from holdfast import registry
from holdfast.check import adapters
from holdfast.check.adapters import CleanRL, Functions, HoldfastPolicy, PolicyAdapter, Puffer, RawModule
from holdfast.errors import ConfigError, ContractError

pytestmark = pytest.mark.usefixtures("annotations_asleep")


class Raises(Small):
    def encode(self, obs):
        raise ValueError("out of cheese")


class SaysNaN(Small):
    def decode(self, features):
        thoughts = super().decode(features)
        return thoughts._replace(values=thoughts.values * torch.nan)


def half_the_rows(module, obs, state, first):
    outputs, state = foreign.clear_then_step(module, obs, state, first)
    return {"y": outputs["y"][:4]}, state


def grown(module, obs, state, first):
    outputs, state = foreign.clear_then_step(module, obs, state, first)
    return outputs, {"h": torch.cat([state["h"]] * 2, -1)}


class GrowingState(foreign.Stepper):
    def forward(self, x, state, first):
        y, after = super().forward(x, None if state is None else state[:, :16], first)
        return y, after if state is None else torch.cat([state, after], 1)


class SaysWholeNumbers(foreign.Stepper):
    def forward(self, x, state, first):
        y, state = super().forward(x, state, first)
        return y.argmax(-1), state


class Elsewhere(foreign.Sequence):
    def forward(self, x, state):
        return super().forward(x + torch.zeros(5, device="meta"), state)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            lambda: make_small(Raises),
            "cannot act one step: ValueError: out of cheese (obs: float32 [8, 5])",
        ),
        (
            lambda: make_small(SaysNaN),
            "act returns 'values' that is not finite, first for agent 0",
        ),
        (lambda: foreign.functions(act=half_the_rows), "act returns 'y' [4, 3]; it must begin"),
        (
            lambda: RawModule(GrowingState(), obs=5, layout="step", initial=lambda m, n: torch.zeros(n, 16)),
            "from a state [[2, 16]] it returned [[2, 32]]",
        ),
        (lambda: foreign.functions(act=grown), "a state keeps its structure, shape and dtype"),
        (lambda: RawModule(SaysWholeNumbers(), obs=5), "int64; outputs must be floating-point"),
    ],
    ids=["raises", "nan", "shape", "returned state", "state", "dtype"],
)
def test_preflight_error_of_a_broken_policy(policy, message):
    with pytest.raises(ContractError) as caught:
        holdfast.check(policy(), *([] if isinstance(policy(), PolicyAdapter) else [OnlySpec()]))
    assert message in str(caught.value)


def test_policy_that_raises_breaks_the_law():
    laws = holdfast.check(RawModule(foreign.Raises(), obs=5))
    assert not laws.ok
    assert "the policy raised ValueError: out of cheese" in laws["clear"].finding


def test_policy_on_another_device_is_refused():
    with pytest.raises(ContractError, match="meta"):
        holdfast.check(Elsewhere())


def test_policy_on_the_meta_device_is_refused():
    with pytest.raises((ContractError, ConfigError), match="meta"):
        holdfast.check(nn.LSTM(5, 16, device="meta"))


class Refuses(nn.Linear):
    def forward(self, x, state=None):
        raise ValueError(f"{x.dim()} axes")


def test_error_names_the_reason_for_each_layout():
    reasons = "x [T,B,...]: ValueError: 3 axes; x [B,T,...]: ValueError: 3 axes; x [B,...]: ValueError: 2 axes"
    with pytest.raises(
        ContractError,
        match=re.escape(f"(y, state): {reasons}. If its forward is right, give the observation shape by --obs"),
    ):
        holdfast.check(Refuses(5, 3))


class KeepsItsState(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head, self.state = nn.GRUCell(4, 8), nn.Linear(8, 3), None

    def forward(self, x):
        self.state = self.cell(x, self.state)
        return self.head(self.state)


def act_with_state(module, obs, state, first):
    module.state = torch.where(first[:, None], 0.0, state)
    return module(obs), module.state


def replay_with_state(module, obs, actions, state, first):
    outputs = []
    for t in range(obs.shape[1]):
        y, state = act_with_state(module, obs[:, t], state, first[:, t])
        outputs.append(y)
    return torch.stack(outputs, 1)


def test_a_module_that_keeps_its_state_is_told_to_use_functions():
    with pytest.raises(ContractError, match=r"not \(y, state\).*on self is checked by .*adapters.Functions\.$"):
        holdfast.check(KeepsItsState())
    functions = {
        "initial": lambda module, rows: torch.zeros(rows, 8, dtype=module.head.weight.dtype),
        "act": act_with_state,
        "replay": replay_with_state,
    }
    laws = holdfast.check(Functions(KeepsItsState(), **functions))
    assert laws.ok, str(laws)


def test_adapt_refuses_what_no_adapter_fits():
    with pytest.raises(ConfigError, match=r"not dict.*holdfast.check.adapters.Functions"):
        holdfast.check({})
    with pytest.raises(ContractError, match=r"Linear cannot be called as \(x, state\)"):
        holdfast.check(nn.Linear(5, 3))
    with pytest.raises(ConfigError, match=r"check\(policy, obs=\(4,\)\)"):
        holdfast.check(foreign.Looks())
    with pytest.raises(ConfigError, match=r"as RawModule, which has no .depth."):
        holdfast.check(nn.LSTM(5, 16), depth=3)
    with pytest.raises(ConfigError, match="Dict"):
        holdfast.check(nn.LSTM(5, 16), obs=spaces.Dict({}))


@pytest.mark.parametrize(
    ("policy", "options", "kind"),
    [
        (lambda: nn.LSTM(5, 16), {}, RawModule),
        (foreign.Agent, {"actions": 3}, CleanRL),
        (lambda: foreign.PufferStyle(True), {"obs": 5}, Puffer),
        (make_small, {"world": OnlySpec()}, HoldfastPolicy),
        (lambda: "fast", {}, HoldfastPolicy),
    ],
    ids=["module", "cleanrl", "puffer", "holdfast", "name"],
)
def test_adapt_chooses_the_adapter(policy, options, kind):
    assert type(adapters.adapt(policy(), **options)) is kind


class Fancy(nn.GRU):
    pass


class FancyAdapter(RawModule):
    @classmethod
    def fits(cls, policy):
        return isinstance(policy, Fancy)


def test_adapter_of_another_package_takes_precedence(monkeypatch):
    point = SimpleNamespace(name="fancy", load=lambda: FancyAdapter)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == "holdfast.check_adapters" else [])
    assert type(adapters.adapt(Fancy(5, 16))) is FancyAdapter
    assert type(adapters.adapt(nn.GRU(5, 16))) is RawModule
    monkeypatch.setattr(FancyAdapter, "fits", lambda policy: isinstance(policy, nn.GRU))
    assert type(adapters.adapt(nn.GRU(5, 16))) is FancyAdapter


def test_adapter_entry_point_that_cannot_be_loaded(monkeypatch):
    point = SimpleNamespace(name="fancy", value="no.such:Thing", load=lambda: importlib.import_module("no.such"))
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    with pytest.raises(ConfigError, match=r"^entry point fancy: no.such:Thing cannot be loaded"):
        adapters.adapt(nn.GRU(5, 16))


def test_half_precision_module_is_checked_in_float32():
    assert holdfast.check(nn.GRU(5, 16).bfloat16())["replay"].ok


class OnlyFloat32(foreign.Sequence):
    """Converts observations to float32, as numpy buffers do."""

    def forward(self, x, state):
        return super().forward(x.float(), state)


def test_float32_only_policy_is_measured_without_float64():
    laws = holdfast.check(OnlyFloat32(), clear=False)
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}
    assert "not measured in float64" in laws.notes[-1]
    assert all("f64" not in part.what for law in laws.values() for part in law.parts)


def from_zeros(module, obs, actions, state, first):
    return foreign.replay_in_pieces(module, obs, actions, foreign.zero_state(module, len(obs)), first)


def test_float32_only_policy_with_small_outputs_is_diagnosed():
    small_outputs = OnlyFloat32()
    nn.init.orthogonal_(small_outputs.outwards.weight, 0.01)
    laws = holdfast.check(foreign.functions(small_outputs, replay=from_zeros))
    assert not laws["replay"].ok
    assert laws["replay"].pattern.name == "replay starts from zeros"


def test_observation_space_of_one_element_is_refused():
    with pytest.raises(ConfigError, match="observation space has one element"):
        holdfast.check(foreign.Names(), obs=spaces.Discrete(1))


def test_functions_adapter_calls_value():
    batches = []

    def value(module, obs, state, first):
        batches.append(len(obs))
        return module(obs[None], state["h"])[0][0]

    laws = holdfast.check(foreign.functions(value=value))
    assert laws["pure"].ok
    assert batches
    assert isinstance(foreign.functions(), Functions)


@pytest.mark.parametrize("layout", ["time first", "batch first", "sideways"])
def test_wrong_layout_is_refused(layout):
    core = nn.GRU(5, 16, batch_first=layout == "time first")
    with pytest.raises((ContractError, ConfigError), match=r"exactly one axis|choose from 'time first'"):
        RawModule(core, layout=layout)


def test_inferred_layout_is_noted():
    assert RawModule(nn.GRU(5, 16)).notes == ("called as x [T,B,...]: inferred by calling it",)
    assert "with starts as first" in RawModule(foreign.Stepper(), obs=5).notes[0]


def test_state_of_other_objects_is_refused():
    class Box:
        pass

    with pytest.raises(ContractError, match=r"has a Box.*tensors in tuples"):
        holdfast.check(foreign.functions(initial=lambda module, rows: Box()))


def test_integer_observations_are_noted_as_without_gradients():
    laws = holdfast.check(foreign.Names(), obs=spaces.Discrete(7))
    assert any("gradients from step to step were not measured" in note for note in laws.notes)


def test_number_of_threads_is_restored():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        holdfast.check(nn.GRUCell(3, 4))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
