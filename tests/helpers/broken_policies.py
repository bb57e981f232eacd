"""Broken Holdfast policies and trainers: each breaks a law."""

import dataclasses
import sys
from contextlib import contextmanager
from unittest import mock

import torch
from tensordict import TensorDict
from torch import nn

from helpers.small_policy import Small
from holdfast.evaluation.evaluate import EvalPolicy, evaluate
from holdfast.learn import replay
from holdfast.policies import Fast, LSTMWrapper
from holdfast.rollout import Collector, step_to_td
from holdfast.worlds import make_world


class NoDetach(LSTMWrapper):
    """Hand-written around its own nn.LSTM; the stored state keeps its graph."""

    def __init__(self):
        super().__init__(5, 16, 1)
        self.core = nn.LSTM(5, 16, 1)
        self.out = nn.Linear(16, 4)
        self.states = {}

    def forward(self, td, state=None, action=None):
        shape = td.batch_size
        B, T = shape[0], shape[1] if len(shape) == 2 else 1
        x = td["env_obs"].to(self.out.weight.dtype).reshape(B, T, -1).transpose(0, 1)
        first = next(td[key] for key in ("first", "dones", "truncateds") if key in td).reshape(B, T)
        start = 0 if self.store.is_replaying else int(td["training_env_id_start"].flatten()[0])
        entry = self.store.read(start, B)
        pair = entry["h"].transpose(0, 1).contiguous(), entry["c"].transpose(0, 1).contiguous()
        if not self.store.is_replaying:
            pair = self.states.get(start, pair)
        outputs = []
        for t in range(T):
            pair = tuple(torch.where(first[None, :, t, None], 0.0, part) for part in pair)
            y, pair = self.core(x[t : t + 1], pair)
            outputs.append(y[0])
        if not self.store.is_replaying:
            self.states[start] = pair
        h, c = (part.detach().transpose(0, 1) for part in pair)
        self.store.write(start, TensorDict({"h": h, "c": c}, batch_size=[B]))
        out = self.out(torch.stack(outputs, 1)).reshape(*shape, 4)
        log_probs = torch.log_softmax(out[..., :3], -1)
        chosen = torch.zeros(shape, dtype=torch.long) if action is None else action
        td["actions"], td["values"], td["full_log_probs"] = chosen, out[..., 3], log_probs
        td["act_log_prob"] = log_probs.gather(-1, chosen[..., None])[..., 0]
        return td

    def reset_memory(self):
        self.states.clear()
        super().reset_memory()


class LateClear(Small):
    """Resets one step after an episode start."""

    late = None

    def unroll(self, obs, first, state, valid=None):
        if first.dim() == 1 and not self.store.is_replaying:
            late = torch.zeros_like(first) if self.late is None or len(self.late) != len(first) else self.late
            self.late = first
        elif first.dim() == 1:
            late = torch.zeros_like(first)
        else:
            late = torch.cat([torch.zeros_like(first[:, :1]), first[:, :-1]], dim=1)
        return super().unroll(obs, late, state, valid)


class NoClear(Small):
    """Never resets the state."""

    def unroll(self, obs, first, state, valid=None):
        return super().unroll(obs, torch.zeros_like(first), state, valid)


class _ClearsOnOneFlag(Small):
    flag = ""

    def forward(self, td, state=None, action=None):
        if self.flag in td:
            td["first"] = td[self.flag].clone()
        elif "first" not in td:
            td["first"] = torch.zeros(td.batch_size, dtype=torch.bool)
        return super().forward(td, state, action)


class ClearsOnTerminatedOnly(_ClearsOnOneFlag):
    """Resets after terminations, not after truncations."""

    flag = "dones"


class ClearsOnTruncatedOnly(_ClearsOnOneFlag):
    """Resets after truncations, not after terminations."""

    flag = "truncateds"


class UpdateIgnoresClears(Small):
    """Resets in rollouts, but not in updates."""

    def unroll(self, obs, first, state, valid=None):
        if self.store.is_replaying and first.dim() == 2:
            first = torch.zeros_like(first)
        return super().unroll(obs, first, state, valid)


class UpdateClearsAtTheStartOnly(Small):
    """Applies only a segment's first flag in updates."""

    def unroll(self, obs, first, state, valid=None):
        if first.dim() == 2:
            first = first.clone()
            first[:, 1:] = False
        return super().unroll(obs, first, state, valid)


class ZeroEntry(Small):
    """Replays from zeros although the rollout carried a state."""

    def replay(self, entry):
        return super().replay(entry.apply(torch.zeros_like))


class TimeAndBatchSwapped(Small):
    """Reads (t b) where (b t) is written."""

    def unroll(self, obs, first, state, valid=None):
        if first.dim() == 2:
            B, T = first.shape
            obs = obs.reshape(T, B, *obs.shape[2:]).transpose(0, 1)
        return super().unroll(obs, first, state, valid)


class SharedSlices(Small):
    """Keeps one state for all slices."""

    def forward(self, td, state=None, action=None):
        if "training_env_id_start" in td:
            td["training_env_id_start"] = torch.zeros_like(td["training_env_id_start"])
        return super().forward(td, state, action)


