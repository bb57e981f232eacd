"""Annotations are checked while tests run: types, and sizes of axes within a call."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from helpers.annotation_checks import check_annotations
from holdfast.memory import LSTM

check = check_annotations(typechecker=beartype)


@check
def add(a: Float[Tensor, "B T"], b: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    return a + b.mean() if a.shape[1] == 2 else a[:1]


@check
def repeat(a: Float[Tensor, " B"], times: int) -> "Float[Tensor, 'B {times}']":
    return a[:, None].expand(-1, max(times, 2))


@check
def rows(a: Float[Tensor, "B T"]) -> Iterator[Float[Tensor, " T"]]:
    yield from a


@check
@dataclass(frozen=True)
class Pair:
    a: Float[Tensor, " B"]
    b: "Float[Tensor, ' B']"


@pytest.mark.parametrize(
    "call",
    [
        lambda: add(torch.ones(3, 2), torch.ones(3, 4)),
        lambda: add(torch.ones(3, 2), torch.ones(3, 2, dtype=torch.long)),
        lambda: add(torch.ones(3, 2), "b"),
        lambda: add(torch.ones(3, 4), torch.ones(3, 4)),
        lambda: repeat(torch.ones(3), 1),
        lambda: rows(torch.ones(3)),
        lambda: Pair(torch.ones(3), torch.ones(4)),
        lambda: Pair(torch.ones(3), 1),
        lambda: LSTM(8, 16, 1)(torch.ones(3, 2, 8), LSTM(8, 16, 1).initial(3), torch.zeros(3, 4, dtype=torch.bool)),
    ],
    ids=[
        "other size",
        "other dtype",
        "no tensor",
        "result",
        "axis of an argument",
        "generator",
        "field",
        "field's type",
        "holdfast",
    ],
)
def test_call_that_contradicts_annotations_raises(call):
    with pytest.raises((BeartypeCallHintViolation, TypeCheckError)):
        call()


def test_calls_that_fit_annotations_return():
    assert Pair(torch.ones(3), torch.ones(3)).b.shape == (3,)
    assert add(torch.ones(3, 2), torch.ones(3, 2)).equal(torch.full((3, 2), 2.0))
    assert repeat(torch.ones(3), 2).shape == (3, 2)
    assert len(list(rows(torch.ones(3, 2)))) == 3


def test_checks_can_be_disabled(annotations_asleep):
    assert repeat(torch.ones(3), 1).shape == (3, 2)
