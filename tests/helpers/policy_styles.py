"""Right policies in the interfaces of other code: flags optional or before the state, states of any structure."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.distributions import Categorical

WIDTH, HIDDEN = 5, 8


class Memory(nn.Module):
    """`forward(x, state=None, first=None)`, one step `[B,D]`: two LSTM layers, a critic and an actor."""

    layers = 2

    def __init__(self):
        super().__init__()
        self.inwards = nn.Linear(WIDTH, HIDDEN)
        self.cells = nn.ModuleList(nn.LSTMCell(HIDDEN, HIDDEN) for _ in range(self.layers))
        self.actor, self.critic = nn.Linear(HIDDEN, 3), nn.Linear(HIDDEN, 1)

    def initial(self, x):
        return tuple(x.new_zeros(self.layers, len(x), HIDDEN) for _ in range(2))

    def clear(self, state, first):
        return tuple(torch.where(first.bool()[None, :, None], 0.0, part) for part in state)

    def step(self, x, state):
        out, h, c = torch.tanh(self.inwards(x)), [], []
        for layer, cell in enumerate(self.cells):
            pair = cell(out, (state[0][layer], state[1][layer]))
            out = pair[0]
            h.append(pair[0])
            c.append(pair[1])
        return out, (torch.stack(h), torch.stack(c))

    def heads(self, out, state):
        return self.actor(out), self.critic(out)

    def forward(self, x, state=None, first=None):
        state = self.initial(x) if state is None else state
        if first is not None:
            state = self.clear(state, first)
        out, state = self.step(x, state)
        return self.heads(out, state), state


class Segments(Memory):
    """`forward(x, state=None, first=None)` over `[T,B,D]`, in a loop."""

    def flags(self, first):
        return first

    def forward(self, x, state=None, first=None):
        state = self.initial(x[0]) if state is None else state
        first = torch.zeros(x.shape[:2], dtype=torch.bool) if first is None else self.flags(first)
        outs = []
        for t in range(len(x)):
            state = self.clear(state, first[t])
            out, state = self.step(x[t], state)
            outs.append(out)
        return self.heads(torch.stack(outs), state), state


class BatchFirst(Segments):
    """`forward(obs, hidden=None, dones=None)` over `[B,T,D]`."""

    def forward(self, obs, hidden=None, dones=None):
        dones = None if dones is None else dones.T
        (actor, critic), hidden = super().forward(obs.transpose(0, 1), hidden, dones)
        return actor.transpose(0, 1), critic.transpose(0, 1), hidden


class DoneBeforeState(Segments):
    """`forward(x, done, state)`, time first."""

    def forward(self, x, done, state):
        (actor, _), state = super().forward(x, state, done)
        return actor, state


class StateBefore(Segments):
    """`forward(hidden, x, resets)`, time first, as scanned cells in JAX; returns `(state, y)`."""

    def forward(self, hidden, x, resets):
        outputs, hidden = super().forward(x, hidden, resets)
        return hidden, outputs


class MasksLast(Segments):
    """`forward(x, hxs, masks)`: a mask is one minus done, and required."""

    def forward(self, x, hxs, masks):
        (actor, critic), hxs = super().forward(x, hxs, masks)
        return critic, actor, hxs

    def clear(self, state, mask):
        return tuple(mask[None, :, None] * part for part in state)


class KeywordFlags(Segments):
    """Episode starts by keyword only."""

    def forward(self, x, state=None, *, episode_starts=None):
        return super().forward(x, state, episode_starts)


class LearnedStart(Memory):
    """A learned initial state, which None and episode starts both select."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.randn(2, self.layers, 1, HIDDEN))

    def initial(self, x):
        return tuple(self.start.expand(2, self.layers, len(x), HIDDEN).clone())

    def clear(self, state, first):
        fresh = self.initial(state[0][0])
        return tuple(
            torch.where(first.bool()[None, :, None], new, part) for new, part in zip(fresh, state, strict=True)
        )


