"""Ways to get memory wrong in the interfaces of `policy_styles`, with the words a diagnosis must contain."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from helpers import foreign_policies as foreign
from helpers import policy_styles as styles
from helpers.policy_styles import BatchFirst, CleanAgent, Memory, Ring, Scan, Segments, Window
from holdfast.check.adapters import Puffer


@dataclass(frozen=True)
class Bug:
    """A sabotaged policy, and words of the pattern that names its bug; no words: nothing may be named."""

    name: str
    make: Callable[[], Any]
    words: tuple[str, ...] = ()
    options: dict[str, Any] | None = None


def variant(base, **methods):
    """A subclass with other methods."""
    return type(f"Other{base.__name__}", (base,), methods)


def cleared(state, flags):
    return tuple(torch.where(flags.bool()[None, :, None], 0.0, part) for part in state)


def only(part):
    """Clear one tensor of the state."""
    return lambda self, state, first: tuple(
        new if at == part else old for at, (new, old) in enumerate(zip(cleared(state, first), state, strict=True))
    )


def layer(number):
    """Clear one layer of all tensors."""
    mask = lambda part: (torch.arange(len(part)) == number)[:, None, None]  # noqa: E731
    return lambda self, state, first: tuple(
        torch.where(mask(old), new, old) for new, old in zip(cleared(state, first), state, strict=True)
    )


def units(chosen):
    """Clear some units of all tensors."""
    return lambda self, state, first: tuple(
        torch.where(chosen(torch.arange(old.shape[-1])), new, old)
        for new, old in zip(cleared(state, first), state, strict=True)
    )


def by_flags(change):
    """Clear by other flags."""
    return lambda self, state, first: cleared(state, change(first))


def soft(share):
    return lambda self, state, first: tuple(
        torch.where(first.bool()[None, :, None], share * part, part) for part in state
    )


def to_value(value):
    return lambda self, state, first: tuple(torch.where(first.bool()[None, :, None], value, part) for part in state)


def stepwise(self, state, change):
    """Change a state at every step."""
    return Memory.step(self, *state) if change is None else change(*Memory.step(self, *state))


def after_step(change):
    """Change the state that a step returns."""
    return lambda self, x, state: (lambda out, new: (out, change(self, new)))(*Memory.step(self, x, state))


def entry(change):
    """Change the state a segment of more than one step starts from."""

    def forward(self, x, state=None, first=None):
        if state is not None and len(x) > 1:
            state = change(state)
        return Segments.forward(self, x, state, first)

    return forward


def exit_state(change):
    """Change the state a segment of more than one step returns."""

    def forward(self, x, state=None, first=None):
        y, state = Segments.forward(self, x, state, first)
        return y, change(state) if len(x) > 1 else state

    return forward


def wiped_at_9(self, x, state=None, first=None):
    """Lose the state at one step of a long call."""
    first = torch.zeros(x.shape[:2], dtype=torch.bool) if first is None else first.clone()
    first[9:10] = True
    return Segments.forward(self, x, state, first)


def chunks(length, keep=False):
    """Read a segment in chunks that start from zeros, or from a detached state."""

    def forward(self, x, state=None, first=None):
        outs = []
        for t in range(0, len(x), length):
            if t:
                state = tuple(part.detach() if keep else torch.zeros_like(part) for part in state)
            (a, v), state = Segments.forward(
                self, x[t : t + length], state, None if first is None else first[t : t + length]
            )
            outs.append((a, v))
        return tuple(torch.cat(part) for part in zip(*outs, strict=True)), state

    return forward


def segment_flags(change):
    return lambda self, first: change(first) if len(first) > 1 else first


def late(first):
    return torch.cat([torch.zeros_like(first[:1]), first[:-1]])


def early(first):
    return torch.cat([first[1:], torch.zeros_like(first[:1])])


def when(condition, base=Segments):
    """Never clear where a condition on `x` holds."""

    def forward(self, x, state=None, first=None):
        if condition(self, x) and first is not None:
            first = torch.zeros_like(first)
        return base.forward(self, x, state, first)

    return forward


class Counter(Memory):
    """Counts steps in a Python number that no start clears."""

    def forward(self, x, state=None, first=None):
        *state, count = (*self.initial(x), 0) if state is None else state
        (actor, critic), state = super().forward(x, tuple(state), first)
        return (actor + 0.1 * torch.sin(torch.tensor(float(count))), critic), (*state, count + 1)


class ClockOf64(Memory):
    """Forgets after 64 steps of an episode."""

    def forward(self, x, state=None, first=None):
        *state, age = (*self.initial(x), x.new_zeros(len(x), 1)) if state is None else state
        age = age if first is None else torch.where(first.bool()[:, None], 0.0, age)
        forget = age[:, 0] >= 64
        y, state = super().forward(x, cleared(state, forget), first)
        return y, (*state, age + 1)


class WipedAt30(Memory):
    """Forgets once, at step 30 of an episode."""

    def forward(self, x, state=None, first=None):
        *state, age = (*self.initial(x), x.new_zeros(len(x), 1)) if state is None else state
        age = age if first is None else torch.where(first.bool()[:, None], 0.0, age)
        y, state = super().forward(x, cleared(state, age[:, 0] == 30), first)
        return y, (*state, age + 1)


class HalvedEveryNinth(Memory):
    """A Python number counts calls, and halves the state in every ninth."""

    def forward(self, x, state=None, first=None):
        *state, calls = (*self.initial(x), 0) if state is None else state
        if calls and calls % 9 == 0:
            state = tuple(0.5 * part for part in state)
        y, state = super().forward(x, tuple(state), first)
        return y, (*state, calls + 1)


class StartsAtMinusInfinity(nn.Module):
    """A running maximum that is cleared by multiplication: 0 times infinity at the first start."""

    def __init__(self):
        super().__init__()
        self.inwards, self.head = nn.Linear(styles.WIDTH, 8), nn.Linear(8 + styles.WIDTH, 3)

    def forward(self, x, state=None, first=None):
        state = x.new_full((len(x), 8), -torch.inf) if state is None else state
        if first is not None:
            start = first.to(x)[:, None]
            state = (1 - start) * state + torch.where(start > 0, -torch.inf, 0.0)
        state = torch.maximum(state, self.inwards(x))
        return self.head(torch.cat([state, x], -1)), state


class RunningMaximum(StartsAtMinusInfinity):
    """The right one: most observations have no gradient into the next output."""

    def forward(self, x, state=None, first=None):
        state = x.new_full((len(x), 8), -10.0) if state is None else state
        state = state if first is None else torch.where(first.bool()[:, None], -10.0, state)
        state = torch.maximum(state, self.inwards(x))
        return self.head(torch.cat([state, x], -1)), state


class NoClearAfter64(Memory):
    """Clears no episode longer than 60 steps."""

    def forward(self, x, state=None, first=None):
        *state, age = (*self.initial(x), x.new_zeros(len(x), 1)) if state is None else state
        first = torch.zeros(len(x), dtype=torch.bool) if first is None else first.bool()
        first = first & (age[:, 0] < 60)
        y, state = super().forward(x, tuple(state), first)
        return y, (*state, torch.where(first[:, None], 0.0, age) + 1)


class Overflows(Memory):
    """A state that may overflow, cleared by multiplication."""

    def initial(self, x):
        return tuple(x.new_zeros(3, len(x), HIDDEN) for _ in range(2)) if False else super().initial(x)

    def clear(self, state, first):
        return tuple((1 - first.to(part.dtype))[None, :, None] * part for part in state)

    def step(self, x, state):
        out, (h, c) = super().step(x, state)
        return out, (h, c + 0.1 * torch.exp(x.abs().mean(-1))[None, :, None])


HIDDEN = styles.HIDDEN


class TwoStarts(styles.LearnedStart):
    """None gives the learned initial state, an episode start gives zeros."""

    def clear(self, state, first):
        return cleared(state, first)


class StartWithoutGradient(styles.LearnedStart):
    """The learned initial state is detached."""

    def initial(self, x):
        return tuple(part.detach() for part in super().initial(x))


class WrongBackward(torch.autograd.Function):
    """tanh, whose backward forgets the square."""

    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * (1 - y.abs())


class RightBackward(WrongBackward):
    """tanh."""

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * (1 - y.square())


def with_function(function):
    """A memory whose output passes a hand-written backward."""

    def step(self, x, state):
        out, (h, c) = Memory.step(self, x, state)
        return function.apply(out), (torch.cat([h[:-1], function.apply(h[-1:])]), c)

    return variant(Segments, step=step)


class HalfWeightGradient(Segments):
    """The recurrent weights get half of their gradient in segments."""

    def step(self, x, state):
        out, h, c = torch.tanh(self.inwards(x)), [], []
        for number, cell in enumerate(self.cells):
            weight = 0.5 * cell.weight_hh + 0.5 * cell.weight_hh.detach()
            gates = x.new_zeros(()) + nn.functional.linear(out, cell.weight_ih, cell.bias_ih)
            gates = gates + nn.functional.linear(state[0][number], weight, cell.bias_hh)
            i, f, g, o = gates.chunk(4, -1)
            new_c = f.sigmoid() * state[1][number] + i.sigmoid() * g.tanh()
            out = o.sigmoid() * new_c.tanh()
            h.append(out)
            c.append(new_c)
        return out, (torch.stack(h), torch.stack(c))


class DetachLate(Segments):
    """Detaches the state every 12 steps of a segment."""

    forward = chunks(12, keep=True)


class StaleValue(Segments):
    """The critic reads the state of the segment's end."""

    def heads(self, out, state):
        if len(out) > 1:
            return self.actor(out), self.critic(state[0][-1].expand_as(out))
        return self.actor(out), self.critic(out)


