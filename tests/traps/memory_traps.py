"""Traps in hidden states: each a way to put the bug into our own code, and a measurement that detects it.

A measure looks at the library as it is and says how much is wrong, 0 where nothing is. A trap replaces the
right code while a `with` lasts.
"""

import dataclasses
import io
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from unittest import mock

import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict

import holdfast
from helpers import broken_policies as own
from helpers.gym_envs import Counting
from helpers.scripted_world import Scripted, make_reader
from helpers.small_policy import make_small
from holdfast.errors import ContractError
from holdfast.evaluation.evaluate import EvalPolicy, evaluate
from holdfast.memory.episode_resets import reset_mask
from holdfast.policies import LSTMWrapper, lstm_wrapper, recurrent_policy
from holdfast.policies.lstm_wrapper import slice_start
from holdfast.rollout import Collector
from holdfast.worlds.gym import GymWorld
from holdfast.worlds.gym.gym_world import VectorEnvWorld

SHORT = {
    "world.agents": 16,
    "world.delay": "2..9",
    "trainer.bptt_horizon": 8,
    "trainer.batch_size": 256,
    "trainer.minibatch_size": 64,
    "trainer.total_timesteps": 1024,
    "trainer.optimizer.learning_rate": 0.02,
    "report": "off",
    "trainer.eval_episodes": 4,
    "policy.hidden_size": 8,
}


def short_run(**keys):
    """Train on recall for four updates, from the first word of the command to the last."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        return holdfast.train("recall", {**SHORT, "runs_dir": folder, "trainer.check": "off", **keys})


# 1 and 2 and 3: what a run does to memories at the edges of rollouts, and in updates.


def share_of_agents_with_zero_state_at_rollout_start():
    """In a run, among all agents at all rollouts but the first."""
    empty, rollout = [], Collector.rollout

    def looked_at(self, version):
        segments = rollout(self, version)
        entry = segments.entry_state.unflatten(0, (self.world.agents, -1))[:, 0]
        numbers = torch.cat([leaf.flatten(1) for leaf in entry.values()], 1)
        empty.extend([(numbers == 0).all(1)] if version else [])
        return segments

    with mock.patch.object(Collector, "rollout", looked_at):
        short_run()
    return float(torch.cat(empty).double().mean())


def wiped_at_the_rollouts_start():
    rollout = Collector.rollout

    def wiped(self, version):
        self.policy.reset_memory()
        return rollout(self, version)

    return mock.patch.object(Collector, "rollout", wiped)


def replay_error_of_a_run():
    """How far PPO's first ratio is from 1."""
    return short_run().summary["memory/replay_error"]


def zero_start_in_training():
    replay = LSTMWrapper.replay

    def from_zeros(self, entry):
        return replay(self, entry.apply(torch.zeros_like))

    return mock.patch.object(LSTMWrapper, "replay", from_zeros)


def no_resets_in_training():
    def deaf(td, clear_on):
        clear = reset_mask(td, clear_on)
        return torch.zeros_like(clear) if clear.dim() == 2 else clear

    return mock.patch.object(recurrent_policy, "reset_mask", deaf)


# 4: what is last seen of an episode, and the next one.


class SaysFarewell(Counting):
    """An environment whose final observations can be set."""

    farewell = 0.0

    def step(self, action):
        obs, reward, terminated, *rest = super().step(action)
        if terminated:
            obs[:] = self.farewell
        return obs, reward, terminated, *rest


def values_behind(farewell):
    """Run episodes of three steps with next-step autoreset; return values without the final observations."""
    make = type("Says", (SaysFarewell,), {"farewell": farewell})
    world = GymWorld(1, env=make, autoreset="next_step")
    collector = Collector(world, make_small(spec=world.spec).double(), length=16, horizon=16, seed=0)
    values = collector.rollout(0).steps["values"].flatten().clone()
    world.close()
    return values.unflatten(0, (4, 4))[:, :3]


def effect_of_final_obs_on_the_next_episode():
    return float((values_behind(0.0) - values_behind(1.0)).abs().max())


def terminal_observation_leak():
    correct = VectorEnvWorld.step

    def leaking(self, actions):
        step = correct(self, actions)
        if self.mode is not AutoresetMode.NEXT_STEP:
            return step
        # The end itself is taken for the start: reset, then read the terminal observation.
        return replace(step, first=step.terminated | step.truncated, valid=torch.ones_like(step.valid))

    return mock.patch.object(VectorEnvWorld, "step", leaking)


# 5: evaluation.


class PaysByAction(Scripted):
    """Episodes of four steps, each action paid so that a return tells all four."""

    def __init__(self, agents, steps):
        super().__init__(agents, steps, terminated=(torch.arange(steps) % 4 == 0).expand(agents, -1).clone())
        self.tables["terminated"][:, 0] = False

    def step(self, actions):
        base_step = super().step(actions)
        return dataclasses.replace(base_step, reward=actions * 3.0 ** ((self.t - 1) % 4))


