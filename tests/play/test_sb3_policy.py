"""Models of sb3-contrib, played and exported; `make slow` installs the library."""

import json
import os
import pickle
import zipfile

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdfast
from holdfast.cli import main
from holdfast.errors import ConfigError, TrustError

sb3_contrib = pytest.importorskip("sb3_contrib", reason="sb3-contrib is not installed; `make slow` installs it")
from stable_baselines3.common.preprocessing import preprocess_obs  # noqa: E402
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv  # noqa: E402

from holdfast.play import sb3_policy  # noqa: E402
from holdfast.play.sb3_policy import _preparation, _preprocessed  # noqa: E402

onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = [
    pytest.mark.usefixtures("annotations_asleep"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
BOUND = 1e-5
VECTOR = spaces.Box(-1, 1, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (1, 36, 36), np.uint8)
PARTS = {"image": IMAGE, "vector": VECTOR, "colour": spaces.Discrete(3), "flags": spaces.MultiBinary(2)}
WIDE = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 5], np.float32))


class Noise(gymnasium.Env):
    """Random observations, a reward for small actions, episodes of 3 to 9 steps."""

    def __init__(self, space, action):
        self.observation_space, self.action_space = space, action

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.left = int(self.np_random.integers(3, 10))
        return self.observation_space.sample(), {}

    def step(self, action):
        self.left -= 1
        return self.observation_space.sample(), -float(np.sum(action)), self.left == 0, False, {}


def save_model(folder, space=VECTOR, action=None, steps=96, policy="MlpLstmPolicy", **policy_kwargs):
    action = spaces.Discrete(4) if action is None else action
    env = DummyVecEnv([lambda: Noise(space, action)] * 3)
    options = {"lstm_hidden_size": 16, "net_arch": [16], **policy_kwargs}
    model = sb3_contrib.RecurrentPPO(
        policy,
        env,
        n_steps=16,
        batch_size=16,
        n_epochs=2,
        learning_rate=0.02,
        seed=3,
        device="cpu",
        policy_kwargs=options,
    )
    model.learn(steps).save(folder / "model.zip")
    return model, folder / "model.zip"


def stack(observations):
    if isinstance(observations[0], dict):
        return {key: np.stack([obs[key] for obs in observations]) for key in observations[0]}
    return np.stack(observations)


def largest_difference(model, act, steps, rows=3):
    """Return how far actions are from sb3's `predict` over steps, and the number of episode ends."""
    generator, space, state, largest, ends = np.random.default_rng(0), model.observation_space, None, 0.0, 0
    space.seed(0)
    first = np.ones(rows, bool)
    for _ in range(steps):
        obs = stack([space.sample() for _ in range(rows)])
        expected, state = model.predict(obs, state, first, deterministic=True)
        largest = max(largest, np.abs(act(obs, first) - expected).max())
        first = generator.random(rows) < 0.1
        ends += first.sum()
    return largest, ends


CASES = {
    "discrete": {},
    "box": {"action": WIDE},
    "multi_discrete": {"action": spaces.MultiDiscrete([3, 2])},
    "options": {
        "activation_fn": torch.nn.ReLU,
        "n_lstm_layers": 2,
        "enable_critic_lstm": False,
        "net_arch": {"pi": [8], "vf": [8, 8]},
    },
    "shared": {"shared_lstm": True, "enable_critic_lstm": False, "lstm_kwargs": {"bias": False}},
    "image": {"space": IMAGE, "policy": "CnnLstmPolicy"},
    "dictionary": {"space": spaces.Dict(PARTS), "policy": "MultiInputLstmPolicy", "share_features_extractor": False},
    "one_hot": {"space": spaces.Discrete(5)},
    "ours": {"policy": "ours"},
}


@pytest.mark.parametrize("name", CASES)
def test_player_acts_as_predict(name, tmp_path):
    case = dict(CASES[name])
    if case.get("policy") == "ours":
        from holdfast.integrations.sb3 import MlpLstmPolicy

        case["policy"] = MlpLstmPolicy
    model, file = save_model(tmp_path, **case)
    player = holdfast.load(f"sb3:{file}")
    session = player.start(agents=3)
    largest, ends = largest_difference(model, session.act, 40)
    assert largest <= BOUND
    assert ends > 5
    values = session.step(*_first_step(model)).values
    expected = _values(model)
    np.testing.assert_allclose(values, expected, atol=BOUND)


