"""Recurrent PPO on `recall` in one file: the world, the network, the rollout, the advantage, the update.

    python examples/one_file.py [seed]

A cue is observed once and must be named some steps later, so the task needs memory. The code takes the most
obvious way and imports nothing of holdfast: the tests compare the library with this file.
Axes: `B` segments of one agent each, `T` steps, `L` layers, `H` hidden size, `M` tokens, `N` any batch.
"""

import math
import sys
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adam

GLOBAL, PADDING, CUE_PLACE, SIDE, TOKENS = 0xFE, 0xFF, 0x45, 11, 4
State = tuple[Tensor, Tensor]  # the LSTM state of B agents: h and c, each [B,L,H]


@dataclass(frozen=True)
class Config:
    """Hyperparameters of the run."""

    seed: int = 0
    agents: int = 64
    cues: int = 4
    delay: tuple[int, int] = (8, 8)
    truncate: bool = False
    horizon: int = 64
    iterations: int = 73  # of 64 agents times 64 steps: 299,008 steps
    epochs: int = 2
    minibatches: int = 8
    lr: tuple[float, float] = (1e-3, 1e-4)
    entropy: tuple[float, float] = (0.02, 0.0)
    gamma: float = 0.9
    lam: float = 0.8
    clip: float = 0.1
    vf_coef: float = 0.5
    vf_clip: float | None = None
    max_grad_norm: float = 0.5


# ---- the world -------------------------------------------------------------------------------------------
class Step(NamedTuple):
    """Output of the world: the current `obs`, with the reward and the two end flags of the action before."""

    obs: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    first: Tensor  # obs starts an episode: clear the state before the forward pass
    last_obs: Tensor  # final observation of an episode that ended; obs is of the next one


class Recall:
    """A cue, then `delay` empty observations, then a query; naming the cue pays 1 and ends the episode."""

    def __init__(self, cfg: Config, agents: int, seed: int) -> None:
        self.cfg, self.agents = cfg, agents
        self.generator = torch.Generator().manual_seed(seed)
        self.cue = self.wait = torch.zeros(agents, dtype=torch.long)

    def reset(self) -> Step:
        """Start an episode for all agents."""
        all_agents = torch.ones(self.agents, dtype=torch.bool)
        self._start(all_agents)
        return self._make_step(all_agents, ~all_agents, torch.zeros(self.agents))

    def step(self, action: Tensor) -> Step:
        """Reward agents at the query and start their next episode; count down for the rest."""
        at_query = self.wait == 0
        reward = (at_query & (action == self.cue)).float()
        self.wait = self.wait - 1
        self._start(at_query)
        return self._make_step(at_query, at_query, reward)

    def _start(self, mask: Tensor) -> None:
        low, high = self.cfg.delay
        cue = torch.randint(self.cfg.cues, mask.shape, generator=self.generator)
        wait = torch.randint(low + 1, high + 2, mask.shape, generator=self.generator)
        self.cue, self.wait = torch.where(mask, cue, self.cue), torch.where(mask, wait, self.wait)

    def _make_step(self, first: Tensor, ended: Tensor, reward: Tensor) -> Step:
        obs = torch.full((self.agents, TOKENS, 3), PADDING, dtype=torch.uint8)
        last_obs, no_agents = obs.clone(), torch.zeros_like(ended)
        cues = torch.tensor([[CUE_PLACE, 1 + n, 255] for n in range(self.cfg.cues)], dtype=torch.uint8)
        obs[first, 0] = cues[self.cue[first]]
        obs[self.wait == 0, 0] = torch.tensor([GLOBAL, 0, 1], dtype=torch.uint8)
        terminated, truncated = (no_agents, ended) if self.cfg.truncate else (ended, no_agents)
        return Step(obs, reward, terminated, truncated, first, last_obs)


