"""Training on several ranks: their checkpoints in the format of one process, and the rank that all wait for."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from holdfast import ranks
from holdfast.checkpoint.format import Checkpoint, TrainingSnapshot, environment
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.run_dir import RunDir, policy_files
from holdfast.config.run import Config
from holdfast.policies import LSTMWrapper
from holdfast.types import Tensor
from holdfast.worlds.reshard import join_ranks

BY_AGENT = ("expected", "has_acted", "age")
"""What the monitor holds of every agent."""


def _join(trees: Sequence[Any]) -> Any:
    """Join trees of the ranks' agents along the first axis of every tensor."""
    first = trees[0]
    if isinstance(first, Mapping):
        return {key: _join([tree[key] for tree in trees]) for key in first}
    return torch.cat(list(trees)) if isinstance(first, Tensor) else first


def _split(tree: Any, agents: int) -> Any:
    """Take this rank's rows of every tensor of a tree of all `agents`."""
    if isinstance(tree, Mapping):
        return {key: _split(value, agents) for key, value in tree.items()}
    if not isinstance(tree, Tensor):
        return tree
    return tree[ranks.first(agents) :][: ranks.share(agents)].clone()


def _with_last_obs(pending: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the observation that no row reads, where only another rank has a truncated episode."""
    return {"last_obs": pending["obs"], **pending}


def merge(snapshot: TrainingSnapshot, num_workers: int) -> TrainingSnapshot | None:
    """Join the snapshots of all ranks on rank 0, as one process with all agents would have made it; elsewhere None."""
    snapshot = replace(snapshot, weights={}).to_cpu() if not ranks.is_main() else snapshot.to_cpu()
    snapshots = ranks.gather_to_main(replace(snapshot, weights={}))
    if snapshots is None:
        return None
    trainers = [part.trainer for part in snapshots]
    trainer = dict(snapshot.trainer)
    collectors = [dict(each["collector"]) for each in trainers]
    if any("last_obs" in each["pending"] for each in collectors):
        collectors = [{**each, "pending": _with_last_obs(each["pending"])} for each in collectors]
    trainer["collector"] = _join(collectors)
    resets = [each["monitor"]["resets"] for each in trainers]
    counts = torch.stack([each["counts"] for each in resets]).sum(0)
    by_agent = _join([{key: each[key] for key in BY_AGENT} for each in resets])
    trainer["monitor"] = {**trainer["monitor"], "resets": {**by_agent, "counts": counts}}
    if "reward" in trainer["learner"]:
        returns = torch.cat([each["learner"]["reward"]["return"] for each in trainers])
        trainer["learner"] = {**trainer["learner"], "reward": {**trainer["learner"]["reward"], "return": returns}}
    trainer["rng"] = {**trainer["rng"], "ranks": [each["rng"] for each in trainers[1:]]}
    memories = _join([part.memories for part in snapshots])
    (leaf, *_) = [*memories["policy"]["leaves"].values(), trainer["collector"]["pending"]["reward"]]
    memories["policy"]["slices"] = {0: len(leaf)}
    world = join_ranks([part.world for part in snapshots], num_workers)
    return replace(snapshot, trainer=trainer, memories=memories, world=world)


def own_agents(trainer: Any, agents: int) -> Any:
    """Return a saved trainer state with this rank's agents alone."""
    if ranks.count() == 1:
        return trainer
    learner, resets = trainer["learner"], trainer["monitor"]["resets"]
    if "reward" in learner:
        returns = _split(learner["reward"]["return"], agents)
        learner = {**learner, "reward": {**learner["reward"], "return": returns}}
    resets = {
        key: _split(value, agents) if key in BY_AGENT else torch.zeros_like(value) for key, value in resets.items()
    }
    others = trainer["rng"].get("ranks", [])
    generators = trainer["rng"] if ranks.is_main() else None
    if generators is None:
        # Another number of ranks: those beyond go on with the generators that they start with.
        generators = others[ranks.rank() - 1] if len(others) == ranks.count() - 1 else {"cpu": torch.get_rng_state()}
    return {
        **trainer,
        "collector": _split(trainer["collector"], agents),
        "learner": learner,
        "monitor": {**trainer["monitor"], "resets": resets},
        "rng": generators,
    }


def own_memories(memories: Any, agents: int) -> Any:
    """Return the saved memories of this rank's agents."""
    return memories if ranks.count() == 1 else _split(memories, agents)


class SharedCheckpoints:
    """The checkpoints of a run: with several ranks, rank 0 writes them, with the agents of all."""

    def __init__(self, manager: CheckpointManager | None, num_workers: int) -> None:
        self._manager, self._num_workers = manager, num_workers
        # Two: an update that makes weights non-finite is noticed one iteration later.
        self._snapshots: deque[TrainingSnapshot] = deque(maxlen=2)

    @property
    def latest(self) -> Path | None:
        """The latest checkpoint; None: there is none, or this is not rank 0."""
        return None if self._manager is None else self._manager.latest

    @property
    def error(self) -> OSError | None:
        """Why the final checkpoint could not be written, if it could not."""
        return None if self._manager is None else self._manager.error

    def save_if_due(self, snapshot: TrainingSnapshot, *, evaluated: bool = False) -> None:
        """Remember the end of an iteration, and save it if one is due or if it is evaluated as the best."""
        if ranks.count() == 1 and self._manager is not None:
            self._manager.save_if_due(snapshot, evaluated=evaluated)
            return
        self._snapshots.append(snapshot)
        due = self._manager is not None and self._manager.is_due(snapshot, evaluated=evaluated)
        if ranks.any_of(due and snapshot.is_finite):
            self._gather(snapshot, evaluated)

    def gather_last(self) -> None:
        """Gather the last complete iteration with finite weights, which are those of all ranks, while all still run."""
        finite = [snapshot for snapshot in self._snapshots if snapshot.is_finite]
        if finite:
            self._gather(finite[-1], evaluated=False)

    def _gather(self, snapshot: TrainingSnapshot, evaluated: bool) -> None:
        self._snapshots.clear()
        merged = merge(snapshot, self._num_workers)
        if merged is not None and self._manager is not None:
            self._manager.save_if_due(merged, evaluated=evaluated)

    def save_final(self) -> str:
        """Save the last complete iteration with finite weights, if not saved yet; return a message."""
        return "" if self._manager is None else self._manager.save_final()


def make_checkpoints(
    config: Config,
    folder: RunDir,
    policy: LSTMWrapper,
    alarm: Callable[[str], object],
    resumed_from: Checkpoint | None,
) -> SharedCheckpoints:
    """Return the checkpoints of a run, which rank 0 writes."""
    trainer = config.trainer
    if not ranks.is_main():
        return SharedCheckpoints(None, trainer.num_workers)
    manager = CheckpointManager(
        folder,
        policy_files(config, policy),
        environment(next(policy.parameters()).device),
        interval=trainer.checkpoint_interval,
        keep=trainer.keep_checkpoints,
        alarm=alarm,
        resumed_from=resumed_from,
    )
    return SharedCheckpoints(manager, trainer.num_workers)


class SlowRanks:
    """Compares the ranks' rollouts: all wait for the slowest."""

    def __init__(self) -> None:
        self._slow, self._times = -1, 0

    def check(self, seconds: float) -> str:
        """Return a line that names a rank whose rollouts are slow, one after the other, else "". On rank 0."""
        if ranks.count() == 1:
            return ""
        times = ranks.concat(torch.tensor([seconds], dtype=torch.double)).tolist()
        slowest = max(range(len(times)), key=times.__getitem__)
        others = median(times[:slowest] + times[slowest + 1 :])
        is_slow = times[slowest] > SLOW_RATIO * others + SLOW_S
        self._times = (self._times + 1 if slowest == self._slow else 1) if is_slow else 0
        self._slow = slowest
        if self._times != SLOW_ROLLOUTS or not ranks.is_main():
            return ""
        return (
            f"rank {slowest}{ranks.host_of(slowest)} is slow: a rollout takes it {times[slowest]:.2f} s, and the "
            f"others {others:.2f} s (median), which wait for it."
        )


SLOW_RATIO, SLOW_S, SLOW_ROLLOUTS = 1.5, 0.05, 3
"""A rank is slow beyond this multiple of the others and so many seconds, in so many rollouts in a row."""
