"""Policies as graphs: the same outputs and gradients as the classes; several memories."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

import holdfast
from helpers.component_graphs import SMALL, with_line
from helpers.component_graphs import make_graph_policy as make
from helpers.small_policy import OnlySpec
from holdfast.errors import ConfigError
from holdfast.policies import POLICIES, ComponentPolicy, make_policy
from holdfast.policies.components.component_policy import _stages
from holdfast.policies.components.graph import BUILTIN, GraphError
from holdfast.policies.distributions import distribution_for
from holdfast.worlds import Feature, WorldSpec, make_world
from holdfast.worlds.tokens import PADDING

DOCS = Path(__file__).parents[3] / "docs" / "guides" / "component_graphs.md"
FEATURES = tuple(Feature(f"feature_{i}", float(i + 1)) for i in range(25))
ACTIONS = tuple(f"action_{i}" for i in range(19))
ORIGINAL = WorldSpec((200, 3), ACTIONS, FEATURES)
COUNTS = {
    # encoder 101,824 + LSTM 2*(4*128*(128+128) + 2*4*128) + critic 128*1024+1024 + 1024+1 + actor
    # 128*512+512 + 512*16+1 + 100*16; the encoders are added up in test_fast.py and test_latent_attn.py
    "fast": 101_824 + 264_192 + 133_121 + 75_841,
    "latent_attn_tiny": 29_782 + 264_192 + 133_121 + 75_841,
    "latent_attn_small": 28_402 + 264_192 + 133_121 + 75_841,
    "latent_attn_med": 55_002 + 264_192 + 133_121 + 75_841,
    # 22 channels: conv 22*128*25+128, conv 128*128*9+128, linear 128*256+256, linear 22*256+256,
    # LSTM 2*(4*512*(512+512) + 2*4*512), actor 512*19+19, critic 512+1
    "example": 70_528 + 147_584 + 33_024 + 5_888 + 4_202_496 + 9_747 + 513,
}
TOTALS = {
    "fast": 574_978,
    "latent_attn_tiny": 502_936,
    "latent_attn_small": 501_556,
    "latent_attn_med": 528_156,
    "example": 4_469_780,
}
NAMES = list(POLICIES)
TWO_MEMORIES = """
components:
  _obs_: {component: TokensToBox}
  flat: {component: Flatten, sources: [_obs_]}
  dense: {component: Linear, sources: [flat], out: 6}
  aside: {component: Memory, sources: [dense], cell: gru, hidden_size: 5, num_layers: 1}
  _core_: {component: LSTM, sources: [dense], hidden_size: 8, num_layers: 1}
  both: {component: Concat, sources: [_core_, aside, dense]}
  late: {component: Memory, sources: [both], cell: lstm, hidden_size: 4, num_layers: 1}
  _action_: {component: Linear, sources: [late], out: actions, nonlinearity: none}
  _value_: {component: Linear, sources: [both], out: 1, nonlinearity: none}
