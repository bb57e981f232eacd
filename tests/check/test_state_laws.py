"""The laws replay, pure, bounded, restore and agree: a right policy obeys, and a broken one breaks each."""

from functools import cache

import pytest
import torch

from helpers import foreign_policies as foreign
from holdfast.check import state_laws
from holdfast.check.adapters import CleanRL, RawModule
from holdfast.check.context import prepare
from holdfast.check.held_memory import bytes_held
from holdfast.types import Tensor

pytestmark = pytest.mark.usefixtures("annotations_asleep")


@cache
def context_of(kind):
    torch.manual_seed(0)
    return prepare(RawModule(kind(), obs=5))


def agent_context(kind, adapter=CleanRL):
    torch.manual_seed(0)
    return prepare(adapter(kind(), obs=4, actions=3))


def broken(parts):
    return {part.what: part.finding for part in parts if not part.ok}


@pytest.mark.parametrize(
    "law",
    [state_laws.replay, state_laws.pure, state_laws.bounded, state_laws.restore, state_laws.agree],
)
def test_right_policy_obeys_the_law(law):
    parts = law(context_of(foreign.Stepper))
    assert parts
    assert broken(parts) == {}


def test_replay_compares_every_output_in_every_precision():
    right = state_laws.replay(agent_context(foreign.Agent))
    names = {part.what for part in right}
    assert broken(right) == {}
    wrong = state_laws.replay(agent_context(foreign.Agent, foreign.StartsFromZeros))
    # Bootstrap values are computed from a state that is handed over.
    assert set(broken(wrong)) == {name for name in names if "bootstrap" not in name}
    assert {what.rpartition(", ")[2] for what in names} == {"f64", "f32"}
    assert len(names) > 2


@pytest.mark.parametrize(
    ("kind", "what", "finding"),
    [
        (foreign.ClearsInPlace, "inputs modified by act", "act wrote into its "),
        (foreign.ClampsInPlace, "inputs modified by replay", "replay wrote into its obs"),
        (foreign.OneBuffer, "returned states modified by the next call", "the next call wrote into "),
    ],
)
def test_pure_names_the_modified_tensor(kind, what, finding):
    assert broken(state_laws.pure(context_of(kind)))[what].startswith(finding)


def test_pure_finds_a_hidden_state():
    parts = broken(state_laws.pure(context_of(foreign.Everywhere)))
    assert "outputs of the same steps repeated" in parts


class CollectsObservations(foreign.Stepper):
    def __init__(self):
        super().__init__()
        self.past = []

    def forward(self, x, state, first):
        self.past.append(x.detach().clone())
        return super().forward(x, state, first)


def test_bounded_finds_growing_memory():
    parts = broken(state_laws.bounded(context_of(CollectsObservations)))
    assert list(parts) == ["growth of bytes from 400 to 2,000 steps"]


class CollectsSparseTensors(CollectsObservations):
    """What it keeps has no storage of its own, and elsewhere there is a tensor of a transform, which has none."""

    def __init__(self, pack=Tensor.to_sparse):
        super().__init__()
        self.pack, self.batched = pack, []
        torch.vmap(lambda x: self.batched.append(x) or x.sum())(torch.ones(2, 3))

    def forward(self, x, state, first):
        y, state = super().forward(x, state, first)
        self.past[-1] = self.pack(self.past[-1])
        return y, state


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta:UserWarning")
@pytest.mark.parametrize("pack", [Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.to_sparse_csc])
def test_sparse_memory_is_counted(pack):
    policy, sizes = CollectsSparseTensors(pack), []
    for _ in range(3):
        policy(torch.ones(2, 5), None, torch.zeros(2, dtype=torch.bool))
        sizes.append(bytes_held(policy)[0])
    # Two rows of five numbers: ten values with their indices.
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 2 * 5 * 4


def test_what_loaded_a_module_is_not_the_policy_s_memory(monkeypatch):
    policy = foreign.Stepper()
    before = bytes_held(policy)
    monkeypatch.setitem(vars(foreign), "__loader__", [torch.ones(1000), torch.eye(3).to_sparse()])
    assert bytes_held(policy) == before
    monkeypatch.setitem(vars(foreign), "LOADED", [torch.ones(1000)])
    assert bytes_held(policy)[0] == before[0] + 4000


def test_restore_finds_a_state_that_is_not_saved():
    assert "outputs after saving and loading" in broken(state_laws.restore(context_of(foreign.Everywhere)))


def test_agree_finds_a_batch_of_one_that_is_read_differently():
    parts = broken(state_laws.agree(agent_context(foreign.ForgetsOneSequence)))
    assert set(parts) == {f"a batch of one sequence against the full batch, {kind}" for kind in ("f64", "f32")}


def test_agree_finds_segments_that_differ_from_steps():
    torch.manual_seed(0)
    parts = broken(state_laws.agree(prepare(RawModule(foreign.OtherInSegments()))))
    assert "one segment of 32 steps against single steps, f64" in parts
    assert "short segments against long ones, f64" in parts
    assert "a batch of one sequence against the full batch, f64" not in parts


class RemakesAnAttribute(foreign.Sequence):
    """Keeps its last output, whose size depends on the call."""

    def forward(self, x, state):
        self.last, state = super().forward(x, state)
        return self.last, state


class HasExtraState(foreign.Sequence):
    """Saves a number that is not a tensor."""

    def get_extra_state(self):
        return {"version": 3}

    def set_extra_state(self, state):
        assert state == {"version": 3}


@pytest.mark.parametrize("kind", [RemakesAnAttribute, HasExtraState])
def test_right_modules_are_bounded_and_restored(kind):
    torch.manual_seed(0)
    context = prepare(RawModule(kind(), obs=5))
    assert broken(state_laws.bounded(context) + state_laws.restore(context)) == {}


class ForgetsWithGradients(foreign.Sequence):
    """Starts from zeros where gradients are on, as in an update."""

    def forward(self, x, state):
        return super().forward(x, None if torch.is_grad_enabled() else state)


def test_replay_runs_with_gradients_on():
    torch.manual_seed(0)
    parts = state_laws.replay(prepare(RawModule(ForgetsWithGradients(), obs=5)))
    assert set(broken(parts)) == {"y, f64", "y, f32"}
