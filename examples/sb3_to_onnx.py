"""RecurrentPPO of sb3-contrib trains our policy on CartPole without velocities; played from ONNX with NumPy."""

import sys

import gymnasium as gym
import numpy as np
import onnxruntime
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.env_util import make_vec_env

import holdfast
from holdfast.integrations.sb3 import MlpLstmPolicy


class Positions(gym.ObservationWrapper):
    """Show positions, and no velocities."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Leave out velocities."""
        return observation[[0, 2]]


def play(file: str, episodes: int) -> float:
    """Return the mean return of episodes, played with NumPy and onnxruntime alone."""
    session, env, returns = onnxruntime.InferenceSession(file), Positions(gym.make("CartPole-v1")), []
    names = [output.name for output in session.get_outputs()]
    states = [each for each in session.get_inputs() if each.name.endswith("_in")]
    inputs = {each.name: np.zeros((1, *each.shape[1:]), np.float32) for each in states}
    for seed in range(episodes):
        (obs, _), first, ended, total = env.reset(seed=seed), True, False, 0.0
        while not ended:
            values = session.run(names, {**inputs, "obs": obs[None], "first": np.array([first])})
            outputs, first = dict(zip(names, values, strict=True)), False
            inputs = {name: outputs[name.replace("_in", "_out")] for name in inputs}
            obs, reward, terminated, truncated, _ = env.step(int(outputs["action"][0]))
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    return float(np.mean(returns))


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    env = make_vec_env("CartPole-v1", 16, seed=0, wrapper_class=Positions)
    options = {"lstm_hidden_size": 64, "enable_critic_lstm": True}
    model = RecurrentPPO(
        MlpLstmPolicy, env, n_steps=128, batch_size=512, learning_rate=1e-3, seed=0, device="cpu", policy_kwargs=options
    )
    model.learn(steps).save("model.zip")
    holdfast.load("sb3:model.zip").export("model.onnx")
    print(f"mean return from ONNX: {play('model.onnx', 10):.0f}")
