"""Resets against episode ends: clears are counted where they are made, and what is due where it is told."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from holdfast.errors import ContractError
from holdfast.memory import Cell
from holdfast.monitor.cells import Heard, hearing, readers_of, remembers
from holdfast.policies import LSTMWrapper
from holdfast.saved import taken, tensor_like
from holdfast.shapes import Bool, Int, Tensor
from holdfast.worlds import Step
from holdfast.worlds.turns import EVERYBODY

STANDING = ("owed", "lived", "valid")


class Resets:
    """Hears two sides that know nothing of each other, and compares them agent by agent, step by step.

    The world tells its steps (`saw`): every end owes one clear, and so does the start of the run; it is due
    when the next episode's first step comes, or at the latest when somebody acts. With
    `memory.clear_on=trial` every trial owes one too, with `never` nobody owes any. The policy's cells tell
    their clears while `listening`; what is replayed is not lived and does not count. A memory of several
    cells is cleared when all of them are; a cell that is called twice in a step is cleared if one call did,
    since a cell is a function and may be asked twice.

    Everything is added up where the data lies; nobody waits for a number before `take`.
    """

    def __init__(self, policy: LSTMWrapper, agents: int) -> None:
        self._policy, self.agents = policy, agents
        self._readers = readers_of(policy)
        self._memories = [
            cell for cell, stands_for in self._readers.items() if stands_for == (cell,) and remembers(cell)
        ]
        device = next(policy.parameters()).device
        nobody = torch.zeros(agents, dtype=torch.bool, device=device)
        # Who is owed a clear, and who has acted since the last start or end.
        self._owed, self._lived = ~nobody, nobody.clone()
        self._due: Tensor | None = None
        self._valid, self._cleared = nobody, dict[Cell, Tensor]()
        # Whose step it was that is not compared yet.
        self._rows: slice | Tensor = EVERYBODY
        # Clears that were due and made, due and not made, made and not due.
        self._counts = torch.zeros(3, dtype=torch.long, device=device)
        self.age: Int[Tensor, " A"] = torch.zeros(agents, dtype=torch.long, device=device)
        """How many steps each memory has read since it was last cleared."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear the clears of a rollout."""
        with hearing(self._policy, self._heard):
            yield

    @torch.no_grad()
    def saw(self, step: Step, rows: slice | Tensor = EVERYBODY) -> None:
        """Hear what the world said to some, the first step from `reset()` too, before the policy does."""
        if not self._memories:
            return
        self._close()
        self._rows = rows
        ended, lived = step.terminated | step.truncated, self._lived[rows]
        owed = self._owed[rows] | ended
        # Somebody who acts unasked owes it now. An episode may be opened again that nobody lived in.
        due = (owed & (step.first | step.valid)) | (step.first & ~lived)
        self._owed[rows] = owed & ~(step.first | step.valid)
        self._lived[rows] = (lived & ~step.first & ~ended) | step.valid
        if self._policy.clear_on == "trial":
            due = due | step.trial
        # Copied: a world may write its next step into the same tensors.
        self._due = torch.zeros_like(due) if self._policy.clear_on == "never" else due
        self._valid = step.valid.clone()

    def take(self) -> dict[str, int]:
        """Return the counts since the last call; nothing, where nothing is remembered.

        Both are equal exactly if every clear that was due was made, in its step, and no other. If some are
        missing, only those made in their step are told; if none is, all that were made.
        """
        if not self._memories:
            return {}
        made, missing, unasked = self._counts.tolist()
        self._counts.zero_()
        return {"memory/resets": made if missing else made + unasked, "memory/resets_due": made + missing}

    def state(self) -> dict[str, Any]:
        """Say who is owed a clear, and what of the last step is not compared yet."""
        nobody = torch.zeros_like(self._valid)
        return {
            "owed": self._owed,
            "lived": self._lived,
            "valid": self._of_all(self._valid),
            "age": self.age,
            "counts": self._counts,
            "due": None if self._due is None else self._of_all(self._due),
            "cleared": [self._of_all(self._cleared.get(memory, nobody)) for memory in self._memories],
        }

    def restore(self, saved: Any) -> None:
        """Go on from there: who is in the middle of an episode is owed nothing."""
        self._rows = EVERYBODY
        self._owed, self._lived, self._valid = (tensor_like(saved, key, self._owed) for key in STANDING)
        self.age, self._counts = (
            tensor_like(saved, "age", self.age),
            tensor_like(saved, "counts", self._counts),
        )
        open_step = isinstance(saved["due"], Tensor)
        self._due = tensor_like(saved, "due", self._owed) if open_step else None
        cleared = dict(enumerate(taken(saved, "cleared", list)))
        found = {
            memory: tensor_like(cleared, number, self._owed) for number, memory in enumerate(self._memories)
        }
        # Where no step is open nothing was cleared in it: the next one may be that of some agents.
        self._cleared = found if open_step else {}

    def forget(self, who: Bool[Tensor, " A"]) -> None:
        """Owe a clear to some who begin anew, in the middle of an episode as they are."""
        self._owed, self._lived = self._owed | who, self._lived & ~who
        self.age = torch.where(who, 0, self.age)

    def _heard(self, cell: Cell, call: Heard) -> None:
        if not self._policy.store.is_living:
            return
        clear = call["clear"]
        if clear.shape != self._valid.shape:
            raise ContractError(
                f"Resets are counted step by step, for all {len(self._valid)} agents at once; a memory was "
                f"called with clears {list(clear.shape)}."
            )
        for memory in self._readers[cell]:
            before = self._cleared.get(memory)
            self._cleared[memory] = clear.clone() if before is None else before | clear

    def _of_all(self, mask: Bool[Tensor, " N"]) -> Bool[Tensor, " A"]:
        """Write what is said of those whose step it was for everybody: nothing of the others."""
        whole = torch.zeros_like(self._owed)
        whole[self._rows] = mask
        return whole

    def _close(self) -> None:
        """Compare what was due in the last step with what was made: now every cell has had its call."""
        if self._due is None:
            return
        nobody = torch.zeros_like(self._due)
        cleared = torch.stack([self._cleared.get(memory, nobody) for memory in self._memories])
        all_did, some_did = cleared.all(0), cleared.any(0)
        self._counts += torch.stack([self._due & all_did, self._due & ~all_did, some_did & ~self._due]).sum(1)
        self.age[self._rows] = torch.where(all_did, 0, self.age[self._rows]) + self._valid
        self._cleared = {}
