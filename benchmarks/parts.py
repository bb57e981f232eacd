"""Training with torch's LSTM and with `holdfast.nn`: RecurrentPPO of sb3-contrib, and an agent in CleanRL's style.

python benchmarks/parts.py [sb3] [cleanrl]
"""

import sys
import time
from functools import partial
from pathlib import Path

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


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread")
    for name in sys.argv[1:] or ["sb3", "cleanrl"]:
        {"sb3": sb3, "cleanrl": cleanrl}[name]()
