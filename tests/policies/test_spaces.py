import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.nn import functional

from helpers.small_policy import OnlySpec
from helpers.space_worlds import IMAGE_SPEC, TREE, TREE_SPEC
from holdfast import Fast, make_policy, make_world
from holdfast.errors import ContractError
from holdfast.policies import Example, LatentAttnTiny
from holdfast.policies.distributions import Gaussian, MultiCategorical
from holdfast.policies.spaces import ImageEncoder, encoder_of, make_encoder
from holdfast.worlds import WorldSpec

INF = np.inf
SPACES = [
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
    """A sample of Gymnasium, as tensors."""
    if isinstance(sample, dict):
        return TensorDict({key: as_tensors(item) for key, item in sample.items()})
    if isinstance(sample, tuple):
        return TensorDict({str(index): as_tensors(item) for index, item in enumerate(sample)})
    return torch.as_tensor(np.asarray(sample))


def samples(space, count):
    space.seed(0)
    return torch.stack([as_tensors(space.sample()) for _ in range(count)])


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_every_space_is_encoded_row_by_row(space):
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
def test_image_encoder_takes_every_size(sides, channels, last, floats):
    shape = (*sides, channels) if last else (channels, *sides)
    dtype, high = (np.float32, 1) if floats else (np.uint8, 255)
    encoder = ImageEncoder(spaces.Box(0, high, shape, dtype), 8)
    obs = (torch.rand(2, *shape) * high).to(torch.float32 if floats else torch.uint8)
    assert encoder(obs).shape == (2, 8)
    assert encoder.convolutions[0].in_channels == channels or channels in sides
    assert encoder.fc.in_features <= 64 * 8 * 8


def test_image_encoder_channels_first_or_last():
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


def test_image_encoder_strides():
    large = ImageEncoder(spaces.Box(0, 255, (84, 84, 3), np.uint8), 128)
    assert [layer.stride for layer in large.convolutions if isinstance(layer, torch.nn.Conv2d)] == [
        *[(2, 2)] * 4,
        (1, 1),
    ]
    narrow = ImageEncoder(spaces.Box(0, 255, (3, 8, 64), np.uint8), 128)
    assert narrow.convolutions[0].stride == (1, 2)
    assert narrow.fc.in_features == 64 * 8 * 8


def test_image_too_small_raises():
    with pytest.raises(ContractError, match=r"is an image of 2x9; .* a Box of shape \(54,\)"):
        encoder_of(spaces.Box(0, 255, (3, 2, 9), np.uint8), 8)


def test_vector_encoder_scales_bounded_numbers():
    space = spaces.Box(np.array([10, -INF, -3e38, 0, 5]), np.array([20, INF, 3e38, INF, 5]), dtype=np.float64)
    encoder = encoder_of(space, 8)
    scaled = (torch.tensor([20.0, 7.0, 7.0, 7.0, 5.0]) - encoder.middle) / encoder.reach
    assert scaled.tolist() == [1.0, 7.0, 7.0, 7.0, 5.0]


def test_choice_encoder_equals_linear_on_one_hot():
    space = spaces.MultiDiscrete([2, 3], start=[-1, 4])
    encoder = encoder_of(space, 8)
    obs = torch.tensor([[-1, 4], [0, 6], [-1, 5]])
    one_hot = torch.cat([functional.one_hot(obs[:, 0] + 1, 2), functional.one_hot(obs[:, 1] - 4, 3)], dim=-1)
    torch.testing.assert_close(encoder(obs), one_hot.float() @ encoder.embeddings.weight / 2**0.5)
    single = encoder_of(spaces.Discrete(4, start=3), 8)
    assert single(torch.tensor([3, 6])).equal(single.embeddings.weight[[0, 3]])
    with pytest.raises(IndexError):
        single(torch.tensor([7]))


def test_order_of_dict_keys_does_not_matter():
    fields = [("b", spaces.Box(-1, 1, (2,))), ("a", spaces.Discrete(3)), ("c.d/", spaces.MultiBinary(2))]
    obs = samples(spaces.Dict(fields), 4)
    torch.manual_seed(0)
    one = encoder_of(spaces.Dict(fields), 8)
    torch.manual_seed(0)
    other = encoder_of(spaces.Dict(fields[::-1]), 8)
    assert one.keys == ["a", "b", "c.d/"]
    assert other(obs).equal(one(obs))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Text(5), r"observation=Text.*no encoder for Text; supported are Box"),
        (spaces.Dict({"a": spaces.Sequence(spaces.Discrete(2))}), r"observation\['a'\]=.*Sequence"),
        (spaces.Tuple((spaces.Graph(spaces.Discrete(2), None),)), r"observation\['0'\]=.*for Graph"),
        (spaces.Dict({}), "is empty; an observation space needs at least one number"),
        (spaces.Box(-1, 1, (0,)), "is empty; an observation space needs at least one number"),
    ],
)
def test_unsupported_space_raises(space, message):
    with pytest.raises(ContractError, match=message):
        encoder_of(space, 8)


