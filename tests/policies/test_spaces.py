import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from holdfast import Fast, make_policy, make_world
from holdfast.errors import ContractError
from holdfast.policies import Example, LatentAttnTiny
from holdfast.policies.actions import Gaussian, MultiCategorical
from holdfast.policies.spaces import ImageEncoder, encoder_of, make_encoder
from holdfast.worlds import WorldSpec
from small import OnlySpec
from spaces_worlds import IMAGE_SPEC, TREE, TREE_SPEC

INF = np.inf
EVERY = [
    spaces.Box(-INF, INF, (5,)),
    spaces.Box(-1, 1, ()),
    spaces.Box(-1, 1, (2, 3)),
    spaces.Box(-1, 1, (2, 2, 2, 2)),
    spaces.Box(0, 255, (7,), np.uint8),
    spaces.Box(0, 255, (16, 9, 3), np.uint8),
    spaces.Box(-INF, INF, (2, 8, 8)),
    spaces.Discrete(4, start=3),
    spaces.MultiDiscrete([2, 3], start=[-1, 4]),
    spaces.MultiDiscrete([[2, 3], [4, 5]]),
    spaces.MultiBinary(4),
    spaces.MultiBinary((2, 2)),
    spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (3,)))),
    TREE,
]


def as_tensors(sample):
    """What Gymnasium draws, as worlds show it."""
    if isinstance(sample, dict):
        return TensorDict({key: as_tensors(part) for key, part in sample.items()})
    if isinstance(sample, tuple):
        return TensorDict({str(number): as_tensors(part) for number, part in enumerate(sample)})
    return torch.as_tensor(np.asarray(sample))


def samples(space, count):
    space.seed(0)
    drawn = [as_tensors(space.sample()) for _ in range(count)]
    return torch.stack(drawn)


@pytest.mark.parametrize("space", EVERY, ids=str)
def test_everything_that_can_be_seen_is_encoded_row_by_row(space):
    torch.manual_seed(0)
    encoder, obs = encoder_of(space, 16), samples(space, 6)
    features = encoder(obs)
    assert features.shape == (6, 16)
    assert features.isfinite().all()
    torch.testing.assert_close(encoder(obs[2:4]), features[2:4])
    features.square().sum().backward()
    assert all(bool(weight.grad.any()) for weight in encoder.parameters())


@settings(max_examples=25)
@given(
    sides=st.tuples(st.integers(3, 40), st.integers(3, 40)),
    channels=st.integers(1, 3),
    last=st.booleans(),
    floats=st.booleans(),
)
def test_every_size_of_image_has_a_network(sides, channels, last, floats):
    shape = (*sides, channels) if last else (channels, *sides)
    dtype, high = (np.float32, 1) if floats else (np.uint8, 255)
    encoder = ImageEncoder(spaces.Box(0, high, shape, dtype), 8)
    obs = (torch.rand(2, *shape) * high).to(torch.float32 if floats else torch.uint8)
    assert encoder(obs).shape == (2, 8)
    assert encoder.convolutions[0].in_channels == channels or channels in sides
    assert encoder.fc.in_features <= 64 * 8 * 8


def test_channels_may_come_first_or_last_and_bytes_are_divided_in_float():
    torch.manual_seed(0)
    first = ImageEncoder(spaces.Box(0, 255, (3, 20, 11), np.uint8), 8)
    last = ImageEncoder(spaces.Box(0, 255, (20, 11, 3), np.uint8), 8)
    fractions = ImageEncoder(spaces.Box(0, 1, (3, 20, 11)), 8)
    for other in (last, fractions):
        other.load_state_dict(first.state_dict())
    obs = torch.randint(256, (2, 3, 20, 11)).to(torch.uint8)
    assert first(obs).any()
    torch.testing.assert_close(last(obs.permute(0, 2, 3, 1)), first(obs))
    torch.testing.assert_close(fractions(obs.float() / 255), first(obs))


def test_images_of_many_sizes_have_as_many_weights_as_need_be():
    large = ImageEncoder(spaces.Box(0, 255, (84, 84, 3), np.uint8), 128)
    assert [layer.stride for layer in large.convolutions if isinstance(layer, torch.nn.Conv2d)] == [
        *[(2, 2)] * 4,
        (1, 1),
    ]
    narrow = ImageEncoder(spaces.Box(0, 255, (3, 8, 64), np.uint8), 128)
    assert narrow.convolutions[0].stride == (1, 2)
    assert narrow.fc.in_features == 64 * 8 * 8


def test_an_image_too_small_for_a_network_says_what_to_write():
    with pytest.raises(ContractError, match=r"is an image of 2x9; .* a Box of shape \(54,\)"):
        encoder_of(spaces.Box(0, 255, (3, 2, 9), np.uint8), 8)


def test_numbers_between_walls_are_moved_and_others_are_read_as_they_are():
    space = spaces.Box(np.array([10, -INF, -3e38, 0, 5]), np.array([20, INF, 3e38, INF, 5]), dtype=np.float64)
    encoder = encoder_of(space, 8)
    moved = (torch.tensor([20.0, 7.0, 7.0, 7.0, 5.0]) - encoder.middle) / encoder.reach
    assert moved.tolist() == [1.0, 7.0, 7.0, 7.0, 5.0]


def test_choices_are_read_as_a_linear_layer_would_read_what_is_hot():
    space = spaces.MultiDiscrete([2, 3], start=[-1, 4])
    encoder = encoder_of(space, 8)
    obs = torch.tensor([[-1, 4], [0, 6], [-1, 5]])
    hot = torch.cat(
        [torch.nn.functional.one_hot(obs[:, 0] + 1, 2), torch.nn.functional.one_hot(obs[:, 1] - 4, 3)], dim=-1
    )
    torch.testing.assert_close(encoder(obs), hot.float() @ encoder.embeddings.weight / 2**0.5)
    single = encoder_of(spaces.Discrete(4, start=3), 8)
    assert single(torch.tensor([3, 6])).equal(single.embeddings.weight[[0, 3]])
    with pytest.raises(IndexError):
        single(torch.tensor([7]))