# ---- the network -----------------------------------------------------------------------------------------
def orthogonal(layer: nn.Module, gain: float = 1.0) -> nn.Module:
    """Initialize a layer with orthogonal weights and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Net(nn.Module):
    """Tokens -> box -> convolutions -> LSTM -> action logits and value."""

    def __init__(self, cues: int, hidden: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.actions, self.hidden, self.layers = cues, hidden, layers
        self.register_buffer("norm", torch.tensor([1.0] + [255.0] * cues).reshape(-1, 1, 1), persistent=False)
        self.conv1 = orthogonal(nn.Conv2d(1 + cues, 64, kernel_size=5, stride=3))
        self.conv2 = orthogonal(nn.Conv2d(64, 64, kernel_size=3))
        self.fc1 = orthogonal(nn.Linear(64, 128))
        self.fc2 = orthogonal(nn.Linear(128, 128))
        sizes = [128] + [hidden] * (layers - 1)
        self.w_x = nn.ParameterList(nn.init.orthogonal_(torch.empty(4 * hidden, size)) for size in sizes)
        self.w_h = nn.ParameterList(nn.init.orthogonal_(torch.empty(4 * hidden, hidden)) for _ in sizes)
        forget = torch.tensor([0.0, 1.0, 0.0, 0.0]).repeat_interleave(hidden)
        self.b_x = nn.ParameterList(forget.clone() for _ in sizes)
        self.b_h = nn.ParameterList(torch.zeros(4 * hidden) for _ in sizes)
        self.critic1 = orthogonal(nn.Linear(hidden, 1024), gain=math.sqrt(2))
        self.critic2 = orthogonal(nn.Linear(1024, 1))
        self.actor = orthogonal(nn.Linear(hidden, 512))
        bound = 1 / math.sqrt(512)
        self.bilinear = nn.Parameter(torch.empty(512, 16).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(1).uniform_(-bound, bound))
        table = nn.init.orthogonal_(torch.empty(100, 16))
        self.embeddings = nn.Parameter(table * 0.1 / table.abs().max())

    def initial_state(self, agents: int) -> State:
        """Return the zero state."""
        zeros = torch.zeros(agents, self.layers, self.hidden, dtype=self.norm.dtype)
        return zeros, zeros

    def unroll(self, obs: Tensor, first: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """Unroll `obs[B,T,M,3]` from `state`; return logits `[B,T,actions]`, values `[B,T]`, state."""
        x = self.encode(obs.flatten(0, 1)).unflatten(0, first.shape)
        h, c = list(state[0].unbind(1)), list(state[1].unbind(1))
        outputs = []
        for t in range(first.shape[1]):
            y = x[:, t]
            for n in range(self.layers):
                h_before = h[n].masked_fill(first[:, t, None], 0.0)
                c_before = c[n].masked_fill(first[:, t, None], 0.0)
                gates = y @ self.w_x[n].T + self.b_x[n] + h_before @ self.w_h[n].T + self.b_h[n]
                i, f, g, o = gates.chunk(4, dim=1)
                c[n] = torch.sigmoid(f) * c_before + torch.sigmoid(i) * torch.tanh(g)
                h[n] = torch.sigmoid(o) * torch.tanh(c[n])
                y = h[n]
            outputs.append(y)
        y = torch.stack(outputs, dim=1)
        query = torch.tanh(torch.relu(self.actor(y)) @ self.bilinear)
        logits = query @ self.embeddings[: self.actions].T + self.bias
        value = self.critic2(torch.tanh(self.critic1(y)))[..., 0]
        return logits, value, (torch.stack(h, dim=1), torch.stack(c, dim=1))

    def forward(self, obs: Tensor, first: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """Run one step, `obs[B,M,3]`."""
        logits, value, state = self.unroll(obs[:, None], first[:, None], state)
        return logits[:, 0], value[:, 0], state

    def encode(self, obs: Tensor) -> Tensor:
        """Scatter tokens `[N,M,3]` into a box (amax where two collide) and encode it as 128 features."""
        location, feature, value = obs.long().unbind(-1)
        cell = torch.where(location == GLOBAL, SIDE * SIDE // 2, (location >> 4) * SIDE + (location & 15))
        # The box starts at 0 and takes the maximum, so the 0 of a padding token changes nothing.
        place = torch.where(location == PADDING, 0, feature * SIDE * SIDE + cell)
        value = torch.where(location == PADDING, 0, value).to(self.norm.dtype)
        box = torch.zeros(len(obs), len(self.norm) * SIDE * SIDE, dtype=self.norm.dtype)
        box = box.scatter_reduce(1, place, value, "amax").unflatten(1, (-1, SIDE, SIDE)) / self.norm
        x = torch.relu(self.conv2(torch.relu(self.conv1(box)))).flatten(1)
        return torch.relu(self.fc2(torch.relu(self.fc1(x))))


# ---- the algorithm ---------------------------------------------------------------------------------------
class Rollout(NamedTuple):
    """Transitions `[B,T]`, with the entry state and the bootstrap value `[B]`."""

    h: Tensor
    c: Tensor
    obs: Tensor
    first: Tensor
    action: Tensor
    log_prob: Tensor
    value: Tensor
    reward: Tensor  # of this step's action; the flags mark whether it ended the episode
    terminated: Tensor
    truncated: Tensor
    last_value: Tensor  # value of the final observation, where truncated
    next_value: Tensor


def draw(logits: Tensor) -> Tensor:
    """Sample an action for each row."""
    return torch.multinomial(logits.softmax(-1), 1)[:, 0]


@torch.no_grad()
def rollout(net: Net, world: Recall, step: Step, state: State, horizon: int) -> tuple[Rollout, Step, State]:
    """Collect `horizon` steps; also return the step and state that the next rollout continues from."""
    entry, transitions = state, []
    for _ in range(horizon):
        logits, value, state = net(step.obs, step.first, state)
        action = draw(logits)
        log_prob = logits.log_softmax(-1).gather(1, action[:, None])[:, 0]
        next_step = world.step(action)
        last_value = torch.zeros_like(value)
        if next_step.truncated.any():
            # Truncation bootstraps from the final observation, with the state before it is cleared.
            _, last_value, _ = net(next_step.last_obs, torch.zeros_like(next_step.first), state)
        outcome = (next_step.reward, next_step.terminated, next_step.truncated, last_value)
        transitions.append((step.obs, step.first, action, log_prob, value, *outcome))
        step = next_step
    _, next_value, _ = net(step.obs, step.first, state)
    columns = [torch.stack(column, dim=1) for column in zip(*transitions, strict=True)]
    return Rollout(*entry, *columns, next_value), step, state


def advantages(batch: Rollout, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return the generalized advantages `[B,T]` and the returns."""
    next_value, next_adv = batch.next_value, torch.zeros_like(batch.next_value)
    adv = torch.zeros_like(batch.value)
    for t in reversed(range(adv.shape[1])):
        terminated, truncated = batch.terminated[:, t], batch.truncated[:, t]
        next_value = torch.where(terminated, 0.0, torch.where(truncated, batch.last_value[:, t], next_value))
        next_adv = torch.where(terminated | truncated, 0.0, next_adv)
        delta = batch.reward[:, t] + gamma * next_value - batch.value[:, t]
        adv[:, t] = next_adv = delta + gamma * lam * next_adv
        next_value = batch.value[:, t]
    return adv, adv + batch.value


