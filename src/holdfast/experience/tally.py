"""Counting episodes: what each agent's first ones returned, and how many steps they took."""

import torch

from holdfast.errors import ContractError
from holdfast.shapes import Bool, Float, Int, Tensor
from holdfast.worlds import Step


class Tally:
    """Adds up rewards and steps until every agent finished its share of episodes.

    Agents count equally many, so short episodes do not crowd out long ones. Rewards and steps count where
    somebody acted. An agent that finishes no episode within `patience` steps is an error.
    """

    def __init__(self, agents: int, share: int, device: torch.device, patience: int) -> None:
        self.agents, self.share, self.patience = agents, share, patience
        self._total = torch.zeros(agents, dtype=torch.float64, device=device)
        self._steps, self._finished, self._since = torch.zeros(3, agents, dtype=torch.long, device=device)
        # One place more than there are episodes, for whoever has finished them all.
        self._returns = self._total.new_zeros(agents, share + 1)
        self._lengths = self._steps.new_zeros(agents, share + 1)

    @property
    def whole(self) -> bool:
        """Whether everybody finished its share."""
        return int(self._finished.min()) >= self.share

    @property
    def returns(self) -> Float[Tensor, "A share"]:
        """What every agent's episodes returned."""
        return self._returns[:, :-1].float()

    @property
    def lengths(self) -> Int[Tensor, "A share"]:
        """How many steps every agent's episodes took."""
        return self._lengths[:, :-1]

    def saw(self, acted: Bool[Tensor, " A"], step: Step) -> None:
        """Take the step that answers what was done by those who acted."""
        ended = step.terminated | step.truncated
        slot = self._finished.clamp(max=self.share)[:, None]
        self._total += torch.where(acted, step.reward, 0.0)
        self._steps += acted
        for table, sums in ((self._returns, self._total), (self._lengths, self._steps)):
            table.scatter_(1, slot, torch.where(ended, sums, table.gather(1, slot)[:, 0])[:, None])
            sums.masked_fill_(ended, 0)
        self._finished += ended
        self._since = torch.where(ended, 0, self._since + 1)
        if int(self._since.max()) > self.patience:
            raise ContractError(
                f"Agent {int(self._since.argmax())} finished no episode within {self.patience} steps; "
                "evaluation needs episodes that end."
            )


def picked(table: Int[Tensor, "A share"] | Float[Tensor, "A share"], episodes: int, together: int) -> Tensor:
    """Take so many episodes, round by round.

    Whose last episode counts is spread over all agents, since those who live in one world are neighbours;
    with `together`, so many neighbours count or do not count as one.
    """
    agents, share = table.shape
    places, left = agents // together, (episodes - (share - 1) * agents) // together
    some = torch.arange(left, device=table.device) * places // left
    rows = (some[:, None] * together + torch.arange(together, device=table.device)).flatten()
    return torch.cat([table[:, :-1].T.flatten(), table[rows, -1]])