@dataclass
class Carry:
    h: torch.Tensor
    c: torch.Tensor


class Pair(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


class DataclassState(Segments):
    """A dataclass as state."""

    def forward(self, x, state=None, first=None):
        y, (h, c) = super().forward(x, None if state is None else (state.h, state.c), first)
        return y, Carry(h, c)


class NestedState(Segments):
    """A dictionary of a named tuple and a tuple as state; no None."""

    def initial_state(self, batch_size):
        zeros = torch.zeros(self.layers, batch_size, HIDDEN, dtype=self.critic.weight.dtype)
        return {"lstm": Pair(zeros, zeros.clone()), "steps": (torch.zeros(batch_size, dtype=torch.long),)}

    def forward(self, x, state, first):
        y, (h, c) = super().forward(x, tuple(state["lstm"]), first)
        count = state["steps"][0]
        for flags in first:
            count = torch.where(flags.bool(), 0, count) + 1
        return y, {"lstm": Pair(h, c), "steps": (count,)}


class DictState(Memory):
    """A dictionary as state."""

    def forward(self, x, state=None, is_init=None):
        y, (h, c) = super().forward(x, None if state is None else (state["h"], state["c"]), is_init)
        return {"logits": y[0], "value": y[1]}, {"h": h, "c": c}


class TwoLSTMs(nn.Module):
    """Two LSTMs of different widths, actor and critic."""

    def __init__(self, proj_size=0):
        super().__init__()
        self.pi, self.vf = nn.LSTM(WIDTH, 8, proj_size=proj_size), nn.LSTM(WIDTH, 6)
        self.actor, self.critic = nn.Linear(proj_size or 8, 3), nn.Linear(6, 1)

    def forward(self, x, state=None, done=None):
        if state is None:
            state = tuple(
                tuple(
                    x.new_zeros(1, x.shape[1], size) for size in (core.proj_size or core.hidden_size, core.hidden_size)
                )
                for core in (self.pi, self.vf)
            )
        outs = []
        for t in range(len(x)):
            if done is not None:
                keep = (1 - done[t].to(x.dtype))[None, :, None]
                state = tuple((h * keep, c * keep) for h, c in state)
            a, pi = self.pi(x[t : t + 1], state[0])
            v, vf = self.vf(x[t : t + 1], state[1])
            state = (pi, vf)
            outs.append((self.actor(a), self.critic(v)))
        return torch.cat([a for a, _ in outs]), torch.cat([v for _, v in outs]), state


class Window(nn.Module):
    """Attention over the last observations, a ring buffer of keys with their ages; `[B,T,D]`."""

    size = 6

    def __init__(self):
        super().__init__()
        self.inwards, self.query = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.key, self.value = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 3)

    def initial(self, x):
        return x.new_zeros(len(x), self.size, HIDDEN), torch.zeros(len(x), self.size, dtype=torch.bool)

    def clear(self, state, first):
        return state[0], torch.where(first.bool()[:, None], False, state[1])

    def push(self, past, there, x):
        return (
            torch.cat([past[:, 1:], x[:, None]], 1),
            torch.cat([there[:, 1:], torch.ones_like(there[:, :1])], 1),
        )

    def read(self, x, past, there):
        scores = (self.key(past) @ self.query(x)[..., None])[..., 0] / HIDDEN**0.5
        weights = scores.masked_fill(~there, -torch.inf).softmax(-1)
        return (weights[:, None] @ self.value(past))[:, 0]

    def forward(self, x, state=None, first=None):
        state = self.initial(x) if state is None else state
        outs = []
        for t in range(x.shape[1]):
            state = state if first is None else self.clear(state, first[:, t])
            one = torch.tanh(self.inwards(x[:, t]))
            state = self.push(*state, one)
            outs.append(self.head(one + self.read(one, *state)))
        return torch.stack(outs, 1), state


