"""Collector: world x policy -> Segments."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict

from holdfast import cuda_graphs, ranks
from holdfast.cuda_graphs import OverwrittenError, is_recording
from holdfast.errors import ContractError
from holdfast.policies import LSTMWrapper
from holdfast.policies.distributions import Gaussian, distribution_for, pink_draws_for, require_fit
from holdfast.policies.recurrent_policy import PolicyBatch
from holdfast.recorded_call import RecordedCall
from holdfast.rollout.agent_groups import AgentGroup, EntryStateRecorder, StepAudit, async_groups
from holdfast.rollout.bootstrap import bootstrap_value, has_truncated, truncation_values
from holdfast.rollout.nan_checks import raise_non_finite_outputs
from holdfast.rollout.recorded import RecordedRollout
from holdfast.rollout.segments import POLICY_INPUTS, BurnIn, Segments, policy_batch, policy_td, segment_end_values
from holdfast.rollout.statistics import EpisodeStatistics, Timer
from holdfast.state_tree import get_field
from holdfast.types import Bool, Float, Int, Tensor
from holdfast.worlds import Step, World, tokens
from holdfast.worlds.checked_world import checked, raise_violations
from holdfast.worlds.save_restore import obs_from_tree, resume_world, rows_from_tree, step_from_tree, step_to_tree
from holdfast.worlds.step import ALL, AsyncWorld, PartialStep, Restarted, as_slice

SMALL = 64
"""Bytes of an agent's leaf up to which the steps of a recorded segment are stored at once."""
TAIL_KEYS = ("rewards", "dones", "truncateds", "values", "last_values")


def step_leaves(step: Step) -> dict[str, Any]:
    """Return a world step by the keys of the TensorDict that a policy reads and the rollout buffer stores."""
    return {
        "env_obs": step.obs,
        "rewards": step.reward,
        "dones": step.terminated,
        "truncateds": step.truncated,
        "first": step.first,
        "valid": step.valid,
        "trial": step.trial,
    }


def step_to_td(step: Step, start: int, uniform: Tensor) -> TensorDict:
    """Convert a world step to the TensorDict that a policy reads."""
    return policy_td(step_leaves(step), start=start, draws=uniform)


