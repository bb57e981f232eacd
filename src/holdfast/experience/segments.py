"""Segments: what was lived, in rows that can be replayed."""

from dataclasses import dataclass

from tensordict import TensorDict

from holdfast.shapes import Int, Tensor


@dataclass(frozen=True)
class Segments:
    """Rows of `T` consecutive steps of one agent, with what replaying them needs.

    `steps[B,T]` holds `env_obs rewards dones truncateds first valid trial actions act_log_prob values
    last_values`. `rewards dones truncateds` of step t came with its observation and judge action t-1;
    `last_values` is what the last observation of a truncated episode was worth.
    """

    steps: TensorDict
    entry: TensorDict
    """`[B]`: the state each row began with, before clearing."""
    tail: TensorDict
    """`[B]`: rewards, flags, value and last value of the step after the row's last."""
    version: int
    """How many updates the weights that lived this had seen."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def lived(self) -> int:
        """How many steps somebody acted in."""
        return int(self.steps["valid"].sum())

    def rows(self, index: Int[Tensor, " rows"]) -> "Segments":
        """Take some rows."""
        return Segments(self.steps[index], self.entry[index], self.tail[index], self.version)
