"""bfloat16: layers compute in it; weights, states, last layers and outputs stay float32."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import holdfast
from helpers.small_policy import OnlySpec, make_small
from holdfast.build import build_policy
from holdfast.check.adapters import adapt
from holdfast.check.script import write_script
from holdfast.config.run import Config, override
from holdfast.errors import ConfigError
from holdfast.memory import CELLS, make_cell
from holdfast.monitor.replay_check import BF16_BOUND
from holdfast.policies import POLICIES, heads
from holdfast.policies.recurrent_policy import full_precision

WORLD = holdfast.make_world("recall", agents=1)
FORMS = [*POLICIES, "component:fast", "component:latent_attn_small", "component:example"]


def make_bfloat16(name="fast", **options):
    """A policy in bfloat16 with perturbed weights, so that its outputs are not near zero."""
    policy = holdfast.make_policy(name, WORLD, seed=0, **{"hidden_size": 32, **options})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += torch.randn(weight.shape, generator=generator) / max(weight[0].numel(), 10) ** 0.5
    policy.precision = "bfloat16"
    return policy


def script_for(adapter):
    return write_script(adapter.random_obs, 8, 32, share_of_starts=0.12, absences=True, act=adapter.random_actions)


@pytest.mark.parametrize(
    ("name", "memory"), [*((name, "lstm") for name in FORMS), *(("fast", memory) for memory in CELLS)]
)
def test_bfloat16_rollout_equals_replay(name, memory, annotations_asleep):
    policy = make_bfloat16(name, memory=memory)
    adapter = adapt(policy, WORLD)
    recording = adapter.rollout_and_replay(script_for(adapter))
    error = (recording.rollout - recording.replay).abs() / recording.rollout.abs().max().clamp(min=1)
    _, size, bound = BF16_BOUND.worst(error)
    assert size <= bound
    assert recording.rollout.dtype == torch.float32
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32}
    policy.precision = "float32"
    full = adapter.rollout_and_replay(script_for(adapter)).rollout
    assert 0 < (full - recording.rollout).abs().max() < 0.3, "bfloat16 differs from float32, but not by much"


@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("name", ["fast", "component:fast"])
def test_layers_compute_in_bfloat16_and_the_last_ones_in_float32(name, steps, monkeypatch):
    policy, dtypes, product = make_bfloat16(name), {}, heads.exact_linear

    def recorded(x, weight, bias):
        y = product(x, weight, bias)
        # In bfloat16, one number in a few hundred would be equal.
        exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        dtypes[f"product {len(dtypes)} fc2"] = (torch.float32, y.dtype)
        assert (y - exact).abs().max() <= 1e-5 * exact.abs().max()
        return y

    monkeypatch.setattr(heads, "exact_linear", recorded)
    for path, module in policy.named_modules():
        if isinstance(module, nn.Linear) or path.endswith(("scores", "_action_", "_value_")):
            module.register_forward_hook(
                lambda _, inputs, output, path=path: dtypes.update({path: (inputs[0].dtype, output.dtype)})
            )
    shape = (3,) if steps == 1 else (3, steps)
    obs = torch.full((*shape, *WORLD.spec.obs_shape), 255, dtype=torch.uint8)
    state = policy.lstm.cell.initial(3)
    output, after = policy.unroll(obs, torch.zeros(shape, dtype=torch.bool), state)
    assert {leaf.dtype for leaf in (*output, *after.values())} == {torch.float32}
    last = {path: kinds for path, kinds in dtypes.items() if path.endswith(("fc2", "scores", "_value_.layer"))}
    last = {path: kinds for path, kinds in last.items() if not path.startswith("encoder")}
    assert len(last) >= 2
    assert {output for _, output in last.values()} == {torch.float32}
    inner = {dtype for path, (_, dtype) in dtypes.items() if path.endswith(("fc1", "fc1.layer", "_1.layer"))}
    assert inner == {torch.bfloat16}


def test_bfloat16_outputs_are_cast_to_float32():
    policy = make_small()
    policy.precision = "bfloat16"
    state = policy.lstm.cell.initial(2)
    output, _ = policy.unroll(torch.randn(2, 5), torch.ones(2, dtype=torch.bool), state)
    assert [leaf.dtype for leaf in output] == [torch.float32, torch.float32]


def test_bfloat16_gradients_are_float32_and_close():
    gradients = []
    for precision in ("float32", "bfloat16"):
        policy = make_bfloat16("example", memory="gru")
        policy.precision = precision
        first = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.3
        obs = adapt(policy, WORLD).random_obs((4, 6), torch.Generator().manual_seed(0))
        output, _ = policy.unroll(obs, first, policy.lstm.cell.initial(4))
        (output.logits.square().sum() + output.values.sum()).backward()
        gradients.append([weight.grad for weight in policy.parameters()])
    assert {gradient.dtype for gradient in gradients[1]} == {torch.float32}
    for full, rounded in zip(*gradients, strict=True):
        assert (full - rounded).norm() <= 0.1 * full.norm()


def test_full_precision_without_autocast():
    layer = nn.Linear(3, 2).double()
    assert full_precision(layer, torch.ones(4, 3).double()).equal(layer(torch.ones(4, 3).double()))


def test_full_precision_inside_autocast():
    layer, x = nn.Linear(64, 2), torch.randn(4, 64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        exact, rounded = full_precision(layer, x), layer(x)
    assert exact.equal(layer(x.float()))
    assert rounded.dtype == torch.bfloat16


@pytest.mark.parametrize("name", list(CELLS))
@given(seed=st.integers(0, 2**16), layers=st.integers(1, 2), steps=st.integers(1, 5))
def test_bfloat16_cell_clears_exactly_and_keeps_invalid_states(name, seed, layers, steps):
    torch.manual_seed(seed)
    cell = make_cell(name, 5, 16, layers)
    clear, valid = torch.rand(3, steps) < 0.4, torch.rand(3, steps) < 0.7
    valid[0] = clear[0] = False
    x, state = torch.randn(3, steps, 5), cell.initial(3).apply(torch.randn_like)
    # Inputs before the last clear of a row differ.
    last = torch.where(clear, torch.arange(1, steps + 1), 0).amax(1)
    before = torch.arange(1, steps + 1)[None] < last[:, None]
    other = torch.where(before[..., None], torch.randn_like(x), x)
    other_state = state.apply(lambda leaf: torch.where((last > 0)[:, None, None], leaf + 1, leaf))
    with torch.autocast("cpu", torch.bfloat16):
        y, after = cell(x, state, clear, valid)
        y_other, after_other = cell(other, other_state, clear, valid)
    for key, leaf in after.items():
        assert leaf.dtype == state[key].dtype
        assert leaf.equal(after_other[key])
        assert leaf[0].equal(state[key][0]), "an agent that never acts keeps its state bit for bit"
    assert torch.where(before[..., None], 0.0, y).equal(torch.where(before[..., None], 0.0, y_other))


@pytest.mark.parametrize("name", [name for name in CELLS if name != "none"])
@pytest.mark.parametrize("starts", [(), (1,)])
@pytest.mark.parametrize("steps", [1, 3])
def test_bfloat16_cell_states_are_float32(name, starts, steps):
    cell = make_cell(name, 5, 16, 2)
    clear = torch.zeros(4, steps, dtype=torch.bool)
    clear[:2, list(starts[: steps - 1])] = True
    x = torch.randn(4, steps, 5)
    with torch.autocast("cpu", torch.bfloat16):
        _, after = cell(x, cell.initial(4), clear)
        _, one = cell(x[:, 0], cell.initial(4), clear[:, 0])
    assert {leaf.dtype for leaf in (*after.values(), *one.values())} == {torch.float32}


def test_minlstm_recurrence_is_float32():
    cell, x = make_cell("minlstm", 5, 16, 1), torch.randn(4, 64, 5)
    never = torch.zeros(4, 64, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        parallel, _ = cell(x, cell.initial(4), never)
        outputs, state = [], cell.initial(4)
        for t in range(64):
            y, state = cell(x[:, t], state, never[:, t])
            outputs.append(y)
    assert (torch.stack(outputs, 1) - parallel).abs().max() <= 1e-5


def test_config_sets_precision():
    config = override(Config(), {"policy.precision": "bfloat16", "policy.hidden_size": 16})
    assert build_policy(config, WORLD, torch.device("cpu")).precision == "bfloat16"
    assert build_policy(Config(), WORLD, torch.device("cpu")).precision == "float32"


@pytest.mark.parametrize("key", ["policy.precision=bfloat16", "policy.compile=true"])
def test_hand_written_policy_rejects_bfloat16_and_compile(key):
    name, _, value = key.partition("=")
    config = override(Config(), {"policy": "helpers.manual_policy:NewLSTMPolicy", name: value})
    with pytest.raises(ConfigError, match=f"{key} needs a RecurrentPolicy; helpers.manual_policy:NewLSTMPolicy"):
        build_policy(config, OnlySpec(), torch.device("cpu"))


def test_compiled_bfloat16_equals_eager(annotations_asleep):
    policy = make_bfloat16("fast")
    obs = adapt(policy, WORLD).random_obs((4, 3), torch.Generator().manual_seed(0))
    inputs = obs, torch.zeros(4, 3, dtype=torch.bool), policy.lstm.cell.initial(4)
    with torch.no_grad():
        eager, _ = policy.unroll(*inputs)
        policy.compile_parts(backend="eager")
        compiled, _ = policy.unroll(*inputs)
    assert compiled.logits.equal(eager.logits)
    assert compiled.values.equal(eager.values)