class Collector:
    """Collects `length` steps from every agent of a world, in segments of `horizon` steps.

    Hidden states carry over between segments and between rollouts. The next rollout overwrites the tensors of the
    returned segments. With `burn_in`, each segment comes with that many steps before it. `audit` sees every step and
    its rows before the policy acts. With `trim_tokens`, token padding that all rows share is not stored. With `graphs`,
    rollouts on a GPU are replayed as CUDA graphs from the second one on; it is called with what came of it.
    """

    def __init__(
        self,
        world: World,
        policy: LSTMWrapper,
        *,
        length: int,
        horizon: int,
        seed: int,
        burn_in: int = 0,
        trim_tokens: bool = True,
        action_noise: Literal["white", "pink"] = "white",
        audit: StepAudit | None = None,
        graphs: Callable[[str], None] | None = None,
    ) -> None:
        self.world, self.policy = checked(world), policy
        self.length, self.horizon, self.seed, self.burn_in = length, horizon, seed, burn_in
        self.audit, self._action_noise = audit, action_noise
        has_long_obs = bool(world.spec.features) and world.spec.obs_shape[0] > tokens.SHORTEST
        self._trim_tokens = trim_tokens and policy.accepts_trimmed_obs and has_long_obs
        self._actions = distribution_for(world.spec)
        policy.require_bound(world.spec)
        policy.store.allocate({0: world.agents})
        self.next_step = self.world.reset()
        """The step that the next rollout starts with."""
        self._clock = 0
        self._agent = torch.arange(world.agents, device=self.next_step.reward.device)
        # Over all ranks, from the next rollout on.
        self._agent_ids = self._agent
        group = len(world.groups[0]) if isinstance(world, AsyncWorld) else world.agents
        # Of a call of the policy, if one of several ranks had all agents.
        self._rows_alone = group * ranks.count() if ranks.count() > 1 else 0
        self._keys = [*policy.get_agent_experience_spec().keys(), "last_values"]
        self._steps: TensorDict | None = None
        # Views of the rollout buffer, by step, in which all agents' tensors of a step are stored.
        self._columns: list[dict[str, Tensor]] = []
        self.copies_steps = False
        """Whether the steps of a segment that is recorded are copied: the world writes each into the one before."""
        self._later = dict[str, list[tuple[Tensor, int]]]()
        self.draws = torch.zeros(0)
        """The uniform numbers that the rollout's actions are sampled with."""
        dtype = next(policy.parameters()).dtype
        self._no_values = torch.zeros(world.agents, dtype=dtype, device=self._agent.device)
        self.next_burn_in: BurnIn | None = None
        """The burn-in of the next rollout."""
        self.episodes = EpisodeStatistics(world.agents, world.spec.parts, self._agent.device)
        self.timer = Timer(self._agent.device)
        self._recorded: RecordedRollout | None = None
        self._version: Int[Tensor, " B"] | None = None
        self._split = RecordedCall[tuple[TensorDict, TensorDict, TensorDict]](
            is_on=graphs is not None and self._can_record()
        )
        if graphs is not None and self._can_record():
            self._recorded = RecordedRollout(self, graphs)

    @torch.no_grad()
    def rollout(self, version: int) -> Segments:
        """Collect one rollout with fixed weights."""
        clock = torch.arange(self._clock, self._clock + self.length, device=self._agent.device)
        self._agent_ids = self._agent + ranks.rank() * self.world.agents
        actions, draw = self.policy.actions, self.policy.actions.draws_for
        if self._action_noise == "pink" and isinstance(actions, Gaussian):
            draw = partial(pink_draws_for, actions)
        self.draws = draw(self.seed, self._agent_ids[:, None], clock)
        if self._recorded is not None and self._recorded.is_ready():
            return self._finish(version, *self._recorded.collect(self.draws))
        recorders = self.entry_recorders()
        with self.policy.rounding_as_one_rank(self._rows_alone):
            for group in self._groups():
                for recorder in recorders:
                    recorder.record(group.rows, group.t)
                self._env_step(group)
            return self._finish(version, *(recorder.states for recorder in recorders))

    def _can_record(self) -> bool:
        return cuda_graphs.can_record(self._agent.device) and ranks.count() == 1

    @property
    def steps(self) -> TensorDict:
        """The steps `[A,L]` of the rollout."""
        assert self._steps is not None, "a rollout has at least one step"
        return self._steps

    def entry_recorders(self) -> list[EntryStateRecorder]:
        """Return recorders of the states that segments, and steps of burn-in, start from."""
        offsets = (0, (self.horizon - self.burn_in) % self.horizon) if self.burn_in else (0,)
        read = partial(self.policy.store.read, 0, self.world.agents)
        return [EntryStateRecorder(read, self._agent, self.length, self.horizon, at) for at in offsets]

    def _finish(self, version: int, *states: TensorDict) -> Segments:
        """Check a rollout, and split it into segments."""
        self._clock += self.length
        raise_violations(self.world)
        if self._agent.device.type != "cpu":
            # On the CPU every step was checked.
            valid, when = self.steps["valid"], f"the rollout up to step {self._clock}"
            outputs = {key: torch.where(valid, self.steps[key], 0.0) for key in ("act_log_prob", "values")}
            self._require_finite(outputs, valid.any(1), ALL, when)
        return self._to_segments(self.steps, version, *states)

    def _groups(self) -> Iterator[AgentGroup]:
        """Yield the agents that act next, until each acted `length` times."""
        world = self.world
        if isinstance(world, AsyncWorld):
            recv = partial(self._recv, world)
            self.next_step = yield from async_groups(world.groups, self.next_step, self.length, recv)
            return
        for t in range(self.length):
            yield AgentGroup(None, ALL, t, self.next_step)

    def _recv(self, world: AsyncWorld) -> PartialStep:
        with self.timer.timing("world"):
            group = world.recv()
        self.episodes.on_step(group.step, as_slice(group.rows, self._agent.device))
        return group

    def _env_step(self, group: AgentGroup) -> None:
        """Let the policy act for the agents of a group, store the transition, and step the world."""
        rows, t, step = group.rows, group.t, group.step
        if self.audit is not None:
            self.audit.on_step(step, rows)
        index = (rows, t) if isinstance(t, int) else (self._agent[rows], t.to(self._agent.device))
        with nullcontext() if group.agent_ids is None else self.policy.store.subset(rows):
            outputs = self.act(step, index, self.draws[:, t] if rows is ALL else self.draws[index])
        self.episodes.on_action(step.valid, rows)
        if step.reward.device.type == "cpu":
            # Before the world acts on them. On a GPU the check would make the host wait until the rollout ends.
            named = {key: outputs[key] for key in (self.policy.actions.key, "values")}
            if not math.isfinite(sum(output.sum().item() for output in named.values())):
                # The sum of an invalid agent's outputs may be anything, and large ones may overflow.
                when = self._clock + (t if isinstance(t, int) else int(t.max()))
                self._require_finite(named, step.valid, rows, f"step {when}")
        env_actions = self.policy.env_actions(outputs["actions"])
        with self.timer.timing("world"):
            if group.agent_ids is not None:
                cast("AsyncWorld", self.world).send(group.agent_ids, env_actions)
                return
            self.next_step = self.world.step(env_actions)
        self.episodes.on_step(self.next_step)

    def act(self, step: Step, index: tuple[slice | Tensor, int | Tensor], draws: Tensor) -> PolicyBatch:
        """Let the policy act, and store the transition at `index`; return the policy's outputs."""
        last_values = self._last_values(step, index[0])
        with self.timer.timing("forward"):
            outputs = self.policy(policy_batch(self.policy, step_leaves(step), start=0, draws=draws))
        with self.timer.timing("copy"):
            # Before the world steps: it may write its next step into the same tensors.
            transition = outputs if isinstance(outputs, dict) else dict(outputs.items())
            transition["last_values"] = last_values
            self._store(index, transition)
        return outputs

    def _last_values(self, step: Step, rows: slice | Tensor = ALL) -> Float[Tensor, " N"]:
        """Values of the last observations of truncated episodes; else 0."""
        if has_truncated(self.world.spec, step):
            return truncation_values(self.policy, step)
        return self._no_values if rows is ALL else self._no_values[rows]

    def _store(self, index: tuple[slice | Tensor, int | Tensor], transition: Mapping[str, Any]) -> None:
        """Write a transition into the rollout buffer."""
        if self._steps is None:
            # Here, because the dtypes are those of the policy's outputs.
            self._steps = self._make_buffer(transition)
            tensors = {str(key): buffer for key, buffer in self._steps.items() if isinstance(buffer, Tensor)}
            self._columns = [{key: buffer[:, t] for key, buffer in tensors.items()} for t in range(self.length)]
        rows, t = index
        columns = self._columns[t] if rows is ALL and isinstance(t, int) else {}
        later = self._keep_small(transition) if is_recording() else ()
        if later:
            columns = {key: column for key, column in columns.items() if key not in later}
        if columns:
            # All of them in one call.
            torch._foreach_copy_(list(columns.values()), [transition[key] for key in columns])  # pyright: ignore[reportPrivateImportUsage]
        for key, buffer in self._steps.items():
            if key not in columns and key not in later:
                buffer[index] = transition[str(key)]

    def _keep_small(self, transition: Mapping[str, Any]) -> set[str]:
        """Keep the small leaves of a step that is recorded until its segment ends; return their keys."""
        keys = set[str]()
        for key in list(self.steps.keys()):
            leaf = transition[str(key)]
            if isinstance(leaf, Tensor) and leaf[0].nbytes <= SMALL:
                leaf = leaf.clone() if self.copies_steps else leaf
                self._later.setdefault(str(key), []).append((leaf, leaf._version))
                keys.add(str(key))
        return keys

    def store_recorded(self, start: int) -> None:
        """Store the small leaves of a segment that was recorded, from step `start` on: one operation for each leaf."""
        later, self._later = self._later, {}
        for key, leaves in later.items():
            if any(leaf._version != version for leaf, version in leaves):
                raise OverwrittenError(f"the world writes {key} into the tensor of the step before")
            columns = self.steps[key][:, start : start + len(leaves)]
            columns.copy_(torch.stack([leaf for leaf, _ in leaves], dim=1))

    def _make_buffer(self, transition: Mapping[str, Any]) -> TensorDict:
        """Check the policy's outputs, and return zeros for as many steps as a rollout has."""
        params = self.policy.actions.key
        for key in (params, "actions", "act_log_prob", "values"):
            if key not in transition:
                raise ContractError(
                    f"The policy's output has no {key}; a rollout needs it: set td[{key!r}] in forward."
                )
        require_fit(self.policy.actions, transition[params].shape[-1], self._actions)
        step = TensorDict({key: transition[key] for key in self._keys}, batch_size=transition["valid"].shape)
        size = (self.world.agents, self.length)
        return cast("TensorDict", step.apply(lambda leaf: leaf.new_zeros(*size, *leaf.shape[1:]), batch_size=size))

    def _state(self) -> TensorDict:
        return self.policy.store.read(0, self.world.agents)

    def _require_finite(
        self, outputs: Mapping[str, Tensor], valid: Bool[Tensor, " N"], rows: slice | Tensor, when: str
    ) -> None:
        """Check the outputs of valid agents for NaN and Inf."""
        finite = {key: output.reshape(len(valid), -1).isfinite().all(1) for key, output in outputs.items()}
        if not bool((torch.stack(list(finite.values())) | ~valid).all()):
            raise_non_finite_outputs(self.policy, finite, valid, self._agent_ids[rows], when)

    def _to_segments(
        self, steps: TensorDict, version: int, entry: TensorDict, burn_in_states: TensorDict | None = None
    ) -> Segments:
        """Split steps `[A, length]` into rows `[A * length / horizon, horizon]` with their tails."""
        rows, entry, tail = self._split(self._split_steps, steps, entry, self.next_step, self._state())
        if self._trim_tokens:
            # Once per rollout, so that no update computes padding that all rows share.
            rows = rows.clone(recurse=False)
            rows["env_obs"] = tokens.shorten(rows["env_obs"])
        return Segments(
            rows,
            entry,
            tail,
            self._versions(len(rows), version),
            self.world.agents,
            None if burn_in_states is None else self._burn_in(steps, burn_in_states),
        )

    def _versions(self, rows: int, version: int) -> Int[Tensor, " B"]:
        """Return the version of each row: where rollouts are recorded, in a tensor that stays where it is."""
        if self._recorded is None or self._version is None:
            self._version = torch.full((rows,), version, device=self._agent.device)
        return self._version.fill_(version)

    def _split_steps(
        self, steps: TensorDict, entry: TensorDict, step: Step, state: TensorDict
    ) -> tuple[TensorDict, TensorDict, TensorDict]:
        """Return rows, their entry states and their tails; `step` and `state` are those after the rollout."""
        values = bootstrap_value(self.policy, state, step.obs, step.first, step.trial, step.valid)
        after = TensorDict(
            {
                "rewards": step.reward,
                "dones": step.terminated,
                "truncateds": step.truncated,
                "values": torch.where(step.valid, values, _last_valid_value(steps)),
                "last_values": self._last_values(step),
            },
            batch_size=[self.world.agents],
        )
        rows = steps.unflatten(1, (self.length // self.horizon, self.horizon))
        rows["values_now"], rows["ratio"] = rows["values"].clone(), torch.ones_like(rows["values"])
        tail = cast("TensorDict", torch.cat([rows[:, 1:, 0].select(*TAIL_KEYS), after[:, None]], dim=1))
        tail["values"] = segment_end_values(steps["values"], steps, after, self.horizon)
        return rows.flatten(0, 1), entry.flatten(0, 1), tail.flatten(0, 1)

    def _burn_in(self, steps: TensorDict, states: TensorDict) -> BurnIn:
        """Gather the steps before each row; before the first rollout they are invalid."""
        shape = (self.length // self.horizon, self.horizon)
        rows = steps.select(*POLICY_INPUTS, "actions").unflatten(1, shape)
        ends = rows[:, :, self.horizon - self.burn_in :]
        before = self.next_burn_in or BurnIn(_invalid_like(ends[:, 0]), self.policy.lstm.cell.initial(len(ends)))
        self.next_burn_in = BurnIn(ends[:, -1].clone(), states[:, -1].clone())
        entry = torch.cat([before.entry_state[:, None], states[:, :-1]], dim=1)
        burn_in_steps = torch.cat([before.steps[:, None], ends[:, :-1]], dim=1)
        return BurnIn(burn_in_steps.flatten(0, 1), entry.flatten(0, 1))

    def state(self) -> dict[str, Any]:
        """Return the next step, the episode statistics and the burn-in steps, as a plain tree."""
        burn_in = self.next_burn_in
        return {
            "clock": self._clock,
            "pending": step_to_tree(self.next_step),
            "episodes": self.episodes.state(),
            "burn_in": None
            if burn_in is None
            else {"steps": burn_in.steps.to_dict(), "entry": burn_in.entry_state.to_dict()},
        }

    def restore(self, saved: Any, world: Mapping[str, Any] | None, *, rollouts: int) -> Restarted | None:
        """Restore collector and world; return the agents that had to restart, with cleared states."""
        next_step = step_from_tree(get_field(saved, "pending", dict), self.next_step)
        clock, agents = get_field(saved, "clock", int), self.world.agents
        if clock != rollouts * self.length:
            raise ContractError(f"Its clock is at {clock}; {rollouts} rollouts end at {rollouts * self.length}.")
        self.episodes.restore(get_field(saved, "episodes", dict))
        if self.burn_in and saved["burn_in"] is not None:
            spec = self.policy.get_agent_experience_spec().select(*POLICY_INPUTS, "actions")
            steps = rows_from_tree(saved["burn_in"], "steps", spec, (agents, self.burn_in))
            entry = self.policy.lstm.cell.initial(agents)
            entry = obs_from_tree(get_field(saved["burn_in"], "entry", dict), entry)
            self.next_burn_in = BurnIn(steps, entry)
        self.next_step, restarted = resume_world(self.world, world, next_step)
        self._clock = clock
        if restarted is not None:
            # Whatever `memory.clear_on` says.
            self.policy.store.reset_slice(0, restarted.mask)
            self.episodes.reset_agents(restarted.mask)
            if self.next_burn_in is not None:
                self.next_burn_in.steps["valid"][restarted.mask] = False
                initial = self.policy.lstm.cell.initial(int(restarted.mask.sum()))
                self.next_burn_in.entry_state[restarted.mask] = initial
        return restarted


def _invalid_like(steps: TensorDict) -> TensorDict:
    """Copy steps with the flags `valid`, `first` and `trial` false."""
    invalid = steps.clone()
    for key in ("valid", "first", "trial"):
        invalid[key] = torch.zeros_like(invalid[key])
    return invalid


def _last_valid_value(steps: TensorDict) -> Float[Tensor, " A"]:
    """Value of each agent's last valid step: the best estimate while the agent is invalid."""
    valid = steps["valid"]
    when = torch.where(valid, torch.arange(valid.shape[1], device=valid.device), -1).amax(1)
    values = steps["values"].gather(1, when.clamp(min=0)[:, None])[:, 0]
    return torch.where(when >= 0, values, 0.0)