def test_the_order_in_which_a_dict_is_written_makes_no_difference():
    parts = [("b", spaces.Box(-1, 1, (2,))), ("a", spaces.Discrete(3)), ("c.d/", spaces.MultiBinary(2))]
    obs = samples(spaces.Dict(parts), 4)
    torch.manual_seed(0)
    one = encoder_of(spaces.Dict(parts), 8)
    torch.manual_seed(0)
    other = encoder_of(spaces.Dict(parts[::-1]), 8)
    assert one.keys == ["a", "b", "c.d/"]
    assert other(obs).equal(one(obs))


@pytest.mark.parametrize(
    ("space", "told"),
    [
        (spaces.Text(5), r"observation=Text.*there is no encoder for Text; there is one for Box"),
        (spaces.Dict({"a": spaces.Sequence(spaces.Discrete(2))}), r"observation\['a'\]=.*Sequence"),
        (spaces.Tuple((spaces.Graph(spaces.Discrete(2), None),)), r"observation\['0'\]=.*for Graph"),
        (spaces.Dict({}), "is empty: there is nothing to see"),
        (spaces.Box(-1, 1, (0,)), "is empty: there is nothing to see"),
    ],
)
def test_what_cannot_be_encoded_is_named(space, told):
    with pytest.raises(ContractError, match=told):
        encoder_of(space, 8)


def test_a_world_that_says_nothing_of_its_space_shows_numbers():
    encoder = make_encoder(WorldSpec((5,), ("a", "b")), 8)
    assert encoder(torch.randn(3, 5)).shape == (3, 8)


@pytest.mark.parametrize(
    ("spec", "kind", "scores"),
    [(TREE_SPEC, Gaussian(2), 4), (IMAGE_SPEC, MultiCategorical((3, 2, 4)), 9)],
    ids=["tree", "image"],
)
def test_fast_answers_in_every_space(spec, kind, scores):
    policy = make_policy("auto", OnlySpec(spec=spec), seed=0, hidden_size=16)
    assert (type(policy), policy.actions) == (Fast, kind)
    obs = samples(spec.sight, 10)
    td = TensorDict({"env_obs": obs, "first": torch.rand(10) < 0.3, "bptt": torch.full((10,), 5)}, [10])
    td = policy(td, state=policy.lstm.cell.initial(2))
    assert td["actions"].shape == (10, *kind.shape)
    assert td[kind.key].shape == (10, scores)
    assert {"full_log_probs", "gaussian"} & set(td.keys()) == {kind.key}
    again = policy(td.select("env_obs", "first", "bptt"), policy.lstm.cell.initial(2), td["actions"])
    torch.testing.assert_close(again["act_log_prob"], td["act_log_prob"])
    (again["act_log_prob"].sum() + again["values"].sum()).backward()
    assert all(bool(weight.grad.any()) for weight in policy.actor.parameters())


def test_actions_start_undecided():
    policy = Fast(TREE_SPEC, hidden_size=16)
    told = policy.actions.tell(policy.decode(torch.randn(50, 16)).logits)
    assert told[:, :2].abs().max() < 0.1
    assert (told[:, 2:] == 0).all()
    policy = Fast(IMAGE_SPEC, hidden_size=16)
    told = policy.actions.tell(policy.decode(torch.randn(50, 16)).logits)
    assert (told[:, :3].exp() - 1 / 3).abs().max() < 0.03


@pytest.mark.parametrize("policy", [Example, LatentAttnTiny])
def test_policies_for_tokens_refuse_other_worlds(policy):
    with pytest.raises(ContractError, match=r"looks at tokens .* this world shows Box\(.*Use policy=fast"):
        policy(WorldSpec((5,), ("a", "b")))
    tokens = make_world("recall", agents=1).spec
    numbers = WorldSpec(tokens.obs_shape, (), tokens.features, action=spaces.Box(-1, 1, (2,)))
    with pytest.raises(ContractError, match=rf"{policy.__name__} looks .* this world takes Box"):
        policy(numbers)
    assert make_encoder(numbers, 8)


@pytest.mark.parametrize(
    "space", [spaces.Discrete(4), spaces.Discrete(4, start=3), spaces.MultiDiscrete([2, 3], start=[1, 5])]
)
def test_choices_that_do_not_exist_harm_nobody_where_nobody_acts(space):
    spec = WorldSpec(space.shape, ("a", "b"), observation=space)
    policy = make_policy("fast", OnlySpec(spec=spec), seed=0, hidden_size=8)
    seen = torch.from_numpy(np.stack([np.asarray(space.sample()) for _ in range(3)]))
    seen[1] = -99
    valid, first = torch.tensor([True, False, True]), torch.ones(3, dtype=torch.bool)
    thoughts, _ = policy.unroll(seen, first, policy.lstm.cell.initial(3), valid)
    assert thoughts.values.isfinite().all()
    with pytest.raises(IndexError):
        policy.unroll(seen, first, policy.lstm.cell.initial(3))


def test_a_deviation_at_its_wall_is_led_back():
    scores = torch.tensor([[0.0, -8.0]], requires_grad=True)
    told = Gaussian(1).tell(scores)
    Gaussian(1).entropy(told).sum().backward()
    assert scores.grad[0, 1] > 0
    assert -5.11 < told[0, 1] < -5
