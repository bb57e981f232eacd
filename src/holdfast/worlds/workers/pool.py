"""WorkerPool: a world in several processes; some groups of agents step while others get their actions."""

import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import AgentCountError, ConfigError, ContractError, WorkerError
from holdfast.state_tree import get_field, get_tensor_like
from holdfast.types import Int, Shaped, Tensor
from holdfast.worlds.checked_world import Checked
from holdfast.worlds.obs import check_actions
from holdfast.worlds.reshard import reshard
from holdfast.worlds.save_restore import placeholder_step
from holdfast.worlds.step import PartialStep, Restarted, Step, WorldSpec, concat, to_device
from holdfast.worlds.workers.connections import WorkerGroup
from holdfast.worlds.workers.shared_memory import Layout, SharedBuffers, SharedSchema


class WorkerPool(Checked):
    """The agents of `make_world(name, agents, **options)` in `workers` processes, in `groups` that act in turn.

    Agents are split evenly and in order, first into groups, then within each group over the workers. A shard draws
    like the same agents of the whole world (`set_agent_offset`), so the steps do not depend on the number of workers,
    and equal those of one process with as many groups.

    Steps are read where workers write them; a step stays valid until its group has acted twice. A worker that raises,
    is silent for `timeout` seconds or dies is a `WorkerError`. With `restart` it is restarted instead: the episodes of
    its agents are truncated, and new ones start. `first_agent` numbers the agents of a rank; None: they are all agents.
    """

    def __init__(
        self,
        name: str,
        agents: int,
        *,
        options: Mapping[str, Any],
        workers: int,
        groups: int = 1,
        seed: int = 0,
        device: str | torch.device = "cpu",
        timeout: float = 120.0,
        restart: bool = False,
        first_agent: int | None = None,
        log: Callable[[str], object] = warnings.warn,
    ) -> None:
        if agents % (workers * groups) or not agents:
            raise _uneven(agents, workers, groups)
        self.agents, self._restart, self._device = agents, restart, torch.device(device)
        self._group_size = agents // groups
        self.groups = tuple(torch.arange(agents).split(self._group_size))
        self._slots, self._stepping = [0] * groups, deque[int]()
        self._buffers: SharedBuffers | None = None
        # Agents within an episode: only these are truncated by a restart.
        self._in_episode = torch.zeros(agents, dtype=torch.bool)
        self._workers = WorkerGroup(
            name,
            options,
            self.groups,
            workers,
            first_agent=first_agent,
            seed=seed,
            timeout=timeout,
            restart=restart,
            log=log,
        )
        try:
            self.spec = self._make_worlds()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [connection.process.pid for connection in self._workers.connections]

    def set_log(self, log: Callable[[str], object], crash_log: Path | None) -> None:
        """Send restart messages to `log`, and append the errors of crashed workers to `crash_log`."""
        self._workers.log, self._workers.crash_log = log, crash_log

    def reset(self) -> Step:
        """Start every agent's first episode."""
        self._workers.raise_crash()
        while self._stepping:
            self.recv()
        layout = self._set_layout(self._workers.request_all("reset"))
        self._slots = [0] * len(self.groups)
        self._workers.request_all("attach", lambda number: {"index": number}, layout=layout, restarted=False)
        self._in_episode[:] = True
        return concat([PartialStep(rows, self._read_step(group)) for group, rows in enumerate(self.groups)])

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Step all agents and wait for them."""
        for rows, group_actions in zip(self.groups, actions.split(self._group_size), strict=True):
            self.send(rows, group_actions)
        return concat([self.recv() for _ in self.groups])

    def send(self, rows: Int[Tensor, " N"], actions: Shaped[Tensor, "N ..."]) -> None:
        """Start the step of a group."""
        group = int(rows[0]) // self._group_size
        if not rows.equal(self.groups[group]) or group in self._stepping:
            raise ContractError(f"send() takes the agents of one group, once before recv(); not {rows.tolist()}.")
        if self._buffers is None:
            raise ContractError("Call reset() before the first step().")
        actions = actions.cpu()
        check_actions(actions, self._group_size, self.spec.action or len(self.spec.action_names))
        self._buffers.actions(group, actions.dtype, tuple(actions.shape[1:])).copy_(actions)
        self._slots[group] = 1 - self._slots[group]
        self._stepping.append(group)
        self._workers.begin_step(group, self._slots[group], actions)

    def recv(self) -> PartialStep:
        """Wait for the group that was sent its actions first."""
        if not self._stepping:
            raise ContractError("No agent is stepping: call send(rows, actions) before recv().")
        self._workers.raise_crash()
        group = self._stepping.popleft()
        for number in self._workers.end_step():
            self._truncate(number, group)
        step, rows = self._read_step(group), self.groups[group]
        if self._restart:
            ended, started = step.terminated | step.truncated, step.first | step.valid
            self._in_episode[rows] = (self._in_episode[rows] & ~ended.cpu()) | started.cpu()
        return PartialStep(rows, step)

    def state(self) -> dict[str, Any] | None:
        """Return the state of every world; None if none of them can be saved."""
        self._require_idle("state()")
        shards, restart_counts = self._workers.states(), list(self._workers.restart_counts)
        if not any(restart_counts) and all(shard is None for worker in shards for shard in worker):
            return None
        return {
            "workers": len(shards),
            "groups": len(self.groups),
            "clocks": list(self._workers.clocks),
            "restart_counts": restart_counts,
            "shards": shards,
        }

    def restore(self, state: Mapping[str, Any]) -> Restarted | None:
        """Restore every world, also from other numbers of workers and groups; a restarted worker keeps its count."""
        self._require_idle("restore()")
        workers, groups = len(self._workers.connections), len(self.groups)
        shards = reshard(state, workers, groups, lambda: self._workers.states()[0][0])
        # Without restarts the saved numbers of workers and groups may be others.
        counts = state["restart_counts"] if any(state.get("restart_counts", ())) else [0] * workers
        for number, count in enumerate(counts):
            if count != self._workers.restart_counts[number]:
                self._workers.restart_as(number, count)
        clock = max(get_field(state, "clocks", list)) if "shards" in state else get_field(state, "steps", int)
        self._workers.clocks = [clock] * groups
        replies = self._workers.request_all("restore", lambda number: {"states": shards[number::workers]})
        restarted = self._merge_restarted(replies)
        running = torch.ones(self._workers.shard_size, dtype=torch.bool)
        over = [~running if shard is None else get_tensor_like(shard, "over", running) for shard in shards]
        self._in_episode = ~torch.cat(over)
        if restarted is not None:
            self._in_episode |= restarted.mask.cpu()
        return restarted

    def _require_idle(self, call: str) -> None:
        if self._stepping:
            raise ContractError(f"Agents are still stepping: call recv() before {call}.")

    def close(self) -> None:
        """End the workers, whatever they do."""
        self._workers.close()

    def _make_worlds(self) -> WorldSpec:
        try:
            specs = self._workers.request_all("make", self._workers.make_args)
        except AgentCountError as error:
            workers, groups = len(self._workers.connections), len(self.groups)
            raise _uneven(self.agents, workers, groups, error.agents_per_env) from None
        _require_equal_specs([spec.interface for spec in specs], "specs")
        # A restart truncates episodes, in any world.
        return replace(specs[0], truncates="always") if self._restart else specs[0]

    def _set_layout(self, schemas: Sequence[SharedSchema]) -> Layout:
        _require_equal_specs(schemas, "steps")
        schema = schemas[0]
        if self._restart:
            last_obs = {("last_obs", *path[1:]): leaf for path, leaf in schema.items() if path[0] == "obs"}
            schema = {**schema, **last_obs}
        space = self.spec.action
        numbers = 1 if space is None else int(space.shape[0])
        layout = Layout(schema, self._group_size, len(self.groups), numbers)
        if layout != self._workers.layout:
            self._buffers, self._workers.layout = layout.map(self._workers.memory), layout
        return layout

    def _read_step(self, group: int) -> Step:
        assert self._buffers is not None
        return to_device(self._buffers.step(group, self._slots[group]), self._device)

    def _truncate(self, number: int, group: int) -> None:
        """Truncate the episodes of a restarted worker's agents at their last observation."""
        assert self._buffers is not None
        size, slot = self._workers.shard_size, self._slots[group]
        rows = slice(number * size, (number + 1) * size)
        step, previous = self._buffers.step(group, slot), self._buffers.step(group, 1 - slot)
        assert step.last_obs is not None
        step.truncated[rows] = self._in_episode[self.groups[group][rows]]
        step.last_obs[rows] = previous.obs[rows]

    def _merge_restarted(self, replies: Sequence[Sequence[Restarted | None]]) -> Restarted | None:
        """Merge the restarted agents of all shards."""
        reasons = [shard.reason for worker in replies for shard in worker if shard is not None]
        if not reasons:
            return None
        steps, mask = list[PartialStep](), torch.zeros(self.agents, dtype=torch.bool)
        for number, worker in enumerate(replies):
            for rows, shard in zip(self._workers.rows_of(number), worker, strict=True):
                if shard is None:
                    step = placeholder_step(self.spec, len(rows), torch.device("cpu"))
                else:
                    step, mask[rows] = shard.step, shard.mask
                if self._restart and step.last_obs is None:
                    step = replace(step, last_obs=step.obs)
                steps.append(PartialStep(rows, step))
        reason = "; ".join(dict.fromkeys(reasons))
        return Restarted(mask.to(self._device), to_device(concat(steps), self._device), reason)


def _require_equal_specs(values: Sequence[Any], name: str) -> None:
    other = next((number for number, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        raise WorkerError(f"The {name} of workers 0 and {other} must be equal: {values[0]} and {values[other]}.")


def _uneven(agents: int, workers: int, groups: int, agents_per_env: int = 1) -> ConfigError:
    multiple = workers * groups * agents_per_env
    nearest = max(1, round(agents / multiple)) * multiple
    fits = [number for number in range(1, workers) if agents % (number * groups * agents_per_env) == 0]
    fewer = f" or trainer.num_workers={fits[-1]}" if fits else ""
    envs = "" if agents_per_env == 1 else f" of whole environments of {agents_per_env} agents"
    return ConfigError(
        f"world.agents={agents} cannot be split evenly: trainer.num_workers={workers} and "
        f"trainer.async_factor={groups} make {workers * groups} shards{envs}; try world.agents={nearest}{fewer}."
    )