def ppo_loss(net: Net, batch: Rollout, adv: Tensor, returns: Tensor, cfg: Config, ent_coef: float) -> Tensor:
    """Replay segments from their entry states and return the PPO loss."""
    logits, value, _ = net.unroll(batch.obs, batch.first, (batch.h, batch.c))
    log_probs = logits.log_softmax(-1)
    log_prob = log_probs.gather(-1, batch.action[..., None])[..., 0]
    ratio = torch.exp(log_prob - batch.log_prob)
    adv = (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)
    policy_loss = -torch.min(ratio * adv, ratio.clamp(1 - cfg.clip, 1 + cfg.clip) * adv).mean()
    error = (value - returns) ** 2
    if cfg.vf_clip is not None:
        clipped = batch.value + (value - batch.value).clamp(-cfg.vf_clip, cfg.vf_clip)
        error = torch.max(error, (clipped - returns) ** 2)
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    return policy_loss + cfg.vf_coef * 0.5 * error.mean() - ent_coef * entropy


def update(net: Net, adam: Adam, batch: Rollout, indices: list[Tensor], cfg: Config, ent_coef: float) -> None:
    """Take one gradient step for each minibatch of row indices."""
    adv, returns = advantages(batch, cfg.gamma, cfg.lam)
    for rows in indices:
        minibatch = Rollout(*(field[rows] for field in batch))
        loss = ppo_loss(net, minibatch, adv[rows], returns[rows], cfg, ent_coef)
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), cfg.max_grad_norm)
        adam.step()


@torch.no_grad()
def evaluate(net: Net, world: Recall, episodes_each: int, cleared: bool) -> float:
    """Return the mean return of greedy actions; `cleared` clears the state before every step."""
    step, state, total = world.reset(), net.initial_state(world.agents), 0.0
    remaining = torch.full((world.agents,), episodes_each)
    while remaining.any():
        logits, _, state = net(step.obs, step.first | cleared, state)
        step = world.step(logits.argmax(-1))
        total += float(step.reward[remaining > 0].sum())
        remaining = (remaining - (step.terminated | step.truncated).long()).clamp(min=0)
    return total / (world.agents * episodes_each)


def main() -> None:
    """Train, then evaluate with the memory intact and cleared."""
    cfg = Config(seed=int(sys.argv[1])) if len(sys.argv) > 1 else Config()
    torch.set_num_threads(1)  # the tensors are small: more threads cost more than they save
    torch.manual_seed(cfg.seed)
    net, world = Net(cfg.cues), Recall(cfg, cfg.agents, seed=1000 + cfg.seed)
    adam = Adam(net.parameters())
    step, state, started = world.reset(), net.initial_state(cfg.agents), time.process_time()
    for iteration in range(cfg.iterations):
        lr, ent_coef = (a + (b - a) * iteration / cfg.iterations for a, b in (cfg.lr, cfg.entropy))
        adam.param_groups[0]["lr"] = lr
        batch, step, state = rollout(net, world, step, state, cfg.horizon)
        orders = [torch.randperm(cfg.agents).chunk(cfg.minibatches) for _ in range(cfg.epochs)]
        update(net, adam, batch, [rows for order in orders for rows in order], cfg, ent_coef)
        if iteration % 6 == 0:
            score = batch.reward.sum() / (batch.terminated | batch.truncated).sum()
            steps, seconds = (iteration + 1) * batch.reward.numel(), time.process_time() - started
            print(f"{steps:>7,} steps  return {score:.3f}  {seconds:.0f} CPU s", flush=True)
    for name, cleared in (("intact", False), ("cleared", True)):
        score = evaluate(net, Recall(cfg, 250, seed=2000 + cfg.seed), 8, cleared)
        print(f"greedy, memory {name}: {score:.3f} over 2,000 episodes")


if __name__ == "__main__":
    main()