class PolicyNormalizesOverBatch(Small):
    """Normalizes over the batch, so that rows depend on each other."""

    def encode(self, obs):
        x = super().encode(obs)
        return x - x.mean(0)


class BootstrapAdvances(Small):
    """A bootstrap value advances the live state."""

    def unroll(self, obs, first, state, valid=None):
        outputs, after = super().unroll(obs, first, state, valid)
        if self.store.is_replaying and self.store.slices.get(0) == len(first):
            entry, self.store._entry = self.store._entry, None
            self.store.write(0, after)
            self.store._entry = entry
        return outputs, after


class StartsEveryCallFromZeros(Small):
    """Starts every call from zeros."""

    def unroll(self, obs, first, state, valid=None):
        return super().unroll(obs, first, state.apply(torch.zeros_like), valid)


class KeepsAllOutputs(Small):
    """Keeps the outputs of every call."""

    def __init__(self, **options):
        super().__init__(**options)
        self.past = []

    def decode(self, features):
        self.past.append(features.detach())
        return super().decode(features)


class EntryWithGraph(Small):
    """Lets gradients flow into the entry state."""

    @contextmanager
    def replay(self, entry):
        with super().replay(entry):
            self.store._entry = entry
            yield


class CellStateNotSaved(Small):
    """Does not save the cell states."""

    def get_memory(self):
        h, c = super().get_memory()
        return h, {start: torch.zeros_like(leaf) for start, leaf in c.items()}


class OtherWhenCompiled(Small):
    """Computes something else when compiled."""

    def encode(self, obs):
        x = super().encode(obs)
        return x * 1.001 if torch.compiler.is_compiling() else x


class WrongKernel(Small):
    """Its cell is slightly wrong over segments."""

    def __init__(self, **options):
        super().__init__(**options)
        self.lstm.cell.register_forward_hook(self.stretch)

    @staticmethod
    def stretch(cell, arguments, result):
        y, after = result
        return (y * (1 + 1e-4) if y.dim() == 3 else y), after


class NoClearInFloat32(Small):
    """Resets in float64, not in float32."""

    def unroll(self, obs, first, state, valid=None):
        if self.inwards.weight.dtype == torch.float32:
            first = torch.zeros_like(first)
        return super().unroll(obs, first, state, valid)


class NoClearInTraining(Small):
    """Resets in evaluation mode only."""

    def unroll(self, obs, first, state, valid=None):
        return super().unroll(obs, torch.zeros_like(first) if self.training else first, state, valid)


class UsesDropout(Small):
    """Uses dropout, so that no rollout can be replayed."""

    def encode(self, obs):
        return torch.dropout(super().encode(obs), 0.3, self.training)


class UpdatesStateAtInvalidSteps(Small):
    """Updates the state of invalid steps."""

    def unroll(self, obs, first, state, valid=None):
        return super().unroll(obs, first, state, None)


class GradientThroughTheEncoder(Small):
    """Keeps the last encoding with its graph in an attribute; its outputs are right."""

    last = None

    def encode(self, obs):
        x = super().encode(obs)
        leak = 0.0 if self.last is None or len(self.last) != len(x) else self.last - self.last.detach()
        self.last = x
        return x + leak


class SecondMemory(Small):
    """Keeps a tensor that get_memory does not return."""

    def __init__(self, **options):
        super().__init__(**options)
        self.trace = {}

    def unroll(self, obs, first, state, valid=None):
        outputs, after = super().unroll(obs, first, state, valid)
        if first.dim() == 1 and not self.store.is_replaying:
            trace = self.trace.get(len(first), torch.zeros_like(outputs.values))
            self.trace[len(first)] = trace = torch.where(first, 0.0, 0.5 * trace + obs[:, 0])
            outputs = outputs._replace(values=outputs.values + trace.detach())
        return outputs, after

    def reset_memory(self):
        self.trace.clear()
        super().reset_memory()


class NaNGradient(Small):
    """The outputs of its cell are right, and the gradient into its input is NaN."""

    def __init__(self, **options):
        super().__init__(**options)
        self.lstm.cell.register_forward_pre_hook(self.spoil)

    @staticmethod
    def spoil(cell, arguments):
        x = arguments[0]
        if x.requires_grad:
            x = x.clone()
            x.register_hook(lambda gradient: gradient * torch.nan)
        return x, *arguments[1:]


class KeepsReplayOutputs(Small):
    """Keeps the outputs of every replay."""

    def __init__(self, **options):
        super().__init__(**options)
        self.past = []

    def unroll(self, obs, first, state, valid=None):
        if self.store.is_replaying:
            self.past.append(obs.clone())
        return super().unroll(obs, first, state, valid)


class IgnoresTrials(Small):
    """Ignores trial starts although clear_on is trial."""

    def forward(self, td, state=None, action=None):
        td["trial"] = torch.zeros_like(td["trial"])
        return super().forward(td, state, action)


