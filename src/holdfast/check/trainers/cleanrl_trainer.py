"""A recurrent PPO in CleanRL's style, written from its published algorithm: one file, one loop.

As there, an episode ends on `terminated | truncated` alike, the state is cleared by `done` inside the agent, a
minibatch is whole environments from the rollout's entry state, and nothing is bootstrapped at a truncation.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from holdfast.types import Float

STEPS, UPDATES, EPOCHS, MINIBATCHES, GAMMA, LAMBDA, CLIP = 16, 3, 2, 2, 0.99, 0.95, 0.1
State = tuple[Tensor, Tensor]


class CleanAgent(nn.Module):
    """An encoder, an LSTM, an actor and a critic."""

    def __init__(self, inputs: int, actions: int, hidden: int = 16) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh())
        self.lstm = nn.LSTM(hidden, hidden)
        self.actor, self.critic = nn.Linear(hidden, actions), nn.Linear(hidden, 1)

    def get_states(
        self, x: Float[Tensor, "N D"], state: State, done: Float[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N H"], State]:
        """Run the LSTM over flat rows, time first, clearing the state where `done` is set."""
        rows = state[0].shape[1]
        hidden = self.network(x).reshape(-1, rows, self.lstm.input_size)
        outputs = []
        for step, first in zip(hidden, done.reshape(-1, rows), strict=True):
            on = (1.0 - first).reshape(1, -1, 1)
            y, state = self.lstm(step[None], (on * state[0], on * state[1]))
            outputs.append(y)
        return torch.cat(outputs).flatten(0, 1), state

    def get_value(self, x: Tensor, state: State, done: Tensor) -> Tensor:
        """Return values; the new state is dropped."""
        return self.critic(self.get_states(x, state, done)[0])

    def get_action_and_value(
        self, x: Tensor, state: State, done: Tensor, action: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, State]:
        """Draw actions, or evaluate them."""
        hidden, state = self.get_states(x, state, done)
        policy = Categorical(logits=self.actor(hidden))
        action = policy.sample() if action is None else action
        return action, policy.log_prob(action), policy.entropy(), self.critic(hidden)[:, 0], state


def train(envs: Any) -> None:
    """Train with learning rate 0."""
    torch.manual_seed(0)
    E, D = envs.num_envs, envs.single_observation_space.shape[0]
    agent = CleanAgent(D, int(envs.single_action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.0, eps=1e-5)
    obs, dones = torch.zeros(STEPS, E, D), torch.zeros(STEPS, E)
    actions, logprobs, rewards, values = (torch.zeros(STEPS, E) for _ in range(4))
    next_obs, next_done = torch.as_tensor(envs.reset(seed=0)[0]), torch.zeros(E)
    state = (torch.zeros(1, E, 16), torch.zeros(1, E, 16))
    for _ in range(UPDATES):
        entry = (state[0].clone(), state[1].clone())
        for t in range(STEPS):
            obs[t], dones[t] = next_obs, next_done
            with torch.no_grad():
                actions[t], logprobs[t], _, values[t], state = agent.get_action_and_value(next_obs, state, next_done)
            x, reward, terminated, truncated, _ = envs.step(actions[t].numpy())
            rewards[t], next_obs = torch.as_tensor(reward), torch.as_tensor(x)
            next_done = torch.as_tensor(terminated | truncated).float()
        with torch.no_grad():
            advantages, last = torch.zeros(STEPS, E), torch.zeros(E)
            next_value = agent.get_value(next_obs, state, next_done)[:, 0]
            for t in reversed(range(STEPS)):
                goes_on = 1.0 - (next_done if t == STEPS - 1 else dones[t + 1])
                following = next_value if t == STEPS - 1 else values[t + 1]
                last = rewards[t] + GAMMA * following * goes_on - values[t] + GAMMA * LAMBDA * goes_on * last
                advantages[t] = last
            returns = advantages + values
        _learn(agent, optimizer, entry, (obs, dones, actions, logprobs, advantages, returns))


def _learn(agent: CleanAgent, optimizer: torch.optim.Optimizer, entry: State, rollout: tuple[Tensor, ...]) -> None:
    for _ in range(EPOCHS):
        for envs in torch.randperm(entry[0].shape[1]).chunk(MINIBATCHES):
            obs, dones, actions, logprobs, advantages, returns = (x[:, envs].flatten(0, 1) for x in rollout)
            start = (entry[0][:, envs], entry[1][:, envs])
            _, logprob, entropy, value, _ = agent.get_action_and_value(obs, start, dones, actions)
            ratio, advantages = (logprob - logprobs).exp(), (advantages - advantages.mean()) / advantages.std()
            policy_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
            loss = policy_loss - 0.01 * entropy.mean() + 0.25 * ((value - returns) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
