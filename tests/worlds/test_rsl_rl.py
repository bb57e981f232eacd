"""Environments with rsl_rl's `VecEnv` interface as worlds; rsl-rl-lib is not needed."""

import pytest
import torch

import holdfast
from helpers.pole_vec_env import PoleVecEnv
from holdfast.errors import AgentCountError, ConfigError, ContractError
from holdfast.training.train import train
from holdfast.worlds.rsl_rl import RslRlWorld

POLE = "rsl_rl:helpers.pole_vec_env:PoleVecEnv"
LOST = "ignore:.*the reset loses the last observation"


def test_steps_are_those_of_the_environment():
    world, env = holdfast.make_world(POLE, agents=3, seed=5, options={"length": 9}), PoleVecEnv(3, 5, length=9)
    step = world.reset()
    assert bool(step.first.all())
    truncations = 0
    for t in range(60):
        actions = torch.full((3, 1), 0.3 * (-1) ** t)
        step = world.step(actions)
        obs, reward, dones, extras = env.step(actions)
        assert torch.equal(step.obs, obs["policy"])
        assert torch.equal(step.reward, reward)
        assert torch.equal(step.truncated, extras["time_outs"])
        assert torch.equal(step.terminated, dones.bool() & ~extras["time_outs"])
        assert torch.equal(step.first, dones.bool())
        assert torch.equal(step.last_obs, extras["final_obs"]["policy"])
        assert step.obs.is_leaf
        truncations += int(step.truncated.sum())
    assert truncations
    assert step.terminated.dtype == torch.bool


def test_world_keeps_its_laws():
    laws = holdfast.check_world(POLE, options={"length": 12})
    assert laws.ok, laws
    assert laws["last"].measured is not None


@pytest.mark.slow
@pytest.mark.filterwarnings(LOST)
def test_check_finds_the_lost_last_observation():
    laws = holdfast.check_world("rsl_rl:helpers.pole_vec_env:lossy_pole", options={"length": 12})
    assert not laws["last"].ok
    assert "the one before the last action" in str(laws)
    assert all(laws[law].ok for law in ("kind", "first", "flags", "dead", "still", "repeat", "isolate", "pure"))


def test_lost_last_observation_is_the_one_before_and_said_once():
    world = holdfast.make_world("rsl_rl:helpers.pole_vec_env:lossy_pole", agents=2, options={"length": 5})
    before = world.reset().obs
    with pytest.warns(UserWarning, match=r"the reset loses the last observation .* extras\['final_obs'\]"):
        step = world.step(torch.zeros(2, 1))
    for _ in range(11):
        assert torch.equal(step.last_obs, before)
        before = step.obs
        step = world.step(torch.zeros(2, 1))


@pytest.mark.parametrize(
    ("groups", "keys"), [((), None), (["critic"], None), (["policy", "critic"], ["critic", "policy"])]
)
def test_observation_groups(groups, keys):
    world = holdfast.make_world(POLE, agents=3, groups=groups)
    obs = world.reset().obs
    if keys is None:
        assert obs.shape == (3, 4 if groups else 2)
    else:
        assert sorted(obs.keys()) == keys
        assert sorted(world.spec.observation_space.spaces) == keys
    policy = holdfast.make_policy("auto", world)
    assert policy.binding.spec is world.spec


def test_environment_without_groups_extras_or_reset():
    world = holdfast.make_world("rsl_rl:helpers.pole_vec_env:bare_pole", agents=4)
    assert world.reset().obs.shape == (4, 2)
    ends = sum(int(world.step(torch.ones(4, 1)).terminated.sum()) for _ in range(100))
    assert ends > 4


def test_actions_are_scaled_and_not_changed(monkeypatch):
    world = holdfast.make_world(POLE, agents=2, clip_actions=3.0)
    policy = holdfast.make_policy("auto", world)
    assert policy.env_actions(torch.tensor([[0.5], [9.0]])).tolist() == [[1.5], [3.0]]
    original = world.env.step
    monkeypatch.setattr(world.env, "step", lambda actions: original(actions.mul_(0)))
    world.reset()
    actions = torch.ones(2, 1)
    world.step(actions)
    assert bool(actions.all())


def test_errors_say_what_to_type():
    with pytest.raises(AgentCountError, match=r"has 8 environments; world\.agents=4\. Type world\.agents=8"):
        holdfast.make_world("rsl_rl:helpers.pole_vec_env:eight_poles", agents=4)
    with pytest.raises(ConfigError, match="no group camera; it has policy, critic"):
        holdfast.make_world(POLE, agents=2, groups=["camera"])
    with pytest.raises(ConfigError, match=r"world\.groups=policy, but it has no groups"):
        holdfast.make_world("rsl_rl:helpers.pole_vec_env:bare_pole", agents=2, groups=["policy"])
    with pytest.raises(ConfigError, match="a VecEnv of rsl_rl has num_envs, num_actions"):
        holdfast.make_world("rsl_rl:helpers.pole_vec_env:LENGTH", agents=2)
    with pytest.raises(ConfigError, match="pole_vec_env has no class Pole"):
        holdfast.make_world("rsl_rl:helpers.pole_vec_env:Pole", agents=2)
    with pytest.raises(ConfigError, match=r"cannot be made.*lenght"):
        holdfast.make_world(POLE, agents=2, options={"lenght": 3})
    world = holdfast.make_world(POLE, agents=2)
    world.env.step = lambda actions: (actions, actions)
    with pytest.raises(ContractError, match="must return \\(obs, rewards, dones, extras\\)"):
        world.step(torch.zeros(2, 1))
    assert isinstance(world, RslRlWorld)


KEYS = {
    "world": POLE,
    "world.agents": 64,
    "policy": "auto",
    "policy.hidden_size": 32,
    "policy.num_layers": 1,
    "trainer.bptt_horizon": 32,
    "trainer.batch_size": 2048,
    "trainer.minibatch_size": 512,
    "trainer.eval_episodes": 64,
    "trainer.total_timesteps": 49152,
}


@pytest.mark.slow
def test_pole_is_learned_and_needs_memory(tmp_path):
    scores = [
        train(None, {**KEYS, "policy.memory": memory, "runs_dir": str(tmp_path), "run": memory}).summary
        for memory in ("lstm", "none")
    ]
    with_memory, without = (summary["eval/return_mean"] for summary in scores)
    assert with_memory > 180
    assert without < 150
    run = tmp_path / "lstm"
    player = holdfast.load(run)
    assert player.spec.action.shape == (1,)
