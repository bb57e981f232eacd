import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ContractError
from holdfast.worlds.actions import ActionTable

# The usual arena: seven types with these largest arguments are 19 actions.
ARENA = ActionTable(
    ("noop", "move", "rotate", "put_items", "get_items", "attack", "swap"), (0, 1, 3, 0, 0, 8, 0)
)


def test_the_arena_has_nineteen_actions_and_each_its_place():
    assert len(ARENA.names) == 19
    assert ARENA.names[:4] == ("noop_0", "move_0", "move_1", "rotate_0")
    assert ARENA.join(torch.tensor([5, 8])).item() == 17
    assert ARENA.split(torch.tensor([0, 17, 18])).tolist() == [[0, 0], [5, 8], [6, 0]]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_every_table_is_numbered_without_gaps(most):
    table = ActionTable(tuple(f"type{i}" for i in range(len(most))), tuple(most))
    flat = torch.arange(len(table.names))
    assert table.join(table.split(flat)).equal(flat)
    assert len(set(table.names)) == sum(most) + len(most)
    for kind, arg in table.pairs:
        # The original's formula, which adds the type to repair sums that leave out the ones.
        assert table.join(torch.tensor([kind, arg])).item() == kind + sum(most[:kind]) + arg


@pytest.mark.parametrize("pair", [(7, 0), (-1, 0), (0, 1), (1, 2), (1, -1)])
def test_a_pair_that_is_no_action_is_refused(pair):
    with pytest.raises(ContractError, match=rf"\(type {pair[0]}, argument {pair[1]}\)"):
        ARENA.join(torch.tensor([[1, 1], list(pair)]))


@pytest.mark.parametrize("flat", [-1, 19])
def test_an_index_that_is_no_action_is_refused(flat):
    with pytest.raises(ContractError, match=f"{flat} is no action; there are 0 to 18"):
        ARENA.split(torch.tensor([0, flat]))


def test_bytes_are_numbers_too():
    pairs = torch.tensor([[5, 8]], dtype=torch.uint8)
    assert ARENA.split(ARENA.join(pairs).to(torch.uint8)).tolist() == [[5, 8]]


def test_a_table_that_does_not_fit_together_is_refused():
    for types, most in ((("a",), ()), ((), ()), (("a",), (-1,))):
        with pytest.raises(ContractError, match="give each type one"):
            ActionTable(types, most)
    with pytest.raises(ContractError, match="not all different"):
        ActionTable(("a", "a"), (0, 1))
