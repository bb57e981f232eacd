import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdfast
from helpers.small_policy import SPEC, OnlySpec
from helpers.space_worlds import IMAGE_SPEC, TREE, TREE_SPEC, SayNumber
from holdfast import Fast
from holdfast.check.adapters import adapt
from holdfast.check.adapters.holdfast import RandomObs
from holdfast.check.context import prepare
from holdfast.check.laws import measure
from holdfast.errors import ContractError
from holdfast.worlds import WorldSpec


def draw_obs(spec, *size):
    return RandomObs(spec).draw(size, torch.Generator().manual_seed(0))


def spec_of(space):
    shape = () if isinstance(space, spaces.Dict | spaces.Tuple) else space.shape
    return WorldSpec(shape, ("a",), observation=space)


def as_gym(obs):
    """One observation as Gymnasium would sample it."""
    if isinstance(obs, torch.Tensor):
        return obs.numpy()
    return {key: as_gym(leaf) for key, leaf in obs.items()}


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
def test_random_obs_lie_in_the_space(space):
    obs = RandomObs(spec_of(space)).show(draw_obs(spec_of(space), 5, 4))
    assert draw_obs(spec_of(space), 5, 4).equal(draw_obs(spec_of(space), 5, 4))
    for agent in range(5):
        for step in range(4):
            sample = as_gym(obs[agent, step])
            if isinstance(space, spaces.Discrete):
                assert space.contains(int(sample))
            elif isinstance(space, spaces.Dict):
                assert space["b"].contains(sample["b"])
                assert space["a"].contains(int(sample["a"]))
            else:
                assert space.contains(sample.astype(space.dtype))


def test_random_obs_of_a_dict_are_drawn_flat_and_shown_as_a_tree():
    random_obs, flat = RandomObs(TREE_SPEC), draw_obs(TREE_SPEC, 3, 2)
    assert flat.shape == (3, 2, 1 + 3 + 2 + 8 * 8 * 3 + 3)
    assert flat.dtype == torch.float32
    for dtype in (torch.float32, torch.float64):
        obs = random_obs.show(flat.to(dtype))
        assert obs.batch_size == (3, 2)
        assert (obs["picture"].shape, obs["picture"].dtype) == ((3, 2, 8, 8, 3), torch.uint8)
        assert obs["vector"].dtype == dtype
        assert (obs["more", "0"].shape, obs["more", "0"].dtype) == ((3, 2), torch.int64)
        assert obs["more", "2"][..., 0].min() >= 5
    assert random_obs.show(flat)["vector"].equal(flat[..., -3:])
    huge = random_obs.show(1000 * flat)
    assert huge["vector"].equal(1000 * flat[..., -3:])
    assert all(TREE["more"][at].contains(huge["more", str(at)][0, 0].numpy()) for at in (0, 2))
    assert random_obs.show(flat[:, 0])["picture"].equal(random_obs.show(flat)["picture"][:, 0])


def test_integer_tree_is_drawn_as_integers_and_gradients_reach_float_leaves():
    integers = WorldSpec((), ("a",), observation=spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2))))
    assert draw_obs(integers, 2).dtype == torch.int64
    flat = draw_obs(TREE_SPEC, 2).requires_grad_()
    RandomObs(TREE_SPEC).show(flat)["vector"].sum().backward()
    assert flat.grad.sum() == 6


def test_random_obs_of_an_unbounded_box_are_normal():
    expected = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    assert draw_obs(SPEC, 4, 3).equal(expected)


def test_unsupported_space_is_an_error():
    with pytest.raises(ContractError, match=r"Text.* has no least and greatest values"):
        draw_obs(WorldSpec((), ("a",), observation=spaces.Dict({"a": spaces.Text(3)})), 2)


def test_random_actions_lie_in_the_space():
    adapter = adapt(Fast(IMAGE_SPEC, hidden_size=4), OnlySpec(spec=IMAGE_SPEC))
    actions = adapter.random_actions((50, 2), torch.Generator().manual_seed(0))
    assert actions.shape == (50, 2, 3)
    assert (actions.amax((0, 1)) + 1).tolist() == [3, 2, 4]
    assert actions.min() == 0
    numbers = adapt(Fast(SayNumber.spec, hidden_size=4), OnlySpec(spec=SayNumber.spec))
    assert numbers.random_actions((50, 2), torch.Generator()).shape == (50, 2, 1)


class Uncleared(Fast):
    """Ignores where episodes start."""

    def unroll(self, obs, first, state, valid=None):
        return super().unroll(obs, torch.zeros_like(first), state, valid)


class ReadsTheNeighbour(Fast):
    """Adds the encoding of the previous row."""

    def encode(self, obs):
        return self.encoder(obs) + 0.1 * self.encoder(obs).roll(1, 0)


def context_of(policy, spec):
    torch.manual_seed(0)
    return prepare(adapt(policy(spec, hidden_size=8, num_layers=1), OnlySpec(spec=spec)))


QUICK = WorldSpec(
    (),
    (),
    observation=spaces.Dict({"number": TREE["vector"], "choice": spaces.Discrete(4, start=-1)}),
    action=spaces.Box(-1, 1, (2,)),
)
"""A tree without images, which are slow."""


@pytest.mark.usefixtures("annotations_asleep")
def test_quick_laws_hold_for_a_dict_space():
    context = context_of(Fast, QUICK)
    assert (list(context.copies), context.notes) == ([torch.float64, torch.float32], ())
    laws = list(measure(context, ["cut", "replay", "pure", "restore"]))
    assert {law.name: law.finding for law in laws if not law.ok} == {}
    assert len(laws) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("annotations_asleep")
@pytest.mark.parametrize("spec", [TREE_SPEC, IMAGE_SPEC, SayNumber.spec], ids=["tree", "image", "vector"])
def test_all_laws_hold_in_every_space(spec):
    torch.manual_seed(0)
    laws = holdfast.check(Fast(spec, hidden_size=16), OnlySpec(spec=spec))
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}
    assert len(laws) == 10
    assert laws["carry"].measured > 0


@pytest.mark.slow
@pytest.mark.usefixtures("annotations_asleep")
@pytest.mark.parametrize(
    ("policy", "law", "spec"),
    [(Uncleared, "clear", IMAGE_SPEC), (ReadsTheNeighbour, "isolate", QUICK)],
    ids=["uncleared image", "mixed tree"],
)
def test_broken_policy_is_caught_in_every_space(policy, law, spec):
    (broken,) = measure(context_of(policy, spec), [law])
    assert not broken.ok
    assert "agent" in broken.finding


@pytest.mark.slow
@pytest.mark.usefixtures("annotations_asleep")
def test_diagnosis_in_a_dict_space():
    torch.manual_seed(0)
    laws = holdfast.check(Uncleared(QUICK, hidden_size=8, num_layers=1), OnlySpec(spec=QUICK))
    assert not laws["clear"].ok
    assert laws["replay"].ok
    assert laws["clear"].pattern is not None
    assert "never reset" in laws["clear"].pattern.name
