"""Policies as graphs: the same numbers as the classes, and one clear error for a bad graph."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

import holdfast
from graphs import SMALL
from holdfast.errors import ConfigError
from holdfast.policies import POLICIES, ComponentPolicy, make_policy
from holdfast.policies.actions import actions_of
from holdfast.policies.component_policy import _stages
from holdfast.policies.components import COMPONENTS, Component, Memory, register_component
from holdfast.policies.graph import OURS, GraphError, find_graph, parse_graph, read_graph
from holdfast.worlds import Feature, WorldSpec, make_world
from holdfast.worlds.tokens import PADDING
from small import OnlySpec

DOCS = Path(__file__).parent.parent.parent / "docs" / "policies.md"
FEATURES = tuple(Feature(f"feature_{i}", float(i + 1)) for i in range(25))
ACTIONS = tuple(f"action_{i}" for i in range(19))
ORIGINAL = WorldSpec((200, 3), ACTIONS, FEATURES)
COUNTS = {
    # encoder 101,824 + LSTM 2*(4*128*(128+128) + 2*4*128) + critic 128*1024+1024 + 1024+1 + actor
    # 128*512+512 + 512*16+1 + 100*16; the encoders are added up in test_fast.py and test_attention.py
    "fast": 101_824 + 264_192 + 133_121 + 75_841,
    "latent_attn_tiny": 29_782 + 264_192 + 133_121 + 75_841,
    "latent_attn_small": 28_402 + 264_192 + 133_121 + 75_841,
    "latent_attn_med": 55_002 + 264_192 + 133_121 + 75_841,
    # 22 channels: conv 22*128*25+128, conv 128*128*9+128, linear 128*256+256, linear 22*256+256,
    # LSTM 2*(4*512*(512+512) + 2*4*512), actor 512*19+19, critic 512+1
    "example": 70_528 + 147_584 + 33_024 + 5_888 + 4_202_496 + 9_747 + 513,
}
TOLD = {
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
  seen: {component: Linear, sources: [flat], out: 6}
  aside: {component: Memory, sources: [seen], cell: gru, hidden_size: 5, num_layers: 1}
  _core_: {component: LSTM, sources: [seen], hidden_size: 8, num_layers: 1}
  both: {component: Concat, sources: [_core_, aside, seen]}
  late: {component: Memory, sources: [both], cell: lstm, hidden_size: 4, num_layers: 1}
  _action_: {component: Linear, sources: [late], out: actions, nonlinearity: none}
  _value_: {component: Linear, sources: [both], out: 1, nonlinearity: none}
"""


def spec_of(name):
    return WorldSpec((200, 3), ACTIONS, FEATURES[:22] if name == "example" else FEATURES)


def graph_of(text):
    return parse_graph(text, "small.yaml")


def make(text, spec=None, **options):
    torch.manual_seed(0)
    return ComponentPolicy(spec or make_world("recall", agents=1).spec, graph_of(text), **options)


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
    """Read the table of docs/policies.md: where each part of a class is in the graph."""
    rows = re.findall(r"^\| (\w+(?:, \w+)*) \| `([\w.]+)` \| `([\w.]+)` \|$", DOCS.read_text(), re.MULTILINE)
    table = {name: {} for name in NAMES}
    for names, part, component in rows:
        for name in names.split(", "):
            table[name][part] = component
    return table


