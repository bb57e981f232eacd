"""A world that fails in a configurable step and way, and a check for leaked shared memory."""

import collections
import itertools
import os
import signal
import time
from pathlib import Path

import torch

from holdfast.worlds import Recall


class Faulty(Recall):
    """Recall whose agent `who` fails once, in step `when`, in the way `how`.

    With `marker`, a file, it fails only if there is none, and creates it. With `stays` every later step
    fails, and with a seed other than 3 (a restarted worker's) also the first.
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
        is_here = int(self._agent[0]) <= self._who <= int(self._agent[-1])
        due = self._taken == self._when or (self._stays and self._taken > self._when)
        if is_here and due and not (self._marker and os.path.exists(self._marker)):
            if self._marker:
                open(self._marker, "w").close()
            step = getattr(self, f"_{self._how}")()
            if step is not None:
                return step
        return super().step(actions)

    def _raise(self):
        raise ValueError("the bottom fell out")

    def _hang(self):
        time.sleep(3600)

    def _hold(self):
        # In C, without releasing the GIL.
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
    """Takes 1.5 seconds to make, and hangs in its second step."""

    def __init__(self, agents, **options):
        time.sleep(1.5)
        super().__init__(agents, when=2, how="hang", **options)


HOW = ("raise", "hang", "hold", "kill", "crash", "leave", "garble", "shape", "nan")


def named_memory(pids):
    """Return the named shared memory of processes, which would stay if they were killed."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
    assert all("memfd:holdfast" in text for text in maps)
    return [line for text in maps for line in text.splitlines() if "/dev/shm/" in line]
