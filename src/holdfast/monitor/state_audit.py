"""Hooks on cells: resets against episode ends; norm, age, saturation."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import reduce
from operator import and_, or_
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from holdfast import ranks
from holdfast.cuda_graphs import is_recording
from holdfast.errors import ContractError
from holdfast.memory import Cell, MultiCell, saturation
from holdfast.policies import LSTMWrapper
from holdfast.state_tree import get_tensor_like
from holdfast.types import Bool, Float, Int, Tensor
from holdfast.worlds import Step
from holdfast.worlds.obs import tensors_of
from holdfast.worlds.step import ALL, array_module, as_array, latest

CELL_ARGUMENTS = ("x", "state", "clear", "valid")
"""Arguments of a cell's call, by position or by name."""
CellInputs = Mapping[str, Any]


def cells_of(policy: LSTMWrapper) -> dict[Cell, tuple[Cell, ...]]:
    """Map each cell that may be called to the single cells it contains: a MultiCell to all of its parts.

    A graph calls the parts of a MultiCell one by one; other policies may call the MultiCell, which does not
    trigger the hooks of its parts, so no call is counted twice.
    """
    return dict(_contained(policy.lstm.cell))


def on_cell_input(policy: LSTMWrapper, callback: Callable[[Cell, CellInputs], None]) -> AbstractContextManager[None]:
    """Call `callback` with the arguments of every call of a cell, before it runs."""

    def hook(cell: Cell, args: tuple[Any, ...], kwargs: CellInputs) -> None:
        callback(cell, dict(zip(CELL_ARGUMENTS, args, strict=False)) | dict(kwargs))

    return _hooked(policy, "register_forward_pre_hook", hook)


def replace_cell_input(policy: LSTMWrapper, function: Callable[[Cell, Tensor], Tensor]) -> AbstractContextManager[None]:
    """Replace the input x of every cell by `function(cell, x)`."""

    def hook(cell: Cell, args: tuple[Any, ...], kwargs: CellInputs) -> tuple[tuple[Any, ...], CellInputs]:
        if args:
            return (function(cell, args[0]), *args[1:]), dict(kwargs)
        return (), {**kwargs, "x": function(cell, kwargs["x"])}

    return _hooked(policy, "register_forward_pre_hook", hook)


def on_cell_output(policy: LSTMWrapper, callback: Callable[[Cell, TensorDict], None]) -> AbstractContextManager[None]:
    """Call `callback` with the state after every call of a cell."""

    def hook(cell: Cell, args: tuple[Any, ...], kwargs: CellInputs, result: Any) -> None:
        callback(cell, result[1])

    return _hooked(policy, "register_forward_hook", hook)


