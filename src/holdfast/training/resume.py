"""Resume a run from its newest valid checkpoint, bit for bit as if it had not been interrupted."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast import ranks, rng
from holdfast.build import config_from
from holdfast.checkpoint.format import Checkpoint
from holdfast.checkpoint.run_dir import Log, RunDir, policy_files
from holdfast.config.run import Config, all_keys, format_value, lookup, override
from holdfast.errors import ConfigError, writing
from holdfast.memory.kernels import load_plans
from holdfast.policies import LSTMWrapper
from holdfast.state_tree import get_field
from holdfast.training.trainer import Trainer

FIXED = (
    *("run", "runs_dir", "seed", "world.", "policy.", "memory."),
    *("trainer.batch_size", "trainer.bptt_horizon", "trainer.stale", "trainer.burn_in"),
    *("trainer.optimizer.name", "trainer.teachers", "trainer.normalize_reward"),
)
"""Keys and prefixes of keys that a resumed run cannot change: the saved state depends on them."""
FREE = ("policy.kernel", "policy.compile")
"""Exceptions to `FIXED`."""


@dataclass(frozen=True)
class ResumePoint:
    """A run's folder, the checkpoint to resume from, and the config to resume with."""

    folder: RunDir
    checkpoint: Checkpoint
    config: Config
    notes: tuple[str, ...]
    """Messages about damaged checkpoints that were skipped."""
    changed: str = ""
    """Keys whose values changed, as text."""
    override_keys: tuple[str, ...] = ()
    """Keys that were given for the resumed run."""

    @property
    def world_seed(self) -> int:
        """The world's seed; a world that cannot be restored must not repeat its first episodes."""
        if self.checkpoint.has_world:
            return self.config.seed
        return rng.derive_seed(self.config.seed, rng.STREAM_RESUMED, self.checkpoint.iteration)

    def restore_into(self, trainer: Trainer, log: Log, command: str, policy: LSTMWrapper) -> None:
        """Restore the trainer, then truncate the logs; if restoring fails, no file has changed."""
        saved, folder = self.checkpoint, self.folder
        for note in self.notes:
            log(note)
        load_plans(saved.environment.get("kernels"))
        restarted = trainer.restore(saved)
        # No file changes before all ranks have read theirs.
        ranks.any_of(False)
        # What is typed now comes before what a callback has set.
        trainer.unset(key.removeprefix("schedule.") for key in self.override_keys)
        if ranks.is_main():
            self._continue_files(command, policy, log)
        finished = saved.iteration == self.config.iterations
        hint = "; it is finished: to train longer, set trainer.total_timesteps=N" if finished else ""
        log(
            f"run {folder.path} resumes after iteration {saved.iteration:,} of {self.config.iterations:,}, "
            f"step {trainer.global_step:,}, from {saved.path.name}{hint}"
        )
        if self.changed:
            log(f"changed: {self.changed}")
        warning = saved.bit_exact_warning(next(policy.parameters()).device)
        if warning:
            log(f"not bit-exact: {warning}.")
        if restarted is not None:
            count = int(torch.count_nonzero(restarted.mask))
            log(
                f"{restarted.reason}: {count} of {len(restarted.mask)} agents start a new episode, with memory cleared."
            )

    def _continue_files(self, command: str, policy: LSTMWrapper, log: Log) -> None:
        """Continue the files of the run where the checkpoint was saved."""
        saved, folder = self.checkpoint, self.folder
        log_state = get_field(saved.trainer(), "files", dict)
        folder.append_provenance(policy_files(self.config, policy), command)
        with writing(folder.checkpoints):
            folder.quarantine_newer(saved)
        folder.truncate_logs(log_state, log)


@contextmanager
def locked_run(path: Path) -> Iterator[None]:
    """Lock the folder of a run to resume, before its checkpoints are read."""
    if not path.is_dir():
        raise ConfigError(f"--resume {path}: no such folder; give a run's folder, for example runs/NAME.")
    if not RunDir(path).numbered():
        run = path.resolve().parents[1] if (path / "model.safetensors").exists() else None
        hint = "has the run saved one?" if run is None else f"it is one: give the run's folder, {run}."
        raise ConfigError(f"{path} holds no checkpoint; {hint}")
    with RunDir(path).locked():
        yield


def shared_resume_point(path: Path, overrides: Mapping[str, Any]) -> ResumePoint:
    """Find the checkpoint to resume from on rank 0, the same one for all ranks."""
    with ranks.failing_together():
        point = find_resume_point(path, overrides) if ranks.is_main() else None
    fields = ranks.broadcast(None if point is None else (point.checkpoint, point.config, point.override_keys))
    if point is not None:
        return point
    assert fields is not None, "rank 0 has found a checkpoint"
    checkpoint, config, override_keys = fields
    return ResumePoint(RunDir(path), checkpoint, config, (), "", override_keys)


def find_resume_point(path: Path, overrides: Mapping[str, Any]) -> ResumePoint:
    """Find the checkpoint to resume from and the config to resume with."""
    folder, notes = RunDir(path), list[str]()
    saved = folder.newest(notes.append)
    before = config_from(saved)
    config = override(before, overrides)
    changed = list[str]()
    for key in all_keys(before.world.name):
        was, now = lookup(before, key), lookup(config, key)
        if was == now:
            continue
        changed.append(f"{key} {format_value(was)} → {format_value(now)}")
        if key.startswith(FIXED) and key not in FREE:
            raise ConfigError(
                f"{key}={now} cannot change in a resumed run: it is {was}. Leave it out, or start a new run."
            )
    if config.iterations < saved.iteration:
        raise ConfigError(
            f"trainer.total_timesteps={config.trainer.total_timesteps} is less than {path} has trained: "
            f"{saved.iteration * config.trainer.batch_size:,}; give more."
        )
    if config.schedule and config.iterations != before.iterations:
        changed.append("schedules now run to the new end")
    return ResumePoint(folder, saved, config, tuple(notes), ", ".join(changed), tuple(overrides))
