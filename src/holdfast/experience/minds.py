"""Whoever plays: a copy of a policy with memories of its own, which may be tampered with at every step."""

import copy
from typing import Literal, get_args

import torch
from tensordict import TensorDict

from holdfast.errors import ContractError
from holdfast.experience.collect import as_batch
from holdfast.memory.cell import select_rows
from holdfast.policies import LSTMWrapper
from holdfast.shapes import Int, Shaped, Tensor
from holdfast.worlds import Step, WorldSpec, draws

MemoryMode = Literal["intact", "cleared", "frozen", "shuffled"]
MEMORY_MODES: tuple[MemoryMode, ...] = get_args(MemoryMode)


class Mind:
    """Plays some rows of a world; weights, memories, mode and binding of the policy it copies are left alone.

    `cleared`: memory is emptied before every step. `frozen`: what is remembered after the first step of an
    episode stays as it is until the episode ends. `shuffled`: before every step everybody gets somebody
    else's memory, all from equally many rows away. Then the step's own clear applies as always.
    """

    def __init__(
        self,
        policy: LSTMWrapper,
        spec: WorldSpec,
        rows: Int[Tensor, " A"],
        *,
        memory: MemoryMode = "intact",
        greedy: bool = True,
        seed: int = 0,
    ) -> None:
        if memory not in MEMORY_MODES:
            raise ContractError(f"memory={memory!r} is none of {', '.join(MEMORY_MODES)}.")
        if memory == "shuffled" and len(rows) < 2:
            raise ContractError(
                "memory='shuffled' gives everybody somebody else's; it needs 2 agents or more."
            )
        self._memory, self._greedy, self._seed = memory, greedy, seed
        self._rows, self._clock = rows, 0
        # Moving a copy to where it is lays its weights end to end again, as cuDNN wants them.
        self._policy = copy.deepcopy(policy).eval().to(rows.device)
        if self._policy.binding.spec is None or self._policy.binding.spec.words != spec.words:
            self._policy.bind(spec, learn=False)
        self._policy.store.open({0: len(rows)})
        # Who has read something in its episode: from then on memory can be frozen.
        self._began = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)

    def act(self, step: Step) -> Shaped[Tensor, "A ..."]:
        """Answer what the world said to these rows."""
        mine = self._policy.actions
        held = self._tampered()
        idle = mine.idle(len(self._rows), self._rows.device)
        uniform = idle if self._greedy else mine.uniform(self._seed, self._rows, self._clock)
        td = self._policy(as_batch(step, 0, uniform))
        if held is not None:
            self._freeze(step, held)
        self._clock += 1
        return mine.greedy(td[mine.key]) if self._greedy else td["actions"]

    def _tampered(self) -> TensorDict | None:
        """Do to the memories what is to be done before a step; return those that may be put back after it."""
        store, agents = self._policy.store, len(self._rows)
        if self._memory == "cleared":
            store.reset()
        elif self._memory == "shuffled":
            nobody = torch.zeros((), dtype=torch.long)
            far = draws.below(agents - 1, self._seed, draws.STREAM_SHUFFLE, nobody, self._clock)
            order = torch.arange(agents, device=self._rows.device).roll(1 + int(far))
            store.write(0, store.read(0, agents)[order])
        return store.read(0, agents).clone() if self._memory == "frozen" else None

    def _freeze(self, step: Step, held: TensorDict) -> None:
        store = self._policy.store
        going_on = self._began & ~step.first
        store.write(0, select_rows(going_on, held, store.read(0, len(held))))
        self._began = going_on | step.valid