@contextmanager
def same_randomness(policy: LSTMWrapper) -> Iterator[None]:
    """Restore the global random generators after: policies with dropout draw from them."""
    device = next(policy.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def current_state(policy: LSTMWrapper) -> TensorDict:
    """Return the live states of all agents, in order."""
    store = policy.store
    return cast("TensorDict", torch.cat([store.view(start) for start in sorted(store.slices)]))


def state_norms(state: TensorDict) -> Float[Tensor, " B"]:
    """Norm of each agent's state, all of its numbers as one vector."""
    squares = [leaf.float().flatten(1).square().sum(1) for leaf in tensors_of(state)]
    return torch.stack(squares).sum(0).sqrt()


def _contained(cell: Cell) -> Iterator[tuple[Cell, tuple[Cell, ...]]]:
    if not isinstance(cell, MultiCell):
        yield cell, (cell,)
        return
    pairs = [pair for part in cell.cells.values() for pair in _contained(part)]
    yield cell, tuple(part for part, _ in pairs if not isinstance(part, MultiCell))
    yield from pairs


@contextmanager
def _hooked(policy: LSTMWrapper, register: str, hook: Callable[..., Any]) -> Iterator[None]:
    """Register a hook on every cell, and remove it after, so that copies of the policy have none."""
    with ExitStack() as stack:
        for cell in cells_of(policy):
            stack.callback(getattr(cell, register)(hook, with_kwargs=True).remove)
        yield


class ResetAudit:
    """Compares the resets that the world's steps require with those that the cells make, step by step.

    `on_step` takes the world's side: every episode end, and the start of the run, requires one reset, at the first step
    of the next episode, or at the latest when the agent acts. `memory.clear_on=trial` requires one at every trial too,
    `never` none. `track` takes the cells' side; calls in a replay do not count. A memory of several cells is cleared
    when all of them are; a cell that is called twice in a step is cleared if one of the calls clears.

    Counts stay on the device; the host waits for them in `pop_metrics`.
    """

    def __init__(self, policy: LSTMWrapper, agents: int) -> None:
        self._policy, self._cells = policy, cells_of(policy)
        single_cells = (cell for cell, contained in self._cells.items() if contained == (cell,))
        self._memories = [cell for cell in single_cells if not cell.initial(0).is_empty()]
        device = next(policy.parameters()).device
        no_agents = torch.zeros(agents, dtype=torch.bool, device=device)
        # Agents that need a reset, and agents that have acted since the last start or end.
        self._expected, self._has_acted = ~no_agents, no_agents.clone()
        # Whether all agents have acted and none needs a reset, on the CPU: a step in which all act leaves that so.
        self._all_act = False
        # Of the last step, which is compared when the next one comes or the rollout ends: resets due, valid agents,
        # resets made.
        self._pending: Any = None
        self._valid, self._cleared = as_array(no_agents), dict[Cell, Any]()
        self._rows: slice | Tensor = ALL
        # Resets that were due and made, due and not made, made and not due.
        self._counts = torch.zeros(3, dtype=torch.long, device=device)
        self.age: Int[Tensor, " A"] = torch.zeros(agents, dtype=torch.long, device=device)
        """Number of steps that each state has read since its last reset."""
        # The resets of a rollout that is recorded, the step being recorded, and the memories logged in it.
        self._log, self._column, self._logged = dict[Cell, Tensor](), 0, set[Cell]()

    def track(self) -> AbstractContextManager[None]:
        """Context of a rollout, in which the cells' resets are recorded."""
        return on_cell_input(self._policy, self._on_input)

    @torch.no_grad()
    def on_step(self, step: Step, rows: slice | Tensor = ALL) -> None:
        """Record a world step of some agents, the one from `reset()` too, before the policy acts."""
        if not self._memories:
            return
        self._close()
        self._rows = rows = as_array(rows) if isinstance(rows, Tensor) else rows
        terminated, truncated, first, valid = map(as_array, (step.terminated, step.truncated, step.first, step.valid))
        ended = terminated | truncated
        due = ended if self._all_act and np.count_nonzero(valid) == len(valid) else self._due(ended, first, valid)
        if self._policy.clear_on == "trial":
            due = due | as_array(step.trial)
        # Copied: a world may write its next step into the same tensors.
        self._pending = due & (self._policy.clear_on != "never")
        self._valid = valid & True

    def log_resets(self, length: int) -> None:
        """Allocate a log of the resets in each step of a rollout that is recorded."""
        agents = len(self.age)
        self._log = {
            memory: torch.zeros(agents, length, dtype=torch.bool, device=self.age.device) for memory in self._memories
        }

    def log_step(self, t: int) -> None:
        """Write the resets of the cells' next calls into column `t` of the log."""
        self._column, self._logged = t, set()

    @torch.no_grad()
    def on_rollout(self, steps: TensorDictBase) -> None:
        """Compare the resets of all steps `[A,L]` of a rollout, whose resets are in the log."""
        if not self._memories:
            return
        self._close()
        first, valid = steps["first"], steps["valid"]
        ended, starts = steps["dones"] | steps["truncateds"], first | valid
        # As step by step: an end sets `expected`, a start clears it; acting sets `has_acted`.
        all_expected = latest(ended, self._expected) > latest(starts, ~self._expected)
        all_acted = latest(valid, self._has_acted) >= latest(first | ended, ~self._has_acted)
        expected, has_acted = all_expected[:, :-1], all_acted[:, :-1]
        due = ((expected | ended) & starts) | (first & ~has_acted)
        if self._policy.clear_on == "trial":
            due = due | steps["trial"]
        due = due & (self._policy.clear_on != "never")
        cleared = list(self._log.values())
        all_cells, any_cell = reduce(and_, cleared), reduce(or_, cleared)
        self._counts += torch.stack([(due & all_cells).sum(), (due & ~all_cells).sum(), (any_cell & ~due).sum()])
        number = torch.arange(1, valid.shape[1] + 1, device=valid.device)
        last = torch.where(all_cells, number, 0).amax(1)
        acted = (valid & (number >= last[:, None])).sum(1)
        self.age.copy_(torch.where(last > 0, acted, self.age + acted))
        self._expected.copy_(all_expected[:, -1])
        self._has_acted.copy_(all_acted[:, -1])
        self._all_act = False

    def _due(self, ended: Any, first: Any, valid: Any) -> Any:
        """Return the resets due in a step of `self._rows`, and record which agents need one or have acted."""
        rows, all_expected, all_acted = self._rows, as_array(self._expected), as_array(self._has_acted)
        has_acted = all_acted[rows]
        expected, starts = all_expected[rows] | ended, first | valid
        # An agent that acts without `first` needs the reset now. `first` may repeat before the agent acts.
        due = (expected & starts) | (first & ~has_acted)
        all_expected[rows] = expected & ~starts
        all_acted[rows] = (has_acted & ~first & ~ended) | valid
        self._all_act = self._expected.is_cpu and bool(all_acted.all()) and not all_expected.any()
        return due

    def pop_metrics(self) -> dict[str, int]:
        """Return the counts since the last call; empty without memory.

        They are equal if and only if every due reset was made, in its step, and no other. If some are
        missing, `memory/resets` counts those made in their step, else all that were made.
        """
        if not self._memories:
            return {}
        self._close()
        made, missing, extra = ranks.reduce(self._counts.clone()).tolist()
        self._counts.zero_()
        return {"memory/resets": made if missing else made + extra, "memory/resets_due": made + missing}

    def state(self) -> dict[str, Tensor]:
        """Return the expected resets and the counts."""
        self._close()
        return {
            "expected": self._expected,
            "has_acted": self._has_acted,
            "age": self.age,
            "counts": self._counts,
        }

    def restore(self, saved: Any) -> None:
        """Restore what `state` returned."""
        self._all_act = False
        self._expected, self._has_acted, self.age, self._counts = (
            get_tensor_like(saved, key, like) for key, like in self.state().items()
        )

    def reset_agents(self, mask: Bool[Tensor, " A"]) -> None:
        """Expect a reset of restarted agents, which leave their episodes without an end."""
        self._expected, self._has_acted, self._all_act = self._expected | mask, self._has_acted & ~mask, False
        self.age = torch.where(mask, 0, self.age)

    def _on_input(self, cell: Cell, call: CellInputs) -> None:
        if not self._policy.store.is_live:
            return
        clear = as_array(call["clear"])
        if self._policy.rows_alone and len(clear) > len(self._valid):
            # The rest repeats the last agent.
            clear = clear[: len(self._valid)]
        if clear.shape != self._valid.shape:
            raise ContractError(
                f"Resets are counted step by step, for all {len(self._valid)} agents at once; a memory was "
                f"called with clear of shape {list(clear.shape)}."
            )
        if is_recording():
            for memory in self._cells[cell]:
                column = self._log[memory][:, self._column]
                column.copy_(column | clear if memory in self._logged else clear)
                self._logged.add(memory)
            return
        for memory in self._cells[cell]:
            before = self._cleared.get(memory)
            # Copied: a world may write its next step into the same tensors.
            self._cleared[memory] = clear & True if before is None else before | clear

    def _close(self) -> None:
        """Compare the resets due in the last step with those made: by now every cell was called."""
        if self._pending is None:
            return
        due, no_agents = self._pending, self._pending & False
        cleared = [self._cleared.get(memory, no_agents) for memory in self._memories]
        age = as_array(self.age)
        if self.age.is_cpu and not any(np.count_nonzero(mask) for mask in (due, *cleared)):
            # Most steps: no reset is due, and none was made.
            age[self._rows] += self._valid
            self._pending, self._cleared = None, {}
            return
        all_cells, any_cell = reduce(and_, cleared), reduce(or_, cleared)
        counts = as_array(self._counts)
        counts += array_module(self.age).stack([due & all_cells, due & ~all_cells, any_cell & ~due]).sum(1)
        age[self._rows] = age[self._rows] * ~all_cells + self._valid
        self._pending, self._cleared = None, {}


@torch.no_grad()
def state_metrics(policy: LSTMWrapper, age: Int[Tensor, " A"] | None = None) -> dict[str, float]:
    """Metrics of all live states and their ages; none without memory; no saturation if states are not bounded."""
    if not policy.has_memory() or not policy.store.slices:
        return {}
    state = current_state(policy)
    size = state_norms(state)
    metrics = {"memory/state_norm": size.mean(), "memory/state_norm_max": size.max()}
    saturated = saturation(policy.lstm.cell, state)
    if saturated is not None:
        metrics["memory/saturation"] = saturated
    if age is not None:
        metrics |= {"memory/age_mean": age.double().mean(), "memory/age_max": age.max()}
    # Read at once, so that the host waits for the device once.
    numbers = torch.stack([number.double() for number in metrics.values()])
    highest, total = ranks.reduce(numbers.clone(), "max").tolist(), ranks.reduce(numbers).tolist()
    means = [number / ranks.count() for number in total]
    is_max = [name.endswith("_max") for name in metrics]
    chosen = [top if m else mean for top, mean, m in zip(highest, means, is_max, strict=True)]
    return dict(zip(metrics, chosen, strict=True))