class EarlierValue(CleanAgent):
    """The bootstrap value is of zeros."""

    def get_value(self, x, lstm_state, done):
        return super().get_value(x, tuple(torch.zeros_like(part) for part in lstm_state), done)


class ClearedValue(CleanAgent):
    """The bootstrap value takes the state to be cleared."""

    def get_value(self, x, lstm_state, done):
        return super().get_value(x, lstm_state, torch.ones_like(done))


class UnclearedValue(CleanAgent):
    """The bootstrap value ignores done."""

    def get_value(self, x, lstm_state, done):
        return super().get_value(x, lstm_state, torch.zeros_like(done))


class NextValue(CleanAgent):
    """The bootstrap value reads its observation twice."""

    def get_value(self, x, lstm_state, done):
        _, lstm_state = self.get_states(x, lstm_state, done)
        return super().get_value(x, lstm_state, torch.zeros_like(done))


class ActsWithoutClear(CleanAgent):
    """Ignores done where no action is given, as in a rollout."""

    def get_action_and_value(self, x, lstm_state, done, action=None):
        done = torch.zeros_like(done) if action is None else done
        return super().get_action_and_value(x, lstm_state, done, action)


class KeepsStateInRollouts(CleanAgent):
    """Returns the state it was given where no action is given."""

    def get_action_and_value(self, x, lstm_state, done, action=None):
        *outputs, after = super().get_action_and_value(x, lstm_state, done, action)
        return *outputs, lstm_state if action is None else after


