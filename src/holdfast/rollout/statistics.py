"""Episode returns and lengths; timers."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from holdfast import ranks
from holdfast.cuda_graphs import is_recording
from holdfast.state_tree import get_tensor_like
from holdfast.types import Bool, Float, Tensor
from holdfast.worlds import Step
from holdfast.worlds.step import ALL, array_module, as_array


class EpisodeStatistics:
    """Returns and lengths of finished episodes, summed on the device, per world of a mixture."""

    def __init__(self, agents: int, parts: tuple[tuple[str, int], ...], device: torch.device) -> None:
        self._parts = parts
        counts = [count for _, count in parts] or [agents]
        # Columns: whether an episode ended, its return, its length.
        self._running = torch.zeros(agents, 3, dtype=torch.float64, device=device)
        self._acted = torch.zeros(agents, dtype=torch.bool, device=device)
        self._part = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(device)
        # Per agent, in the order of its steps: sums must not depend on which agents arrive first.
        self._totals = torch.zeros_like(self._running)

    def on_step(self, step: Step, rows: slice | Tensor = ALL) -> None:
        """Count a world step of some agents; a reward without an action does not count."""
        rows = as_array(rows) if isinstance(rows, Tensor) else rows
        where = array_module(step.reward).where
        running, totals, acted = map(as_array, (self._running, self._totals, self._acted))
        running[rows, 1] += where(acted[rows], as_array(step.reward), 0.0)
        ended = as_array(step.terminated) | as_array(step.truncated)
        if step.reward.device.type == "cpu" and not ended.any():
            return
        episodes = running[rows]
        episodes[:, 0] = ended
        totals[rows] += where(ended[:, None], episodes, 0.0)
        running[rows] = where(ended[:, None], 0.0, episodes)

    def on_action(self, valid: Tensor, rows: slice | Tensor = ALL) -> None:
        """Count the actions of some agents."""
        rows = as_array(rows) if isinstance(rows, Tensor) else rows
        valid_mask = as_array(valid)
        as_array(self._acted)[rows] = valid_mask
        as_array(self._running)[rows, 2] += valid_mask

    def on_rollout(
        self, valid: Bool[Tensor, "A L"], next_rewards: Float[Tensor, "A L"], next_ended: Bool[Tensor, "A L"]
    ) -> None:
        """Count all steps of a rollout at once; what is `next` came with the following step."""
        steps = torch.arange(1, valid.shape[1] + 1, device=valid.device)
        # 0: none ended.
        last_end = torch.where(next_ended, steps, 0).amax(1, keepdim=True)
        before, acted = steps <= last_end, valid.double()
        counts = torch.stack([next_ended.double(), torch.where(valid, next_rewards, 0.0).double(), acted], dim=-1)
        done, left = (
            torch.where(before[..., None], counts, 0.0).sum(1),
            torch.where(before[..., None], 0.0, counts).sum(1),
        )
        has_ended = last_end > 0
        self._totals += torch.where(has_ended, self._running + done, 0.0)
        self._running.copy_(torch.where(has_ended, left, self._running + left))
        self._acted.copy_(valid[:, -1])

    def pop(self) -> dict[str, float]:
        """Return means since the last call, overall and per world of a mixture, and reset them."""
        totals = torch.zeros(max(1, len(self._parts)), 3, dtype=torch.float64, device=self._totals.device)
        totals.index_add_(0, self._part, self._totals)
        totals = ranks.reduce(totals)
        named = {"": totals.sum(0).tolist()}
        if self._parts:
            labels = [f"@{label}" for label, _ in self._parts]
            named |= dict(zip(labels, totals.tolist(), strict=True))
        self._totals.zero_()
        metrics: dict[str, float] = {}
        for label, (episodes, returns, lengths) in named.items():
            metrics[f"charts/episodes{label}"] = episodes
            if episodes:
                metrics[f"charts/episodic_return{label}"] = returns / episodes
                metrics[f"charts/episodic_length{label}"] = lengths / episodes
        return metrics

    def state(self) -> dict[str, Tensor]:
        """Return the sums of running episodes and the totals not popped yet."""
        return {"running": self._running, "acted": self._acted, "totals": self._totals}

    def restore(self, saved: Any) -> None:
        """Restore what `state` returned."""
        self._running, self._acted, self._totals = (
            get_tensor_like(saved, key, like) for key, like in self.state().items()
        )

    def reset_agents(self, mask: Bool[Tensor, " A"]) -> None:
        """Drop the running episodes of restarted agents."""
        self._running[mask], self._acted = 0.0, self._acted & ~mask


PHASES = ("world", "forward", "copy", "rollout", "update")
"""What takes time; `rollout` is one that runs as CUDA graphs, where the others cannot be told apart."""


class Timer:
    """Sums the seconds spent in each phase; on a GPU, where the host only launches work, by CUDA events."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Add the time inside to a phase."""
        if is_recording():
            # The whole rollout is timed.
            yield
            return
        if not self._on_gpu:
            start = time.perf_counter()
            yield
            self._seconds[phase] += time.perf_counter() - start
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._events.append((phase, start, end))

    def pop(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, and reset them."""
        if self._events:
            self._events[-1][2].synchronize()
        for phase, start, end in self._events:
            self._seconds[phase] += start.elapsed_time(end) / 1000
        seconds = dict(self._seconds)
        self._seconds.clear()
        self._events.clear()
        return seconds


class Throughput:
    """Steps per second of each iteration, measured from the end of the one before, and time per phase."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Duration of the run up to the end of its last iteration."""
        return self._last - self._start

    def restore(self, seconds: float) -> None:
        """Continue counting from a duration."""
        self._last = time.perf_counter()
        self._start = self._last - seconds

    def pop(self, timer: Timer, num_steps: int) -> dict[str, float]:
        """End an iteration of `num_steps` steps; time outside all phases is `time/other`."""
        seconds = timer.pop()
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        phases = {f"time/{phase}": seconds.get(phase, 0.0) for phase in PHASES}
        phases["time/other"] = max(0.0, elapsed - sum(phases.values()))
        return {"seconds": now - self._start, "charts/SPS": num_steps / elapsed, **phases}