def carried_over(name, weights):
    """Rename the weights of a class to those of its graph, as the docs say."""
    moved = {}
    for key, leaf in weights.items():
        part = next((part for part in mapping()[name] if key.startswith(f"{part}.")), None)
        moved[key if part is None else mapping()[name][part] + key.removeprefix(part)] = leaf
    return moved


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_have_as_many_parameters_as_the_original(name):
    spec = spec_of(name)
    for policy in (POLICIES[name](spec), ComponentPolicy(spec, name)):
        assert sum(p.numel() for p in policy.parameters()) == COUNTS[name] == TOLD[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_graph_is_the_class_with_the_weights_carried_over(name):
    spec = spec_of(name)
    torch.manual_seed(0)
    one, other = POLICIES[name](spec).double(), ComponentPolicy(spec, name).double()
    with torch.no_grad():
        for weight in one.parameters():
            # No weight is at rest: what happens to start at zero hides what it would do.
            weight.add_(0.05 * torch.randn_like(weight))
    other.load_state_dict(carried_over(name, one.state_dict()))
    seen, valid = some_tokens(spec, 3, 5), torch.rand(3, 5) < 0.8
    td = TensorDict({"env_obs": seen, "first": torch.rand(3, 5) < 0.3, "valid": valid}, batch_size=[3, 5])
    actions, outputs = torch.randint(19, (3, 5)), []
    for policy in (one, other):
        said = policy(td.clone(), state=policy.lstm.cell.initial(3), action=actions)
        loss = said["act_log_prob"] + said["values"] ** 2 + said["entropy"]
        torch.where(valid, loss, 0.0).sum().backward()
        outputs.append(said)
    for key in ("full_log_probs", "act_log_prob", "values", "entropy"):
        torch.testing.assert_close(outputs[1][key][valid], outputs[0][key][valid], atol=1e-10, rtol=0)
    gradients = carried_over(name, {key: weight.grad for key, weight in one.named_parameters()})
    assert gradients.keys() == dict(other.named_parameters()).keys()
    for key, weight in other.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[key], atol=1e-10, rtol=0)
        assert weight.grad.abs().max() > 0, key


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_start_alike(name):
    """Not the same draws, but weights of the same size in every layer."""
    spec = spec_of(name)
    torch.manual_seed(0)
    one, other = POLICIES[name](spec), ComponentPolicy(spec, name)
    expected = carried_over(name, dict(one.named_parameters()))
    for key, weight in other.named_parameters():
        here, there = weight.square().mean().sqrt(), expected[key].square().mean().sqrt()
        torch.testing.assert_close(here, there, rtol=0.35, atol=0.03, msg=lambda told, key=key: key + told)


def test_every_graph_of_ours_has_a_class_and_is_found_by_name():
    assert sorted(file.stem for file in OURS.glob("*.yaml")) == sorted(NAMES)
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


def test_a_flat_batch_is_read_by_bptt_and_batch():
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
TREE = spaces.Dict(
    {"eye": spaces.Box(0, 255, (3, 8, 8), np.uint8), "leg": spaces.Box(-1, 1, (2,), np.float32)}
)


@pytest.mark.parametrize(
    ("spec", "scores"),
    [
        (WorldSpec((5,), ("a", "b")), 2),
        (WorldSpec((), (), observation=TREE, action=spaces.Box(-1, 1, (3,), np.float32)), 6),
        (WorldSpec((), ("a",), observation=spaces.Discrete(4)), 1),
        (WorldSpec((2,), (), action=spaces.MultiDiscrete([3, 4])), 7),
        (ORIGINAL, 19),
    ],
)
def test_a_graph_for_any_world(spec, scores):
    policy = make(ANY, spec)
    assert policy.shapes["_action_"] == (scores,)
    policy.bind(spec)
    step = policy.get_agent_experience_spec()
    assert policy.actions == actions_of(spec)
    assert step["actions"].shape == (0, *policy.actions.shape)


def test_embeddings_are_for_named_actions():
    text = ANY.replace("Actor, sources: [_core_]", "Bilinear, sources: [_core_, names]") + (
        "  names: {component: ActionEmbeddings}\n"
    )
    with pytest.raises(GraphError, match=r"names: it knows actions by name; the world takes Box.*use Actor"):
        make(text, WorldSpec((2,), (), action=spaces.Box(-1, 1, (3,), np.float32)))


@pytest.mark.slow
@pytest.mark.usefixtures("annotations_asleep")
def test_a_graph_for_any_world_obeys_the_laws():
    spec = WorldSpec((), (), observation=TREE, action=spaces.Box(-1, 1, (3,), np.float32))
    laws = holdfast.check(make(ANY, spec), OnlySpec(spec=spec))
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}


# Memory ----------------------------------------------------------------------------------------------------


def test_all_memories_are_one():
    policy = make(TWO_MEMORIES)
    assert policy.has_memory()
    policy.store.open({0: 3})
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
    assert policy.store.leaves == ["aside.h", "_core_.h", "_core_.c", "late.h", "late.c"]
    assert len(memory) == 5
    assert all(part[0].abs().min() > 0 for part in memory)
    policy.reset_memory()
    assert all((part[0] == 0).all() for part in policy.get_memory())
    policy.set_memory(memory)
    assert all(part[0].equal(old[0]) for part, old in zip(policy.get_memory(), memory, strict=True))