"""


def spec_of(name):
    return WorldSpec((200, 3), ACTIONS, FEATURES[:22] if name == "example" else FEATURES)


def some_tokens(spec, *batch):
    generator = torch.Generator().manual_seed(1)
    shape = (*batch, 200)
    place = torch.randint(0, 11, shape, generator=generator) * 16 + 5
    feature = torch.randint(0, len(spec.features), shape, generator=generator)
    value = torch.randint(0, 200, shape, generator=generator)
    obs = torch.stack([place, feature, value], -1).to(torch.uint8)
    obs[..., 90:, :] = PADDING
    return obs


def mapping():
    """Read the table of docs/guides/component_graphs.md: where each part of a class is in the graph."""
    rows = re.findall(r"^\| (\w+(?:, \w+)*) \| `([\w.]+)` \| `([\w.]+)` \|$", DOCS.read_text(), re.MULTILINE)
    table = {name: {} for name in NAMES}
    for names, part, component in rows:
        for name in names.split(", "):
            table[name][part] = component
    return table


def carried_over(name, weights):
    """Rename the weights of a class to those of its graph, by the table of the docs."""
    moved = {}
    for key, leaf in weights.items():
        part = next((part for part in mapping()[name] if key.startswith(f"{part}.")), None)
        moved[key if part is None else mapping()[name][part] + key.removeprefix(part)] = leaf
    return moved


@pytest.mark.parametrize("name", NAMES)
def test_class_and_graph_have_the_same_parameter_count(name):
    spec = spec_of(name)
    for policy in (POLICIES[name](spec), ComponentPolicy(spec, name)):
        assert sum(p.numel() for p in policy.parameters()) == COUNTS[name] == TOTALS[name]


@pytest.mark.parametrize("name", NAMES)
def test_class_and_graph_give_equal_outputs_and_gradients(name):
    spec = spec_of(name)
    torch.manual_seed(0)
    one, other = POLICIES[name](spec).double(), ComponentPolicy(spec, name).double()
    with torch.no_grad():
        for weight in one.parameters():
            # Perturbed, because weights that start at zero would hide an error.
            weight.add_(0.05 * torch.randn_like(weight))
    other.load_state_dict(carried_over(name, one.state_dict()))
    obs, valid = some_tokens(spec, 3, 5), torch.rand(3, 5) < 0.8
    td = TensorDict({"env_obs": obs, "first": torch.rand(3, 5) < 0.3, "valid": valid}, batch_size=[3, 5])
    actions, outputs = torch.randint(19, (3, 5)), []
    for policy in (one, other):
        output = policy(td.clone(), state=policy.lstm.cell.initial(3), action=actions)
        loss = output["act_log_prob"] + output["values"] ** 2 + output["entropy"]
        torch.where(valid, loss, 0.0).sum().backward()
        outputs.append(output)
    for key in ("full_log_probs", "act_log_prob", "values", "entropy"):
        torch.testing.assert_close(outputs[1][key][valid], outputs[0][key][valid], atol=1e-10, rtol=0)
    gradients = carried_over(name, {key: weight.grad for key, weight in one.named_parameters()})
    assert gradients.keys() == dict(other.named_parameters()).keys()
    for key, weight in other.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[key], atol=1e-10, rtol=0)
        # A bias that all scores share changes no probability: its gradient is 0 or rounding.
        assert weight.grad.abs().max() > 0 or key == "components._action_.scores.bias", key


@pytest.mark.parametrize("name", NAMES)
def test_class_and_graph_start_with_weights_of_equal_size(name):
    """Not the same random numbers, but weights of the same size in every layer."""
    spec = spec_of(name)
    torch.manual_seed(0)
    one, other = POLICIES[name](spec), ComponentPolicy(spec, name)
    expected = carried_over(name, dict(one.named_parameters()))
    for key, weight in other.named_parameters():
        here, there = weight.square().mean().sqrt(), expected[key].square().mean().sqrt()
        torch.testing.assert_close(here, there, rtol=0.35, atol=0.03, msg=lambda message, key=key: key + message)


def test_built_in_graphs_have_a_class():
    assert sorted(file.stem for file in BUILTIN.glob("*.yaml")) == sorted(NAMES)
    world = make_world("recall", agents=2)
    policy = make_policy("component:fast", world, seed=3, memory="gru", hidden_size=24, num_layers=1)
    assert isinstance(policy, ComponentPolicy)
    assert (policy.hidden_size, policy.num_layers) == (24, 1)
    assert type(policy.lstm.cell) is holdfast.memory.GRU
    assert make_policy("component:example", world, seed=3).hidden_size == 512


def test_shapes_are_propagated():
    policy = ComponentPolicy(ORIGINAL, "fast")
    assert policy.shapes["cnn1"] == (64, 3, 3)
    assert policy.shapes["obs_flattener"] == (64,)
    assert policy.shapes["_action_"] == (19,)
    assert ComponentPolicy(ORIGINAL, "latent_attn_small").shapes["_obs_"] == (None, 41)


def test_component_policy_reads_flat_batches():
    policy, world = make(SMALL), make_world("recall", agents=4)
    obs = torch.stack([world.reset().obs, *(world.step(torch.zeros(4).long()).obs for _ in range(5))], 1)
    td = TensorDict({"env_obs": obs, "first": torch.rand(4, 6) < 0.3}, batch_size=[4, 6])
    flat = td.reshape(24).clone()
    flat["bptt"], flat["batch"] = torch.full((24,), 6), torch.full((24,), 4)
    entry = policy.lstm.cell.initial(4)
    assert policy(flat, state=entry)["values"].reshape(4, 6).equal(policy(td, state=entry)["values"])


ANY = """
components:
  _obs_: {component: Encoder, size: 12}
  _core_: {component: LSTM, sources: [_obs_], hidden_size: 8, num_layers: 1}
  _action_: {component: Actor, sources: [_core_]}
  _value_: {component: Linear, sources: [_core_], out: 1, nonlinearity: none}
