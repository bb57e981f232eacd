from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from holdfast.errors import ContractError
from holdfast.worlds import Feature, WorldSpec
from holdfast.worlds.seen import check_action_space, choose, device_of, parts_of, still
from holdfast.worlds.step import check_actions

BOX = spaces.Box(-1, 1, (2,))
FEATURES = (Feature("a", 1.0),)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"action_names": ()}, "has no actions; name them"),
        ({"action": spaces.Box(-1, 1, (2, 3))}, r"has the shape \(2, 3\); write it flat"),
        ({"action": spaces.Box(-1, 1, ())}, r"has the shape \(\); write it flat"),
        ({"action": spaces.Box(-1, 1, (0,))}, r"has the shape \(0,\); write it flat"),
        ({"action": spaces.MultiDiscrete([[2, 2]])}, r"has the shape \(1, 2\)"),
        ({"action": spaces.MultiDiscrete([2, 2], start=[0, 1])}, "actions count from 0"),
        ({"action": spaces.Box(0, 9, (2,), np.int64)}, "holds fractions; whole numbers: MultiDiscrete"),
        ({"action": BOX, "action_names": ("x", "y", "z")}, "There are 3 action_names for the 2 entries"),
        ({"observation": spaces.Box(-1, 1, (3,))}, r"obs_shape is \(2,\), .* write obs_shape=\(3,\)"),
        ({"observation": spaces.Dict({"a": BOX})}, r"write obs_shape=\(\)"),
        ({"observation": spaces.Discrete(3)}, r"write obs_shape=\(\)"),
        ({"observation": BOX, "features": FEATURES}, "has features, so it shows tokens"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused_at_birth(spec, told):
    with pytest.raises(ContractError, match=told):
        WorldSpec(**{"obs_shape": (2,), "action_names": () if "action" in spec else ("a",), **spec})


@pytest.mark.parametrize(
    ("space", "told"),
    [
        (spaces.Discrete(3), "go by action_names"),
        (spaces.MultiBinary(3), "an action space is MultiDiscrete or Box"),
    ],
)
def test_another_kind_of_action_space_is_refused(space, told):
    # Called directly: in tests the annotations of the spec refuse these before it can.
    with pytest.raises(ContractError, match=told):
        check_action_space(space, ())


def test_a_spec_says_what_is_seen():
    assert WorldSpec((2,), ("a",)).sight == spaces.Box(-np.inf, np.inf, (2,))
    assert WorldSpec((4, 3), ("a",), FEATURES).sight == spaces.Box(0, 255, (4, 3), np.uint8)
    assert WorldSpec((2,), ("x", "y"), observation=BOX, action=BOX).sight is BOX


@pytest.mark.parametrize(
    ("actions", "wanted", "told"),
    [
        (torch.zeros(3), BOX, r"are \(3,\) .* wants fractions \(3, 2\) for Box"),
        (torch.zeros(3, 2, dtype=torch.long), BOX, "torch.int64; .* wants fractions"),
        (torch.tensor([[0, 0], [0, torch.nan], [0, 0]]), BOX, "agent 1 took action .*nan.*must be finite"),
        (torch.zeros(3, 2), spaces.MultiDiscrete([2, 3]), r"wants whole numbers \(3, 2\) for Multi"),
        (torch.tensor([[0, 2], [1, 3], [0, 0]]), spaces.MultiDiscrete([2, 3]), r"agent 1 took .*\[1, 3\]; "),
        (torch.tensor([[0, 2], [-1, 0], [0, 0]]), spaces.MultiDiscrete([2, 3]), r"actions 0 to \[1, 2\]"),
    ],
)
def test_actions_that_do_not_fit_are_refused(actions, wanted, told):
    with pytest.raises(ContractError, match=told):
        check_actions(actions, 3, wanted)


def test_actions_that_fit_are_let_through_outside_of_their_box_too():
    check_actions(torch.tensor([[-7.0, 0.0], [0.5, 9.0]]), 2, BOX)
    check_actions(torch.tensor([[1, 2]]), 1, spaces.MultiDiscrete([2, 3]))


def tree(*batch):
    inner = TensorDict({"whole": torch.arange(batch[0]).expand(*batch[::-1]).mT.clone()}, batch_size=batch)
    return TensorDict({"part": torch.rand(*batch, 3), "inner": inner}, batch_size=batch)


def test_trees_are_chosen_from_and_stilled_leaf_by_leaf():
    one, other = tree(4, 2), tree(4, 2)
    where = torch.tensor([[True, False], [False, False], [True, True], [False, True]])
    chosen = choose(where, one, other)
    assert chosen["part"].equal(torch.where(where[..., None], one["part"], other["part"]))
    assert choose(where, one["part"], other["part"]).equal(chosen["part"])
    one["part"][0, 1] = torch.nan
    stilled = still(one, where, None)
    assert stilled["part"].equal(torch.where(where[..., None], one["part"], 0.0))
    assert stilled["inner", "whole"].equal(torch.where(where, one["inner", "whole"], 0))
    nothing = TensorDict(
        {"part": torch.zeros(1, 3), "inner": TensorDict({"whole": torch.tensor([7])}, [1])}, [1]
    )
    started = still(one, where, nothing)
    assert started["inner", "whole"].equal(torch.where(where, one["inner", "whole"], 7))
    assert one["part"][0, 1].isnan().all()
    assert still(one["part"], where, None).equal(stilled["part"])
    assert device_of(one) == device_of(one["part"]) == torch.device("cpu")


def test_the_parts_of_a_space_have_a_fixed_order():
    parts = parts_of(spaces.Dict([("z", BOX), ("a", spaces.Tuple((BOX, spaces.Discrete(2))))]))
    assert list(parts) == ["a", "z"]
    assert parts_of(parts["a"]) == {"0": BOX, "1": spaces.Discrete(2)}
    assert parts_of(BOX) == {}


def test_what_is_seen_is_made_once_and_says_the_same_in_a_changed_spec():
    spec = WorldSpec(obs_shape=(4, 3), action_names=("a",), features=FEATURES)
    assert spec.sight is spec.sight
    assert replace(spec, features=()).sight != spec.sight
    assert replace(spec) == spec