class OtherLogProb(CleanAgent):
    """The log-probability of a rollout is of a sharper distribution."""

    def get_action_and_value(self, x, lstm_state, done, action=None):
        action_taken, log_prob, *outputs = super().get_action_and_value(x, lstm_state, done, action)
        return action_taken, log_prob * (1.1 if action is None else 1.0), *outputs


class NoClearWithGradients(CleanAgent):
    """Ignores done where gradients are on."""

    def keep(self, state, d):
        return state if torch.is_grad_enabled() else super().keep(state, d)


class AgentPart(CleanAgent):
    """Clears h, not c."""

    def keep(self, state, d):
        return super().keep(state, d)[0], state[1]


class AgentInverted(CleanAgent):
    """Clears where done is false."""

    def keep(self, state, d):
        return super().keep(state, 1 - d)


class AgentWrongView(CleanAgent):
    """Regroups the flattened rollout batch first."""

    def get_states(self, x, lstm_state, done):
        rows = lstm_state[0].shape[1]
        if len(x) > rows:
            done = done.reshape(rows, -1).T.flatten()
        return super().get_states(x, lstm_state, done)


class AgentZeroEntry(CleanAgent):
    """Replays from zeros."""

    def get_states(self, x, lstm_state, done):
        if len(x) > lstm_state[0].shape[1]:
            lstm_state = tuple(torch.zeros_like(part) for part in lstm_state)
        return super().get_states(x, lstm_state, done)


