"""Trainer: one rollout-and-update iteration, and all state a checkpoint must hold."""

import time
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from holdfast import ranks
from holdfast.checkpoint.format import Checkpoint, TrainingSnapshot
from holdfast.checkpoint.run_dir import load_weights
from holdfast.checkpoint.serialization import CorruptFileError, clone_tree
from holdfast.config.run import Config
from holdfast.config.trainer import TrainerConfig, require_scheduled, with_number
from holdfast.errors import ConfigError, ContractError, WorkerError, one_line
from holdfast.learn import Learner, Teacher, trainer_config_at, weight_metrics
from holdfast.monitor import TrainingMonitor
from holdfast.monitor.replay_check import check_segments
from holdfast.monitor.training_monitor import is_due
from holdfast.policies import LSTMWrapper
from holdfast.report.console import RunNotices
from holdfast.rollout import Collector, Segments
from holdfast.rollout.nan_checks import report_outside_box
from holdfast.rollout.statistics import Throughput
from holdfast.state_tree import get_field
from holdfast.training.distributed import SlowRanks, own_agents, own_memories
from holdfast.types import Tensor
from holdfast.worlds import World
from holdfast.worlds.obs import has_bounds
from holdfast.worlds.reshard import part_of_rank
from holdfast.worlds.save_restore import save_world
from holdfast.worlds.step import AsyncWorld, Restarted

MISMATCH_ERRORS = (ContractError, LookupError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError)
"""Exceptions raised when a checkpoint does not match this run."""