def test_stages_part_where_something_is_remembered():
    policy = make(TWO_MEMORIES)
    assert [set(remembering) for _, remembering in policy.stages] == [{"aside", "_core_"}, {"late"}, set()]
    assert _stages(policy.graph, policy.lstm.cell.cells) == policy.stages


@pytest.mark.usefixtures("annotations_asleep")
def test_a_graph_with_several_memories_obeys_the_laws():
    laws = holdfast.check(make(TWO_MEMORIES), make_world("recall", agents=8))
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}
    assert laws["carry"].measured > 0


@pytest.mark.usefixtures("annotations_asleep")
@pytest.mark.parametrize("broken", ["aside", "late"])
def test_one_memory_among_several_that_does_not_clear_is_caught(broken):
    policy = make(TWO_MEMORIES)
    cell = policy.lstm.cell.cells[broken]
    forward = cell.forward
    cell.forward = lambda x, state, clear, valid=None: forward(x, state, torch.zeros_like(clear), valid)
    laws = holdfast.check(policy, make_world("recall", agents=8))
    assert not laws["clear"].ok


# Bad graphs ------------------------------------------------------------------------------------------------


def with_line(old, new):
    assert old in SMALL
    return SMALL.replace(old, new)


@pytest.mark.parametrize(
    ("text", "told", "place"),
    [
        (
            with_line("sources: [flat], out: 6", "sources: [_core_], out: 6"),
            "it reads itself: ",
            "seen",
        ),
        (
            with_line("sources: [flat], out: 6", "sources: [flatt], out: 6"),
            "its source flatt is not there; did you mean flat?",
            "seen",
        ),
        (
            with_line(
                "Linear, sources: [flat], out: 6", "Conv2d, sources: [flat], out_channels: 2, kernel_size: 3"
            ),
            "it reads [channels, rows, columns]; its source gives [605].",
            "seen",
        ),
        (
            with_line("component: Linear, sources: [flat]", "component: Linnear, sources: [flat]"),
            "There is no component 'Linnear'; did you mean Linear?",
            "seen",
        ),
        (SMALL + "  _core_: {component: LSTM, sources: [seen]}\n", "there are two _core_", "_core_"),
        (with_line("  _value_: ", "  worth: "), "there is no _value_; a graph has _obs_, _core_", None),
        (SMALL + "  idle: {component: Flatten, sources: [_obs_]}\n", "nobody reads idle", "idle"),
        (with_line("out: 6", "outt: 6"), "Linear has no option 'outt'; did you mean out?", "seen"),
        (with_line(", out: 6", ""), "Linear needs the option 'out'.", "seen"),
        (with_line("out: 6", "out: many"), "out='many': ", "seen"),
        (with_line("LSTM, sources: [seen]", "Linear, out: 4, sources: [seen]"), "", "_core_"),
        (with_line("out: actions", "out: 3"), "it must give [4]; it gives [3].", "_action_"),
        (with_line("sources: [flat], ", ""), "it reads nothing; name its sources.", "seen"),
        (with_line("sources: [flat], ", "sources: 3, "), "sources is a list of names", "seen"),
        (with_line("component: Flatten, ", ""), "say which component it is", "flat"),
        (with_line("flat: {", "items: {"), "the name items is taken", "items"),
        (with_line("flat: {", "training: {"), "the name training is taken", "training"),
        (with_line("flat: {", "fl-at: {"), "a component's name is one word", "fl-at"),
        (with_line("out: 6", "out: 6, out: 7"), "line 5: out is given twice.", None),
        (with_line("flat: {", "1: {"), "'1' is not a name", None),
        (with_line("flat: {", "yes: {"), "'yes' is not a name", None),
        (with_line("flat: {", "? [a, b]\n  : {"), "is not", None),
        (with_line("out: 6", "out: 2024-13-45"), "is not YAML that can be read", None),
        (with_line("out: 6", "out: !!int x"), "is not YAML that can be read", None),
        ("", "has no components", None),
        ("components: {a: " + "[" * 5000, "is not YAML that can be read", None),
        (with_line("Flatten, sources: [_obs_]", "TokensToBox"), "only _obs_ does", "flat"),
        (with_line("{component: TokensToBox}", "{component: Flatten, sources: [flat]}"), "", "_obs_"),
        (with_line("hidden_size: 8", "hidden_size: 0"), "hidden_size", "_core_"),
        ("components: [1, 2]", "has no components", None),
        ("parts: {}", "has no components", None),
        (SMALL + "colour: red\n", "has 'colour' beside its components", None),
        ("components: {a: [", "is not YAML", None),
        ("components:\n\t_obs_: 1", "is not YAML", None),
    ],
)
def test_a_bad_graph_is_one_clear_error(text, told, place):
    with pytest.raises(ConfigError) as caught:
        make(text)
    first, *graph = str(caught.value).splitlines()
    assert first.startswith("small.yaml")
    assert told in first
    marked = [line for line in graph if line.startswith(">")]
    assert len(marked) == (0 if place is None else 1 + ("there are two" in told))
    if place is not None:
        assert marked[0].split()[1] == place
        assert re.match(rf"small.yaml, line \d+, {place}: ", first)
        assert len(graph) >= 6