def share_of_episodes_not_played_as_if_they_were_the_first():
    agents, episodes = 16, 5
    policy, world = make_reader().double(), PaysByAction(agents, 4 * episodes + 1)
    returns = evaluate(policy, world, episodes=agents * episodes).returns.unflatten(0, (episodes, agents))
    steps = torch.arange(4 * episodes).unflatten(0, (episodes, 1, 4))
    obs = (1000.0 * torch.arange(agents)[:, None] + steps).reshape(-1, 4, 1)
    first = (torch.arange(4) == 0).expand(len(obs), -1)
    with torch.no_grad():
        thoughts, _ = policy.unroll(obs, first, policy.lstm.cell.initial(len(obs)))
    alone = (thoughts.logits.argmax(-1) * 3.0 ** torch.arange(4)).sum(-1)
    return float((returns.flatten() != alone).double().mean())


def evaluation_never_resets():
    return mock.patch.object(sys.modules[EvalPolicy.__module__], "step_to_td", own._without_flags)


# 7, 8, 9 and 17: whose memories.


class SlotBySlice:
    """Keeps memories in a dictionary by a slice's first agent, and compares nothing."""

    is_replaying = False

    def __init__(self, cell):
        self.cell, self.states = cell, {}

    def read(self, start, length):
        return self.states[start] if start in self.states else self.cell.initial(length)

    def write(self, start, state):
        self.states[start] = state.detach()


def slot_by_slice():
    return mock.patch.object(lstm_wrapper, "StateStore", SlotBySlice)


def seen_at(t, start=0, length=4, **flags):
    """Make a batch of some agents' step t."""
    number = 1000.0 * torch.arange(start, start + length) + t
    fields = {"env_obs": number[:, None], "first": torch.full((length,), t == 0), "draws": torch.zeros(length)}
    fields["training_env_id_start"] = torch.full((length,), start)
    return TensorDict(fields | flags, batch_size=[length])


@torch.no_grad()
def values_of(policy, batch):
    return policy(batch)["values"].clone()


def lived_in_one_slice(steps=6):
    policy = make_reader().double()
    return torch.stack([values_of(policy, seen_at(t)) for t in range(steps)])


def difference_when_slices_change():
    """Four agents act as a batch, then the last two in their own slice: 0 if that is an error."""
    policy, right = make_reader().double(), lived_in_one_slice()
    for t in range(5):
        values_of(policy, seen_at(t))
    try:
        late = values_of(policy, seen_at(5, start=2, length=2))
    except ContractError:
        return 0.0
    return float((late - right[5, 2:]).abs().max())


def mismatches_accepted():
    """A state of another size, another precision and another device, for agents who have one."""
    store, cell = (policy := make_reader()).store, policy.lstm.cell
    store.write(0, store.read(0, 4))
    misfits = cell.initial(2), cell.initial(4).apply(torch.Tensor.double), cell.initial(4).to("meta")
    return float(sum(_is_taken(store, state) for state in misfits))


def _is_taken(store, state):
    try:
        store.write(0, state)
    except ContractError:
        return False
    return True


def difference_when_each_agent_is_served_alone():
    policy, right = make_reader().double(), lived_in_one_slice()
    alone = [[values_of(policy, seen_at(t, start=a, length=1)) for a in range(4)] for t in range(6)]
    return float((torch.stack([torch.cat(row) for row in alone]) - right).abs().max())


def one_memory_for_all_in_play():
    return mock.patch.object(recurrent_policy, "slice_start", return_value=0)


def difference_without_env_id():
    """Two slices served in turn by batches without an id: 0 if they are refused."""
    policy, right, values = make_reader().double(), lived_in_one_slice(), []
    try:
        for t in range(6):
            turns = (seen_at(t, start, 2).exclude("training_env_id_start") for start in (0, 2))
            values.append(torch.cat([values_of(policy, batch) for batch in turns]))
    except ContractError:
        return 0.0
    return float((torch.stack(values) - right).abs().max())


def slice_zero_by_default():
    def guessed(td):
        return slice_start(td) if "training_env_id_start" in td else 0

    return mock.patch.object(recurrent_policy, "slice_start", guessed)


# 18: which flags clear.


def difference_with_one_flag():
    """An episode behind an end that `dones` alone tells, or `truncateds` alone, against one that is new."""
    worst = 0.0
    for flag in ("dones", "truncateds"):
        policy, fresh = make_reader().double(), make_reader().double()
        for t in range(8):
            batch = seen_at(t).exclude("first")
            batch[flag] = torch.full((4,), t == 3)
            now = values_of(policy, batch)
            if t >= 3:
                begun = values_of(fresh, seen_at(t, first=torch.full((4,), t == 3)))
                worst = max(worst, float((now - begun).abs().max()))
    return worst


def both_flags_required():
    def strict(td, clear_on):
        has_flags = "first" in td or ("dones" in td and "truncateds" in td)
        return reset_mask(td, clear_on) if has_flags else torch.zeros(td.batch_size, dtype=torch.bool)

    return mock.patch.object(recurrent_policy, "reset_mask", strict)
