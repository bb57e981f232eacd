"""Conditions of a check: bfloat16, GPU, kernels."""

import math
import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import holdfast
from helpers import triton_interpreter
from helpers.small_policy import OnlySpec, Small, make_small
from holdfast import make_policy, make_world
from holdfast.check import preflight
from holdfast.check.adapters import adapt
from holdfast.check.context import prepare
from holdfast.check.laws import measure
from holdfast.check.preflight import Conditions
from holdfast.cli import main
from holdfast.errors import ConfigError, ContractError
from holdfast.memory.kernels import ops
from holdfast.monitor.replay_check import RoundingBound

pytestmark = pytest.mark.usefixtures("annotations_asleep")
triton_interpreter.repair()
BF16 = Conditions(precision="bfloat16")


def require_all(laws):
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}
    assert len(laws) == 10


def measure_law(policy, law, conditions=BF16):
    (result,) = measure(prepare(adapt(policy, OnlySpec()), conditions), [law])
    return result


def broken(law):
    return [part.what for part in law.parts if not part.ok]


class ForgetsInBfloat16(Small):
    """Replays from zeros in bfloat16."""

    def unroll(self, obs, first, state, valid=None):
        if self.precision == "bfloat16" and first.dim() == 2:
            state = state.apply(torch.zeros_like)
        return super().unroll(obs, first, state, valid)


class NoClearInBfloat16(Small):
    """Never resets in bfloat16."""

    def unroll(self, obs, first, state, valid=None):
        return super().unroll(obs, first & (self.precision == "float32"), state, valid)


class WritesInBfloat16(Small):
    """Writes into the state in bfloat16."""

    def unroll(self, obs, first, state, valid=None):
        outputs, after = super().unroll(obs, first, state, valid)
        if self.precision == "bfloat16":
            state["h"].add_(1.0)
        return outputs, after


class MixesInBfloat16(Small):
    """Mixes rows in bfloat16."""

    def encode(self, obs):
        x = super().encode(obs)
        return x + x.mean(0, keepdim=True) if torch.is_autocast_enabled("cpu") else x


@pytest.mark.slow
def test_correct_policy_obeys_every_law_in_bfloat16():
    laws = holdfast.check(make_small(), OnlySpec(), precision="bfloat16")
    require_all(laws)
    in_bf16 = {name: [part.what for part in law.parts if "bf16" in part.what] for name, law in laws.items()}
    exact = {"cut", "carry", "clear", "replay", "isolate", "pure", "restore", "agree"}
    assert {name for name, parts in in_bf16.items() if parts} == exact
    assert not any("f32" in part.what for law in laws.values() for part in law.parts)
    assert any("bfloat16" in note for note in laws.notes)


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("fast", "gru"),
        pytest.param("fast", "minlstm", marks=pytest.mark.slow),
        pytest.param("component:latent_attn_tiny", "lstm", marks=pytest.mark.slow),
    ],
)
def test_builtin_policies_replay_clear_and_agree_in_bfloat16(name, memory):
    world = make_world("recall", agents=1)
    policy = make_policy(name, world, seed=0, memory=memory, hidden_size=32)
    context = prepare(adapt(policy, world), BF16)
    for law in measure(context, ["clear", "replay", "agree"]):
        assert law.ok, law.finding