class Trainer:
    """Collects rollouts and updates the policy; saves and restores all training state."""

    def __init__(
        self,
        config: Config,
        world: World,
        policy: LSTMWrapper,
        teachers: Sequence[Teacher] = (),
        notices: RunNotices | None = None,
    ) -> None:
        self._config, self._policy, self._teachers = config, policy, teachers
        self._device = next(policy.parameters()).device
        self._notices, self._throughput = notices or RunNotices(), Throughput()
        self.iterations = config.iterations
        """Iterations of the run."""
        self.iteration = 0
        """Complete iterations."""
        self.global_step = 0
        """Valid steps collected, over all agents."""
        self.episodes = 0.0
        """Finished episodes."""
        self._numbers: dict[str, float] = {}
        self._worker_error: WorkerError | None = None
        self._slow_ranks, self._rollout_s = SlowRanks(), 0.0
        self._checks_boxes = has_bounds(world.spec.observation_space)
        trainer = config.trainer
        self._monitor = TrainingMonitor(policy, world.agents, trainer.monitor, total_steps=config.steps)
        graphs = self._notices.graphs if trainer.cuda_graphs else None
        self._collector = Collector(
            world,
            policy,
            length=config.rollout_length,
            horizon=trainer.bptt_horizon,
            seed=config.seed,
            burn_in=trainer.burn_in if trainer.stale == "burn_in" else 0,
            trim_tokens=all(teacher.policy.accepts_trimmed_obs for teacher in teachers),
            action_noise=trainer.action_noise,
            audit=self._monitor.resets,
            graphs=graphs,
        )
        self._learner = Learner(policy, trainer, config.seed, clip_reward=config.world.clip_reward, graphs=graphs)

    @property
    def seconds(self) -> float:
        """Duration of the run up to the end of its last iteration."""
        return self._throughput.seconds

    def value(self, key: str) -> float | None:
        """Return the number of a `trainer.` key in the next iteration, by its schedule if it has one."""
        require_scheduled(key)
        config = trainer_config_at(self._config, self.iteration / self.iterations, self._numbers)
        return attrgetter(key.removeprefix("trainer."))(config)

    def set(self, key: str, value: int | float) -> None:
        """Set a number that is read in every iteration, from the next one on and instead of its schedule.

        The key is one that can be scheduled: `trainer.optimizer.learning_rate`, `trainer.ppo.ent_coef`. The number is
        part of checkpoints.
        """
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{key}={value}: {error}") from None
        try:
            with_number(self._config.trainer, key, number)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._numbers[key] = number

    def share_numbers(self) -> None:
        """Take the numbers that were set on rank 0."""
        self._numbers = ranks.broadcast(self._numbers)

    def unset(self, keys: Iterable[str]) -> None:
        """Go back to the config for some keys."""
        for key in keys:
            self._numbers.pop(key, None)

    def collect(self) -> Segments:
        """Collect one rollout; a rank does so alone, without collective calls."""
        if self._worker_error is not None:
            raise self._worker_error
        with self._monitor.resets.track():
            start = time.perf_counter()
            segments = self._collector.rollout(version=self.iteration)
        self._rollout_s = time.perf_counter() - start
        self._notices.rollout(segments, self.iteration)
        if self._checks_boxes:
            report = report_outside_box(segments, self._collector.world.spec.observation_space)
            # Once.
            self._checks_boxes = not report
            self._notices.alarm(report)
        return segments

    def check_replay(self, segments: Segments) -> dict[str, float]:
        """Check replay and clear on a rollout, in iterations where `trainer.check` is due; return metrics."""
        if not is_due(self._config.trainer.check, self.iteration):
            return {}
        checks = check_segments(self._policy, segments)
        # Whether there was a reset to check depends on the rank.
        names = ("memory/check_replay", "memory/check_clear")
        errors = ranks.reduce(torch.tensor([checks.get(name, -1.0) for name in names]).double(), "max").tolist()
        return {name: error for name, error in zip(names, errors, strict=True) if error >= 0}

    def update(self, segments: Segments) -> dict[str, int | float]:
        """Update the policy on a rollout, which completes the iteration; return its metrics."""
        iteration, collector, monitor = self.iteration, self._collector, self._monitor
        self._notices.alarm(self._slow_ranks.check(self._rollout_s))
        progress = iteration / self.iterations
        config = trainer_config_at(self._config, progress, self._numbers)
        with collector.timer.timing("update"):
            outputs = [teacher.run(segments, self.global_step) for teacher in self._teachers]
            teacher_outputs = [output for output in outputs if output is not None]
            hooks = monitor.before_update(segments, iteration)
            losses = self._learner.update(
                segments, config, progress=progress, teacher_outputs=teacher_outputs, hooks=hooks, iteration=iteration
            )
            losses |= self._learner.refresh(segments, collector, config)
        self._notices.update(iteration, losses)
        num_valid = int(ranks.reduce(segments.steps["valid"].sum()))
        self.global_step += num_valid
        self.iteration += 1
        episodes = collector.episodes.pop()
        self.episodes += episodes["charts/episodes"]
        interval = config.analyze_weights_interval
        return self._notices.on_metrics(
            {
                "iteration": self.iteration,
                "global_step": self.global_step,
                **self._throughput.pop(collector.timer, num_valid),
                **_scheduled_values(self._config, config, self._numbers),
                **episodes,
                **losses,
                **monitor.pop_metrics(segments, self.global_step),
                **(weight_metrics(self._policy) if interval and self.iteration % interval == 0 else {}),
            },
            monitor.memory_usage.alarm(),
        )

    @torch.no_grad()
    def snapshot(self, score: float | None, log_state: Mapping[str, Any]) -> TrainingSnapshot:
        """Copy all training state between two iterations; `log_state` is that of the run's log files."""
        trainer = {
            "episodes": self.episodes,
            "seconds": self.seconds,
            "reach": self._notices.reach,
            "numbers": dict(self._numbers),
            "files": dict(log_state),
            "collector": self._collector.state(),
            "learner": self._learner.state(),
            "monitor": self._monitor.state(),
            "rng": rng_state(self._device),
        }
        memories = {
            "policy": self._policy.store.snapshot().as_tree(),
            "teachers": {teacher.name: teacher.policy.store.snapshot().as_tree() for teacher in self._teachers},
        }
        return TrainingSnapshot(
            self.iteration,
            self.global_step,
            clone_tree(self._policy.state_dict()),
            clone_tree(trainer),
            clone_tree(memories),
            clone_tree(self._world_state()),
            score,
        )

    def _world_state(self) -> dict[str, Any] | None:
        """Save the world's state; a worker failure is raised by the next rollout, after this is saved."""
        try:
            return save_world(self._collector.world)
        except WorkerError as error:
            self._worker_error = error
            return None

    def _own_part(self, trainer: Any, memories: Any, world: Any) -> tuple[Any, Any, Any]:
        """Return what a checkpoint holds of this rank's agents."""
        if ranks.count() > 1 and world is not None:
            pool, group_count = self._collector.world, 1
            if isinstance(pool, AsyncWorld):
                group_count = len(pool.groups)
            workers = self._config.trainer.num_workers

            def current() -> Any:
                state = save_world(pool)
                return state["shards"][0][0] if workers and state is not None else state

            world = part_of_rank(
                world, ranks.rank(), ranks.count(), workers=workers, groups=group_count, current=current
            )
        return own_agents(trainer, self._config.world.agents), own_memories(memories, self._config.world.agents), world

    def restore(self, saved: Checkpoint) -> Restarted | None:
        """Restore a checkpoint; return the agents whose worlds could not be restored: they start new episodes."""
        trainer, memories, world = saved.trainer(), saved.memories(), saved.world()
        try:
            trainer, memories, world = self._own_part(trainer, memories, world)
            load_weights(self._policy, saved.path / "model.safetensors")
            # Before the collector clears the memory of agents that start new episodes.
            self._policy.store.restore_tree(get_field(memories, "policy", dict))
            for teacher in self._teachers:
                states = get_field(get_field(memories, "teachers", dict), teacher.name, dict)
                teacher.policy.store.restore_tree(states)
            self._learner.restore(get_field(trainer, "learner", dict))
            collector = get_field(trainer, "collector", dict)
            restarted = self._collector.restore(collector, world, rollouts=saved.iteration)
            self.iteration, self.global_step = saved.iteration, saved.global_step or 0
            self._monitor.restore(get_field(trainer, "monitor", dict), self.global_step)
            self.episodes = get_field(trainer, "episodes", float)
            numbers = get_field(trainer, "numbers", dict)
            self._numbers = {key: get_field(numbers, key, float) for key in numbers}
            # A number that does not fit is found here.
            self.value("trainer.optimizer.learning_rate")
            self._throughput.restore(get_field(trainer, "seconds", float))
            self._notices.reach = None if trainer["reach"] is None else get_field(trainer, "reach", int)
            _restore_rng(get_field(trainer, "rng", dict), self._device)
        except MISMATCH_ERRORS as error:
            reason = ": " if isinstance(error, ContractError) else " does not match this run: "
            raise CorruptFileError(f"{saved.path}{reason}{one_line(error)}") from error
        if restarted is not None:
            self._monitor.resets.reset_agents(restarted.mask)
            for teacher in self._teachers:
                teacher.reset_agents(restarted.mask)
            if self._learner.reward_normalizer is not None:
                self._learner.reward_normalizer.reset_agents(restarted.mask)
        return restarted


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of torch's global generators, which policies with dropout draw from."""
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state()} | cuda


def _restore_rng(saved: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(get_field(saved, "cpu", Tensor))
    # A run saved on the CPU has no CUDA generator to restore.
    if device.type == "cuda" and "cuda" in saved:
        torch.cuda.set_rng_state(get_field(saved, "cuda", Tensor), device)


def _scheduled_values(config: Config, current: TrainerConfig, numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the learning rate and the current value of every other key that is scheduled or was set."""
    keys = dict.fromkeys([*(schedule.key for schedule in config.schedule), *numbers])
    keys.pop("trainer.optimizer.learning_rate", None)
    return {"charts/learning_rate": current.optimizer.learning_rate} | {
        f"charts/scheduled@{key}": attrgetter(key.removeprefix("trainer."))(current) for key in keys
    }