def test_default_observation_space_is_a_box():
    encoder = make_encoder(WorldSpec((5,), ("a", "b")), 8)
    assert encoder(torch.randn(3, 5)).shape == (3, 8)


@pytest.mark.parametrize(
    ("spec", "kind", "num_logits"),
    [(TREE_SPEC, Gaussian(2), 4), (IMAGE_SPEC, MultiCategorical((3, 2, 4)), 9)],
    ids=["tree", "image"],
)
def test_fast_acts_in_dict_and_image_spaces(spec, kind, num_logits):
    policy = make_policy("auto", OnlySpec(spec=spec), seed=0, hidden_size=16)
    assert (type(policy), policy.actions) == (Fast, kind)
    obs = samples(spec.observation_space, 10)
    td = TensorDict({"env_obs": obs, "first": torch.rand(10) < 0.3, "bptt": torch.full((10,), 5)}, [10])
    td = policy(td, state=policy.lstm.cell.initial(2))
    assert td["actions"].shape == (10, *kind.shape)
    assert td[kind.key].shape == (10, num_logits)
    assert {"full_log_probs", "gaussian"} & set(td.keys()) == {kind.key}
    again = policy(td.select("env_obs", "first", "bptt"), policy.lstm.cell.initial(2), td["actions"])
    torch.testing.assert_close(again["act_log_prob"], td["act_log_prob"])
    (again["act_log_prob"].sum() + again["values"].sum()).backward()
    assert all(bool(weight.grad.any()) for weight in policy.actor.parameters())


def test_fast_starts_with_near_uniform_actions():
    policy = Fast(TREE_SPEC, hidden_size=16)
    params = policy.actions.parameters(policy.decode(torch.randn(50, 16)).logits)
    assert params[:, :2].abs().max() < 0.1
    assert (params[:, 2:] == 0).all()
    policy = Fast(IMAGE_SPEC, hidden_size=16)
    params = policy.actions.parameters(policy.decode(torch.randn(50, 16)).logits)
    assert (params[:, :3].exp() - 1 / 3).abs().max() < 0.03


@pytest.mark.parametrize("policy", [Example, LatentAttnTiny])
def test_token_policies_reject_other_worlds(policy):
    with pytest.raises(ContractError, match=r"reads tokens .* this world has observations Box\(.*Use policy=fast"):
        policy(WorldSpec((5,), ("a", "b")))
    tokens = make_world("recall", agents=1).spec
    numbers = WorldSpec(tokens.obs_shape, (), tokens.features, action=spaces.Box(-1, 1, (2,)))
    with pytest.raises(ContractError, match=rf"{policy.__name__} reads .* this world takes Box"):
        policy(numbers)
    assert make_encoder(numbers, 8)


@pytest.mark.parametrize(
    "space", [spaces.Discrete(4), spaces.Discrete(4, start=3), spaces.MultiDiscrete([2, 3], start=[1, 5])]
)
def test_invalid_rows_may_be_outside_the_space(space):
    spec = WorldSpec(space.shape, ("a", "b"), observation=space)
    policy = make_policy("fast", OnlySpec(spec=spec), seed=0, hidden_size=8)
    obs = torch.from_numpy(np.stack([np.asarray(space.sample()) for _ in range(3)]))
    obs[1] = -99
    valid, first = torch.tensor([True, False, True]), torch.ones(3, dtype=torch.bool)
    output, _ = policy.unroll(obs, first, policy.lstm.cell.initial(3), valid)
    assert output.values.isfinite().all()
    with pytest.raises(IndexError):
        policy.unroll(obs, first, policy.lstm.cell.initial(3))


def test_clamped_log_std_has_a_gradient():
    logits = torch.tensor([[0.0, -8.0]], requires_grad=True)
    params = Gaussian(1).parameters(logits)
    Gaussian(1).entropy(params).sum().backward()
    assert logits.grad[0, 1] > 0
    assert -5.11 < params[0, 1] < -5