@triton_interpreter.needs_kernels
@pytest.mark.parametrize(
    ("memory", "laws"),
    [
        ("lstm", ["cut", "replay"]),
        ("gru", ["cut", "replay"]),
        pytest.param("lstm", ["clear", "agree"], marks=pytest.mark.slow),
    ],
)
def test_laws_hold_with_the_triton_kernel(memory, laws, monkeypatch):
    """Where there is no GPU, Triton's interpreter runs the kernel, in float32."""
    calls, run = [], ops.run_forward
    monkeypatch.setattr(ops, "run_forward", lambda *args, **options: calls.append(1) or run(*args, **options))
    world = make_world("recall", agents=1)
    policy = make_policy("fast", world, seed=0, memory=memory, hidden_size=16, num_layers=1)
    for law in measure(prepare(adapt(policy, world), Conditions(kernel="triton")), laws):
        assert law.ok, law.finding
    assert calls


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
def test_bug_in_bfloat16_only_is_caught(sabotage, law):
    result = measure_law(make_small(sabotage), law)
    assert not result.ok
    assert all("bf16" in what for what in broken(result))
    assert measure_law(make_small(sabotage), law, Conditions()).ok


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (torch.nn.LSTM(3, 4), {"precision": "bfloat16"}, "are for Holdfast policies; LSTM is measured on"),
        (torch.nn.LSTM(3, 4), {"kernel": "torch"}, "are for Holdfast policies; LSTM is measured on"),
        (
            "helpers.manual_policy:NewLSTMPolicy",
            {"precision": "bfloat16"},
            "needs a RecurrentPolicy; NewLSTMPolicy",
        ),
        ("fast", {"precision": "float16"}, "--precision float16: choose from float32, bfloat16."),
        ("fast", {"kernel": "cudnn"}, "--kernel cudnn: choose from auto, torch, triton."),
        ("fast", {"device": "gpu"}, "--device gpu: choose from cpu, cuda."),
    ],
)
def test_unsupported_conditions_are_an_error(policy, options, message):
    world = OnlySpec() if policy == "helpers.manual_policy:NewLSTMPolicy" else None
    with pytest.raises(ConfigError, match=message):
        holdfast.check(policy, world, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_an_error(capsys):
    assert main(["check", "fast", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "holdfast: --device cuda, but torch finds no GPU here; leave it out.\n"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            {"h": [1.0]},
            {"h": [1.0], "c": [1.0]},
            "The state (its ['c']) is absent at first and float32 [1] after a step",
        ),
        (
            {"h": [1.0], "c": [1.0]},
            {"h": [1.0]},
            "The state (its ['c']) is float32 [1] at first and absent after a step",
        ),
        ({"h": [1.0]}, {"h": [1, 2]}, "The state (its ['h']) is float32 [1] at first and int64 [2] after a step; a"),
        ({"h": [1.0]}, {"h": [math.nan]}, "The state['h'] is not finite after one step."),
        ([1.0], [math.inf], "The state is not finite after one step."),
    ],
)
def test_state_that_changes_its_kind_is_refused(before, after, message):
    states = [
        torch.tensor(x) if isinstance(x, list) else {k: torch.tensor(v) for k, v in x.items()} for x in (before, after)
    ]
    with pytest.raises(ContractError, match=re.escape(message)):
        preflight._require_state(*states)


@pytest.mark.parametrize("option", ["--device", "--precision", "--kernel"])
def test_conditions_of_a_world_are_an_error(option, capsys):
    assert main(["check", "world:recall", option, "cpu"]) == 2
    assert capsys.readouterr().err.startswith(f"holdfast: {option} is for policies")


def test_command_line_passes_conditions(monkeypatch, capsys):
    received = []
    monkeypatch.setattr("holdfast.cli.check.run_laws", lambda *_, conditions: received.append(conditions))
    monkeypatch.setattr("holdfast.cli.check.print_laws", lambda screen, laws: None)
    with pytest.raises(AttributeError, match="ok"):
        main(["check", "fast", "--precision", "bfloat16", "--kernel", "torch"])
    assert received == [Conditions("cpu", "bfloat16", "torch")]


@example(errors=[0.05] * 8, mean=1e-2, most=1e-1)
@example(errors=[0.0] * 40 + [0.2], mean=1e-2, most=1e-1)
@given(
    errors=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=50),
    mean=st.floats(1e-4, 1e-1),
    most=st.floats(1e-4, 1e-1),
)
def test_rounding_bound_limits_mean_and_largest(errors, mean, most):
    error = torch.tensor(errors)
    _, size, bound = RoundingBound(mean, most).worst(error)
    # With so few errors the largest is not ignored.
    assert (size <= bound) == (float(error.double().mean()) <= mean and float(error.max()) <= most)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", ["auto", "torch", "triton"])
def test_fast_obeys_every_law_on_a_gpu(precision, kernel):
    laws = holdfast.check("fast", device="cuda", precision=precision, kernel=kernel)
    require_all(laws)
    if kernel == "auto":
        assert any("triton" in part.what for part in laws["agree"].parts), "the kernel that may be chosen"


@pytest.mark.gpu
@pytest.mark.parametrize("sabotage", [NoClearInBfloat16, ForgetsInBfloat16])
def test_broken_policy_is_caught_on_a_gpu(sabotage):
    laws = holdfast.check(make_small(sabotage), OnlySpec(), device="cuda", precision="bfloat16")
    assert not laws.ok


@pytest.mark.gpu
def test_broken_policy_is_diagnosed_on_a_gpu():
    from helpers import broken_policies as own

    laws = holdfast.check(make_small(own.LateClear), OnlySpec(), device="cuda")
    assert laws["clear"].pattern.name == "state reset one step late"
