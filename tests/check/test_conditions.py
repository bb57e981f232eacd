"""The check under other conditions: in bfloat16, on a GPU, by one kernel or another."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import holdfast
from holdfast import make_policy, make_world
from holdfast.check.bench import set_up
from holdfast.check.compare import ROUNDED, Spread, close
from holdfast.check.conditions import Conditions
from holdfast.check.laws import measure
from holdfast.check.subjects.cell import GRADIENT_BOUND, _kernels
from holdfast.check.subjects.find import subject_of
from holdfast.cli import main
from holdfast.errors import ConfigError
from holdfast.memory import GRU, LSTM, MinLSTM, kernels
from small import OnlySpec, Small, make_small

pytestmark = pytest.mark.usefixtures("annotations_asleep")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BF16 = Conditions(precision="bfloat16")


def require_all(laws):
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}
    assert len(laws) == 9


def verdict(policy, law, conditions=BF16):
    (found,) = measure(set_up(subject_of(policy, OnlySpec()), conditions), [law])
    return found


def broken(law):
    return [part.what for part in law.parts if not part.ok]


class ForgetsInBfloat16(Small):
    """Updates in bfloat16 start from nothing."""

    def unroll(self, obs, first, state, valid=None):
        if self.precision == "bfloat16" and first.dim() == 2:
            state = state.apply(torch.zeros_like)
        return super().unroll(obs, first, state, valid)


class NoClearInBfloat16(Small):
    """Never clears in bfloat16."""

    def unroll(self, obs, first, state, valid=None):
        return super().unroll(obs, first & (self.precision == "float32"), state, valid)


class WritesInBfloat16(Small):
    """Writes into the state it is given, in bfloat16."""

    def unroll(self, obs, first, state, valid=None):
        said, after = super().unroll(obs, first, state, valid)
        if self.precision == "bfloat16":
            state["h"].add_(1.0)
        return said, after


class MixesInBfloat16(Small):
    """Rows see each other, in bfloat16."""

    def encode(self, obs):
        x = super().encode(obs)
        return x + x.mean(0, keepdim=True) if torch.is_autocast_enabled("cpu") else x


class HalfAGradient(LSTM):
    """A kernel in bfloat16 that loses the gradient of its input weights at every other step."""

    def forward(self, x, state, clear, valid=None):
        y, after = super().forward(x, state, clear, valid)
        if x.dim() == 3 and torch.is_autocast_enabled("cpu"):
            y = torch.cat([y[:, ::2], y[:, 1::2].detach()], 1)[:, _inverse(x.shape[1])]
        return y, after


def _inverse(steps):
    return torch.cat([torch.arange(0, steps, 2), torch.arange(1, steps, 2)]).argsort()


def test_a_right_policy_obeys_every_law_in_bfloat16():
    laws = holdfast.check(make_small(), OnlySpec(), precision="bfloat16")
    require_all(laws)
    told = {name: [part.what for part in law.parts if "bf16" in part.what] for name, law in laws.items()}
    exact = {"cut", "clear", "replay", "isolate", "pure", "restore", "agree"}
    assert {name for name, parts in told.items() if parts} == exact
    assert not any("f32" in part.what for law in laws.values() for part in law.parts)
    assert any("bfloat16" in note for note in laws.notes)


@pytest.mark.parametrize(
    ("name", "memory"), [("fast", "gru"), ("fast", "minlstm"), ("component:latent_attn_tiny", "lstm")]
)
def test_policies_of_the_catalogue_replay_clear_and_agree_in_bfloat16(name, memory):
    world = make_world("recall", agents=1)
    policy = make_policy(name, world, seed=0, memory=memory, hidden_size=32)
    bench = set_up(subject_of(policy, world), BF16)
    for law in measure(bench, ["clear", "replay", "agree"]):
        assert law.ok, law.finding


@pytest.mark.parametrize(
    ("sabotage", "law"),
    [
        (ForgetsInBfloat16, "replay"),
        (ForgetsInBfloat16, "agree"),
        (NoClearInBfloat16, "clear"),
        (WritesInBfloat16, "pure"),
        (MixesInBfloat16, "isolate"),
    ],
)
def test_what_is_wrong_in_bfloat16_alone_is_caught(sabotage, law):
    found = verdict(make_small(sabotage), law)
    assert not found.ok
    assert all("bf16" in what for what in broken(found))
    assert verdict(make_small(sabotage), law, Conditions()).ok


def test_a_gradient_that_a_kernel_loses_is_caught_in_bfloat16():
    right, wrong = (verdict(make_small(memory=kind(12, 16, 2)), "agree") for kind in (LSTM, HalfAGradient))
    assert right.ok
    assert broken(wrong) == ["its gradients, bf16"]
    assert wrong.measured > 2 * GRADIENT_BOUND[torch.bfloat16]


def test_a_policy_is_measured_in_what_it_computes_in_and_proven_in_full():
    policy = make_small()
    policy.precision = "bfloat16"
    policy.lstm.cell.kernel = "triton"
    bench = set_up(subject_of(policy, OnlySpec()), Conditions(kernel="torch"))
    assert list(bench.cases) == [torch.float64, torch.bfloat16]
    assert [case.subject.module.precision for case in bench.cases.values()] == ["float32", "bfloat16"]
    assert [case.subject.module.lstm.cell.kernel for case in bench.cases.values()] == ["torch", "torch"]
    assert (policy.precision, policy.lstm.cell.kernel) == ("bfloat16", "triton")
    plain = set_up(subject_of(policy, OnlySpec()), Conditions(precision="float32", kernel="auto"))
    assert list(plain.cases) == [torch.float64, torch.float32]
    assert [case.subject.module.lstm.cell.kernel for case in plain.cases.values()] == ["torch", "auto"]


def test_on_a_gpu_both_kernels_are_held_against_the_reference_where_either_may_run(monkeypatch):
    monkeypatch.setattr(kernels, "refused_on", lambda device: None)
    case = set_up(subject_of(make_small(), OnlySpec())).practice
    on_gpu = replace(case, device=torch.device("cuda"))
    assert _kernels(LSTM(4, 48), on_gpu) == _kernels(GRU(4, 512), on_gpu) == ("torch", "triton")
    forced = LSTM(4, 48)
    forced.kernel = "triton"
    for cell, where in (
        (forced, on_gpu),
        (LSTM(4, 40), on_gpu),
        (MinLSTM(4, 48), on_gpu),
        (LSTM(4, 48), case),
    ):
        assert _kernels(cell, where) == ()


@pytest.mark.parametrize(
    ("policy", "asked", "told"),
    [
        (torch.nn.LSTM(3, 4), {"precision": "bfloat16"}, "are for policies of Holdfast; LSTM is measured on"),
        (torch.nn.LSTM(3, 4), {"kernel": "torch"}, "are for policies of Holdfast; LSTM is measured on"),
        ("handwritten:NewLSTMPolicy", {"precision": "bfloat16"}, "needs a RecurrentPolicy; NewLSTMPolicy"),
        ("fast", {"precision": "float16"}, "--precision float16: there is float32, bfloat16."),
        ("fast", {"kernel": "cudnn"}, "--kernel cudnn: there is auto, torch, triton."),
        ("fast", {"device": "gpu"}, "--device gpu: there is cpu, cuda."),
    ],
)
def test_conditions_that_cannot_be_are_told(policy, asked, told):
    world = OnlySpec() if policy == "handwritten:NewLSTMPolicy" else None
    with pytest.raises(ConfigError, match=told):
        holdfast.check(policy, world, **asked)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told(capsys):
    assert main(["check", "fast", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "holdfast: --device cuda, but torch finds no GPU here; leave it out.\n"


@pytest.mark.parametrize("word", ["--device", "--precision", "--kernel"])
def test_worlds_have_no_conditions(word, capsys):
    assert main(["check", "world:recall", word, "cpu"]) == 2
    assert capsys.readouterr().err.startswith(f"holdfast: {word} is for policies")


def test_the_command_line_passes_conditions_on(monkeypatch, capsys):
    met = []
    monkeypatch.setattr("holdfast.cli.check.examine", lambda *given, conditions: met.append(conditions))
    monkeypatch.setattr("holdfast.cli.check.show", lambda screen, laws: None)
    with pytest.raises(AttributeError, match="ok"):
        main(["check", "fast", "--precision", "bfloat16", "--kernel", "torch"])
    assert met == [Conditions("cpu", "bfloat16", "torch")]


@example(errors=[0.05] * 8, mean=1e-2, most=1e-1)
@example(errors=[0.0] * 40 + [0.2], mean=1e-2, most=1e-1)
@given(
    errors=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=50),
    mean=st.floats(1e-4, 1e-1),
    most=st.floats(1e-4, 1e-1),
)
def test_a_spread_is_broken_by_its_mean_or_by_its_tail(errors, mean, most):
    error = torch.tensor(errors)
    _, size, bound = Spread(mean, most).judge(error)
    # Of so few the largest is not left out.
    assert (size <= bound) == (float(error.double().mean()) <= mean and float(error.max()) <= most)


def test_one_in_a_thousand_may_be_further_off_and_no_number_may_be_none():
    was = torch.zeros(10, 200)
    few, many, no_number = was.clone(), was.clone(), was.clone()
    few[0, 0], many[0, :9] = 0.5, 0.5
    no_number[3, :5] = torch.nan
    assert close("x", few, was, ROUNDED).ok
    assert not close("x", many, was, ROUNDED).ok
    assert not close("x", no_number, was, ROUNDED).ok
    assert "agent 0, step 0 is off by" in close("x", many, was, ROUNDED).finding


@needs_gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", ["auto", "torch", "triton"])
def test_fast_obeys_every_law_on_a_gpu(precision, kernel):
    laws = holdfast.check("fast", device="cuda", precision=precision, kernel=kernel)
    require_all(laws)
    if kernel == "auto":
        assert any("triton" in part.what for part in laws["agree"].parts), "the kernel that may be chosen"


@needs_gpu
@pytest.mark.parametrize("sabotage", [NoClearInBfloat16, ForgetsInBfloat16])
def test_what_is_wrong_is_caught_on_a_gpu_too(sabotage):
    laws = holdfast.check(make_small(sabotage), OnlySpec(), device="cuda", precision="bfloat16")
    assert not laws.ok


@needs_gpu
def test_what_is_wrong_everywhere_is_explained_on_a_gpu_too():
    from check import own

    laws = holdfast.check(make_small(own.LateClear), OnlySpec(), device="cuda")
    assert laws["clear"].pattern.name == "state cleared one step late"