class Ring(nn.Module):
    """A ring buffer with a pointer for each row; a mean over the entries of the episode; one step."""

    size = 5

    def __init__(self):
        super().__init__()
        self.inwards, self.head = nn.Linear(WIDTH, HIDDEN), nn.Linear(2 * HIDDEN, 3)

    def forward(self, x, state=None, reset=None):
        if state is None:
            state = {"ring": x.new_zeros(len(x), self.size, HIDDEN), "count": torch.zeros(len(x), dtype=torch.long)}
        ring, count = state["ring"], state["count"]
        if reset is not None:
            count = self.clear_count(count, reset.bool())
        one = torch.tanh(self.inwards(x))
        slot = nn.functional.one_hot(count % self.size, self.size).bool()[..., None]
        ring, count = torch.where(slot, one[:, None], ring), count + 1
        there = torch.arange(self.size)[None] < count[:, None]
        mean = (ring * there[..., None]).sum(1) / there.sum(1, keepdim=True)
        return self.head(torch.cat([one, mean], -1)), {"ring": ring, "count": count}

    def clear_count(self, count, reset):
        return torch.where(reset, 0, count)


class Scan(nn.Module):
    """A diagonal linear recurrence, in parallel over `[T,B,D]` by sums of logarithms; `(x, state, first)`."""

    def __init__(self):
        super().__init__()
        self.inwards, self.head = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 3)
        self.decay = nn.Parameter(torch.linspace(0.5, 0.95, HIDDEN))

    def forward(self, x, state=None, first=None):
        T, B = x.shape[:2]
        state = x.new_zeros(B, HIDDEN) if state is None else state
        first = torch.zeros(T, B, dtype=torch.bool) if first is None else first.bool()
        inputs, episode = self.inwards(x), first.cumsum(0)
        log_decay = torch.arange(T, dtype=x.dtype)[:, None] * self.decay.log()
        # weight[t, s] of input s in state t: decay^(t - s), within the episode only.
        weight = (log_decay[:, None] - log_decay[None]).exp() * torch.ones(T, T, dtype=x.dtype).tril()[..., None]
        same = (episode[:, None] == episode[None]).to(x.dtype)
        memory = torch.einsum("tsh,tsb,sbh->tbh", weight, same, inputs)
        entry = (log_decay + self.decay.log()).exp()[:, None] * state[None] * (episode == 0)[..., None]
        memory = memory + entry
        return self.head(torch.tanh(memory)), memory[-1]


class Rounds(Memory):
    """Stores its state in steps of 1/64."""

    def step(self, x, state):
        out, state = super().step(x, state)
        return out, tuple(part + (torch.round(part * 64) / 64 - part).detach() for part in state)


class Hard(Memory):
    """Overwrites its first layer where a hard gate opens."""

    def step(self, x, state):
        gate = (x[:, :1] > 0.8).to(x.dtype)
        out, (h, c) = super().step(x, state)
        return out, (torch.cat([h[:1] * (1 - gate), h[1:]]), c)


class DetachedCritic(Memory):
    """The critic sends no gradient into the memory."""

    def heads(self, out, state):
        return self.actor(out), self.critic(out.detach())


class AnswersLate(Memory):
    """Its outputs show what it read one step earlier."""

    def forward(self, x, state=None, first=None):
        state = (*self.initial(x), x.new_zeros(len(x), HIDDEN)) if state is None else state
        if first is not None:
            state = (*self.clear(state[:2], first), torch.where(first.bool()[:, None], 0.0, state[2]))
        out, pair = self.step(x, state[:2])
        return self.heads(state[2], state), (*pair, out)


