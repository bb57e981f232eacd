"""Observations: trees of tensors, their spaces, and masks over their rows."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from holdfast.errors import ContractError
from holdfast.worlds.obs import (
    check_actions,
    device_of,
    empty_obs,
    mask_invalid,
    out_of_range,
    subspaces,
    tensors_of,
    where_obs,
    zero_obs,
)

BOX = spaces.Box(-1, 1, (2,))
NESTED = spaces.Dict(
    {
        "b": spaces.Tuple((spaces.Discrete(3, start=5), spaces.MultiBinary(2))),
        "a": spaces.MultiDiscrete([2, 3], start=[0, 7]),
        "c": BOX,
    }
)


def tree(*batch):
    inner = TensorDict({"whole": torch.arange(batch[0]).expand(*batch[::-1]).mT.clone()}, batch_size=batch)
    return TensorDict({"part": torch.rand(*batch, 3), "inner": inner}, batch_size=batch)


def test_where_obs_and_mask_invalid():
    one, other = tree(4, 2), tree(4, 2)
    where = torch.tensor([[True, False], [False, False], [True, True], [False, True]])
    chosen = where_obs(where, one, other)
    assert chosen["part"].equal(torch.where(where[..., None], one["part"], other["part"]))
    assert where_obs(where, one["part"], other["part"]).equal(chosen["part"])
    one["part"][0, 1] = torch.nan
    stilled = mask_invalid(one, where, None)
    assert stilled["part"].equal(torch.where(where[..., None], one["part"], 0.0))
    assert stilled["inner", "whole"].equal(torch.where(where, one["inner", "whole"], 0))
    nothing = TensorDict({"part": torch.zeros(1, 3), "inner": TensorDict({"whole": torch.tensor([7])}, [1])}, [1])
    started = mask_invalid(one, where, nothing)
    assert started["inner", "whole"].equal(torch.where(where, one["inner", "whole"], 7))
    assert one["part"][0, 1].isnan().all()
    assert mask_invalid(one["part"], where, None).equal(stilled["part"])
    assert device_of(one) == device_of(one["part"]) == torch.device("cpu")


def test_subspaces_are_sorted():
    parts = subspaces(spaces.Dict([("z", BOX), ("a", spaces.Tuple((BOX, spaces.Discrete(2))))]))
    assert list(parts) == ["a", "z"]
    assert subspaces(parts["a"]) == {"0": BOX, "1": spaces.Discrete(2)}
    assert subspaces(BOX) == {}


def test_empty_obs_has_the_structure_and_dtypes_of_the_space():
    obs = empty_obs(NESTED)
    shapes = {"a": (0, 2), ("b", "0"): (0,), ("b", "1"): (0, 2), "c": (0, 2)}
    assert {key: tuple(obs[key].shape) for key in shapes} == shapes
    assert [obs[key].dtype for key in shapes] == [torch.int64, torch.int64, torch.int8, torch.float32]
    assert len(tensors_of(obs)) == 4
    with pytest.raises(ContractError, match=r"cannot be stored; observation spaces are Box, Discrete"):
        empty_obs(spaces.Text(3))


def test_zero_obs_is_the_start_of_a_discrete_space():
    obs = zero_obs(NESTED, 3)
    assert obs["b", "0"].tolist() == [5, 5, 5]
    assert obs["a"].tolist() == [[0, 7]] * 3
    assert not obs["b", "1"].any()
    assert not obs["c"].any()
    assert not out_of_range(obs, NESTED).any()


@pytest.mark.parametrize(
    ("key", "low", "high"), [(("b", "0"), 4, 8), ("a", torch.tensor([0, 6]), torch.tensor([2, 7]))]
)
def test_out_of_range_marks_rows_of_discrete_leaves(key, low, high):
    obs = zero_obs(NESTED, 3)
    # Boxes may have any values.
    obs["c"][:] = 99
    obs[key][0], obs[key][2] = low, high
    assert out_of_range(obs, NESTED).tolist() == [True, False, True]


def test_mask_invalid_keeps_bytes_and_resets_integers():
    valid = torch.tensor([True, False])
    pixels = torch.tensor([[3], [200]], dtype=torch.uint8)
    assert mask_invalid(pixels, valid, None) is pixels
    numbers = torch.from_numpy(np.array([8, 99]))
    assert mask_invalid(numbers, valid, torch.tensor([5])).tolist() == [8, 5]
    assert mask_invalid(numbers, valid, None).tolist() == [8, 0]


@pytest.mark.parametrize(
    ("actions", "wanted", "message"),
    [
        (torch.zeros(3), BOX, r"are \(3,\) .* needs floats \(3, 2\) for Box"),
        (torch.zeros(3, 2, dtype=torch.long), BOX, "torch.int64; .* needs floats"),
        (torch.tensor([[0, 0], [0, torch.nan], [0, 0]]), BOX, "agent 1 took action .*nan.*must be finite"),
        (torch.zeros(3, 2), spaces.MultiDiscrete([2, 3]), r"needs integers \(3, 2\) for Multi"),
        (torch.tensor([[0, 2], [1, 3], [0, 0]]), spaces.MultiDiscrete([2, 3]), r"agent 1 took .*\[1, 3\]; "),
        (torch.tensor([[0, 2], [-1, 0], [0, 0]]), spaces.MultiDiscrete([2, 3]), r"actions 0 to \[1, 2\]"),
    ],
)
def test_check_actions_errors(actions, wanted, message):
    with pytest.raises(ContractError, match=message):
        check_actions(actions, 3, wanted)


def test_check_actions_accepts_samples_outside_a_box():
    check_actions(torch.tensor([[-7.0, 0.0], [0.5, 9.0]]), 2, BOX)
    check_actions(torch.tensor([[1, 2]]), 1, spaces.MultiDiscrete([2, 3]))
