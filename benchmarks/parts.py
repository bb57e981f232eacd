"""Training with torch's LSTM and with `holdfast.nn`: RecurrentPPO of sb3-contrib, CleanRL's style, PPO of rsl_rl.

python benchmarks/parts.py [sb3] [cleanrl] [rsl_rl]
"""

import sys
import time
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
REPEATS = 3


def cpu_seconds(call):
    start = time.process_time()
    call()
    return time.process_time() - start


def ratios(name, with_torch, with_ours):
    """Alternate both, print the medians and the median of the ratios."""
    pairs = [(cpu_seconds(with_torch), cpu_seconds(with_ours)) for _ in range(REPEATS)]
    middle = REPEATS // 2
    before, after = (sorted(times)[middle] for times in zip(*pairs, strict=True))
    ratio = sorted(a / b for a, b in pairs)[middle]
    print(f"{name}: {before:.2f} CPU-s, with ours {after:.2f}: {ratio:.2f}x", flush=True)


def sb3():
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env

    from holdfast.integrations.sb3 import MlpLstmPolicy

    for envs, sizes in ((8, {"n_steps": 128, "batch_size": 128}), (16, {"n_steps": 256, "batch_size": 1024})):
        for hidden in (64, 256):

            def learn(policy, envs=envs, sizes=sizes, hidden=hidden):
                env = make_vec_env("CartPole-v1", envs, seed=0)
                options = {"lstm_hidden_size": hidden}
                RecurrentPPO(policy, env, **sizes, seed=0, device="cpu", policy_kwargs=options).learn(8192)

            name = f"RecurrentPPO, {envs} envs x {sizes['n_steps']}, batch {sizes['batch_size']}, LSTM {hidden}"
            ratios(name, lambda learn=learn: learn("MlpLstmPolicy"), lambda learn=learn: learn(MlpLstmPolicy))


def cleanrl():
    from cleanrl_parts import FastAgent
    from cleanrl_style import Agent

    T, B = 128, 8
    for hidden in (64, 128):
        agents = []
        for kind in (Agent, FastAgent):
            torch.manual_seed(0)
            agents.append(kind(hidden=hidden))
        x, done = torch.randn(T * B, 4), (torch.rand(T * B) < 0.02).float()
        action, state = torch.randint(3, (T * B,)), (torch.zeros(1, B, hidden), torch.zeros(1, B, hidden))

        def update(agent, x=x, done=done, action=action, state=state):
            for _ in range(20):
                _, log_prob, entropy, value, _ = agent.get_action_and_value(x, state, done, action)
                agent.zero_grad()
                (log_prob.mean() + value.square().mean() - entropy.mean()).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)

        update(agents[0])
        update(agents[1])
        ratios(
            f"CleanRL's update, {T} x {B}, LSTM {hidden}",
            partial(update, agents[0]),
            partial(update, agents[1]),
        )


def rsl_rl():
    from rsl_rl.algorithms import PPO
    from tensordict import TensorDict

    E = 256
    for hidden, T, length in ((64, 24, 200), (256, 24, 200), (64, 64, 16), (256, 64, 16)):
        algorithms = []
        for kind in ("RNNModel", "holdfast.integrations.rsl_rl:RNNModel"):
            torch.manual_seed(0)
            network = {"class_name": kind, "hidden_dims": [64], "rnn_hidden_dim": hidden}
            config = {
                "num_steps_per_env": T,
                "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
                "actor": {**network, "distribution_cfg": {"class_name": "GaussianDistribution"}},
                "critic": network,
                "algorithm": {"class_name": "PPO"},
                "multi_gpu": None,
            }
            obs = TensorDict({"policy": torch.randn(E, 48)}, batch_size=[E])
            env = SimpleNamespace(num_envs=E, num_actions=12)
            with redirect_stdout(StringIO()):
                algorithms.append(PPO.construct_algorithm(obs, env, config, "cpu"))

        def iteration(algorithm, T=T, length=length, obs=obs):
            with torch.inference_mode():
                for _ in range(T):
                    algorithm.act(obs)
                    dones = torch.rand(E) < 1 / length
                    algorithm.process_env_step(obs, torch.randn(E), dones, {})
                algorithm.compute_returns(obs)
            algorithm.update()

        for algorithm in algorithms:
            iteration(algorithm)
        name = f"rsl_rl's PPO, {T} x {E}, LSTM {hidden}, episodes of {length} steps"
        ratios(name, partial(iteration, algorithms[0]), partial(iteration, algorithms[1]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread")
    for name in sys.argv[1:] or ["sb3", "cleanrl", "rsl_rl"]:
        {"sb3": sb3, "cleanrl": cleanrl, "rsl_rl": rsl_rl}[name]()
