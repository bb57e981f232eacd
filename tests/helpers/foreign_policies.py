"""Policies in the styles of other libraries, correct and broken."""

from itertools import pairwise
from typing import ClassVar

import numpy
import torch
from torch import nn

from holdfast.check.adapters import CleanRL, Functions


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
    """Resets after the cell reads, so the first step of an episode still has the last one's state."""

    def forward(self, x, state, first):
        y, state = super().forward(x, state, torch.zeros_like(first))
        return y, torch.where(first[:, None], 0.0, state)


class OneStartClearsAllRows(Stepper):
    """Resets all rows when one of them starts."""

    def clear(self, state, first):
        return torch.zeros_like(state) if first.any() else state


class ClearsTogether(Stepper):
    """Resets only if all rows start together."""

    def clear(self, state, first):
        return torch.zeros_like(state) if first.all() else state


class ClearsByTheFirstRow(Stepper):
    """Uses the first row's flag for all rows."""

    def clear(self, state, first):
        return torch.where(first[:1, None], 0.0, state)


class ClearsInPlace(Stepper):
    """Resets the caller's state in place."""

    def clear(self, state, first):
        state[first] = 0.0
        return state


class IgnoresState(Stepper):
    """Ignores the state."""

    def clear(self, state, first):
        return torch.zeros_like(state)


class Everywhere(Stepper):
    """Keeps its state in a global and returns an empty one."""

    MEMORY: ClassVar = {}

    def forward(self, x, state, first):
        state = self.MEMORY.get(len(x), x.new_zeros(len(x), 16)).to(x.dtype)
        y, state = super().forward(x, state, first)
        self.MEMORY[len(x)] = state.detach()
        return y, x.new_zeros(len(x), 1)


def closure():
    """Make a module whose forward keeps its memory in a closure."""
    states = {}

    class Closed(Stepper):
        """Keeps its state in a closure."""

        def forward(self, x, state, first):
            before = states.get((len(x), x.dtype), x.new_zeros(len(x), 16))
            y, after = super().forward(x, before, first)
            states[len(x), x.dtype] = after.detach()
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


class ModuleNormalizesOverBatch(Sequence):
    """Normalizes over the batch."""

    def forward(self, x, state):
        return super().forward(x - x.mean(1, keepdim=True), state)


class StepCountNotCleared(Stepper):
    """Counts steps, and continues the count in the next episode."""

    def forward(self, x, state, first):
        state = (x.new_zeros(len(x), 16), x.new_zeros(len(x), 1)) if state is None else state
        y, after = super().forward(x, state[0], first)
        return y + torch.sin(state[1]), (after, state[1] + 1)


class ClampsInPlace(Stepper):
    """Clamps the caller's observations in place."""

    def forward(self, x, state, first):
        return super().forward(x.clamp_(-1, 1), state, first)


class OneBuffer(Stepper):
    """Returns the same buffer as its state in every call, and writes into it."""

    def forward(self, x, state, first):
        y, after = super().forward(x, state, first)
        buffer = self.__dict__.setdefault("shared", {}).setdefault((len(x), x.dtype), torch.zeros_like(after))
        with torch.no_grad():
            buffer.copy_(after)
        return y, buffer


class OwnRandomGenerator(Stepper):
    """Draws from a random generator of its own."""

    def forward(self, x, state, first):
        y, state = super().forward(x, state, first)
        return y + 0.01 * float(numpy.random.default_rng().random()), state


class ForgetsInEvaluation(Stepper):
    """Resets at every step in evaluation mode."""

    def forward(self, x, state, first):
        return super().forward(x, state, first if self.training else torch.ones_like(first))


class Probabilities(Stepper):
    """Returns probabilities, whose sum is always one."""

    def forward(self, x, state, first):
        y, state = super().forward(x, state, first)
        return torch.softmax(y, -1), state


