"""A small component graph, its variants, and policies built from them."""

import torch

from holdfast.policies import ComponentPolicy
from holdfast.policies.components.graph import parse_graph
from holdfast.worlds import make_world

SMALL = """
components:
  _obs_: {component: TokensToBox}
  flat: {component: Flatten, sources: [_obs_]}
  seen: {component: Linear, sources: [flat], out: 6}
  _core_: {component: LSTM, sources: [seen], hidden_size: 8, num_layers: 1}
  _action_: {component: Linear, sources: [_core_], out: actions, nonlinearity: none}
  _value_: {component: Linear, sources: [_core_], out: 1, nonlinearity: none}
"""


def with_line(old, new):
    """`SMALL` with one replacement."""
    assert old in SMALL
    return SMALL.replace(old, new)


def make_graph_policy(text, spec=None, **options):
    torch.manual_seed(0)
    graph = parse_graph(text, "small.yaml")
    return ComponentPolicy(spec or make_world("recall", agents=1).spec, graph, **options)
