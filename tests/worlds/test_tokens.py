"""Token format and action tables."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ContractError
from holdfast.worlds import tokens
from holdfast.worlds.tokens import ActionTable

CPU = torch.device("cpu")


@given(st.integers(0, 14), st.integers(0, 14))
def test_pack_location_bits(row, column):
    location = tokens.pack_location(row, column)
    assert (location >> 4, location & 0x0F) == (row, column)


def test_pack_location_examples():
    assert tokens.pack_location(4, 5) == 0x45
    assert tokens.pack_location(0, 0) == 0x00
    assert tokens.pack_location(14, 14) == 0xEE


def test_pack_location_is_unique():
    packed = [tokens.pack_location(row, column) for row in range(15) for column in range(15)]
    assert len(set(packed)) == 225
    assert not {tokens.GLOBAL, tokens.PADDING} & set(packed)


def test_global_and_padding_bytes():
    assert (tokens.GLOBAL, tokens.PADDING) == (0xFE, 0xFF)


@pytest.mark.parametrize(("row", "column"), [(15, 0), (0, 15), (-1, 3), (3, -1), (255, 255)])
def test_pack_location_out_of_range(row, column):
    with pytest.raises(ContractError, match=rf"row {row}, column {column} is outside 0\.\.14"):
        tokens.pack_location(row, column)


@given(st.integers(0, 5), st.integers(0, 9))
def test_empty_observation_is_padding(agents, places):
    obs = tokens.empty(agents, places, CPU)
    assert obs.shape == (agents, places, 3)
    assert obs.dtype == torch.uint8
    assert bool((obs == 0xFF).all())


def test_empty_observations_are_not_shared():
    one, other = tokens.empty(2, 3, CPU), tokens.empty(2, 3, CPU)
    one[0, 0] = 0
    assert bool((other == 0xFF).all())


def test_pack_keeps_order_and_limit():
    a, b = tokens.word(3, 7), tokens.word(0, 255)
    cells = torch.tensor([[0, a, 0, b, a], [0, 0, 0, 0, 0], [b, b, b, b, b]], dtype=torch.int32)
    places = torch.tensor([0x00, 0x12, 0x23, 0xEE, 0x45], dtype=torch.int32)
    obs = tokens.pack(cells, places, 3)
    assert obs.dtype == torch.uint8
    padding = [0xFF] * 3
    assert obs.tolist() == [
        [[0x12, 3, 7], [0xEE, 0, 255], [0x45, 3, 7]],
        [padding] * 3,
        [[0x00, 0, 255], [0x12, 0, 255], [0x23, 0, 255]],
    ]
    assert tokens.pack(cells, places, 7)[0].tolist()[2:] == [[0x45, 3, 7], *[padding] * 4]


# The usual arena: seven types with these largest arguments are 19 actions.
ARENA = ActionTable(("noop", "move", "rotate", "put_items", "get_items", "attack", "swap"), (0, 1, 3, 0, 0, 8, 0))


def test_action_table_of_the_arena():
    assert len(ARENA.names) == 19
    assert ARENA.names[:4] == ("noop_0", "move_0", "move_1", "rotate_0")
    assert ARENA.join(torch.tensor([5, 8])).item() == 17
    assert ARENA.split(torch.tensor([0, 17, 18])).tolist() == [[0, 0], [5, 8], [6, 0]]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_action_table_round_trip(most):
    table = ActionTable(tuple(f"type{i}" for i in range(len(most))), tuple(most))
    flat = torch.arange(len(table.names))
    assert table.join(table.split(flat)).equal(flat)
    assert len(set(table.names)) == sum(most) + len(most)
    for kind, arg in table.pairs:
        # The original's formula, which adds the type to repair sums that leave out the ones.
        assert table.join(torch.tensor([kind, arg])).item() == kind + sum(most[:kind]) + arg


@pytest.mark.parametrize("pair", [(7, 0), (-1, 0), (0, 1), (1, 2), (1, -1)])
def test_action_table_join_errors(pair):
    with pytest.raises(ContractError, match=rf"\(type {pair[0]}, argument {pair[1]}\)"):
        ARENA.join(torch.tensor([[1, 1], list(pair)]))


@pytest.mark.parametrize("flat", [-1, 19])
def test_action_table_split_errors(flat):
    with pytest.raises(ContractError, match=f"{flat} is not an action; valid are 0 to 18"):
        ARENA.split(torch.tensor([0, flat]))


def test_action_table_accepts_uint8():
    pairs = torch.tensor([[5, 8]], dtype=torch.uint8)
    assert ARENA.split(ARENA.join(pairs).to(torch.uint8)).tolist() == [[5, 8]]


def test_action_table_errors():
    for types, most in ((("a",), ()), ((), ()), (("a",), (-1,))):
        with pytest.raises(ContractError, match="give one per type"):
            ActionTable(types, most)
    with pytest.raises(ContractError, match="not all different"):
        ActionTable(("a", "a"), (0, 1))
