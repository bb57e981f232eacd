"""Learn a pole without velocities, with a library's own recurrent policy and with ours: steps of greedy episodes.

python benchmarks/pole.py [sb3] [rsl_rl] [--seeds 3]
"""

import argparse
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
EPISODES = 64


def sb3(policy, seed):
    """RecurrentPPO on CartPole-v1: at most 500 steps an episode."""
    import gymnasium as gym
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env

    def hide(env):
        low, high = env.observation_space.low[::2], env.observation_space.high[::2]
        return gym.wrappers.TransformObservation(env, lambda obs: obs[::2], gym.spaces.Box(low, high))

    env = make_vec_env("CartPole-v1", 8, seed=seed, wrapper_class=hide)
    sizes = {"n_steps": 128, "batch_size": 256, "n_epochs": 10, "learning_rate": 1e-3}
    model = RecurrentPPO(policy, env, **sizes, seed=seed, device="cpu", policy_kwargs={"lstm_hidden_size": 64})
    model.learn(60_000)
    env = make_vec_env("CartPole-v1", EPISODES, seed=1000 + seed, wrapper_class=hide)
    obs, state, start = env.reset(), None, np.ones(EPISODES, bool)
    steps, over = np.zeros(EPISODES), np.zeros(EPISODES, bool)
    while not over.all():
        action, state = model.predict(obs, state=state, episode_start=start, deterministic=True)
        obs, _, start, _ = env.step(action)
        steps += ~over
        over |= start
    return steps.mean()


def rsl_rl(kind, seed):
    """PPO of rsl_rl on a pole on tensors: at most 200 steps an episode."""
    from rsl_rl.runners import OnPolicyRunner

    from helpers.pole_vec_env import LENGTH, PoleVecEnv

    network = {"class_name": kind, "hidden_dims": [32], "rnn_type": "lstm", "rnn_hidden_dim": 32}
    config = {
        "num_steps_per_env": 32,
        "save_interval": 1000,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**network, "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 0.5}},
        "critic": network,
        "algorithm": {"class_name": "PPO", "entropy_coef": 0.0, "learning_rate": 1e-3},
    }
    torch.manual_seed(seed)
    with redirect_stdout(StringIO()):
        runner = OnPolicyRunner(PoleVecEnv(64, seed=seed), config)
        runner.learn(80)
    env, policy = PoleVecEnv(EPISODES, seed=1000 + seed), runner.get_inference_policy()
    policy.reset()
    steps, alive = torch.zeros(EPISODES), torch.ones(EPISODES, dtype=torch.bool)
    with torch.inference_mode():
        for _ in range(LENGTH):
            steps += alive
            alive &= env.step(policy(env.get_observations()))[2] == 0
    return steps.mean().item()


def ours_for_sb3():
    from holdfast.integrations.sb3 import MlpLstmPolicy

    return MlpLstmPolicy


LIBRARIES = {
    "sb3": (sb3, {"theirs": lambda: "MlpLstmPolicy", "ours": ours_for_sb3}),
    "rsl_rl": (rsl_rl, {"theirs": lambda: "RNNModel", "ours": lambda: "holdfast.integrations.rsl_rl:RNNModel"}),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", choices=[[], *LIBRARIES], default=[])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread")
    for library in options.libraries or LIBRARIES:
        learn, policies = LIBRARIES[library]
        for seed in range(options.seeds):
            for whose, policy in policies.items():
                start = time.process_time()
                steps = learn(policy(), seed)
                print(
                    f"{library}, seed {seed}, {whose}: {steps:.1f} steps, {time.process_time() - start:.1f} CPU-s",
                    flush=True,
                )