class CleanAgent(nn.Module):
    """A CleanRL agent with an LSTM."""

    layers = 1

    def __init__(self, envs=None):
        super().__init__()
        width, actions = 4, 3
        if envs is not None:
            width, actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
        self.network = nn.Sequential(nn.Linear(width, 16), nn.Tanh())
        self.lstm = nn.LSTM(16, 12, self.layers)
        self.actor, self.critic = nn.Linear(12, actions), nn.Linear(12, 1)

    def keep(self, state, d):
        return tuple((1.0 - d).view(1, -1, 1) * part for part in state)

    def get_states(self, x, lstm_state, done):
        hidden = self.network(x)
        batch_size = lstm_state[0].shape[1]
        hidden, done = hidden.reshape((-1, batch_size, 16)), done.reshape((-1, batch_size))
        new_hidden = []
        for h, d in zip(hidden, done, strict=True):
            h, lstm_state = self.lstm(h.unsqueeze(0), self.keep(lstm_state, d))
            new_hidden += [h]
        return torch.flatten(torch.cat(new_hidden), 0, 1), lstm_state

    def get_value(self, x, lstm_state, done):
        hidden, _ = self.get_states(x, lstm_state, done)
        return self.critic(hidden)

    def get_action_and_value(self, x, lstm_state, done, action=None):
        hidden, lstm_state = self.get_states(x, lstm_state, done)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden), lstm_state


class TwoStreams(CleanAgent):
    """A CleanRL agent with an LSTM for the actor and one for the critic."""

    def __init__(self):
        super().__init__()
        self.lstm_critic = nn.LSTM(16, 10)
        self.critic = nn.Linear(10, 1)

    def get_initial_state(self, batch_size):
        sizes = (12, 12, 10, 10)
        return tuple(torch.zeros(1, batch_size, size, dtype=self.actor.weight.dtype) for size in sizes)

    def both(self, x, lstm_state, done):
        pi, vf = lstm_state[:2], lstm_state[2:]
        hidden, pi = self.get_states(x, pi, done)
        pi_lstm, self.lstm = self.lstm, self.lstm_critic
        try:
            values, vf = self.get_states(x, vf, done)
        finally:
            self.lstm = pi_lstm
        return hidden, self.critic(values), (*pi, *vf)

    def get_value(self, x, lstm_state, done):
        return self.both(x, lstm_state, done)[1]

    def get_action_and_value(self, x, lstm_state, done, action=None):
        hidden, values, lstm_state = self.both(x, lstm_state, done)
        probs = Categorical(logits=self.actor(hidden))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), values, lstm_state


class PufferPolicy(nn.Module):
    """What PufferLib's own wrapper wraps: encodes observations, decodes actions."""

    def __init__(self, hidden_size=16):
        super().__init__()
        self.hidden_size, self.is_continuous = hidden_size, False
        self.inwards, self.actor = nn.Linear(WIDTH, hidden_size), nn.Linear(hidden_size, 3)
        self.value = nn.Linear(hidden_size, 1)

    def encode_observations(self, observations, state=None):
        return torch.relu(self.inwards(observations))

    def decode_actions(self, hidden):
        return self.actor(hidden), self.value(hidden)


class PufferLSTM(nn.Module):
    """PufferLib 3's LSTM wrapper: a cell in rollouts, an LSTM with the same weights in updates; no episode starts."""

    def __init__(self):
        super().__init__()
        self.policy = PufferPolicy()
        self.hidden_size = 16
        self.lstm = nn.LSTM(16, 16, batch_first=False)
        self.cell = nn.LSTMCell(16, 16)
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            setattr(self.cell, name, getattr(self.lstm, f"{name}_l0"))

    def forward_eval(self, observations, state):
        hidden = self.policy.encode_observations(observations, state=state)
        h, c = state["lstm_h"], state["lstm_c"]
        hidden, c = self.cell(hidden, None if h is None else (h, c))
        state["hidden"], state["lstm_h"], state["lstm_c"] = hidden, hidden, c
        return self.policy.decode_actions(hidden)

    def forward(self, observations, state):
        B, TT = observations.shape[:2]
        h, c = state["lstm_h"], state["lstm_c"]
        hidden = self.policy.encode_observations(observations.reshape(B * TT, -1), state).reshape(B, TT, -1)
        hidden, _ = self.lstm(hidden.transpose(0, 1), None if h is None else (h[None], c[None]))
        logits, values = self.policy.decode_actions(hidden.transpose(0, 1).reshape(B * TT, -1))
        return logits, values.reshape(B, TT)