class AgentEvalStuck(CleanAgent):
    """In evaluation mode one environment alone keeps its state over episodes."""

    def keep(self, state, d):
        return state if not self.training and len(d) == 1 else super().keep(state, d)


class BatchNormed(CleanAgent):
    """Batch normalization after the encoder."""

    def __init__(self):
        super().__init__()
        self.network.append(nn.BatchNorm1d(16))


class WindowOffByOne(Window):
    """Clearing keeps the newest entry."""

    def clear(self, state, first):
        keep = torch.arange(self.size) == self.size - 1
        return state[0], torch.where(first.bool()[:, None] & ~keep, False, state[1])


class WindowUnmasked(Window):
    """Clearing zeroes entries, and attends to them still."""

    def clear(self, state, first):
        return torch.where(first.bool()[:, None, None], 0.0, state[0]), state[1]


class WindowNotCleared(Window):
    """No start clears the window."""

    def clear(self, state, first):
        return state


class RingPointer(Ring):
    """A start clears the count of no row but those of an even number."""

    def clear_count(self, count, reset):
        return torch.where(reset & (count % 2 == 0), 0, count)


class ScanEntryLost(Scan):
    """The parallel form drops the entry state's decay of one step."""

    def forward(self, x, state=None, first=None):
        if state is not None and len(x) > 1:
            state = state / self.decay
        return super().forward(x, state, first)


class ScanLastEpisode(Scan):
    """The state after a segment is that without episode starts."""

    def forward(self, x, state=None, first=None):
        y, after = super().forward(x, state, first)
        return y, super().forward(x, state, None)[1] if len(x) > 1 else after


class EvalForgets(Segments):
    """One row alone in evaluation mode starts every call from zeros."""

    def forward(self, x, state=None, first=None):
        if not self.training and x.shape[1] == 1:
            state = None
        return super().forward(x, state, first)


class NoneIsKept(Memory):
    """None continues from the last call."""

    last = None

    def initial(self, x):
        if self.last is not None and self.last[0].shape[1] == len(x) and self.last[0].dtype == x.dtype:
            return self.last
        return super().initial(x)

    def step(self, x, state):
        out, after = super().step(x, state)
        self.last = tuple(part.detach() for part in after)
        return out, after


