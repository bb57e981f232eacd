"""bfloat16: layers compute in it; weights, states, last layers and all that is said stay float32."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast.build import build_policy
from holdfast.check.compare import ROUNDED
from holdfast.check.script import write_script
from holdfast.check.subjects.find import subject_of
from holdfast.config import Config, change
from holdfast.errors import ConfigError
from holdfast.memory import CELLS, make_cell
from holdfast.policies import POLICIES
from holdfast.policies.precision import in_full
from small import OnlySpec, make_small

WORLD = holdfast.make_world("recall", agents=1)
FORMS = [*POLICIES, "component:fast", "component:latent_attn_small", "component:example"]


def loud(name="fast", **options):
    """A policy in bfloat16 whose weights were stirred, so that it says something."""
    policy = holdfast.make_policy(name, WORLD, seed=0, **{"hidden_size": 32, **options})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += torch.randn(weight.shape, generator=generator) / max(weight[0].numel(), 10) ** 0.5
    policy.precision = "bfloat16"
    return policy


def script_for(subject):
    return write_script(subject.imagine, 8, 32, share_of_starts=0.12, absences=True, act=subject.do)


@pytest.mark.parametrize(
    ("name", "memory"), [*((name, "lstm") for name in FORMS), *(("fast", memory) for memory in CELLS)]
)
def test_a_policy_in_bfloat16_replays_what_it_lived(name, memory, annotations_asleep):
    policy = loud(name, memory=memory)
    subject = subject_of(policy, WORLD)
    life = subject.live(script_for(subject))
    error = (life.lived - life.replayed).abs() / life.lived.abs().max().clamp(min=1)
    _, size, bound = ROUNDED.judge(error)
    assert size <= bound
    assert life.lived.dtype == torch.float32
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32}
    policy.precision = "float32"
    full = subject.live(script_for(subject)).lived
    assert 0 < (full - life.lived).abs().max() < 0.3, "it was computed otherwise, and nearly the same"


@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("name", ["fast", "component:fast"])
def test_layers_compute_in_bfloat16_and_the_last_ones_in_float32(name, steps):
    policy, met = loud(name), {}
    for path, module in policy.named_modules():
        if isinstance(module, nn.Linear) or path.endswith(("scores", "_action_", "_value_")):
            module.register_forward_hook(
                lambda _, given, said, path=path: met.update({path: (given[0].dtype, said.dtype)})
            )
    shape = (3,) if steps == 1 else (3, steps)
    obs = torch.full((*shape, *WORLD.spec.obs_shape), 255, dtype=torch.uint8)
    state = policy.lstm.cell.initial(3)
    thoughts, after = policy.unroll(obs, torch.zeros(shape, dtype=torch.bool), state)
    assert {leaf.dtype for leaf in (*thoughts, *after.values())} == {torch.float32}
    last = {path: kinds for path, kinds in met.items() if path.endswith(("fc2", "scores", "_value_.layer"))}
    last = {path: kinds for path, kinds in last.items() if not path.startswith("encoder")}
    assert len(last) >= 2
    assert set(last.values()) == {(torch.float32, torch.float32)}
    inner = {said for path, (_, said) in met.items() if path.endswith(("fc1", "fc1.layer", "_1.layer"))}
    assert inner == {torch.bfloat16}


def test_what_decode_says_in_bfloat16_is_told_in_float32():
    policy = make_small()
    policy.precision = "bfloat16"
    state = policy.lstm.cell.initial(2)
    thoughts, _ = policy.unroll(torch.randn(2, 5), torch.ones(2, dtype=torch.bool), state)
    assert [part.dtype for part in thoughts] == [torch.float32, torch.float32]


def test_gradients_of_a_replay_in_bfloat16_are_float32_and_near():
    found = []
    for precision in ("float32", "bfloat16"):
        policy = loud("example", memory="gru")
        policy.precision = precision
        first = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.3
        obs = subject_of(policy, WORLD).imagine((4, 6), torch.Generator().manual_seed(0))
        thoughts, _ = policy.unroll(obs, first, policy.lstm.cell.initial(4))
        (thoughts.logits.square().sum() + thoughts.values.sum()).backward()
        found.append([weight.grad for weight in policy.parameters()])
    assert {gradient.dtype for gradient in found[1]} == {torch.float32}
    for full, rounded in zip(*found, strict=True):
        assert (full - rounded).norm() <= 0.1 * full.norm()


def test_a_layer_in_full_is_called_as_it_is_where_nothing_is_rounded():
    layer = nn.Linear(3, 2).double()
    assert in_full(layer, torch.ones(4, 3).double()).equal(layer(torch.ones(4, 3).double()))


def test_a_layer_in_full_reads_what_was_rounded_and_rounds_nothing():
    layer, x = nn.Linear(64, 2), torch.randn(4, 64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        said, rounded = in_full(layer, x), layer(x)
    assert said.equal(layer(x.float()))
    assert rounded.dtype == torch.bfloat16


@pytest.mark.parametrize("name", list(CELLS))
@given(seed=st.integers(0, 2**16), layers=st.integers(1, 2), steps=st.integers(1, 5))
def test_a_cell_in_bfloat16_forgets_exactly_and_gives_its_state_back_as_it_was(name, seed, layers, steps):
    torch.manual_seed(seed)
    cell = make_cell(name, 5, 16, layers)
    clear, valid = torch.rand(3, steps) < 0.4, torch.rand(3, steps) < 0.7
    valid[0] = clear[0] = False
    x, state = torch.randn(3, steps, 5), cell.initial(3).apply(torch.randn_like)
    # Whatever comes before a row's last clear is something else.
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
        assert leaf[0].equal(state[key][0]), "who never acts remembers the same to the last bit"
    assert torch.where(before[..., None], 0.0, y).equal(torch.where(before[..., None], 0.0, y_other))


@pytest.mark.parametrize("name", [name for name in CELLS if name != "none"])
@pytest.mark.parametrize("starts", [(), (1,)])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_cell_in_bfloat16_remembers_in_float32_whichever_way_it_reads(name, starts, steps):
    cell = make_cell(name, 5, 16, 2)
    clear = torch.zeros(4, steps, dtype=torch.bool)
    clear[:2, list(starts[: steps - 1])] = True
    x = torch.randn(4, steps, 5)
    with torch.autocast("cpu", torch.bfloat16):
        _, after = cell(x, cell.initial(4), clear)
        _, one = cell(x[:, 0], cell.initial(4), clear[:, 0])
    assert {leaf.dtype for leaf in (*after.values(), *one.values())} == {torch.float32}


def test_the_recurrence_of_a_minlstm_is_not_rounded():
    cell, x = make_cell("minlstm", 5, 16, 1), torch.randn(4, 64, 5)
    never = torch.zeros(4, 64, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        whole, _ = cell(x, cell.initial(4), never)
        said, state = [], cell.initial(4)
        for t in range(64):
            y, state = cell(x[:, t], state, never[:, t])
            said.append(y)
    assert (torch.stack(said, 1) - whole).abs().max() <= 1e-5


def test_a_config_says_what_a_policy_computes_in():
    config = change(Config(), {"policy.precision": "bfloat16", "policy.hidden_size": 16})
    assert build_policy(config, WORLD, torch.device("cpu")).precision == "bfloat16"
    assert build_policy(Config(), WORLD, torch.device("cpu")).precision == "float32"


@pytest.mark.parametrize("key", ["policy.precision=bfloat16", "policy.compile=true"])
def test_a_policy_written_by_hand_computes_in_float32(key):
    name, _, value = key.partition("=")
    config = change(Config(), {"policy": "handwritten:NewLSTMPolicy", name: value})
    with pytest.raises(ConfigError, match=f"{key} needs a RecurrentPolicy; handwritten:NewLSTMPolicy"):
        build_policy(config, OnlySpec(), torch.device("cpu"))


def test_compiled_parts_compute_in_bfloat16_too(annotations_asleep):
    policy = loud("fast")
    obs = subject_of(policy, WORLD).imagine((4, 3), torch.Generator().manual_seed(0))
    asked = obs, torch.zeros(4, 3, dtype=torch.bool), policy.lstm.cell.initial(4)
    with torch.no_grad():
        eager, _ = policy.unroll(*asked)
        policy.compile_parts(backend="eager")
        compiled, _ = policy.unroll(*asked)
    assert compiled.logits.equal(eager.logits)
    assert compiled.values.equal(eager.values)
