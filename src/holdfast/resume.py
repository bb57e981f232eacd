"""Going on with a run that was interrupted: from its newest whole checkpoint, as if it had never been."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.build import config_of, policy_config
from holdfast.config import Config, change, keys_of
from holdfast.errors import ConfigError
from holdfast.keep import Checkpoint, RunFolder, described
from holdfast.keep.folder import Say
from holdfast.life import Life
from holdfast.memory.kernels import adopt
from holdfast.policies import LSTMWrapper
from holdfast.report import lookup, typed
from holdfast.saved import taken
from holdfast.worlds import draws

FIXED = (
    *("run", "runs_dir", "seed", "world.", "policy.", "memory."),
    *("trainer.batch_size", "trainer.bptt_horizon", "trainer.stale", "trainer.burn_in"),
    *("trainer.optimizer.name", "trainer.teachers", "trainer.num_workers", "trainer.async_factor"),
)
"""Keys, and beginnings of keys, on which what was saved depends."""
FREE = ("policy.kernel", "policy.compile")
"""Those among them on which it does not."""


@dataclass(frozen=True)
class Resumed:
    """A run that is to go on, and from where."""

    folder: RunFolder
    saved: Checkpoint
    config: Config
    notes: tuple[str, ...]
    """What was found damaged on the way."""
    changed: str = ""
    """Which keys are not as they were."""

    @property
    def to_build(self) -> Config:
        """The config to build the policy by: a component graph as it was saved."""
        return policy_config(self.saved, self.config)

    @property
    def world_seed(self) -> int:
        """The seed of the world; one that cannot be put back must not live its first episodes again."""
        if self.saved.has_world:
            return self.config.seed
        return draws.seed_of(self.config.seed, draws.STREAM_RESUMED, self.saved.iteration)

    def go_on(self, life: Life, say: Say, command: str, policy: LSTMWrapper) -> None:
        """Put everything back, then cut the files to where they were; whatever fails changes nothing."""
        saved, folder = self.saved, self.folder
        for note in self.notes:
            say(note)
        adopt(saved.made_with.get("kernels"))
        anew = life.restore(saved)
        folder.reopen(described(self.config, policy), command)
        folder.clean(saved)
        folder.cut(taken(saved.trainer(), "files", dict), say)
        finished = saved.iteration == self.config.iterations
        more = "; it is finished: for longer, give trainer.total_timesteps=N" if finished else ""
        say(
            f"run {folder.path} goes on after iteration {saved.iteration:,} of {self.config.iterations:,}, "
            f"step {life.global_step:,}, from {saved.path.name}{more}"
        )
        if self.changed:
            say(f"changed: {self.changed}")
        changed = saved.not_exact(next(policy.parameters()).device)
        if changed:
            say(f"not bit-exact: {changed}.")
        if anew is not None:
            count = int(torch.count_nonzero(anew.who))
            say(
                f"{anew.why}: {count} of {len(anew.who)} agents begin a new episode, with their memories "
                "cleared."
            )


@contextmanager
def holding(path: Path) -> Iterator[None]:
    """Hold the folder of a run that is to go on, before anybody looks for where from."""
    if not path.is_dir():
        raise ConfigError(f"--resume {path}: there is no such folder; give a run's, for example runs/NAME.")
    if not RunFolder(path).numbered():
        run = path.resolve().parents[1] if (path / "model.safetensors").exists() else None
        hint = "has the run saved one?" if run is None else f"it is one: give the run's folder, {run}."
        raise ConfigError(f"{path} holds no checkpoint; {hint}")
    with RunFolder(path).locked():
        yield


def find_resumed(path: Path, overrides: Mapping[str, Any]) -> Resumed:
    """Find out from where a run can go on, and by which config."""
    folder, notes = RunFolder(path), list[str]()
    saved = folder.newest(notes.append)
    saved.require_trainer()
    before = config_of(saved)
    config = change(before, overrides)
    changed = list[str]()
    for key in keys_of(before.world.name):
        was, now = lookup(before, key), lookup(config, key)
        if was != now:
            changed.append(f"{key} {typed(was)} → {typed(now)}")
        if was != now and key.startswith(FIXED) and key not in FREE:
            raise ConfigError(
                f"{key}={now} cannot be changed in a run that goes on: it is {was}. Leave it out, or begin a "
                "new run."
            )
    if config.iterations < saved.iteration:
        raise ConfigError(
            f"trainer.total_timesteps={config.trainer.total_timesteps} is less than {path} has lived: "
            f"{saved.iteration * config.trainer.batch_size:,}; give more."
        )
    if config.schedule and config.iterations != before.iterations:
        changed.append("what is scheduled now goes on to the new end")
    return Resumed(folder, saved, config, tuple(notes), ", ".join(changed))