class Running(Segments):
    """Normalizes by a running mean that rollouts change."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(styles.WIDTH))

    def forward(self, x, state=None, first=None):
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 1)), 0.01)
        return super().forward(x - self.mean, state, first)


def at_64(self, x):
    return x.shape[1] >= 64


PART, SOFT, NEVER = "only part of the state", "soft", "state never reset"
NEIGHBOUR, INVERTED, TWO = "flags of other rows", "inverted", "two different initial states"
BUGS = [
    # Parts of a state.
    Bug("h cleared, not c", variant(Memory, clear=only(0)), (PART,)),
    Bug("c cleared, not h", variant(BatchFirst, clear=only(1)), (PART,)),
    Bug("first layer cleared", variant(Segments, clear=layer(0)), (PART,)),
    Bug("all but the last of 3 layers", variant(Memory, layers=3, clear=lambda s, x, f: tuple(
        torch.cat([new[:2], old[2:]]) for new, old in zip(cleared(x, f), x, strict=True))), (PART,)),
    Bug("half the units cleared", variant(Memory, clear=units(lambda at: at < styles.HIDDEN // 2)), (PART,)),
    Bug("one unit not cleared", variant(styles.DictState, clear=units(lambda at: at != 3)), (PART,)),
    Bug("every second unit cleared", variant(styles.DataclassState, clear=units(lambda at: at % 2 == 0)), (PART,)),
    Bug("soft clear by 0.5", variant(Memory, clear=soft(0.5)), (SOFT,)),
    Bug("soft clear by 0.01", variant(styles.DoneBeforeState, clear=soft(0.01)), (SOFT,)),
    Bug("cleared to 0.1", variant(Memory, clear=to_value(0.1)), (TWO,)),
    Bug("two initial states", TwoStarts, (TWO,)),
    Bug("dict state, c kept", variant(styles.DictState, clear=only(0)), (PART,)),
    Bug("two LSTMs, critic kept", variant(foreign.Agent, keep=lambda self, s, d: (s[0] * (1 - d)[None, :, None], s[1])),
        (PART,), {"obs": 4, "actions": 3}),
    # Flags.
    Bug("flags of the neighbour", variant(Memory, clear=by_flags(lambda f: f.roll(1))), (NEIGHBOUR,)),
    Bug("flags flipped", variant(Segments, clear=by_flags(lambda f: f.flip(0))), (NEIGHBOUR,)),
    Bug("flags inverted", variant(Memory, clear=by_flags(lambda f: ~f.bool())), (INVERTED,)),
    Bug("no clear", variant(BatchFirst, clear=by_flags(torch.zeros_like)), (NEVER,)),
    Bug("no clear, keyword", variant(styles.KeywordFlags, clear=by_flags(torch.zeros_like)), (NEVER,)),
    Bug("no clear, done before state", variant(styles.DoneBeforeState, clear=by_flags(torch.zeros_like)), (NEVER,)),
    Bug("no clear, masks", variant(styles.MasksLast, clear=lambda self, s, f: s), (NEVER,)),
    Bug("any start clears all", variant(BatchFirst, clear=by_flags(lambda f: f.bool().any().expand_as(f))),
        ("one episode start resets all rows",)),
    Bug("late in segments", variant(Segments, flags=segment_flags(late)), ("one step late",)),
    Bug("early in segments", variant(BatchFirst, flags=segment_flags(early)), ("one step early",)),
    Bug("cyclic roll in segments", variant(Segments, flags=segment_flags(lambda f: f.roll(1, 0))),
        ("one step late", "rolled")),
    Bug("two steps late", variant(Segments, flags=segment_flags(lambda f: late(late(f)))), ("late",)),
    Bug("first flag ignored", variant(Segments, flags=segment_flags(
        lambda f: torch.cat([torch.zeros_like(f[:1]), f[1:]]))), ("first flag is ignored",)),
    Bug("last flag ignored", variant(Segments, flags=segment_flags(
        lambda f: torch.cat([f[:-1], torch.zeros_like(f[:1])]))), ("last flag is ignored",)),
    Bug("first flag only", variant(Segments, flags=segment_flags(
        lambda f: torch.cat([f[:1], torch.zeros_like(f[1:])]))), ("only a segment's first flag",)),
    Bug("clear after reading", variant(Segments, clear=lambda self, s, f: s, step=None), ("late",)),
    # Entry states.
    Bug("entry in bfloat16", variant(Segments, forward=entry(
        lambda s: tuple(p.bfloat16().to(p.dtype) for p in s))), ("rounded",)),
    Bug("entry in float16", variant(Segments, forward=entry(
        lambda s: tuple(p.half().to(p.dtype) for p in s))), ("rounded",)),
    Bug("entry h and c swapped", variant(Segments, forward=entry(lambda s: s[::-1])), ("swapped",)),
    Bug("entry layers swapped", variant(Segments, forward=entry(
        lambda s: tuple(p.flip(0) for p in s))), ("swapped",)),
    Bug("entry of zeros", variant(Segments, forward=entry(
        lambda s: tuple(torch.zeros_like(p) for p in s))), ("starts from zeros",)),
    Bug("entry without c", variant(Segments, forward=entry(
        lambda s: (s[0], torch.zeros_like(s[1])))), ("part of the entry state",)),
    Bug("entry without layer 1", variant(Segments, forward=entry(
        lambda s: tuple(torch.cat([p[:1], torch.zeros_like(p[1:])]) for p in s))), ("part of the entry state",)),
    Bug("entry without half the units", variant(Segments, forward=entry(
        lambda s: tuple(torch.cat([p[..., :4], torch.zeros_like(p[..., 4:])], -1) for p in s))),
        ("part of the entry state",)),
    Bug("entry of other rows", variant(Segments, forward=entry(
        lambda s: tuple(p.roll(1, 1) for p in s))), ("other rows",)),
    # Exit states.
    Bug("exit state of the entry", variant(Segments, forward=lambda self, x, state=None, first=None: (
        Segments.forward(self, x, state, first)[0],
        Segments.forward(self, x, state, first)[1] if len(x) == 1 or state is None else state)),
        ("state a segment returns",)),
    Bug("exit state swapped", variant(Segments, forward=exit_state(lambda s: s[::-1])), ("state a segment returns",)),
    Bug("exit state of zeros", variant(BatchFirst, forward=lambda self, obs, hidden=None, dones=None: (
        lambda a, v, s: (a, v, tuple(p * (obs.shape[1] == 1) for p in s)))(
            *BatchFirst.forward(self, obs, hidden, dones))), ("state a segment returns",)),
    Bug("exit state of a scan", ScanLastEpisode, ("state a segment returns",)),
    Bug("every call returns zeros", variant(Segments, forward=lambda self, x, state=None, first=None: (
        lambda y, s: (y, tuple(torch.zeros_like(part) for part in s)))(*Segments.forward(self, x, state, first))),
        ("every call starts from zeros",)),
    # Segments.
    Bug("a call's first flag ignored", variant(Segments, flags=lambda self, f: torch.cat(
        [torch.zeros_like(f[:1]), f[1:]])), ("first flag of every call",)),
    Bug("no clear where many start", variant(Segments, flags=lambda self, f: f & (f.sum(1, True) < 2)),
        ("rows of a batch mix", "some of a segment")),
    Bug("later outputs", variant(Segments, heads=lambda self, out, s: Memory.heads(self, out + 0.1 * out.flip(0), s)),
        ("later steps",)),
    Bug("zeros at a call's step 9", variant(Segments, forward=wiped_at_9), ("long segments are read",)),
    Bug("chunks of 4 from zeros", variant(Segments, forward=chunks(4)), ("chunks of 4",)),
    Bug("chunks of 16 from zeros", variant(Segments, forward=chunks(16)), ("chunks of 16",)),
    Bug("chunks of 40 from zeros", variant(Segments, forward=chunks(40)), ("chunks of 40", "long segments are read")),
    Bug("scan's entry", ScanEntryLost, ()),
    Bug("window off by one", WindowOffByOne, (PART,)),
    Bug("window zeroed, not masked", WindowUnmasked, (PART, TWO)),
    Bug("window not cleared", WindowNotCleared, (NEVER,)),
    Bug("ring", RingPointer, ()),
    Bug("segment's critic", StaleValue, ()),
    # Gradients.
    Bug("detach every step", variant(Segments, clear=lambda self, s, f: tuple(p.detach() for p in cleared(s, f))),
        ("graph cut inside",)),
    Bug("detach every 12 steps", DetachLate, ("graph cut inside",)),
    Bug("detach one tensor", variant(Segments, clear=lambda self, s, f: (cleared(s, f)[0].detach(), cleared(s, f)[1])),
        ("part of the gradient", "gradient")),
    Bug("half gradient", HalfWeightGradient, ("gradient",)),
    Bug("wrong backward", with_function(WrongBackward), ("hand-written backward",)),
    Bug("learned start without gradient", StartWithoutGradient, ("no gradient",)),
    Bug("no_grad memory", variant(Segments, step=torch.no_grad()(Memory.step)), ("gradient",)),
    # Call paths.
    Bug("acts without clear", ActsWithoutClear, (NEVER, "without an action"), {"obs": 4, "actions": 3}),
    Bug("keeps its state in rollouts", KeepsStateInRollouts, ("without an action", "starts from zeros"),
        {"obs": 4, "actions": 3}),
    Bug("other log-probability in rollouts", OtherLogProb, ("without an action",), {"obs": 4, "actions": 3}),
    Bug("no clear with gradients on", NoClearWithGradients, (NEVER,), {"obs": 4, "actions": 3}),
    Bug("agent's part", AgentPart, (PART,), {"obs": 4, "actions": 3}),
    Bug("agent's 1 - done", AgentInverted, (INVERTED,), {"obs": 4, "actions": 3}),
    Bug("agent's flags regrouped", AgentWrongView, ("time and batch axes swapped",), {"obs": 4, "actions": 3}),
    Bug("agent replays from zeros", AgentZeroEntry, ("starts from zeros",), {"obs": 4, "actions": 3}),
    Bug("agent alone in evaluation", AgentEvalStuck, ("batch of one", NEVER), {"obs": 4, "actions": 3}),
    Bug("agent with batch norm", BatchNormed, ("rows of a batch mix",), {"obs": 4, "actions": 3}),
    Bug("bootstrap from zeros", EarlierValue, ("bootstrap",), {"obs": 4, "actions": 3}),
    Bug("bootstrap cleared", ClearedValue, ("bootstrap",), {"obs": 4, "actions": 3}),
    Bug("bootstrap not cleared", UnclearedValue, ("bootstrap",), {"obs": 4, "actions": 3}),
    Bug("bootstrap one step on", NextValue, ("bootstrap",), {"obs": 4, "actions": 3}),
    Bug("one row in evaluation", EvalForgets, ("batch of one", "every call starts"), {}),
    Bug("None continues", NoneIsKept, ("outside the returned state",)),
    # Sizes.
    Bug("no clear of 64 rows", variant(Segments, forward=when(at_64)), ("64 rows", NEVER)),
    Bug("no clear of one row", variant(Segments, forward=when(lambda self, x: x.shape[1] == 1)), ("batch of one",)),
    Bug("no clear in segments over 32", variant(Segments, forward=when(lambda self, x: len(x) > 32)),
        ("long segments are read", NEVER)),
    Bug("no clear in segments", variant(Segments, forward=when(lambda self, x: len(x) > 1)), (NEVER,)),
    Bug("forgets after 64 steps", ClockOf64, ("64",)),
    Bug("no clear after 60 steps", NoClearAfter64, ("long episodes", NEVER)),
    Bug("T times B", variant(Segments, flags=lambda self, f: f.flatten().reshape(f.shape[::-1]).T
        if len(f) > 1 and f.shape[0] == f.shape[1] else f), ("time and batch axes swapped",)),
    # Other values.
    Bug("Python counter", Counter, ("not a tensor", PART)),
    Bug("halved every ninth call", HalvedEveryNinth, ("no tensor",)),
    Bug("wiped at step 30", WipedAt30, ("forgets after",)),
    Bug("starts at minus infinity", StartsAtMinusInfinity, ("not finite",)),
    Bug("overflow", Overflows, ("not finite",)),
    Bug("running mean", Running, ("outside the returned state",)),
    Bug("PufferLib's wrapper", styles.PufferLSTM, ("before each rollout", NEVER), {"obs": 5, "actions": 3}),
]  # fmt: skip


def _clear_after(self, x, state):
    return Memory.step(self, x, state)


class ClearsAfter(Segments):
    """Clears after reading."""

    def forward(self, x, state=None, first=None):
        state = self.initial(x[0]) if state is None else state
        first = torch.zeros(x.shape[:2]) if first is None else first
        outs = []
        for t in range(len(x)):
            out, state = self.step(x[t], state)
            state = cleared(state, first[t])
            outs.append(out)
        return self.heads(torch.stack(outs), state), state


BUGS = [Bug(bug.name, ClearsAfter, bug.words) if bug.name == "clear after reading" else bug for bug in BUGS]

AGENT = {"obs": 4, "actions": 3}
RIGHT = {
    "optional flags, step": (Memory, {}),
    "optional flags, time first": (Segments, {}),
    "optional dones, batch first": (BatchFirst, {}),
    "done before state": (styles.DoneBeforeState, {}),
    "state before x, resets": (styles.StateBefore, {"obs": 5}),
    "masks": (styles.MasksLast, {}),
    "keyword flags": (styles.KeywordFlags, {}),
    "learned start": (styles.LearnedStart, {}),
    "dataclass": (styles.DataclassState, {}),
    "nested, no None": (styles.NestedState, {}),
    "dictionary": (styles.DictState, {}),
    "two LSTMs": (styles.TwoLSTMs, {}),
    "proj_size": (lambda: styles.TwoLSTMs(4), {}),
    "window": (Window, {}),
    "ring": (Ring, {}),
    "scan": (Scan, {}),
    "rounds": (styles.Rounds, {}),
    "hard gates": (styles.Hard, {}),
    "detached critic": (styles.DetachedCritic, {}),
    "answers late": (styles.AnswersLate, {}),
    "CleanRL agent": (CleanAgent, AGENT),
    "CleanRL agent of two layers": (variant(CleanAgent, layers=2), AGENT),
    "CleanRL agent of two LSTMs": (styles.TwoStreams, AGENT),
    "right backward": (with_function(RightBackward), {}),
    "compiled": (lambda: torch.compile(Segments(), backend="eager"), {}),
    "frozen encoder": (lambda: _frozen(Memory()), {}),
    "multiplied": (variant(Memory, clear=lambda self, s, f: tuple(
        (1 - f.to(p.dtype))[None, :, None] * p for p in s)), {}),
    "three layers": (variant(Segments, layers=3), {}),
    "layer norm": (variant(Memory, heads=lambda self, out, s: self.actor(
        nn.functional.layer_norm(out, out.shape[-1:]))), {}),
    "float64": (lambda: Segments().double(), {}),
    "nn.LSTM projected": (lambda: nn.LSTM(5, 16, 2, proj_size=4), {"clear": False}),
    "nn.LSTM bare": (lambda: nn.LSTM(5, 16), {"clear": False}),
    "no memory": (foreign.without_memory, {}),
    "Puffer stored": (lambda: Puffer(foreign.PufferStyle(True), obs=5, trainer="stored"), {}),
    "functions": (foreign.functions, {}),
    "dropout off": (variant(Memory, heads=lambda self, out, s: self.actor(torch.dropout(out, 0.0, True))), {}),
    "float32 inside": (variant(Memory, heads=lambda self, out, s: self.actor(out).float()), {}),
    "ReLU memory": (variant(Memory, step=lambda self, x, s: (lambda o, n: (torch.relu(o), n))(
        *Memory.step(self, x, s))), {}),
    "one layer, time first": (variant(Segments, layers=1), {}),
    "gated recurrent": (foreign.Stepper, {"obs": 5}),
    "deterministic": (foreign.Several, {"obs": 5, "clear": False}),
}  # fmt: skip


def _frozen(module):
    module.inwards.requires_grad_(False)
    return module