def test_observations_are_prepared_as_in_sb3():
    every = spaces.Dict({**PARTS, "counts": spaces.MultiDiscrete([2, 4]), "map": spaces.Box(0, 1, (2, 3, 3))})
    every.seed(0)
    obs = {key: torch.as_tensor(part) for key, part in stack([every.sample() for _ in range(4)]).items()}
    for scaled in (True, False):
        expected = preprocess_obs(obs, every, normalize_images=scaled)
        actual = _preprocessed(obs, _preparation(every, scaled))
        assert sorted(actual) == sorted(expected)
        assert all(torch.equal(actual[key], expected[key]) for key in expected)


def _first_step(model):
    model.observation_space.seed(1)
    return stack([model.observation_space.sample() for _ in range(3)]), np.ones(3, bool)


def _values(model):
    obs, _ = _first_step(model)
    obs, _ = model.policy.obs_to_tensor(obs)
    size = (model.policy.lstm_hidden_state_shape[0], 3, model.policy.lstm_hidden_state_shape[2])
    states = (torch.zeros(size), torch.zeros(size))
    with torch.no_grad():
        return model.policy.predict_values(obs, states, torch.ones(3))[:, 0].numpy()


def onnx_act(file, rows=3):
    """Play a file with NumPy and onnxruntime alone."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    state = {
        each.name: np.zeros((rows, *each.shape[1:]), np.float32)
        for each in session.get_inputs()
        if each.name.endswith("_in")
    }

    def act(obs, first):
        inputs = {f"obs.{key}": part for key, part in obs.items()} if isinstance(obs, dict) else {"obs": obs}
        outputs = dict(zip(names, session.run(names, {**inputs, **state, "first": first}), strict=True))
        state.update({name: outputs[f"{name.removesuffix('_in')}_out"] for name in state})
        return outputs["action"]

    return act


@pytest.mark.parametrize("name", ["discrete", "box", pytest.param("dictionary", marks=pytest.mark.slow)])
def test_exported_model_plays_1000_steps_as_predict(name, tmp_path, capsys):
    model, file = save_model(tmp_path, **CASES[name])
    assert main(["export", f"sb3:{file}", "--to", "onnx"]) == 0
    printed = capsys.readouterr().out
    assert "with its own memory" in printed
    assert "actor.h_in" in printed
    largest, ends = largest_difference(model, onnx_act(tmp_path / "model.onnx"), 1000)
    assert largest <= BOUND
    assert ends > 200


def test_memory_is_used_and_cleared(tmp_path):
    model, file = save_model(tmp_path, action=WIDE)
    session = holdfast.load(f"sb3:{file}").start(agents=3)
    forgets = holdfast.load(f"sb3:{file}").start(agents=3)
    _, _ = largest_difference(model, session.act, 5)
    assert largest_difference(model, lambda obs, first: forgets.act(obs, np.ones(3, bool)), 40)[0] > 100 * BOUND
    before = session.memory
    assert sorted(before) == ["actor.c", "actor.h", "critic.c", "critic.h"]
    session.reset([1])
    assert not session.memory["actor.h"][1].any()
    assert torch.equal(session.memory["actor.h"][0], before["actor.h"][0])


class Custom(BaseFeaturesExtractor):
    def __init__(self, space):
        super().__init__(space, 5)
        self.layer = torch.nn.Linear(3, 5)

    def forward(self, observations):
        return self.layer(observations)


def test_code_of_others_needs_trust(tmp_path):
    model, file = save_model(tmp_path, features_extractor_class=Custom)
    with pytest.raises(TrustError, match=r"pickle \(policy_kwargs\).*Custom.*--trust-code"):
        holdfast.load(f"sb3:{file}")
    session = holdfast.load(f"sb3:{file}", trust_code=True).start(agents=3)
    assert largest_difference(model, session.act, 20)[0] <= BOUND


class Touch:
    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return os.mkdir, (self.file,)


def rewrite(file, **entries):
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    data = json.loads(parts["data"]) | entries
    with zipfile.ZipFile(file, "w") as archive:
        for name, part in {**parts, "data": json.dumps({k: v for k, v in data.items() if v is not ...})}.items():
            archive.writestr(name, part)


def test_pickle_that_runs_code_is_not_run(tmp_path):
    import base64

    _, file = save_model(tmp_path, steps=0)
    attack = base64.b64encode(pickle.dumps(Touch(tmp_path / "executed"))).decode()
    for name in ("policy_class", "policy_kwargs", "observation_space", "action_space"):
        rewrite(file, **{name: {":type:": "x", ":serialized:": attack}})
        with pytest.raises(TrustError, match=r"mkdir"):
            holdfast.load(f"sb3:{file}")
        save_model(tmp_path, steps=0)
    # Not read at all.
    rewrite(file, clip_range={":type:": "x", ":serialized:": attack})
    holdfast.load(f"sb3:{file}")
    assert not (tmp_path / "executed").exists()


def test_errors_say_what_is_wrong(tmp_path, capsys):
    with pytest.raises(ConfigError, match="there is no such file"):
        holdfast.load(f"sb3:{tmp_path}/none.zip")
    (tmp_path / "text.zip").write_text("no zip")
    with pytest.raises(ConfigError, match=r"text\.zip is not a zip that model\.save wrote"):
        holdfast.load(f"sb3:{tmp_path}/text.zip")
    _, file = save_model(tmp_path, steps=0)
    with pytest.raises(ConfigError, match="leave out env and policy"):
        holdfast.load(f"sb3:{file}", env="CartPole-v1")
    with pytest.raises(ConfigError, match="there is no option activation"):
        holdfast.load(f"sb3:{file}?activation=elu")
    with pytest.raises(ConfigError, match="without a Holdfast config"):
        holdfast.load(f"sb3:{file}").save_pretrained(tmp_path / "saved")
    rewrite(file, action_space=...)
    with pytest.raises(ConfigError, match="its data lacks"):
        holdfast.load(f"sb3:{file}")
    _, file = save_model(tmp_path, steps=0, action=spaces.MultiBinary(2))
    with pytest.raises(ConfigError, match="Discrete, MultiDiscrete and flat Boxes are played"):
        holdfast.load(f"sb3:{file}")
    assert main(["export", f"sb3:{file}", "--to", "onnx"]) == 2
    assert "flat Boxes" in capsys.readouterr().err
    plain = sb3_contrib.TRPO("MlpPolicy", "CartPole-v1", device="cpu")
    plain.save(file)
    with pytest.raises((ConfigError, TrustError), match=r"policies.ActorCriticPolicy|has no LSTM"):
        holdfast.load(f"sb3:{file}")


@pytest.mark.parametrize(
    "entries",
    [
        {"policy_kwargs": {"lstm_hidden_size": 200_000}},
        {"policy_kwargs": {"n_lstm_layers": 10**7}},
        {"policy_kwargs": {"net_arch": [10**6, 10**6]}},
        {"policy_kwargs": {"features_extractor_kwargs": {"features_dim": 10**9}}},
    ],
)
def test_sizes_that_the_weights_do_not_have_are_refused_before_they_are_built(entries, tmp_path):
    _, file = save_model(tmp_path, steps=0)
    rewrite(file, **entries)
    with pytest.raises(ConfigError, match=r"policy_kwargs has the size [\d,]+, but the weights have at most 64"):
        holdfast.load(f"sb3:{file}")


def test_weights_that_are_not_finite_are_refused(tmp_path):
    model, file = save_model(tmp_path, steps=0)
    with torch.no_grad():
        model.policy.value_net.bias.fill_(torch.nan)
    model.save(file)
    for trust_code in (None, True):
        with pytest.raises(ConfigError, match=r"not finite, in value_net\.bias"):
            holdfast.load(f"sb3:{file}", trust_code=trust_code)


def test_entry_that_unpacks_to_gigabytes_is_not_read(tmp_path, monkeypatch):
    _, file = save_model(tmp_path, steps=0)
    monkeypatch.setitem(sb3_policy.LARGEST, "data", 100)
    with pytest.raises(ConfigError, match="data unpacks to more than 100 bytes"):
        holdfast.load(f"sb3:{file}")
