import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ContractError
from holdfast.worlds import tokens

CPU = torch.device("cpu")


@given(st.integers(0, 14), st.integers(0, 14))
def test_a_location_holds_the_row_above_the_column(row, column):
    location = tokens.pack_location(row, column)
    assert (location >> 4, location & 0x0F) == (row, column)


def test_a_known_place_has_its_known_byte():
    assert tokens.pack_location(4, 5) == 0x45
    assert tokens.pack_location(0, 0) == 0x00
    assert tokens.pack_location(14, 14) == 0xEE


def test_no_two_places_share_a_byte_and_none_is_a_mark():
    packed = [tokens.pack_location(row, column) for row in range(15) for column in range(15)]
    assert len(set(packed)) == 225
    assert not {tokens.GLOBAL, tokens.PADDING} & set(packed)


def test_the_marks_are_those_of_the_format():
    assert (tokens.GLOBAL, tokens.PADDING) == (0xFE, 0xFF)


@pytest.mark.parametrize(("row", "column"), [(15, 0), (0, 15), (-1, 3), (3, -1), (255, 255)])
def test_a_place_without_a_byte_is_refused_by_its_numbers(row, column):
    with pytest.raises(ContractError, match=rf"row {row}, column {column} is outside 0\.\.14"):
        tokens.pack_location(row, column)


@given(st.integers(0, 5), st.integers(0, 9))
def test_an_empty_observation_is_padding_in_all_three_bytes(agents, places):
    obs = tokens.empty(agents, places, CPU)
    assert obs.shape == (agents, places, 3)
    assert obs.dtype == torch.uint8
    assert bool((obs == 0xFF).all())


def test_empty_observations_are_not_shared():
    one, other = tokens.empty(2, 3, CPU), tokens.empty(2, 3, CPU)
    one[0, 0] = 0
    assert bool((other == 0xFF).all())


def test_cells_are_packed_to_the_front_in_their_order_and_the_rest_is_left_out():
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
