"""A subject: all that the check needs to know of a recurrent policy, whoever wrote it."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from gymnasium import spaces
from torch import nn

from holdfast.check.script import Moments, Script
from holdfast.check.tree import State, copied
from holdfast.policies.clock import ClearOn
from holdfast.shapes import Bool, Float, Tensor

if TYPE_CHECKING:
    from holdfast.check.bench import Bench
    from holdfast.check.results import Measurement

SINGLE = 200
"""How many steps are lived one at a time before whole segments are."""
Answer = Mapping[str, Tensor]
"""What a policy says, by name: `[A]` or `[A,k]` for a step, `[B,T]` or `[B,T,k]` for a segment."""


@dataclass(frozen=True)
class Life:
    """The same steps lived in rollouts and replayed as an update would."""

    lived: Float[Tensor, "A N K"]
    replayed: Float[Tensor, "A N K"]


class Subject(ABC):
    """A recurrent policy under test: it makes an initial state, acts one step, and replays a segment.

    `act` must be what its rollouts call and `replay` what its updates call. A subject whose library
    collects and trains in a way of its own also says how it lives a whole script.
    """

    module: Any
    """The torch module that holds the weights; the check copies, converts and spoils it."""
    rollouts: int = 2
    segments: int = 2
    """How its trainer cuts a life: so many rollouts of so many segments each."""
    clear_on: ClearOn = "episode"
    actions: int | spaces.MultiDiscrete | spaces.Box = 1
    """How many actions there are to choose from, or the space they are in."""
    told_of_starts: bool = True
    """Whether it, or its trainer, is told where episodes start; if not, the check clears in its place."""
    notes: tuple[str, ...] = ()
    """What was assumed about it, for the verdict."""
    knows_absence: ClassVar[bool] = False
    """Whether it is told in which steps nobody acts."""
    recuts: bool = False
    """Whether its trainer cuts rows anew at starts, so that agents in another order round differently."""
    cuts_itself: bool = False
    """Whether its states must be free of graphs where gradients are on; if not, its rollouts have none."""

    @abstractmethod
    def imagine(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw observations it could see: `[*size, ...]`."""

    def do(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw actions it could take."""
        if isinstance(self.actions, int):
            return torch.randint(self.actions, size, generator=generator)
        if isinstance(self.actions, spaces.MultiDiscrete):
            parts = [torch.randint(count, size, generator=generator) for count in self.actions.nvec.tolist()]
            return torch.stack(parts, dim=-1)
        return torch.randn(*size, *self.actions.shape, generator=generator)

    @abstractmethod
    def initial(self, rows: int) -> State:
        """Make the state of so many agents that remember nothing yet."""

    @abstractmethod
    def act(self, moment: Moments, state: State) -> tuple[Answer, State]:
        """Live one step `[A]`, and return what it says and the state after it."""

    @abstractmethod
    def replay(self, moments: Moments, state: State) -> Answer:
        """Go over a segment `[B,T]` again from its entry state, as an update does."""

    def value(self, moment: Moments, state: State) -> Answer:
        """Ask what a step is worth, as a bootstrap does."""
        return self.act(moment, state)[0]

    def live(self, script: Script) -> Life:
        """Live a script in rollouts, and replay every segment from the state at its entry."""
        horizon = script.steps // (self.rollouts * self.segments)
        lived, replayed = [], []
        state = self.initial(script.agents)
        for rollout in range(self.rollouts):
            entries = []
            for t in range(rollout * self.segments * horizon, (rollout + 1) * self.segments * horizon):
                if t % horizon == 0:
                    entries.append((t, copied(state)))
                said, state = self.act(script.at(t), state)
                lived.append(flat(said, 1))
            replayed += [flat(self.replay(script.moments(t, t + horizon), entry), 2) for t, entry in entries]
        return Life(torch.stack(lived, dim=1), torch.cat(replayed, dim=1))

    def evaluate(self, script: Script) -> Float[Tensor, "A N K"]:
        """Live a script as an evaluation would."""
        state, said = self.initial(script.agents), []
        for t in range(script.steps):
            answer, state = self.act(script.at(t), state)
            said.append(flat(answer, 1))
        return torch.stack(said, dim=1)

    def counted(self, script: Script) -> Bool[Tensor, "A N1"]:
        """Say which steps of an evaluation it counts; what it does with others is nobody's concern."""
        return torch.ones_like(script.first)

    def over(self, moments: Moments, state: State) -> State:
        """Live a segment `[B,T]` and return the state after it; in one call, if it can."""
        for t in range(moments.batch[1]):
            _, state = self.act(moments[:, t], state)
        return state

    def pass_time(self, script: Script, state: State, steps: int) -> State:
        """Live so many steps, the script again and again: some single ones first, then whole segments."""
        for t in range(min(steps, SINGLE)):
            _, state = self.act(script.at(t % script.steps), state)
        horizon = script.steps // (self.rollouts * self.segments)
        for done in range(SINGLE, steps, horizon):
            start = done % (script.steps - horizon)
            state = self.over(script.moments(start, start + min(horizon, steps - done)), state)
        return state

    def entrances(self) -> Sequence[nn.Module]:
        """Point at the modules that read `[B,T,D]` and remember, for observations that are whole numbers."""
        return ()

    def beyond(self, law: str, bench: "Bench") -> list["Measurement"]:
        """Measure what only this kind of policy has, in addition."""
        return []

    def in_precision(self, dtype: torch.dtype) -> "Subject":
        """Copy it, in training mode, on the CPU, in some precision."""
        twin = copy.deepcopy(self)
        twin.module = twin.module.cpu().to(dtype).train()
        return twin

    def call(self, weights: dict[str, Tensor], name: str, *arguments: Any) -> Any:
        """Call one of the methods above with other weights in the module."""
        lent = {f"module.{key}": leaf for key, leaf in weights.items()}
        return torch.func.functional_call(_Loan(self), lent, (name, *arguments))


class _Loan(nn.Module):
    """Lets a method run while the module holds borrowed weights."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.module = subject.module
        self._subject = [subject]

    def forward(self, name: str, *arguments: Any) -> Any:
        return getattr(self._subject[0], name)(*arguments)


def flat(answer: Answer, batch_dims: int) -> Float[Tensor, "*batch K"]:
    """Lay all numbers of an answer side by side."""
    return torch.cat(
        [
            leaf.flatten(batch_dims) if leaf.dim() > batch_dims else leaf[..., None]
            for leaf in answer.values()
        ],
        dim=-1,
    )
