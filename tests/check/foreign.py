"""Policies in other people's styles: right ones in every layout, and ones that are wrong on purpose."""

from itertools import pairwise
from typing import ClassVar

import numpy
import torch
from torch import nn

from holdfast.check.subjects import Callables, CleanRL


class Stepper(nn.Module):
    """`(x, state, first) -> (y, state)`, one step at a time."""

    def __init__(self, cell=nn.GRUCell):
        super().__init__()
        self.inwards, self.cell, self.outwards = nn.Linear(5, 8), cell(8, 16), nn.Linear(16, 3)

    def forward(self, x, state, first):
        state = x.new_zeros(len(x), 16) if state is None else state
        state = self.cell(torch.tanh(self.inwards(x)), self.clear(state, first))
        return self.outwards(state), state

    def clear(self, state, first):
        return torch.where(first[:, None], 0.0, state)


class ClearsAfterReading(Stepper):
    """Clears when it has read, so the first step of an episode still remembers the last one."""

    def forward(self, x, state, first):
        y, state = super().forward(x, state, torch.zeros_like(first))
        return y, torch.where(first[:, None], 0.0, state)


class ClearsEverybody(Stepper):
    """Clears all rows when one of them starts."""

    def clear(self, state, first):
        return torch.zeros_like(state) if first.any() else state


class ClearsTogether(Stepper):
    """Clears only if all rows start at once."""

    def clear(self, state, first):
        return torch.zeros_like(state) if first.all() else state


class ClearsByTheFirstRow(Stepper):
    """Looks at the first row's flag."""

    def clear(self, state, first):
        return torch.where(first[:1, None], 0.0, state)


class ClearsInPlace(Stepper):
    """Wipes the caller's state instead of a copy of it."""

    def clear(self, state, first):
        state[first] = 0.0
        return state


class Deaf(Stepper):
    """Reads no state at all."""

    def clear(self, state, first):
        return torch.zeros_like(state)


class Everywhere(Stepper):
    """Keeps its memory in a global and hands out an empty state."""

    MEMORY: ClassVar = {}

    def forward(self, x, state, first):
        kept = self.MEMORY.get(len(x), x.new_zeros(len(x), 16)).to(x.dtype)
        y, kept = super().forward(x, kept, first)
        self.MEMORY[len(x)] = kept.detach()
        return y, x.new_zeros(len(x), 1)


def closure():
    """Make a module whose forward keeps its memory in a closure."""
    kept = {}

    class Closed(Stepper):
        """Remembers in the function it was made by."""

        def forward(self, x, state, first):
            before = kept.get((len(x), x.dtype), x.new_zeros(len(x), 16))
            y, after = super().forward(x, before, first)
            kept[len(x), x.dtype] = after.detach()
            return y, x.new_zeros(len(x), 1)

    return Closed()


class Sequence(nn.Module):
    """`(x, state) -> (y, state)` over `[B,T,D]` or `[T,B,D]`."""

    def __init__(self, kind=nn.GRU, batch_first=False, layers=1):
        super().__init__()
        self.inwards = nn.Linear(5, 8)
        self.core = kind(8, 16, layers, batch_first=batch_first)
        self.outwards = nn.Linear(16, 3)

    def forward(self, x, state):
        y, state = self.core(torch.tanh(self.inwards(x)), state)
        return self.outwards(y), state


class Mixes(Sequence):
    """Normalises over the batch."""

    def forward(self, x, state):
        return super().forward(x - x.mean(1, keepdim=True), state)


class Ages(Stepper):
    """Counts its steps, and goes on counting in the next episode."""

    def forward(self, x, state, first):
        state = (x.new_zeros(len(x), 16), x.new_zeros(len(x), 1)) if state is None else state
        y, after = super().forward(x, state[0], first)
        return y + torch.sin(state[1]), (after, state[1] + 1)


class ClampsInPlace(Stepper):
    """Clamps the caller's observations."""

    def forward(self, x, state, first):
        return super().forward(x.clamp_(-1, 1), state, first)


class OneBuffer(Stepper):
    """Hands out one and the same buffer as its state, and writes into it."""

    def forward(self, x, state, first):
        y, after = super().forward(x, state, first)
        kept = self.__dict__.setdefault("kept", {}).setdefault((len(x), x.dtype), torch.zeros_like(after))
        with torch.no_grad():
            kept.copy_(after)
        return y, kept


