"""A world that goes wrong, at a step and in a way that its options say; and what a worker would leave."""

import collections
import itertools
import os
import signal
import time
from pathlib import Path

import torch

from holdfast.worlds import Recall


class Faulty(Recall):
    """Recall, until agent `who` has taken `when` steps: then it does what `how` says, once in its life.

    With `marker`, a file, it does so only while there is none, and makes it. With `stays` it is broken from
    then on, and so is every other one that is made with another seed than 3.
    """

    def __init__(
        self,
        agents,
        *,
        seed=0,
        device="cpu",
        how="raise",
        when=9,
        who=0,
        marker="",
        truncate=False,
        stays=False,
    ):
        super().__init__(agents, delay=(0, 3), cues=4, seed=seed, device=device, truncate=truncate)
        self._how, self._when, self._who, self._marker = how, when, who, marker
        self._taken, self._stays = (when if stays and seed != 3 else 0), stays

    def step(self, actions):
        self._taken += 1
        mine = int(self._agent[0]) <= self._who <= int(self._agent[-1])
        due = self._taken == self._when or (self._stays and self._taken > self._when)
        if mine and due and not (self._marker and os.path.exists(self._marker)):
            if self._marker:
                open(self._marker, "w").close()
            told = getattr(self, f"_{self._how}")()
            if told is not None:
                return told
        return super().step(actions)

    def _raise(self):
        raise ValueError("the bottom fell out")

    def _hang(self):
        time.sleep(3600)

    def _hold(self):
        # In C, without letting any other thread of this process run.
        collections.deque(itertools.count(), 0)

    def _exit(self):
        raise SystemExit(7)

    def _kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def _crash(self):
        os.abort()

    def _leave(self):
        os._exit(3)

    def _garble(self):
        return "garbage"

    def _shape(self):
        step = super().step(torch.zeros(self.agents, dtype=torch.long))
        return type(step)(**{**vars(step), "reward": step.reward[:-1]})

    def _nan(self):
        step = super().step(torch.zeros(self.agents, dtype=torch.long))
        step.reward[:] = torch.nan
        return step


class Slow(Faulty):
    """Takes its time to be made."""

    def __init__(self, agents, **options):
        time.sleep(1.5)
        super().__init__(agents, when=2, how="hang", **options)


HOW = ("raise", "hang", "hold", "kill", "crash", "leave", "garble", "shape", "nan")


def named_memory(pids):
    """What a process would leave behind if it were killed: memory that has a name."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
    assert all("memfd:holdfast" in each for each in maps)
    return [line for each in maps for line in each.splitlines() if "/dev/shm/" in line]
