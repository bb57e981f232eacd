"""What the check says to policies that raise, lie, hide, roll dice or live elsewhere."""

import pytest
import torch
from gymnasium import spaces
from torch import nn

import holdfast
from check import foreign
from holdfast.check.subjects import Bare, Callables, CleanRL, Puffer, Subject, Wrapped
from holdfast.errors import ConfigError, ContractError
from small import OnlySpec, Small, make_small

pytestmark = pytest.mark.usefixtures("annotations_asleep")


class Raises(Small):
    def encode(self, obs):
        raise ValueError("out of cheese")


class SaysNaN(Small):
    def decode(self, features):
        thoughts = super().decode(features)
        return thoughts._replace(values=thoughts.values * torch.nan)


def half_an_answer(module, obs, state, first):
    said, state = foreign.clear_then_step(module, obs, state, first)
    return {"y": said["y"][:4]}, state


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
    ("policy", "told"),
    [
        (
            lambda: make_small(Raises),
            "cannot act one step: ValueError: out of cheese (it saw float32 [8, 5])",
        ),
        (
            lambda: make_small(SaysNaN),
            "'values' is not a finite number while acting one step, first for agent 0",
        ),
        (lambda: foreign.functions(act=half_an_answer), "'y' is [4, 3] while acting one step; it must begin"),
        (
            lambda: Bare(GrowingState(), obs=5, layout="step", initial=lambda m, n: torch.zeros(n, 16)),
            "keeps its",
        ),
        (lambda: Bare(SaysWholeNumbers(), obs=5), "int64 while acting one step"),
    ],
    ids=["raises", "nan", "shape", "state", "dtype"],
)
def test_what_cannot_be_tested_is_one_clear_error(policy, told):
    with pytest.raises(ContractError) as caught:
        holdfast.check(policy(), *([] if isinstance(policy(), Subject) else [OnlySpec()]))
    assert told in str(caught.value)


def test_a_policy_that_raises_later_has_no_tick_where_it_raised():
    laws = holdfast.check(Bare(foreign.Raises(), obs=5))
    assert not laws.ok
    assert "the policy raised ValueError: out of cheese" in laws["clear"].finding


def test_a_policy_that_needs_another_device_is_refused():
    with pytest.raises(ContractError, match="meta"):
        holdfast.check(Elsewhere())


def test_a_policy_without_numbers_is_refused():
    with pytest.raises((ContractError, ConfigError), match="meta"):
        holdfast.check(nn.LSTM(5, 16, device="meta"))


def test_what_is_no_policy_is_refused():
    with pytest.raises(ConfigError, match=r"this is dict.*Callables"):
        holdfast.check({})
    with pytest.raises(ContractError, match=r"Linear cannot be called as \(x, state\)"):
        holdfast.check(nn.Linear(5, 3))
    with pytest.raises(ConfigError, match=r"check\(policy, obs=\(4,\)\)"):
        holdfast.check(foreign.Looks())
    with pytest.raises(ConfigError, match=r"as Bare, which takes no .depth."):
        holdfast.check(nn.LSTM(5, 16), depth=3)
    with pytest.raises(ConfigError, match="Dict"):
        holdfast.check(nn.LSTM(5, 16), obs=spaces.Dict({}))


@pytest.mark.parametrize(
    ("policy", "options", "kind"),
    [
        (lambda: nn.LSTM(5, 16), {}, Bare),
        (foreign.Agent, {"actions": 3}, CleanRL),
        (lambda: foreign.Swims(True), {"obs": 5}, Puffer),
        (make_small, {"world": OnlySpec()}, Wrapped),
        (lambda: "fast", {}, Wrapped),
    ],
    ids=["bare", "cleanrl", "puffer", "own", "name"],
)
def test_how_a_policy_is_called_is_found_out(policy, options, kind):
    from holdfast.check.subjects.find import subject_of

    assert type(subject_of(policy(), **options)) is kind


def test_half_precision_is_checked_although_the_processor_may_not_run_it():
    assert holdfast.check(nn.GRU(5, 16).bfloat16())["replay"].ok


class OnlyFloat32(foreign.Sequence):
    """Insists on single precision, as buffers of numpy arrays do."""

    def forward(self, x, state):
        return super().forward(x.float(), state)


def test_what_runs_in_float32_only_is_proven_there_and_the_note_says_so():
    laws = holdfast.check(OnlyFloat32())
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}
    assert "not measured in float64" in laws.notes[-1]
    assert all("f64" not in part.what for law in laws.values() for part in law.parts)


def from_zeros(module, obs, actions, state, first):
    return foreign.replay_in_pieces(module, obs, actions, foreign.nothing_yet(module, len(obs)), first)


def test_a_small_error_is_seen_in_float32_too():
    says_little = OnlyFloat32()
    nn.init.orthogonal_(says_little.outwards.weight, 0.01)
    laws = holdfast.check(foreign.functions(says_little, replay=from_zeros))
    assert not laws["replay"].ok
    assert laws["replay"].pattern.name == "training starts from zeros"


def test_observations_that_never_differ_are_refused():
    with pytest.raises(ConfigError, match="only one observation"):
        holdfast.check(foreign.Names(), obs=spaces.Discrete(1))


def test_callables_may_say_how_values_are_asked_for():
    asked = []

    def value(module, obs, state, first):
        asked.append(len(obs))
        return module(obs[None], state["h"])[0][0]

    laws = holdfast.check(foreign.functions(value=value))
    assert laws["pure"].ok
    assert asked
    assert isinstance(foreign.functions(), Callables)


@pytest.mark.parametrize("layout", ["time first", "batch first", "sideways"])
def test_a_layout_that_does_not_fit_is_refused(layout):
    core = nn.GRU(5, 16, batch_first=layout == "time first")
    with pytest.raises((ContractError, ConfigError), match=r"exactly one axis|there is 'time first'"):
        Bare(core, layout=layout)


def test_the_layout_that_was_found_is_told():
    assert Bare(nn.GRU(5, 16)).notes == ("called as x [T,B,...]: found by calling it",)
    assert "with first" in Bare(foreign.Stepper(), obs=5).notes[0]


def test_a_state_that_nobody_can_copy_is_refused():
    class Box:
        pass

    with pytest.raises(ContractError, match=r"holds a Box.*tensors in tuples"):
        holdfast.check(foreign.functions(initial=lambda module, rows: Box()))


def test_gradients_that_cannot_be_measured_are_told():
    laws = holdfast.check(foreign.Names(), obs=spaces.Discrete(7))
    assert any("gradients from step to step were not measured" in note for note in laws.notes)


def test_a_policy_is_checked_with_one_thread_and_the_others_come_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        holdfast.check(nn.GRUCell(3, 4))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
