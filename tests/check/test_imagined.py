import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdfast
from holdfast import Fast
from holdfast.check.bench import set_up
from holdfast.check.laws import measure
from holdfast.check.subjects.find import subject_of
from holdfast.check.subjects.imagined import Sights
from holdfast.errors import ContractError
from holdfast.worlds import WorldSpec
from small import SPEC, OnlySpec
from spaces_worlds import IMAGE_SPEC, TREE, TREE_SPEC, SayNumber


def drawn_of(spec, *size):
    return Sights(spec).draw(size, torch.Generator().manual_seed(0))


def spec_of(space):
    shape = () if isinstance(space, spaces.Dict | spaces.Tuple) else space.shape
    return WorldSpec(shape, ("a",), observation=space)


def as_gym(shown):
    """One observation as Gymnasium would draw it."""
    if isinstance(shown, torch.Tensor):
        return shown.numpy()
    return {key: as_gym(part) for key, part in shown.items()}


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2,)),
        spaces.Box(np.array([0, -np.inf], np.float32), np.array([np.inf, 3], np.float32)),
        spaces.Box(0, 255, (2, 2), np.uint8),
        spaces.Discrete(4, start=-2),
        spaces.MultiDiscrete([2, 3], start=[5, 0]),
        spaces.MultiBinary(3),
        spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Dict({"c": spaces.Box(-1, 1, (2, 2))})}),
    ],
    ids=str,
)
def test_what_is_imagined_lies_in_the_space(space):
    sights = Sights(spec_of(space))
    shown = sights.show(drawn_of(spec_of(space), 5, 4))
    for agent in range(5):
        for step in range(4):
            seen = as_gym(shown[agent, step])
            if isinstance(space, spaces.Discrete):
                assert space.contains(int(seen))
            elif isinstance(space, spaces.Dict):
                assert space["b"].contains(seen["b"])
                assert space["a"].contains(int(seen["a"]))
            else:
                assert space.contains(seen.astype(space.dtype))


def test_a_tree_is_drawn_flat_and_shown_as_it_is():
    sights, flat = Sights(TREE_SPEC), drawn_of(TREE_SPEC, 3, 2)
    assert flat.shape == (3, 2, 1 + 3 + 2 + 8 * 8 * 3 + 3)
    assert flat.dtype == torch.float32
    for dtype in (torch.float32, torch.float64):
        shown = sights.show(flat.to(dtype))
        assert shown.batch_size == (3, 2)
        assert (shown["picture"].shape, shown["picture"].dtype) == ((3, 2, 8, 8, 3), torch.uint8)
        assert shown["vector"].dtype == dtype
        assert (shown["more", "0"].shape, shown["more", "0"].dtype) == ((3, 2), torch.int64)
        assert shown["more", "2"][..., 0].min() >= 5
    assert sights.show(flat)["vector"].equal(flat[..., -3:])
    assert sights.show(flat[:, 0])["picture"].equal(sights.show(flat)["picture"][:, 0])


def test_a_tree_of_whole_numbers_is_drawn_whole_and_gradients_reach_the_fractions_of_others():
    whole = WorldSpec((), ("a",), observation=spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2))))
    assert drawn_of(whole, 2).dtype == torch.int64
    flat = drawn_of(TREE_SPEC, 2).requires_grad_()
    Sights(TREE_SPEC).show(flat)["vector"].sum().backward()
    assert flat.grad.sum() == 6


def test_a_world_of_numbers_is_imagined_as_before():
    expected = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    assert drawn_of(SPEC, 4, 3).equal(expected)


def test_what_cannot_be_imagined_is_told():
    with pytest.raises(ContractError, match=r"cannot imagine Text"):
        drawn_of(WorldSpec((), ("a",), observation=spaces.Dict({"a": spaces.Text(3)})), 2)


def test_actions_are_drawn_from_their_space():
    subject = subject_of(Fast(IMAGE_SPEC, hidden_size=4), OnlySpec(spec=IMAGE_SPEC))
    acted = subject.do((50, 2), torch.Generator().manual_seed(0))
    assert acted.shape == (50, 2, 3)
    assert (acted.amax((0, 1)) + 1).tolist() == [3, 2, 4]
    assert acted.min() == 0
    numbers = subject_of(Fast(SayNumber.spec, hidden_size=4), OnlySpec(spec=SayNumber.spec))
    assert numbers.do((50, 2), torch.Generator()).shape == (50, 2, 1)


class Uncleared(Fast):
    """Ignores where episodes start."""

    def unroll(self, obs, first, state, valid=None):
        return super().unroll(obs, torch.zeros_like(first), state, valid)


class ReadsTheNeighbour(Fast):
    """Encodes what stands in the row before."""

    def encode(self, obs):
        return self.encoder(obs) + 0.1 * self.encoder(obs).roll(1, 0)


def bench_of(policy, spec):
    torch.manual_seed(0)
    return set_up(subject_of(policy(spec, hidden_size=8, num_layers=1), OnlySpec(spec=spec)))


QUICK = WorldSpec(
    (),
    (),
    observation=spaces.Dict({"number": TREE["vector"], "choice": spaces.Discrete(4, start=-1)}),
    action=spaces.Box(-1, 1, (2,)),
)
"""A tree without pictures, which take their time."""


@pytest.mark.usefixtures("annotations_asleep")
def test_the_laws_that_are_quick_to_measure_hold_for_a_tree_and_numbers():
    bench = bench_of(Fast, QUICK)
    assert (list(bench.cases), bench.notes) == ([torch.float64, torch.float32], ())
    laws = list(measure(bench, ["cut", "replay", "pure", "restore"]))
    assert {law.name: law.finding for law in laws if not law.ok} == {}
    assert len(laws) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("annotations_asleep")
@pytest.mark.parametrize("spec", [TREE_SPEC, IMAGE_SPEC, SayNumber.spec], ids=["tree", "image", "vector"])
def test_all_laws_hold_in_every_space(spec):
    torch.manual_seed(0)
    laws = holdfast.check(Fast(spec, hidden_size=16), OnlySpec(spec=spec))
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}
    assert len(laws) == 9
    assert laws["carry"].measured > 0


@pytest.mark.slow
@pytest.mark.usefixtures("annotations_asleep")
@pytest.mark.parametrize(
    ("policy", "law", "spec"),
    [(Uncleared, "clear", IMAGE_SPEC), (ReadsTheNeighbour, "isolate", QUICK)],
    ids=["uncleared image", "mixed tree"],
)
def test_broken_memory_is_caught_in_every_space(policy, law, spec):
    (broken,) = measure(bench_of(policy, spec), [law])
    assert not broken.ok
    assert "agent" in broken.finding


@pytest.mark.slow
@pytest.mark.usefixtures("annotations_asleep")
def test_what_broke_is_named_for_a_tree_too():
    torch.manual_seed(0)
    laws = holdfast.check(Uncleared(QUICK, hidden_size=8, num_layers=1), OnlySpec(spec=QUICK))
    assert not laws["clear"].ok
    assert laws["replay"].ok
    assert laws["clear"].pattern is not None
    assert "never cleared" in laws["clear"].pattern.name
