"""PPO_RNN of skrl with LSTM models; in skrl a model is the user's, and clears its states in updates itself."""

from typing import Any

import torch
from skrl.agents.torch.ppo import PPO_RNN  # pyright: ignore[reportMissingImports]
from skrl.envs.wrappers.torch import wrap_env  # pyright: ignore[reportMissingImports]
from skrl.memories.torch import RandomMemory  # pyright: ignore[reportMissingImports]
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

STEPS, UPDATES, HIDDEN = 16, 3, 16


class SkrlRecurrent(Model):
    """An LSTM and a head; sequences are cleared after their ends."""

    def __init__(self, env: Any, outputs: int) -> None:
        spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
        Model.__init__(self, **spaces, device="cpu")
        self.envs = env.num_envs
        self.lstm = nn.LSTM(env.observation_space.shape[0], HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, outputs)

    def get_specification(self) -> dict[str, Any]:
        """Name the length of sequences and the sizes of states."""
        return {"rnn": {"sequence_length": STEPS, "sizes": [(1, self.envs, HIDDEN)] * 2}}

    def compute(self, inputs: Any, role: str = "") -> tuple[Tensor, dict[str, Any]]:
        """Run one step, or sequences of a minibatch from the states stored at their first steps."""
        x, state = inputs["observations"], tuple(inputs["rnn"])
        if "terminated" not in inputs:
            y, state = self.lstm(x[:, None], state)
            return self.head(y[:, 0]), {"rnn": list(state)}
        x = x.reshape(-1, STEPS, x.shape[-1])
        ended = (inputs["terminated"] | inputs["truncated"]).reshape(-1, STEPS)
        state, outputs = tuple(part[:, ::STEPS].contiguous() for part in state), []
        for t in range(STEPS):
            y, state = self.lstm(x[:, t : t + 1], state)
            state = tuple(torch.where(ended[:, t, None], 0.0, part) for part in state)
            outputs.append(y)
        return self.head(torch.cat(outputs, 1).flatten(0, 1)), {"rnn": list(state)}


class SkrlPolicy(CategoricalMixin, SkrlRecurrent):
    """Logits."""

    def __init__(self, env: Any) -> None:
        SkrlRecurrent.__init__(self, env, int(env.action_space.n))
        CategoricalMixin.__init__(self)


class SkrlCritic(DeterministicMixin, SkrlRecurrent):
    """Values."""

    def __init__(self, env: Any) -> None:
        SkrlRecurrent.__init__(self, env, 1)
        DeterministicMixin.__init__(self)


def train(envs: Any) -> None:
    """Train with learning rate 0, in the loop of skrl's sequential trainer."""
    torch.manual_seed(0)
    env = wrap_env(envs, wrapper="gymnasium")
    memory = RandomMemory(memory_size=STEPS, num_envs=env.num_envs, device="cpu")
    options = {"rollouts": STEPS, "learning_epochs": 2, "mini_batches": 2, "learning_rate": 0.0, "gae_lambda": 0.95}
    options["experiment"] = {"write_interval": 0, "checkpoint_interval": 0}
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    models = {"policy": SkrlPolicy(env), "value": SkrlCritic(env)}
    agent = PPO_RNN(models=models, memory=memory, **spaces, device="cpu", cfg=options)
    agent.init()
    agent.enable_training_mode(True)
    agent.enable_models_training_mode(False)
    obs, _ = env.reset()
    for timestep in range(UPDATES * STEPS):
        times = {"timestep": timestep, "timesteps": UPDATES * STEPS}
        with torch.no_grad():
            actions, _ = agent.act(obs, None, **times)
            following, rewards, terminated, truncated, infos = env.step(actions)
            agent.record_transition(
                observations=obs,
                states=None,
                actions=actions,
                rewards=rewards,
                next_observations=following,
                next_states=None,
                terminated=terminated,
                truncated=truncated,
                infos=infos,
                **times,
            )
        agent.post_interaction(**times)
        obs = following