class RollsDice(Stepper):
    """Draws numbers from a generator of its own."""

    def forward(self, x, state, first):
        y, state = super().forward(x, state, first)
        return y + 0.01 * float(numpy.random.default_rng().random()), state


class ForgetsInEvaluation(Stepper):
    """Clears at every step in evaluation mode."""

    def forward(self, x, state, first):
        return super().forward(x, state, first if self.training else torch.ones_like(first))


class Probabilities(Stepper):
    """Says probabilities, whose sum is always one."""

    def forward(self, x, state, first):
        y, state = super().forward(x, state, first)
        return torch.softmax(y, -1), state


class Rectified(nn.Module):
    """Sees through a ReLU: some observations say nothing."""

    def __init__(self):
        super().__init__()
        self.inwards, self.core = nn.Linear(5, 8), nn.GRU(8, 16)

    def forward(self, x, state):
        return self.core(torch.relu(self.inwards(x)), state)


class Several(nn.Module):
    """Says two things, and takes a third one or not; holds a switch."""

    def __init__(self):
        super().__init__()
        self.core, self.actor, self.critic = nn.GRU(5, 5), nn.Linear(5, 3), nn.Linear(5, 1)
        self.register_buffer("switch", torch.tensor([True, False]))

    def forward(self, x, state, deterministic=False):
        y, state = self.core(x, state)
        return self.actor(y), self.critic(y), state


class Masks(Stepper):
    """Multiplies with one minus the flag, as a number."""

    def clear(self, state, first):
        return (1 - first)[:, None] * state


class Continuous(nn.Module):
    """CleanRL's style with a Gaussian over two actions."""

    def __init__(self):
        super().__init__()
        self.core, self.mean, self.critic = nn.LSTM(4, 12), nn.Linear(12, 2), nn.Linear(12, 1)
        self.log_std = nn.Parameter(torch.zeros(2))

    def get_states(self, x, lstm_state, done):
        rows, out = lstm_state[0].shape[1], []
        for h, d in zip(x.reshape(-1, rows, 4), done.reshape(-1, rows), strict=True):
            kept = (1.0 - d).view(1, -1, 1)
            h, lstm_state = self.core(h[None], (kept * lstm_state[0], kept * lstm_state[1]))
            out.append(h)
        return torch.cat(out).flatten(0, 1), lstm_state

    def get_value(self, x, lstm_state, done):
        return self.critic(self.get_states(x, lstm_state, done)[0])

    def get_action_and_value(self, x, lstm_state, done, action=None):
        hidden, lstm_state = self.get_states(x, lstm_state, done)
        chosen = torch.distributions.Normal(self.mean(hidden), self.log_std.exp())
        action = chosen.sample() if action is None else action
        said = chosen.log_prob(action).sum(1), chosen.entropy().sum(1), self.critic(hidden)
        return action, *said, lstm_state


class Raises(Stepper):
    """Raises when it has lived for a while."""

    lived = 0

    def forward(self, x, state, first):
        self.lived += 1
        if self.lived > 100:
            raise ValueError("out of cheese")
        return super().forward(x, state, first)


class Agent(nn.Module):
    """CleanRL's style: flat, time first, a loop over time."""

    def __init__(self, kind=nn.LSTM, layers=1):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.core = kind(16, 12, layers)
        self.actor, self.critic = nn.Linear(12, 3), nn.Linear(12, 1)
        # CleanRL's own scale: a newborn actor says very little.
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def batch(self, state):
        return (state[0] if isinstance(state, tuple) else state).shape[1]

    def keep(self, state, done):
        kept = (1.0 - done).view(1, -1, 1)
        return tuple(kept * part for part in state) if isinstance(state, tuple) else kept * state

    def get_states(self, x, lstm_state, done):
        rows = self.batch(lstm_state)
        hidden, done, out = self.network(x).reshape(-1, rows, 16), done.reshape(-1, rows), []
        for h, d in zip(hidden, done, strict=True):
            h, lstm_state = self.core(h.unsqueeze(0), self.keep(lstm_state, d))
            out.append(h)
        return torch.flatten(torch.cat(out), 0, 1), lstm_state

    def get_value(self, x, lstm_state, done):
        return self.critic(self.get_states(x, lstm_state, done)[0])

    def get_action_and_value(self, x, lstm_state, done, action=None):
        hidden, lstm_state = self.get_states(x, lstm_state, done)
        chosen = torch.distributions.Categorical(logits=self.actor(hidden))
        action = chosen.sample() if action is None else action
        return action, chosen.log_prob(action), chosen.entropy(), self.critic(hidden), lstm_state