def test_anchors_and_merges_are_ordinary_yaml():
    text = SMALL.replace("_value_: {", "_value_: &head {").splitlines()
    *rest, action, value = [line for line in text if line]
    merged = "\n".join([*rest, value, action.split("{")[0] + "{<<: *head, out: actions}"])
    assert make(merged).shapes["_action_"] == (4,)


def test_the_line_of_the_place_is_the_files():
    with pytest.raises(GraphError, match=r"small.yaml, line 5, seen: "):
        make(with_line("out: 6", "outt: 6"))


def test_a_graph_that_reads_tokens_refuses_a_world_without():
    with pytest.raises(GraphError, match=r"_obs_: it reads tokens; .*Encoder reads anything"):
        ComponentPolicy(WorldSpec((5,), ("a", "b")), "fast")


def test_a_kernel_that_does_not_fit_is_told():
    text = with_line("{component: Flatten, sources: [_obs_]}", "{component: Flatten, sources: [big]}") + (
        "  big: {component: Conv2d, sources: [_obs_], out_channels: 2, kernel_size: 12}\n"
    )
    with pytest.raises(GraphError, match=r"big: a kernel of 12 does not fit into \[5, 11, 11\]"):
        make(text)


# One's own -------------------------------------------------------------------------------------------------


class Double(Component):
    """Twice as much."""

    def __init__(self, times: float = 2.0) -> None:
        super().__init__()
        self.times = times

    def build(self, sources, spec):
        return sources[0]

    def forward(self, x):
        return self.times * x


class Liar(Double):
    """Says one shape and gives another."""

    def build(self, sources, spec):
        return (7,)


class Fails(Double):
    def forward(self, x):
        raise ValueError("no\nway")


WITH_DOUBLE = with_line("sources: [seen], hidden", "sources: [more], hidden") + (
    "  more: {component: NAME, sources: [seen]}\n"
)


def test_a_component_of_ones_own_is_found_by_its_path_and_by_its_name(monkeypatch):
    monkeypatch.setattr(COMPONENTS, "_known", dict(COMPONENTS))
    by_path = make(WITH_DOUBLE.replace("NAME", f"{__name__}:Double"))
    assert by_path.components["more"].times == 2.0
    register_component("Double", Double)
    assert type(make(WITH_DOUBLE.replace("NAME", "Double, times: 3.0")).components["more"]) is Double
    with pytest.raises(ConfigError, match="a component called Double already"):
        register_component("Double", Liar)
    with pytest.raises(ConfigError, match=r"is not a subclass of .*Component"):
        register_component("Else", torch.nn.Linear)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("Liar", r"more: it was to give \[7\] and gives \[6\]"),
        ("Fails", "more: it fails: ValueError: no way"),
    ],
)
def test_a_component_that_does_not_do_what_it_says_is_told_when_it_is_built(kind, told):
    text = WITH_DOUBLE.replace("NAME", f"{__name__}:{kind}")
    with pytest.raises(GraphError, match=told):
        make(text)


