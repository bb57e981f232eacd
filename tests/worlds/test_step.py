from dataclasses import replace

import numpy as np
import pytest
from gymnasium import spaces

from holdfast.errors import ContractError
from holdfast.worlds import Feature, WorldSpec
from holdfast.worlds.step import check_action_space

BOX = spaces.Box(-1, 1, (2,))
FEATURES = (Feature("a", 1.0),)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"action_names": ()}, "has no actions; set action_names"),
        ({"action": spaces.Box(-1, 1, (2, 3))}, r"has the shape \(2, 3\); write it flat"),
        ({"action": spaces.Box(-1, 1, ())}, r"has the shape \(\); write it flat"),
        ({"action": spaces.Box(-1, 1, (0,))}, r"has the shape \(0,\); write it flat"),
        ({"action": spaces.MultiDiscrete([[2, 2]])}, r"has the shape \(1, 2\)"),
        ({"action": spaces.MultiDiscrete([2, 2], start=[0, 1])}, "actions count from 0"),
        ({"action": spaces.Box(0, 9, (2,), np.int64)}, "use MultiDiscrete for integers"),
        ({"action": BOX, "action_names": ("x", "y", "z")}, "There are 3 action_names for the 2 entries"),
        ({"observation": spaces.Box(-1, 1, (3,))}, r"obs_shape is \(2,\), .* write obs_shape=\(3,\)"),
        ({"observation": spaces.Dict({"a": BOX})}, r"write obs_shape=\(\)"),
        ({"observation": spaces.Discrete(3)}, r"write obs_shape=\(\)"),
        ({"observation": BOX, "features": FEATURES}, "has features, so it has tokens"),
    ],
)
def test_world_spec_errors(spec, message):
    with pytest.raises(ContractError, match=message):
        WorldSpec(**{"obs_shape": (2,), "action_names": () if "action" in spec else ("a",), **spec})


def test_observation_space_defaults():
    assert WorldSpec((2,), ("a",)).observation_space == spaces.Box(-np.inf, np.inf, (2,))
    assert WorldSpec((4, 3), ("a",), FEATURES).observation_space == spaces.Box(0, 255, (4, 3), np.uint8)
    assert WorldSpec((2,), ("x", "y"), observation=BOX, action=BOX).observation_space is BOX


def test_observation_space_is_cached():
    spec = WorldSpec(obs_shape=(4, 3), action_names=("a",), features=FEATURES)
    assert spec.observation_space is spec.observation_space
    assert replace(spec, features=()).observation_space != spec.observation_space
    assert replace(spec) == spec


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Discrete(3), "set action_names"),
        (spaces.MultiBinary(3), "an action space is MultiDiscrete or Box"),
    ],
)
def test_check_action_space_errors(space, message):
    # Called directly: in tests the annotations of the spec refuse these before it can.
    with pytest.raises(ContractError, match=message):
        check_action_space(space, ())