class KeepsTheCell(Agent):
    """Masks the hidden state and forgets the cell state."""

    def keep(self, state, done):
        return (1.0 - done).view(1, -1, 1) * state[0], state[1]


class KeepsTheDeepLayer(Agent):
    """Masks the first of two layers."""

    def __init__(self):
        super().__init__(nn.GRU, layers=2)

    def keep(self, state, done):
        return torch.cat([(1.0 - done).view(1, -1, 1) * state[:1], state[1:]])


class BatchFirst(Agent):
    """Reads `(t b)` as `(b t)`."""

    def get_states(self, x, lstm_state, done):
        rows = self.batch(lstm_state)
        if len(x) > rows:
            x = x.reshape(rows, -1, *x.shape[1:]).transpose(0, 1).flatten(0, 1)
        return super().get_states(x, lstm_state, done)


class ForgetsOneSequence(Agent):
    """Takes a short cut, without flags, when a batch holds one sequence."""

    def get_states(self, x, lstm_state, done):
        if self.batch(lstm_state) == 1 and len(x) > 1:
            out, lstm_state = self.core(self.network(x)[:, None], lstm_state)
            return out[:, 0], lstm_state
        return super().get_states(x, lstm_state, done)


class CutsEveryStep(Agent):
    """Detaches its state at every step of a segment, so it never learns to remember."""

    def keep(self, state, done):
        return tuple(part.detach() for part in super().keep(state, done))


class FlagsLateInUpdates(Agent):
    """Has its flags one step off where it is given segments."""

    def get_states(self, x, lstm_state, done):
        rows = self.batch(lstm_state)
        if len(x) > rows:
            done = torch.cat([torch.zeros_like(done[:rows]), done[:-rows]])
        return super().get_states(x, lstm_state, done)


class StartsFromZeros(CleanRL):
    """An update that is given zeros in place of the state its rollout began with."""

    def replay(self, moments, state):
        return super().replay(moments, self.initial(len(moments.first)))


class Swims(nn.Module):
    """PufferLib's style: the state lives in a dictionary; `done` clears if it is told to."""

    def __init__(self, clears):
        super().__init__()
        self.clears = clears
        self.encoder, self.core = nn.Linear(5, 16), nn.LSTM(16, 16, batch_first=True)
        self.decoder, self.value = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward_eval(self, observations, state):
        h, c = (state[key] for key in ("lstm_h", "lstm_c"))
        if self.clears:
            h, c = (torch.where(state["done"].bool()[:, None], 0.0, part) for part in (h, c))
        out, (h, c) = self.core(self.encoder(observations)[:, None], (h[None], c[None]))
        state["lstm_h"], state["lstm_c"] = h[0], c[0]
        return self.decoder(out[:, 0]), self.value(out[:, 0])

    def forward(self, observations, state):
        h, c = state["lstm_h"], state["lstm_c"]
        pair, x = None if h is None else (h[None], c[None]), self.encoder(observations)
        if self.clears:
            parts = []
            for t in range(x.shape[1]):
                pair = tuple(torch.where(state["done"][None, :, t, None].bool(), 0.0, part) for part in pair)
                out, pair = self.core(x[:, t : t + 1], pair)
                parts.append(out)
            out = torch.cat(parts, 1)
        else:
            out, _ = self.core(x, pair)
        return self.decoder(out).flatten(0, 1), self.value(out).flatten(0, 1)


# Three functions around a module, as a trainer of one's own would have them.


def nothing_yet(module, rows):
    return {"h": torch.zeros(module.core.num_layers, rows, 16, dtype=module.outwards.weight.dtype)}