class Many(Double):
    """Takes whatever comes, whatever it is called."""

    def __init__(self, schema: int = 1, **options):
        super().__init__()
        self.options = {"schema": schema, **options}


class Later(Double):
    """Annotations that are words."""

    def __init__(self, times: "Number" = 2.0) -> None:
        super().__init__(times)


Number = float


class Broken(Double):
    def build(self, sources, spec):
        raise ZeroDivisionError("not\nagain")


class Own(Memory):
    """A memory with a layer of its own: it would never be called."""


def test_options_may_be_anything():
    many = make(WITH_DOUBLE.replace("NAME", f"{__name__}:Many, schema: 3, more: 4"))
    assert many.components["more"].options == {"schema": 3, "more": 4}
    later = make(WITH_DOUBLE.replace("NAME", f"{__name__}:Later, times: 3.0"))
    assert later.components["more"].times == 3.0
    with pytest.raises(GraphError, match="times='x': input should be a valid number"):
        make(WITH_DOUBLE.replace("NAME", f"{__name__}:Later, times: x"))
    with pytest.raises(GraphError, match="more: it fails: ZeroDivisionError: not again"):
        make(WITH_DOUBLE.replace("NAME", f"{__name__}:Broken"))
    with pytest.raises(GraphError, match="a memory of your own is a cell"):
        make(with_line("component: LSTM", f"component: {__name__}:Own"))


def test_a_memory_starts_as_the_file_says_unless_the_run_says_otherwise():
    text = with_line("component: LSTM", "component: Memory, init: original")
    assert (make(text).lstm.cell.rnn.bias_hh_l0 == 1).all()
    assert (make(text, memory_init="standard").lstm.cell.rnn.bias_hh_l0 == 0).all()
    assert (make(SMALL, memory_init="original").lstm.cell.rnn.bias_hh_l0 == 1).all()
    with pytest.raises(GraphError, match="init='foo'"):
        make(with_line("component: LSTM", "component: Memory, init: foo"))
    with pytest.raises(ConfigError, match=r"^There is no memory 'lst'; did you mean lstm"):
        make(SMALL, memory="lst")


def test_graphs_are_found_here_and_never_hide_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "configs" / "agent"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(SMALL)
    assert find_graph("mine").where == "configs/agent/mine.yaml"
    assert find_graph("configs/agent/mine.yaml").text == SMALL
    with pytest.raises(ConfigError, match="There is no component graph 'mien'; did you mean mine"):
        find_graph("mien")
    (folder / "fast.yaml").write_text(SMALL)
    with pytest.raises(ConfigError, match=r"agent=configs/agent/fast.yaml"):
        find_graph("fast")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_graph(folder)


class Hoards(Double):
    """Keeps a running sum of its own, and draws nothing."""

    def build(self, sources, spec):
        self.kept = torch.zeros(())
        return super().build(sources, spec)

    def forward(self, x):
        self.kept = (0.5 * self.kept + x.sum()).clone()
        return x + 0.1 * self.kept


@pytest.mark.usefixtures("annotations_asleep")
def test_what_is_kept_beside_the_memory_is_not_taken_for_dice():
    policy = make(WITH_DOUBLE.replace("NAME", f"{__name__}:Hoards"))
    laws = holdfast.check(policy, make_world("recall", agents=8))
    assert not laws.ok
    patterns = {law.pattern.name for law in laws.values() if not law.ok and law.pattern is not None}
    assert "draws random numbers while it thinks" not in patterns


def test_what_fails_inside_a_component_is_told_with_its_place():
    with pytest.raises(GraphError, match=r"ValueError: no way \(test_component_policy.py, line \d+\)"):
        make(WITH_DOUBLE.replace("NAME", f"{__name__}:Fails"))


class Number7(Double):
    def build(self, sources, spec):
        return 7


class Pair(Double):
    def forward(self, x):
        return x, x


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("Number7", r"build returns the shape .*; it returned 7"),
        ("Pair", "its output is a tensor; it gives tuple"),
    ],
)
def test_what_a_component_must_give_is_told(kind, told):
    with pytest.raises(GraphError, match=f"more: {told}"):
        make(WITH_DOUBLE.replace("NAME", f"{__name__}:{kind}"))
