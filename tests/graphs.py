"""A graph small enough to be built many times in a test."""

SMALL = """
components:
  _obs_: {component: TokensToBox}
  flat: {component: Flatten, sources: [_obs_]}
  seen: {component: Linear, sources: [flat], out: 6}
  _core_: {component: LSTM, sources: [seen], hidden_size: 8, num_layers: 1}
  _action_: {component: Linear, sources: [_core_], out: actions, nonlinearity: none}
  _value_: {component: Linear, sources: [_core_], out: 1, nonlinearity: none}
"""