def clear_then_step(module, obs, state, first):
    h = torch.where(first[None, :, None], 0.0, state["h"])
    y, h = module(obs[None], h)
    return {"y": y[0]}, {"h": h}


def replay_in_pieces(module, obs, actions, state, first):
    """Cut a segment wherever somebody starts, and call the core once a piece."""
    edges = sorted({0, first.shape[1], *first.any(0).nonzero().flatten().tolist()})
    h, out = state["h"], []
    for start, stop in pairwise(edges):
        h = torch.where(first[None, :, start, None], 0.0, h)
        y, h = module(obs[:, start:stop].transpose(0, 1), h)
        out.append(y.transpose(0, 1))
    return {"y": torch.cat(out, 1)}


def replay_without_clears(module, obs, actions, state, first):
    """An update that is not told of starts."""
    return replay_in_pieces(module, obs, actions, state, torch.zeros_like(first))


def forget_if_alone(module, obs, state, first):
    """Acts without clearing when there is one agent, as at play."""
    return clear_then_step(module, obs, state, first & (len(first) > 1))


def replay_without_gradient(module, obs, actions, state, first):
    """An update whose action scores are cut from the graph, while its values are not."""
    said = replay_in_pieces(module, obs, actions, state, first)["y"]
    return {"logits": said[..., :2].detach(), "value": said[..., 2]}


def step_by_name(module, obs, state, first):
    said, state = clear_then_step(module, obs, state, first)
    return {"logits": said["y"][..., :2], "value": said["y"][..., 2]}, state


def replay_by_name(module, obs, actions, state, first):
    said = replay_in_pieces(module, obs, actions, state, first)["y"]
    return {"logits": said[..., :2], "value": said[..., 2]}


def value_in_place(module, obs, state, first):
    """A bootstrap that writes the state it comes to into the one it was given."""
    said, after = clear_then_step(module, obs, state, first)
    state["h"].copy_(after["h"])
    return said


def either(act):
    """Let functions that want `first` be told how episodes ended."""
    return lambda module, *rest: act(module, *rest[:-2], rest[-2] | rest[-1])


def terminated_only(act):
    """Clears where episodes terminate, and not where they are truncated."""
    return lambda module, *rest: act(module, *rest[:-2], rest[-2])


def functions(module=None, wrap=None, act=clear_then_step, replay=replay_in_pieces, **options):
    """Acts with gradients on, and hands on its state with the graph."""
    given = {"initial": nothing_yet, "act": act, "replay": replay, "obs": 5, **options}
    if wrap is not None:
        given |= {"act": wrap(act), "replay": wrap(replay), "ends": True}
    return Callables(module or Sequence(), **given)


class OtherInSegments(Sequence):
    """Says a little more over segments than over steps, for no reason that is in any list."""

    def forward(self, x, state):
        y, state = super().forward(x, state)
        return (y + 1e-3 * y.square() if len(x) > 1 else y), state


class LearnedStart(Stepper):
    """Begins every episode in a state it has learnt."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.linspace(-1, 1, 16))

    def clear(self, state, first):
        return torch.where(first[:, None], self.start, state)


class Looks(nn.Module):
    """Images, by a small convolution."""

    def __init__(self):
        super().__init__()
        self.eyes, self.core = nn.Conv2d(1, 4, 3), nn.GRU(4 * 36, 16)

    def forward(self, x, state):
        T, B = x.shape[:2]
        seen = self.eyes((x / 255).flatten(0, 1)).relu().reshape(T, B, -1)
        return self.core(seen, state)


class Names(nn.Module):
    """Whole numbers, by an embedding."""

    def __init__(self):
        super().__init__()
        self.table, self.core = nn.Embedding(7, 8), nn.GRU(8, 16, batch_first=True)

    def forward(self, x, state):
        return self.core(self.table(x), state)


class NoMemory(nn.Module):
    """Thinks about the present only."""

    def __init__(self):
        super().__init__()
        self.outwards = nn.Linear(5, 3)


def without_memory():
    return Callables(
        NoMemory(),
        initial=lambda module, rows: (),
        act=lambda module, obs, state, first: (module.outwards(obs), state),
        replay=lambda module, obs, actions, state, first: module.outwards(obs),
        obs=5,
    )