class FastZeroEntry(Fast):
    """`fast`, replayed from zeros: initial outputs are small, so the error is small."""

    def __init__(self, **options):
        super().__init__(make_world("recall", agents=1).spec, **options)

    def replay(self, entry):
        return super().replay(entry.apply(torch.zeros_like))


class NoClearInEvaluation(Small):
    """Resets in training mode only."""

    def unroll(self, obs, first, state, valid=None):
        return super().unroll(obs, first if self.training else torch.zeros_like(first), state, valid)


class OtherLayerNotCleared(Small):
    """Resets the first layer, not the second."""

    def unroll(self, obs, first, state, valid=None):
        if first.dim() == 1 and not self.store.is_replaying:
            fresh = {key: torch.where(first[:, None], 0.0, leaf[:, 0]) for key, leaf in state.items()}
            state = TensorDict(
                {key: torch.stack([fresh[key], leaf[:, 1]], 1) for key, leaf in state.items()}, [len(first)]
            )
            first = torch.zeros_like(first)
        return super().unroll(obs, first, state, valid)


class CutsInside(Small):
    """Detaches the state between steps: no gradient from a step to the one before it."""

    def unroll(self, obs, first, state, valid=None):
        if first.dim() == 1:
            return super().unroll(obs, first, state, valid)
        outputs = []
        for t in range(first.shape[1]):
            one, state = super().unroll(obs[:, t], first[:, t], state, None if valid is None else valid[:, t])
            outputs.append(one)
        return type(outputs[0])(*(torch.stack(part, 1) for part in zip(*outputs, strict=True))), state


class EntryAfterTheStep(Collector):
    """Stores a segment's entry state one step late."""

    def rollout(self, version):
        entries = []
        one_step = self._env_step

        def record_entry(turn):
            one_step(turn)
            entries.append(self._state().clone())

        self._env_step = record_entry
        segments = super().rollout(version)
        del self._env_step
        late = torch.stack(entries[:: self.horizon], dim=1).flatten(0, 1)
        return type(segments)(segments.steps, late, segments.tail, segments.version)


class ClearsBeforeEachRollout(Collector):
    """Resets all states before each rollout."""

    def rollout(self, version):
        self.policy.reset_memory()
        return super().rollout(version)


class EntriesShuffled(Collector):
    """Gives segments the entry states of other rows."""

    def rollout(self, version):
        s = super().rollout(version)
        return type(s)(s.steps, s.entry_state[torch.arange(len(s)).roll(1)], s.tail, s.version)


class EntryOneStepOld(Collector):
    """Stores a segment's entry state one step early."""

    def rollout(self, version):
        states, one_step = [self.__dict__.get("previous", self._state().clone())], self._env_step

        def record_entry(turn):
            states.append(self._state().clone())
            one_step(turn)

        self._env_step = record_entry
        s = super().rollout(version)
        del self._env_step
        self.previous = states[-1]
        old = torch.stack(states[:-1][:: self.horizon], dim=1).flatten(0, 1)
        return type(s)(s.steps, old, s.tail, s.version)


class OneEntryForARollout(Collector):
    """Stores one state per rollout and replays all its segments from it."""

    def rollout(self, version):
        s = super().rollout(version)
        segments = self.length // self.horizon
        first = s.entry_state[torch.arange(len(s)) // segments * segments]
        return type(s)(s.steps, first, s.tail, s.version)


class EntriesBackwards(Collector):
    """Exchanges the entry states of an agent's segments."""

    def rollout(self, version):
        s = super().rollout(version)
        segments = self.length // self.horizon
        row = torch.arange(len(s))
        mirrored = row // segments * segments + segments - 1 - row % segments
        return type(s)(s.steps, s.entry_state[mirrored], s.tail, s.version)


class EntryTensorDropped(Collector):
    """Stores one tensor of the state and drops the other."""

    def rollout(self, version):
        s = super().rollout(version)
        entry = s.entry_state.clone()
        entry["c"].zero_()
        return type(s)(s.steps, entry, s.tail, s.version)


def replay_clears_late(policy, segments):
    """The update applies every flag one step late."""
    steps = segments.steps.clone()
    steps["first"] = torch.cat([torch.zeros_like(steps["first"][:, :1]), steps["first"][:, :-1]], dim=1)
    return replay(policy, type(segments)(steps, segments.entry_state, segments.tail, segments.version))


def replay_misses_the_first_flag(policy, segments):
    """Entry states are stored before the reset, and the update ignores a segment's first flag."""
    steps = segments.steps.clone()
    steps["first"][:, 0] = False
    return replay(policy, type(segments)(steps, segments.entry_state, segments.tail, segments.version))


def _without_flags(step, start, uniform):
    return step_to_td(dataclasses.replace(step, first=torch.zeros_like(step.first)), start, uniform)


def evaluate_without_clearing(policy, world, *, episodes):
    """The evaluation passes no episode starts to the policy."""
    with mock.patch.object(sys.modules[EvalPolicy.__module__], "step_to_td", _without_flags):
        return evaluate(policy, world, episodes=episodes)


def evaluate_in_place(policy, world, *, episodes):
    """The evaluation runs on the training's live state."""
    evaluate(policy, world, episodes=episodes)
    policy.store.reset()
