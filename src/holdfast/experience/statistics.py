"""Returns and lengths of the episodes that ended."""

from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.saved import tensor_like
from holdfast.shapes import Bool, Tensor
from holdfast.worlds import Step
from holdfast.worlds.turns import EVERYBODY


@dataclass
class EpisodeStatistics:
    """Returns and lengths of the episodes that ended, added up where the data lies, world by world."""

    agent: Tensor
    parts: tuple[tuple[str, int], ...] = ()
    totals: Tensor = field(init=False)
    _running: Tensor = field(init=False)
    _acted: Tensor = field(init=False)
    _part: Tensor = field(init=False)

    def __post_init__(self) -> None:
        device, agents = self.agent.device, len(self.agent)
        counts = [count for _, count in self.parts] or [agents]
        # Whether an episode ended, its return, its length.
        self._running = torch.zeros(agents, 3, dtype=torch.float64, device=device)
        self._acted = torch.zeros(agents, dtype=torch.bool, device=device)
        self._part = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(device)
        self.totals = torch.zeros(len(counts), 3, dtype=torch.float64, device=device)

    def saw(self, step: Step, rows: slice | Tensor = EVERYBODY) -> None:
        """Count a step that answers an action of some agents; a reward for no action is none."""
        running = self._running[rows]
        running[:, 1] += torch.where(self._acted[rows], step.reward, 0.0)
        ended = step.terminated | step.truncated
        running[:, 0] = ended
        over = torch.where(ended[:, None], running, 0.0)
        self.totals.index_add_(0, self._part[rows], over)
        self._running[rows] = torch.where(ended[:, None], 0.0, running)

    def acted(self, valid: Tensor, rows: slice | Tensor = EVERYBODY) -> None:
        """Count an action of some agents."""
        self._acted[rows] = valid
        self._running[rows, 2] += valid

    def take(self) -> dict[str, float]:
        """Return the means since the last call, of all and of each world of several, and begin anew."""
        named = {"": self.totals.sum(0).tolist()}
        if self.parts:
            labels = [f"@{label}" for label, _ in self.parts]
            named |= dict(zip(labels, self.totals.tolist(), strict=True))
        self.totals.zero_()
        found: dict[str, float] = {}
        for label, (episodes, returns, lengths) in named.items():
            found[f"charts/episodes{label}"] = episodes
            if episodes:
                found[f"charts/episodic_return{label}"] = returns / episodes
                found[f"charts/episodic_length{label}"] = lengths / episodes
        return found

    def state(self) -> dict[str, Tensor]:
        """Say what the episodes that go on have brought so far, and what was not taken yet."""
        return {"running": self._running, "acted": self._acted, "totals": self.totals}

    def restore(self, saved: Any) -> None:
        """Go on from there."""
        self._running, self._acted, self.totals = (
            tensor_like(saved, key, like) for key, like in self.state().items()
        )

    def forget(self, who: Bool[Tensor, " A"]) -> None:
        """Leave out the episodes of some, who begin anew."""
        self._running[who], self._acted = 0.0, self._acted & ~who
