"""The law shard, and trainers that only it catches."""

import pytest
import torch

from helpers.small_policy import SPEC, make_small
from holdfast import ranks
from holdfast.check.adapters import adapt
from holdfast.check.adapters.holdfast import HoldfastPolicy
from holdfast.check.laws import LAWS, measure, prepare
from holdfast.check.shard import on_ranks
from holdfast.errors import ContractError
from holdfast.learn import Learner
from holdfast.rollout import Collector


def law_of(adapter, name="shard"):
    (law,) = measure(prepare(adapter), [name])
    return law


class DrawsByOwnNumber(Collector):
    """Every rank counts its agents from 0, so they draw the same actions as those of rank 0."""

    def rollout(self, version):
        rank, ranks.rank = ranks.rank, lambda: 0
        try:
            return super().rollout(version)
        finally:
            ranks.rank = rank


class SumsNothing(Learner):
    """Every rank follows the gradients of its own rows."""

    def update(self, *args, **kwargs):
        average, ranks.average_gradients = ranks.average_gradients, lambda weights, *numbers: list(numbers)
        try:
            return super().update(*args, **kwargs)
        finally:
            ranks.average_gradients = average


class NormalizesAlone(Learner):
    """Every rank normalizes the advantages of its own rows."""

    def update(self, *args, **kwargs):
        sums, ranks.sums = ranks.sums, lambda *numbers: list(numbers) if len(numbers) == 2 else sums(*numbers)
        try:
            return super().update(*args, **kwargs)
        finally:
            ranks.sums = sums


def sabotaged(**hooks):
    return type("Sabotaged", (HoldfastPolicy,), hooks)(make_small(), SPEC)


def test_a_right_trainer_holds():
    law = law_of(adapt(make_small(), None, spec=SPEC))
    assert law.ok, law.finding
    assert [part.measured for part in law.parts[:-1]] == [0.0] * 4
    assert law.parts[-1].measured <= 1e-12


@pytest.mark.parametrize(
    ("hooks", "finding"),
    [
        ({"collector": DrawsByOwnNumber}, "actions of a rollout on 2 ranks"),
        ({"learner": SumsNothing}, "weights of the ranks after an update"),
        ({"learner": NormalizesAlone}, "weights after an update on 2 ranks"),
    ],
)
def test_a_trainer_that_depends_on_the_ranks_is_caught(hooks, finding):
    assert finding in law_of(sabotaged(**hooks)).finding


@pytest.mark.slow
@pytest.mark.parametrize("hooks", [{"collector": DrawsByOwnNumber}, {"learner": SumsNothing}])
def test_no_other_law_catches_it(hooks):
    laws = list(measure(prepare(sabotaged(**hooks))))
    assert [law.name for law in laws if not law.ok] == ["shard"]


def test_a_policy_of_another_library_is_not_measured():
    law = law_of(adapt(torch.nn.LSTM(4, 4), None))
    assert (law.ok, law.worst.path) == (True, "n/a")
    assert law.finding == "only Holdfast policies are trained by Holdfast"


def test_a_rank_that_fails_is_named():
    def fail(rank):
        assert rank == 0, "no"
        return {}

    with pytest.raises(ContractError, match="rank 1: AssertionError"):
        on_ranks(2, fail)


def test_it_is_the_tenth_law():
    assert [*LAWS][9:] == ["shard"]
