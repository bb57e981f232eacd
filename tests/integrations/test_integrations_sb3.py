"""`RecurrentPPO` with our policies and with sb3-contrib's; `make slow` installs the library."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdfast
from holdfast.errors import ConfigError

sb3_contrib = pytest.importorskip("sb3_contrib", reason="sb3-contrib is not installed; `make slow` installs it")
from stable_baselines3.common.vec_env import DummyVecEnv  # noqa: E402

from holdfast.integrations import sb3  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
IMAGE = spaces.Box(0, 255, (1, 36, 36), np.uint8)
VECTOR = spaces.Box(-1, 1, (3,), np.float32)
SPACES = {
    "MlpLstmPolicy": VECTOR,
    "CnnLstmPolicy": IMAGE,
    "MultiInputLstmPolicy": spaces.Dict({"image": IMAGE, "vector": VECTOR}),
}
SIZES = {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "seed": 3, "device": "cpu"}


class Noise(gymnasium.Env):
    """Random observations, a reward for action 1, episodes of 3 to 9 steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, space):
        self.observation_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.left = int(self.np_random.integers(3, 10))
        return self.observation_space.sample(), {}

    def step(self, action):
        self.left -= 1
        return self.observation_space.sample(), float(action), self.left == 0, False, {}


def train(policy, space, iterations=2, **policy_kwargs):
    policy_kwargs = {"lstm_hidden_size": 8, "net_arch": [8], **policy_kwargs}
    env = DummyVecEnv([lambda: Noise(space)] * 3)
    model = sb3_contrib.RecurrentPPO(policy, env, **SIZES, policy_kwargs=policy_kwargs)
    return model.learn(iterations * 3 * SIZES["n_steps"])


def same_weights(ours, reference):
    ours, reference = ours.policy.state_dict(), reference.policy.state_dict()
    assert list(ours) == list(reference)
    for name, weight in ours.items():
        torch.testing.assert_close(weight, reference[name], rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize("name", SPACES)
def test_training_gives_the_weights_of_sb3s_policy(name):
    ours, reference = train(getattr(sb3, name), SPACES[name]), train(name, SPACES[name])
    assert isinstance(ours.policy.lstm_actor, holdfast.nn.LSTM)
    start = train(name, SPACES[name], 0).policy.state_dict()["lstm_actor.weight_hh_l0"]
    assert not torch.allclose(ours.policy.lstm_actor.weight_hh_l0, start, atol=1e-4)
    same_weights(ours, reference)


@pytest.mark.parametrize(
    "options",
    [
        {"shared_lstm": True, "enable_critic_lstm": False},
        {"enable_critic_lstm": False},
        {"n_lstm_layers": 2},
        {"lstm_kwargs": {"bias": False}},
    ],
)
def test_options_of_the_policy(options):
    same_weights(*(train(policy, VECTOR, 1, **options) for policy in (sb3.MlpLstmPolicy, "MlpLstmPolicy")))


def test_sequences_with_resets_inside_equal_sb3s_loop():
    model = train(sb3.MlpLstmPolicy, VECTOR, 0, n_lstm_layers=2)
    lstm, reference = model.policy.lstm_actor, sb3_contrib.common.recurrent.policies.RecurrentActorCriticPolicy
    features, starts = torch.randn(5 * 7, 3), (torch.rand(5 * 7) < 0.3).float()
    state = (torch.randn(2, 5, 8), torch.randn(2, 5, 8))
    torch_lstm = torch.nn.LSTM(3, 8, 2)
    torch_lstm.load_state_dict(lstm.state_dict())
    actual = model.policy._process_sequence(features, state, starts, lstm)
    expected = reference._process_sequence(features, state, starts, torch_lstm)
    assert starts.reshape(5, 7)[:, 1:].any()
    for a, b in zip([actual[0], *actual[1]], [expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_models_load_both_ways(tmp_path):
    for policy, other in ((sb3.MlpLstmPolicy, "MlpLstmPolicy"), ("MlpLstmPolicy", sb3.MlpLstmPolicy)):
        model = train(policy, VECTOR, 1)
        model.save(tmp_path / "model.zip")
        reloaded = sb3_contrib.RecurrentPPO.load(tmp_path / "model.zip")
        assert type(reloaded.policy) is type(model.policy)
        same_weights(reloaded, model)
        converted = train(other, VECTOR, 0)
        converted.set_parameters(str(tmp_path / "model.zip"))
        obs, starts = np.ones((3, 3), np.float32), np.zeros(3)
        (action, state), (expected, expected_state) = (
            each.predict(obs, episode_start=starts, deterministic=True) for each in (converted, model)
        )
        assert np.array_equal(action, expected)
        np.testing.assert_allclose(state, expected_state, atol=1e-6)


def test_dropout_is_refused():
    with pytest.raises(ConfigError, match=r"dropout=0\.1"):
        train(sb3.MlpLstmPolicy, VECTOR, 0, n_lstm_layers=2, lstm_kwargs={"dropout": 0.1})


def test_laws_hold(tmp_path):
    # Loaded: a policy of sb3 that has just trained keeps tensors with a graph, which cannot be copied.
    train(sb3.MlpLstmPolicy, VECTOR, 1).save(tmp_path / "model.zip")
    laws = holdfast.check(sb3_contrib.RecurrentPPO.load(tmp_path / "model.zip").policy)
    assert laws.ok, laws
