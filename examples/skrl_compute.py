"""skrl's PPO_RNN with `holdfast.nn` in `compute`, on CartPole without velocities."""

import sys
from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TransformObservation
from skrl.agents.torch.ppo import PPO_RNN
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.trainers.torch import SequentialTrainer

import holdfast.nn

ENVS, STEPS, HIDDEN = 16, 128, 64


class Recurrent(Model):
    """An LSTM and a layer; skrl calls `compute` with one step, and in updates with sequences of STEPS steps."""

    def __init__(self, env: Any, outputs: int) -> None:
        Model.__init__(self, observation_space=env.observation_space, action_space=env.action_space, device=env.device)
        self.lstm = holdfast.nn.LSTM(self.num_observations, HIDDEN, batch_first=True)
        self.head = torch.nn.Linear(HIDDEN, outputs)
        (CategoricalMixin if outputs > 1 else DeterministicMixin).__init__(self)

    def get_specification(self) -> dict[str, Any]:
        """Return the sizes of the state."""
        return {"rnn": {"sequence_length": STEPS, "sizes": [(1, ENVS, HIDDEN)] * 2}}

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[torch.Tensor, dict[str, Any]]:
        """Run a step, or of an update all steps; each has the state before it, zero where an episode starts."""
        steps = STEPS if "terminated" in inputs else 1
        x = inputs["observations"].unflatten(0, (-1, steps))
        h, c = (state.unflatten(1, (-1, steps)) for state in inputs["rnn"])
        y, state = self.lstm(x, (h[:, :, 0].contiguous(), c[:, :, 0].contiguous()), (h == 0).all(-1).all(0))
        return self.head(y.flatten(0, 1)), {"rnn": list(state)}


Policy = type("Policy", (CategoricalMixin, Recurrent), {"__init__": Recurrent.__init__})
Value = type("Value", (DeterministicMixin, Recurrent), {"__init__": Recurrent.__init__})

if __name__ == "__main__":
    torch.manual_seed(0)
    positions = (lambda obs: obs[[0, 2]], gym.spaces.Box(-5, 5, (2,)))
    envs = [lambda: TransformObservation(gym.make("CartPole-v1"), *positions)] * ENVS
    env = wrap_env(SyncVectorEnv(envs, autoreset_mode=AutoresetMode.SAME_STEP))
    cfg = {"rollouts": STEPS, "mini_batches": 4, "learning_epochs": 6, "learning_rate": 2e-3}
    cfg["experiment"] = {"write_interval": 0, "checkpoint_interval": 0}
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    models = {"policy": Policy(env, 2), "value": Value(env, 1)}
    agent = PPO_RNN(models=models, memory=RandomMemory(memory_size=STEPS, num_envs=ENVS), cfg=cfg, **spaces)
    timesteps = int(sys.argv[1]) if len(sys.argv) > 1 else 40 * STEPS
    SequentialTrainer(env=env, agents=agent, cfg={"timesteps": timesteps, "headless": True}).train()
    print(f"mean return of the last episodes: {sum(agent._track_rewards) / max(1, len(agent._track_rewards)):.0f}")
