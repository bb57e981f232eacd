"""A case: one copy of the policy under test, in one precision, and the ways to let it live."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch

from holdfast.check.script import Moments, Script, Some
from holdfast.check.subject import Life, Subject, flat
from holdfast.check.tree import Rows, State, copied, leaves
from holdfast.shapes import Float, Tensor

AGENTS = 8
"""A whole number of the blocks that matrix products work in, so that permuted rows are bit-equal."""
HORIZON = 8
STEPS = 4 * HORIZON


@dataclass(frozen=True)
class Case:
    """A copy of the policy in one precision: while it thinks, that is what numbers are made of by default."""

    subject: Subject
    dtype: torch.dtype
    kind: torch.dtype
    """What its layers compute in: `dtype`, or something coarser."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where it lives; what it is shown is taken there, and what it says is brought back to the CPU."""

    @contextmanager
    def precisely(self) -> Iterator[None]:
        """Make this case's precision the default one."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    @cached_property
    def rows(self) -> Rows:
        """Which axis of each tensor of a state counts the agents."""
        with self.precisely():
            return Rows.learn(self.subject.initial(2), self.subject.initial(3))

    @cached_property
    def forgetful(self) -> bool:
        """Whether there is no memory to speak of."""
        with self.precisely():
            return not leaves(self.subject.initial(2))

    @torch.no_grad()
    def live(self, script: Script) -> Life:
        """Live and replay a script as the subject's own trainer would."""
        with self.precisely():
            life = self.subject.live(self.shown(script).copied())
        return Life(life.lived.cpu(), life.replayed.cpu())

    @torch.no_grad()
    def evaluate(self, script: Script) -> Float[Tensor, "A N K"]:
        """Live a script as the subject's own evaluation would."""
        self.subject.module.eval()
        try:
            with self.precisely():
                return self.subject.evaluate(self.shown(script).copied()).cpu()
        finally:
            self.subject.module.train()

    @torch.no_grad()
    def replay(self, moments: Moments, state: State) -> Float[Tensor, "B T K"]:
        """Replay segments from their entry states."""
        with self.precisely():
            return flat(self.subject.replay(self.shown(moments), copied(state)), 2).cpu()

    @torch.no_grad()
    def steps(
        self, script: Script, start: int = 0, stop: int | None = None, state: State = None
    ) -> tuple[Float[Tensor, "A N K"], list[State]]:
        """Act step by step from a state, empty by default; return answers and the state before every step."""
        said, states = [], []
        with self.precisely():
            state = self.subject.initial(script.agents) if state is None else state
            script = self.shown(script)
            for t in range(start, script.steps if stop is None else stop):
                states.append(copied(state))
                answer, state = self.subject.act(script.at(t), copied(state))
                said.append(flat(answer, 1))
        return torch.stack(said, dim=1).cpu(), [*states, copied(state)]

    def shown(self, moments: Some) -> Some:
        """Take what is met to where the policy lives, in its precision."""
        return moments.to(self.dtype, self.device)
