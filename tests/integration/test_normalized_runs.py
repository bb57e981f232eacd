"""Normalization in whole runs: laws, resume, evaluation, player and export."""

import json

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdfast
from helpers.small_runs import apart
from holdfast.cli import main
from holdfast.play.export import difference_in_world, export_module, open_exported, write_exported
from holdfast.policies.normalization import RunningStats

pytestmark = pytest.mark.usefixtures("annotations_asleep")
KEYS = {
    "world": "gym:Pendulum-v1",
    "world.options": {"max_episode_steps": 10},
    "world.agents": 4,
    "world.previous_action": True,
    "policy.hidden_size": 4,
    "policy.num_layers": 1,
    "policy.normalize_obs": True,
    "policy.normalize_value": True,
    "trainer.normalize_reward": True,
    "trainer.action_noise": "pink",
    "trainer.bptt_horizon": 8,
    "trainer.batch_size": 64,
    "trainer.minibatch_size": 32,
    "trainer.total_timesteps": 256,
    "report": "off",
    "trainer.eval_episodes": 4,
    "trainer.checkpoint_interval": 1,
    "trainer.check": "every:1",
}


REPLAY_ERRORS = ("memory/replay_error", "memory/replay_value_error")


def world():
    return holdfast.make_world("gym:Pendulum-v1", agents=4, previous_action=True, seed=5)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return holdfast.train("general", {**KEYS, "runs_dir": str(tmp_path_factory.mktemp("runs")), "run": "x"})


def test_the_statistics_are_those_of_all_steps(run):
    stats = [module for module in run.policy.modules() if isinstance(module, RunningStats)]
    assert len(stats) == 3
    assert all(int(each.count) == 256 for each in stats)
    obs = run.policy.obs_norm.stats[0]
    # Cosine and sine of an angle, and its velocity.
    assert float(obs.mean[2].abs()) < 2
    assert 0.1 < float(obs.var[0]) < 1
    assert float(run.policy.value_norm.mean) < 0


def test_replay_is_exact_and_all_laws_hold(run):
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    errors = [line[name] for line in lines for name in REPLAY_ERRORS if name in line]
    # None in the first iteration, which only fills the statistics.
    assert len(errors) == 3 * len(REPLAY_ERRORS)
    assert max(errors) < 1e-5
    laws = holdfast.check(run.policy, world())
    assert {name: law.finding for name, law in laws.items() if not law.ok} == {}


def test_resume_is_bit_equal(tmp_path):
    keys = {**KEYS, "schedule": "none", "runs_dir": str(tmp_path)}
    uninterrupted = holdfast.train("general", {**keys, "run": "uninterrupted"}).folder
    part = holdfast.train("general", {**keys, "run": "part", "trainer.total_timesteps": 128}).folder
    holdfast.train(resume=part, config={"trainer.total_timesteps": 256})
    assert apart(uninterrupted, part) == []


def test_player_evaluation_and_export_agree_with_the_policy(run, tmp_path):
    pendulum, player = world(), holdfast.load(run.folder)
    session, step = player.start(4), pendulum.reset()
    returns = torch.zeros(4)
    for _ in range(200):
        step = pendulum.step(torch.from_numpy(session.act(step.obs.numpy(), step.first.numpy())))
        returns += step.reward
    scores = holdfast.evaluate(run.policy, world(), episodes=4)
    torch.testing.assert_close(scores.returns, returns, rtol=1e-4, atol=1e-3)
    exported = export_module(run.policy)
    for to, name in (("onnx", "policy.onnx"), ("torch", "policy.pt2")):
        write_exported(exported, tmp_path / name, to, "pendulum")
        assert difference_in_world(exported, open_exported(tmp_path / name), pendulum, steps=50) < 1e-4


class Ruler(gymnasium.Env):
    """Pays the action's distance from the middle of its Box, and fails outside of it."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Box(np.array([-3.0, 10.0, 0.0]), np.array([5.0, 10.5, np.inf]), dtype=np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.uniform(-1, 1, 1).astype(np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.steps += 1
        return self.np_random.uniform(-1, 1, 1).astype(np.float32), 0.0, self.steps >= 8, False, {}


def test_actions_are_scaled_to_their_box_and_never_outside(tmp_path):
    keys = {key: value for key, value in KEYS.items() if not key.startswith("world")}
    run = holdfast.train(
        "general", {**keys, "world": f"{__name__}:Ruler", "world.agents": 4, "runs_dir": str(tmp_path)}
    )
    player = holdfast.load(run.folder)
    for greedy in (True, False):
        session = player.start(64)
        actions = np.concatenate(
            [session.act(np.full((64, 1), x, np.float32), np.ones(64, bool), greedy=greedy) for x in (-1, 0, 1)]
        )
        assert all(player.spec.action.contains(action) for action in actions)
    # Sampled around the middle, with a deviation of half the width: both bounds are reached.
    assert actions[:, 0].min() == -3
    assert actions[:, 0].max() == 5
    assert abs(float(np.median(actions[:, 0])) - 1) < 1.5
    exported = export_module(run.policy)
    inputs = exported.random_inputs(64, torch.Generator().manual_seed(0))
    assert all(player.spec.action.contains(action.detach().numpy()) for action in exported(inputs)["action"])


class Lottery(gymnasium.Env):
    """Pays 100 or -100."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 100.0 if action else -100.0, True, False, {}


def test_clipped_and_normalized_rewards_leave_returns_raw(tmp_path, capsys):
    keys = {key: value for key, value in KEYS.items() if not key.startswith("world")}
    keys |= {"trainer.ppo.gamma": 0.0, "trainer.ppo.gae_lambda": 0.0, "trainer.normalize_reward": False}
    code = main(
        [
            "train",
            "general",
            *(f"{key}={value}" for key, value in keys.items()),
            f"world={__name__}:Lottery",
            "world.agents=4",
            "world.clip_reward=1",
            f"runs_dir={tmp_path}",
            "run=x",
        ]
    )
    assert code == 0
    text = capsys.readouterr().out
    assert "greedy return 100.000" in text or "greedy return -100.000" in text
    run = holdfast.load(tmp_path / "x")
    # Returns of 1 and -1 reach the learner.
    assert 0.5 < float(run.policy.value_norm.var) <= 1