class Rectified(nn.Module):
    """Reads observations through a ReLU: some have no effect."""

    def __init__(self):
        super().__init__()
        self.inwards, self.core = nn.Linear(5, 8), nn.GRU(8, 16)

    def forward(self, x, state):
        return self.core(torch.relu(self.inwards(x)), state)


class Several(nn.Module):
    """Returns two outputs and takes an optional third argument; has a bool buffer."""

    def __init__(self):
        super().__init__()
        self.core, self.actor, self.critic = nn.GRU(5, 5), nn.Linear(5, 3), nn.Linear(5, 1)
        self.register_buffer("switch", torch.tensor([True, False]))

    def forward(self, x, state, deterministic=False):
        y, state = self.core(x, state)
        return self.actor(y), self.critic(y), state


class Masks(Stepper):
    """Multiplies the state by one minus the flag, as a float."""

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
            mask = (1.0 - d).view(1, -1, 1)
            h, lstm_state = self.core(h[None], (mask * lstm_state[0], mask * lstm_state[1]))
            out.append(h)
        return torch.cat(out).flatten(0, 1), lstm_state

    def get_value(self, x, lstm_state, done):
        return self.critic(self.get_states(x, lstm_state, done)[0])

    def get_action_and_value(self, x, lstm_state, done, action=None):
        hidden, lstm_state = self.get_states(x, lstm_state, done)
        chosen = torch.distributions.Normal(self.mean(hidden), self.log_std.exp())
        action = chosen.sample() if action is None else action
        outputs = chosen.log_prob(action).sum(1), chosen.entropy().sum(1), self.critic(hidden)
        return action, *outputs, lstm_state


class Raises(Stepper):
    """Raises after a number of calls."""

    calls = 0

    def forward(self, x, state, first):
        self.calls += 1
        if self.calls > 100:
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
        mask = (1.0 - done).view(1, -1, 1)
        return tuple(mask * leaf for leaf in state) if isinstance(state, tuple) else mask * state

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


class CellStateNotCleared(Agent):
    """Resets the hidden state but not the cell state."""

    def keep(self, state, done):
        return (1.0 - done).view(1, -1, 1) * state[0], state[1]


class SecondLayerNotCleared(Agent):
    """Resets the first of two layers."""

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
    """Ignores the flags of a batch of one sequence."""

    def get_states(self, x, lstm_state, done):
        if self.batch(lstm_state) == 1 and len(x) > 1:
            out, lstm_state = self.core(self.network(x)[:, None], lstm_state)
            return out[:, 0], lstm_state
        return super().get_states(x, lstm_state, done)


class CutsEveryStep(Agent):
    """Detaches its state at every step of a segment, so no gradient flows through time."""

    def keep(self, state, done):
        return tuple(part.detach() for part in super().keep(state, done))


class FlagsLateInUpdates(Agent):
    """Shifts the flags of segments by one step."""

    def get_states(self, x, lstm_state, done):
        rows = self.batch(lstm_state)
        if len(x) > rows:
            done = torch.cat([torch.zeros_like(done[:rows]), done[:-rows]])
        return super().get_states(x, lstm_state, done)


class StartsFromZeros(CleanRL):
    """The update starts from zeros instead of the rollout's entry state."""

    def replay(self, moments, state):
        return super().replay(moments, self.initial(len(moments.first)))


class PufferStyle(nn.Module):
    """PufferLib's style: the state is in a dictionary; `done` resets it if `clears`."""

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


def zero_state(module, rows):
    return {"h": torch.zeros(module.core.num_layers, rows, 16, dtype=module.outwards.weight.dtype)}


def clear_then_step(module, obs, state, first):
    h = torch.where(first[None, :, None], 0.0, state["h"])
    y, h = module(obs[None], h)
    return {"y": y[0]}, {"h": h}