"""
TREE = spaces.Dict({"eye": spaces.Box(0, 255, (3, 8, 8), np.uint8), "leg": spaces.Box(-1, 1, (2,), np.float32)})


@pytest.mark.parametrize(
    ("spec", "num_logits"),
    [
        (WorldSpec((5,), ("a", "b")), 2),
        (WorldSpec((), (), observation=TREE, action=spaces.Box(-1, 1, (3,), np.float32)), 6),
        (WorldSpec((), ("a",), observation=spaces.Discrete(4)), 1),
        (WorldSpec((2,), (), action=spaces.MultiDiscrete([3, 4])), 7),
        (ORIGINAL, 19),
    ],
)
def test_encoder_and_actor_fit_any_world(spec, num_logits):
    policy = make(ANY, spec)
    assert policy.shapes["_action_"] == (num_logits,)
    policy.bind(spec)
    step = policy.get_agent_experience_spec()
    assert policy.actions == distribution_for(spec)
    assert step["actions"].shape == (0, *policy.actions.shape)


@pytest.mark.slow
@pytest.mark.usefixtures("annotations_asleep")
def test_encoder_and_actor_obey_the_laws():
    spec = WorldSpec((), (), observation=TREE, action=spaces.Box(-1, 1, (3,), np.float32))
    laws = holdfast.check(make(ANY, spec), OnlySpec(spec=spec))
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}


def test_states_of_all_memories_are_stored_together():
    policy = make(TWO_MEMORIES)
    assert policy.has_memory()
    policy.store.allocate({0: 3})
    obs = torch.full((3, 4, 3), PADDING, dtype=torch.uint8)
    td = TensorDict(
        {
            "env_obs": obs,
            "first": torch.ones(3, dtype=torch.bool),
            "training_env_id_start": torch.zeros(3, dtype=torch.long),
        },
        batch_size=[3],
    )
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.1)
        policy(td)
    memory = policy.get_memory()
    assert policy.store.state_keys == ["aside.h", "_core_.h", "_core_.c", "late.h", "late.c"]
    assert len(memory) == 5
    assert all(states[0].abs().min() > 0 for states in memory)
    policy.reset_memory()
    assert all((states[0] == 0).all() for states in policy.get_memory())
    policy.set_memory(memory)
    assert all(states[0].equal(old[0]) for states, old in zip(policy.get_memory(), memory, strict=True))


def test_stages_are_split_at_memories():
    policy = make(TWO_MEMORIES)
    assert [set(memories) for _, memories in policy.stages] == [{"aside", "_core_"}, {"late"}, set()]
    assert _stages(policy.graph, policy.lstm.cell.cells) == policy.stages


@pytest.mark.slow
@pytest.mark.usefixtures("annotations_asleep")
def test_several_memories_obey_the_laws():
    laws = holdfast.check(make(TWO_MEMORIES), make_world("recall", agents=8))
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}
    assert laws["carry"].measured > 0


@pytest.mark.slow
@pytest.mark.usefixtures("annotations_asleep")
@pytest.mark.parametrize("broken", ["aside", "late"])
def test_one_of_several_memories_that_does_not_clear_breaks_the_law(broken):
    policy = make(TWO_MEMORIES)
    cell = policy.lstm.cell.cells[broken]
    forward = cell.forward
    cell.forward = lambda x, state, clear, valid=None: forward(x, state, torch.zeros_like(clear), valid)
    laws = holdfast.check(policy, make_world("recall", agents=8))
    assert not laws["clear"].ok


def test_memory_options_of_the_run_override_the_file():
    text = with_line("component: LSTM", "component: Memory, init: original")
    assert (make(text).lstm.cell.rnn.bias_hh_l0 == 1).all()
    assert (make(text, memory_init="standard").lstm.cell.rnn.bias_hh_l0 == 0).all()
    assert (make(SMALL, memory_init="original").lstm.cell.rnn.bias_hh_l0 == 1).all()
    with pytest.raises(GraphError, match="init='foo'"):
        make(with_line("component: LSTM", "component: Memory, init: foo"))
    with pytest.raises(ConfigError, match=r"^There is no cell 'lst'; did you mean lstm"):
        make(SMALL, memory="lst")
