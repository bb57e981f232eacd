"""Components: their options, shapes, outputs and errors; and user-defined ones."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdfast
from helpers.component_graphs import make_graph_policy as make
from helpers.component_graphs import with_line
from holdfast.errors import ConfigError, ContractError
from holdfast.memory import GRU, LSTM
from holdfast.policies import ComponentPolicy
from holdfast.policies.components import COMPONENTS, Component, register_component
from holdfast.policies.components.graph import GraphError
from holdfast.policies.components.layers import (
    ActionEmbeddingsComponent,
    BilinearComponent,
    LatentAttention,
    LSTMComponent,
    MemoryComponent,
    SelfAttentionComponent,
    TokensToBoxComponent,
    TokensToVectors,
)
from holdfast.worlds import WorldSpec, make_world

WORLD = make_world("recall", agents=3)


def test_kernel_larger_than_the_image_raises():
    text = with_line("{component: Flatten, sources: [_obs_]}", "{component: Flatten, sources: [big]}") + (
        "  big: {component: Conv2d, sources: [_obs_], out_channels: 2, kernel_size: 12}\n"
    )
    with pytest.raises(GraphError, match=r"big: a kernel of 12 does not fit into \[5, 11, 11\]"):
        make(text)


class Double(Component):
    """Multiplies its source."""

    def __init__(self, times: float = 2.0) -> None:
        super().__init__()
        self.times = times

    def build(self, sources, spec):
        return sources[0]

    def forward(self, x):
        return self.times * x


class WrongShape(Double):
    """Declares another shape than it returns."""

    def build(self, sources, spec):
        return (7,)


class Fails(Double):
    def forward(self, x):
        raise ValueError("no\nway")


WITH_DOUBLE = with_line("sources: [seen], hidden", "sources: [more], hidden") + (
    "  more: {component: NAME, sources: [seen]}\n"
)


def test_register_component(monkeypatch):
    monkeypatch.setattr(COMPONENTS, "_entries", dict(COMPONENTS))
    by_path = make(WITH_DOUBLE.replace("NAME", f"{__name__}:Double"))
    assert by_path.components["more"].times == 2.0
    register_component("Double", Double)
    assert type(make(WITH_DOUBLE.replace("NAME", "Double, times: 3.0")).components["more"]) is Double
    with pytest.raises(ConfigError, match="a component called Double already"):
        register_component("Double", WrongShape)
    with pytest.raises(ConfigError, match=r"is not a subclass of .*Component"):
        register_component("Else", torch.nn.Linear)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("WrongShape", r"more: it must give \[7\]; it gives \[6\]"),
        ("Fails", "more: it fails: ValueError: no way"),
    ],
)
def test_wrong_shape_or_failing_component_raises_when_built(kind, message):
    text = WITH_DOUBLE.replace("NAME", f"{__name__}:{kind}")
    with pytest.raises(GraphError, match=message):
        make(text)


class Many(Double):
    """Takes any options."""

    def __init__(self, schema: int = 1, **options):
        super().__init__()
        self.options = {"schema": schema, **options}


class Later(Double):
    """Has a forward reference as annotation."""

    def __init__(self, times: "Number" = 2.0) -> None:
        super().__init__(times)


Number = float


class Broken(Double):
    def build(self, sources, spec):
        raise ZeroDivisionError("not\nagain")


class Own(MemoryComponent):
    """A memory with a layer of its own, which would never be called."""


def test_component_options_are_validated():
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


class KeepsSum(Double):
    """Keeps a running sum outside of the memory, without random numbers."""

    def build(self, sources, spec):
        self.total = torch.zeros(())
        return super().build(sources, spec)

    def forward(self, x):
        self.total = (0.5 * self.total + x.sum()).clone()
        return x + 0.1 * self.total


@pytest.mark.slow
@pytest.mark.usefixtures("annotations_asleep")
def test_state_outside_the_memory_is_not_diagnosed_as_randomness():
    policy = make(WITH_DOUBLE.replace("NAME", f"{__name__}:KeepsSum"))
    laws = holdfast.check(policy, make_world("recall", agents=8))
    assert not laws.ok
    patterns = {law.pattern.name for law in laws.values() if not law.ok and law.pattern is not None}
    assert "random numbers in the forward pass" not in patterns


def test_failure_inside_a_component_names_file_and_line():
    with pytest.raises(GraphError, match=r"ValueError: no way \(test_layers.py, line \d+\)"):
        make(WITH_DOUBLE.replace("NAME", f"{__name__}:Fails"))


class Number7(Double):
    def build(self, sources, spec):
        return 7


class Pair(Double):
    def forward(self, x):
        return x, x


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Number7", r"build returns the shape .*; it returned 7"),
        ("Pair", "its output is a tensor; it gives tuple"),
    ],
)
def test_invalid_component_output_raises(kind, message):
    with pytest.raises(GraphError, match=f"more: {message}"):
        make(WITH_DOUBLE.replace("NAME", f"{__name__}:{kind}"))


def test_token_graph_rejects_a_world_without_tokens():
    with pytest.raises(GraphError, match=r"_obs_: it reads tokens; .*Encoder reads any"):
        ComponentPolicy(WorldSpec((5,), ("a", "b")), "fast")


def test_action_embeddings_need_named_actions():
    text = (
        "components:\n"
        "  _obs_: {component: Encoder, size: 12}\n"
        "  _core_: {component: LSTM, sources: [_obs_], hidden_size: 8, num_layers: 1}\n"
        "  names: {component: ActionEmbeddings}\n"
        "  _action_: {component: Bilinear, sources: [_core_, names]}\n"
        "  _value_: {component: Linear, sources: [_core_], out: 1, nonlinearity: none}\n"
    )
    with pytest.raises(GraphError, match=r"names: it embeds named actions; the world takes Box.*use Actor"):
        make(text, WorldSpec((2,), (), action=spaces.Box(-1, 1, (3,), np.float32)))


def test_tokens_to_box_gives_the_shape_it_declares():
    component = TokensToBoxComponent()
    shape = component.build([], WORLD.spec)
    assert shape == (len(WORLD.spec.features), *WORLD.spec.window)
    assert component(WORLD.reset().obs).shape == (3, *shape)


def test_attention_over_tokens_ignores_padding():
    torch.manual_seed(0)
    vectors, attention = TokensToVectors(4, 2), LatentAttention(queries=3, size=8, heads=2, layers=1)
    shape = vectors.build([], WORLD.spec)
    assert shape[0] is None
    assert attention.build([shape], WORLD.spec) == (3, 8)
    obs = WORLD.reset().obs
    padded = torch.cat([obs, torch.full_like(obs, 0xFF)], dim=1)
    torch.testing.assert_close(attention(vectors(padded)), attention(vectors(obs)))
    only_first = LatentAttention(queries=3, size=8, heads=2, layers=1, out=5, use_cls=True)
    assert only_first.build([shape], WORLD.spec) == (5,)
    assert only_first(vectors(obs)).shape == (3, 5)


def test_self_attention_reduces_vectors_to_one():
    component = SelfAttentionComponent(heads=2, layers=1, out=5)
    assert component.build([(3, 8)], WORLD.spec) == (5,)
    assert component(torch.randn(2, 3, 8)).shape == (2, 5)


@pytest.mark.parametrize(
    ("component", "sources", "message"),
    [
        (
            LatentAttention(1, 8, 2, 1),
            [(3, 8)],
            r"it reads token vectors \[tokens, size\]; .* \[3, 8\]",
        ),
        (SelfAttentionComponent(2, 1, 5), [(None, 8)], r"it reads \[vectors, size\]; .*\[tokens, 8\]"),
        (SelfAttentionComponent(3, 1, 5), [(2, 8)], "vectors of 8 cannot be shared by 3 heads"),
        (LSTMComponent(), [(2, 8)], r"it reads \[size\]"),
        (ActionEmbeddingsComponent(), [(8,)], "it reads 0 sources; 1 are named"),
        (BilinearComponent(), [(8,), (9, 4)], "its second source must be the embeddings of the actions"),
        (BilinearComponent(), [(8,)], "it reads 2 sources; 1 are named"),
    ],
)
def test_build_rejects_other_shapes(component, sources, message):
    with pytest.raises(ContractError, match=message):
        component.build(sources, WORLD.spec)


def test_heads_must_divide_the_size():
    with pytest.raises(ContractError, match="size 8 cannot be shared by 3 heads"):
        LatentAttention(queries=1, size=8, heads=3, layers=1)


def test_memory_component_builds_the_named_cell():
    component = MemoryComponent("gru", hidden_size=6, num_layers=1)
    assert component.build([(4,)], WORLD.spec) == (6,)
    assert type(component.cell) is GRU
    default = LSTMComponent()
    assert default.build([(4,)], WORLD.spec) == (128,)
    assert type(default.cell) is LSTM
    assert (default.cell.input_size, default.cell.num_layers) == (4, 2)


def test_bilinear_scores_every_action():
    embeddings, scores = ActionEmbeddingsComponent(size=4, room=9), BilinearComponent()
    actions = len(WORLD.spec.action_names)
    assert embeddings.build([], WORLD.spec) == (actions, 4)
    assert scores.build([(8,), (actions, 4)], WORLD.spec) == (actions,)
    assert scores(torch.randn(3, 8), embeddings()).shape == (3, actions)