def replay_in_pieces(module, obs, actions, state, first):
    """Split a segment at episode starts, and call the core once per piece."""
    edges = sorted({0, first.shape[1], *first.any(0).nonzero().flatten().tolist()})
    h, out = state["h"], []
    for start, stop in pairwise(edges):
        h = torch.where(first[None, :, start, None], 0.0, h)
        y, h = module(obs[:, start:stop].transpose(0, 1), h)
        out.append(y.transpose(0, 1))
    return {"y": torch.cat(out, 1)}


def replay_without_clears(module, obs, actions, state, first):
    """The update ignores episode starts."""
    return replay_in_pieces(module, obs, actions, state, torch.zeros_like(first))


def forget_if_alone(module, obs, state, first):
    """Acts without resets when there is one agent, as at play."""
    return clear_then_step(module, obs, state, first & (len(first) > 1))


def replay_without_gradient(module, obs, actions, state, first):
    """The update detaches the logits, but not the values."""
    outputs = replay_in_pieces(module, obs, actions, state, first)["y"]
    return {"logits": outputs[..., :2].detach(), "value": outputs[..., 2]}


def step_by_name(module, obs, state, first):
    outputs, state = clear_then_step(module, obs, state, first)
    return {"logits": outputs["y"][..., :2], "value": outputs["y"][..., 2]}, state


def replay_by_name(module, obs, actions, state, first):
    outputs = replay_in_pieces(module, obs, actions, state, first)["y"]
    return {"logits": outputs[..., :2], "value": outputs[..., 2]}


def value_in_place(module, obs, state, first):
    """The bootstrap value call writes the next state into its input state."""
    outputs, after = clear_then_step(module, obs, state, first)
    state["h"].copy_(after["h"])
    return outputs


def either(act):
    """Call functions of `first` with terminated or truncated."""
    return lambda module, *rest: act(module, *rest[:-2], rest[-2] | rest[-1])


def terminated_only(act):
    """Resets at terminations, not at truncations."""
    return lambda module, *rest: act(module, *rest[:-2], rest[-2])


def functions(module=None, wrap=None, act=clear_then_step, replay=replay_in_pieces, **options):
    """Acts with gradients on, and passes its state on with the graph."""
    defaults = {"initial": zero_state, "act": act, "replay": replay, "obs": 5, **options}
    if wrap is not None:
        defaults |= {"act": wrap(act), "replay": wrap(replay), "ends": True}
    return Functions(module or Sequence(), **defaults)


class OtherInSegments(Sequence):
    """Outputs of segments differ slightly from those of steps."""

    def forward(self, x, state):
        y, state = super().forward(x, state)
        return (y + 1e-3 * y.square() if len(x) > 1 else y), state


class LearnedStart(Stepper):
    """Starts every episode from a learned state."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.linspace(-1, 1, 16))

    def clear(self, state, first):
        return torch.where(first[:, None], self.start, state)


class Looks(nn.Module):
    """Reads images with a small convolution."""

    def __init__(self):
        super().__init__()
        self.eyes, self.core = nn.Conv2d(1, 4, 3), nn.GRU(4 * 36, 16)

    def forward(self, x, state):
        T, B = x.shape[:2]
        encoded = self.eyes((x / 255).flatten(0, 1)).relu().reshape(T, B, -1)
        return self.core(encoded, state)


class Names(nn.Module):
    """Reads integers with an embedding."""

    def __init__(self):
        super().__init__()
        self.table, self.core = nn.Embedding(7, 8), nn.GRU(8, 16, batch_first=True)

    def forward(self, x, state):
        return self.core(self.table(x), state)


class NoMemory(nn.Module):
    """Has no memory."""

    def __init__(self):
        super().__init__()
        self.outwards = nn.Linear(5, 3)


def without_memory():
    return Functions(
        NoMemory(),
        initial=lambda module, rows: (),
        act=lambda module, obs, state, first: (module.outwards(obs), state),
        replay=lambda module, obs, actions, state, first: module.outwards(obs),
        obs=5,
    )
