"""Segments: what was lived, in rows that can be replayed."""

from dataclasses import dataclass

from tensordict import TensorDict

from holdfast.errors import ContractError
from holdfast.shapes import Int, Tensor

READ = ("env_obs", "first", "valid", "trial")
"""What a policy reads of a stored step."""


@dataclass(frozen=True)
class Lead:
    """The last steps before each row, and what was remembered before them: to warm a memory up."""

    steps: TensorDict
    """`[B,k]`: what a policy reads."""
    entry: TensorDict
    """`[B]`: the state before them."""

    def rows(self, index: Int[Tensor, " rows"]) -> "Lead":
        """Take some rows."""
        return Lead(self.steps[index], self.entry[index])


@dataclass(frozen=True)
class Segments:
    """Rows of `T` consecutive steps of one agent, with what replaying them needs.

    `steps[B,T]` holds `env_obs rewards dones truncateds first valid trial actions act_log_prob values
    last_values`. `rewards dones truncateds` of step t came with its observation and judge action t-1;
    `last_values` is what the last observation of a truncated episode was worth. `values_now` and `ratio`
    are what the update made of values and probabilities when it last saw the row; `values` stays as lived.
    """

    steps: TensorDict
    entry: TensorDict
    """`[B]`: the state each row began with, before clearing."""
    tail: TensorDict
    """`[B]`: rewards, flags, value and last value of the step after the row's last."""
    version: Int[Tensor, " B"]
    """How many updates the weights that lived each row had seen."""
    agents: int | None = None
    """How many agents' rows lie behind each other, agent by agent; none: these are some rows."""
    lead: Lead | None = None
    """What came before each row, where memories are to be warmed up."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def lived(self) -> int:
        """How many steps somebody acted in."""
        return int(self.steps["valid"].sum())

    @property
    def by_agent(self) -> tuple[int, int]:
        """How many agents there are, and how many rows each has."""
        if self.agents is None:
            raise ContractError("These are some rows of a rollout; only a whole one has rows in order.")
        return self.agents, len(self) // self.agents

    @property
    def each(self) -> int:
        """How many rows each agent has."""
        return self.by_agent[1]

    def rows(self, index: Int[Tensor, " rows"]) -> "Segments":
        """Take some rows."""
        lead = None if self.lead is None else self.lead.rows(index)
        parts = (self.steps[index], self.entry[index], self.tail[index], self.version[index])
        return Segments(*parts, lead=lead)

    def place(self, row: int, step: int) -> str:
        """Say whose step this is, and when it was."""
        agent, segment = divmod(row, self.each)
        return f"agent {agent}, step {segment * self.steps.shape[1] + step} of the rollout"
