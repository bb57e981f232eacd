"""The Cell interface, LayeredCell, NoMemory, MultiCell and saturation."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast, final

import torch
from tensordict import TensorDict
from torch import nn

from holdfast.errors import ContractError
from holdfast.memory.layers import LeavesOutput, detached
from holdfast.memory.reference import stack_layers
from holdfast.types import Bool, Float, Tensor

Inputs = Float[Tensor, "B *T D"]
Mask = Bool[Tensor, "B *T"]
CellOutput = tuple[Float[Tensor, "B *T H"], TensorDict]


class Cell(nn.Module, ABC):
    """`y, state = cell(x, state, clear)`: clear, then read; the returned state is detached.

    One step takes `x[B,D]` and `clear[B]`, a segment `x[B,T,D]` and `clear[B,T]`; both give the same numbers. Where
    `clear` is true, a row's state is reset before that step is read. Where `valid` is false, the step is skipped: its
    output is zero, the state is unchanged, but a clear still applies. A state is a TensorDict whose leaves start with
    the batch axis.
    """

    input_size: int
    bounded_state: ClassVar[Callable[[TensorDict], Tensor] | None] = None
    """The part of a state that lies in [-1, 1], one value per unit; None: the state is unbounded."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers

    @abstractmethod
    def initial(self, batch: int) -> TensorDict:
        """Return the initial state of `batch` agents, on the device of the weights."""

    @abstractmethod
    def forward(self, x: Inputs, state: TensorDict, clear: Mask, valid: Mask | None = None) -> CellOutput:
        """Process one step or one segment."""

    @abstractmethod
    def reference_forward(self, x: Inputs, state: TensorDict, clear: Mask, valid: Mask | None = None) -> CellOutput:
        """Process a segment step by step: the reference that `forward` is tested against."""


def require_fit(cell: Cell, x: Tensor, state: TensorDict, clear: Tensor) -> None:
    """Raise if the shapes of input, state and clear do not match."""
    # Not every kernel checks its shapes: one that reads past its input returns plausible numbers.
    if x.shape[-1] != cell.input_size or len(state) != len(x) or clear.shape != x.shape[:-1]:
        raise ContractError(
            f"The memory expects x [..., {cell.input_size}] and got x {list(x.shape)} with {len(state)} "
            f"states and clear {list(clear.shape)}. Set input_size to the size that encode returns."
        )


def select_rows(mask: Bool[Tensor, " B"], yes: TensorDict, no: TensorDict) -> TensorDict:
    """Take `yes` where the mask is true, else `no`; torch.where, because 0 x NaN is NaN."""
    return yes.apply(  # pyright: ignore[reportReturnType]
        lambda a, b: torch.where(mask.reshape(-1, *[1] * (a.dim() - 1)), a, b), no
    )


def stack_and_detach(leaves: Sequence[str], layers: Iterable[Sequence[Tensor]]) -> TensorDict:
    """Stack the final states of all layers and detach them: truncated BPTT ends here."""
    return _detached_state(leaves, stack_layers(layers))


def _detached_state(keys: Sequence[str], leaves: Sequence[Tensor]) -> TensorDict:
    return TensorDict(dict(zip(keys, detached(leaves), strict=True)), batch_size=[len(leaves[0])])


class LayeredCell(Cell):
    """A cell whose state has leaves `[B,L,H]`, zeros at first; a subclass computes on them, in the order of the keys.

    `holdfast.nn` has the same layers without a TensorDict, which takes long to import.
    """

    state_keys: ClassVar[tuple[str, ...]]

    @abstractmethod
    def run(self, x: Inputs, state: list[Tensor], clear: Mask, valid: Mask | None) -> LeavesOutput:
        """Process one step or one segment."""

    @abstractmethod
    def run_reference(self, x: Inputs, state: list[Tensor], clear: Mask, valid: Mask | None) -> LeavesOutput:
        """Process a segment step by step."""

    def initial(self, batch: int) -> TensorDict:
        """Return the initial state of `batch` agents: zeros."""
        zeros, size = next(self.parameters()).new_zeros, (batch, self.num_layers, self.hidden_size)
        return TensorDict({key: zeros(size) for key in self.state_keys}, batch_size=[batch])

    def forward(self, x: Inputs, state: TensorDict, clear: Mask, valid: Mask | None = None) -> CellOutput:
        """Process one step `[B,D]` or one segment `[B,T,D]`."""
        require_fit(self, x, state, clear)
        y, leaves = self.run(x, [state[key] for key in self.state_keys], clear, valid)
        return y, _detached_state(self.state_keys, leaves)

    def reference_forward(self, x: Inputs, state: TensorDict, clear: Mask, valid: Mask | None = None) -> CellOutput:
        """Process a segment step by step."""
        y, leaves = self.run_reference(x, [state[key] for key in self.state_keys], clear, valid)
        return y, _detached_state(self.state_keys, leaves)


@final
class NoMemory(Cell):
    """A linear layer and a ReLU in place of a memory; the state is empty."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1) -> None:
        super().__init__(input_size, hidden_size, num_layers)
        self.layer = nn.Linear(input_size, hidden_size)
        nn.init.orthogonal_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def initial(self, batch: int) -> TensorDict:
        """Return an empty state for `batch` agents."""
        return TensorDict({}, batch_size=[batch], device=self.layer.weight.device)

    def forward(self, x: Inputs, state: TensorDict, clear: Mask, valid: Mask | None = None) -> CellOutput:
        """Process one step `[B,D]` or one segment `[B,T,D]`."""
        require_fit(self, x, state, clear)
        y = torch.relu(self.layer(x))
        y = y if valid is None else torch.where(valid[..., None], y, 0.0)
        return y, self.initial(len(x))

    def reference_forward(self, x: Inputs, state: TensorDict, clear: Mask, valid: Mask | None = None) -> CellOutput:
        """Process a segment step by step."""
        valid = torch.ones_like(clear) if valid is None else valid
        steps = zip(x.unbind(1), clear.unbind(1), valid.unbind(1), strict=True)
        return torch.stack([self(x_BD, state, *masks)[0] for x_BD, *masks in steps], dim=1), self.initial(len(x))


@final
class MultiCell(Cell):
    """Several cells in parallel, each on its slice of the input; state leaves are named `CELL.leaf`."""

    def __init__(self, cells: Mapping[str, Cell]) -> None:
        sizes = [(cell.input_size, cell.hidden_size) for cell in cells.values()]
        super().__init__(*map(sum, zip(*sizes, strict=True)))
        self.parts = nn.ModuleDict(cells)

    def initial(self, batch: int) -> TensorDict:
        """Return the joined initial states of `batch` agents."""
        return self.join({name: cell.initial(batch) for name, cell in self.cells.items()})

    @property
    def cells(self) -> dict[str, Cell]:
        """The cells by name."""
        return {name: cell for name, cell in self.parts.items() if isinstance(cell, Cell)}

    def split(self, state: TensorDict) -> dict[str, TensorDict]:
        """Split a joined state by cell."""
        leaves: dict[str, dict[str, Any]] = {name: {} for name in self.cells}
        for key, leaf in state.items():
            name, _, leaf_name = str(key).partition(".")
            leaves[name][leaf_name] = leaf
        return {name: TensorDict(each, batch_size=state.batch_size) for name, each in leaves.items()}

    def join(self, states: Mapping[str, TensorDict]) -> TensorDict:
        """Join the states of all cells."""
        leaves = {f"{name}.{key}": leaf for name, state in states.items() for key, leaf in state.items()}
        return TensorDict(leaves, batch_size=next(iter(states.values())).batch_size)

    def forward(self, x: Inputs, state: TensorDict, clear: Mask, valid: Mask | None = None) -> CellOutput:
        """Run every cell on its slice of one step `[B,D]` or one segment `[B,T,D]`."""
        require_fit(self, x, state, clear)
        return self._run_cells("forward", x, state, clear, valid)

    def reference_forward(self, x: Inputs, state: TensorDict, clear: Mask, valid: Mask | None = None) -> CellOutput:
        """Run every cell on its slice, step by step."""
        return self._run_cells("reference_forward", x, state, clear, valid)

    def _run_cells(self, method: str, x: Tensor, state: TensorDict, clear: Tensor, valid: Tensor | None) -> CellOutput:
        slices = x.split([cell.input_size for cell in self.cells.values()], -1)
        states, outputs, next_states = self.split(state), [], {}
        for (name, cell), cell_x in zip(self.cells.items(), slices, strict=True):
            y, next_states[name] = getattr(cell, method)(cell_x, states[name], clear, valid)
            outputs.append(y)
        return torch.cat(outputs, -1), self.join(next_states)


SATURATED = 0.97
"""A unit beyond this is saturated: tanh's derivative there is 1 - 0.97^2 = 0.06."""


def saturation(cell: Cell, state: TensorDict) -> Float[Tensor, ""] | None:
    """Return the fraction of saturated units; None: no part of the state is bounded."""
    units = [unit.flatten() for unit in _bounded_units(cell, state)]
    return (torch.cat(units).abs() > SATURATED).double().mean() if units else None


def unit_values(cell: Cell, state: TensorDict) -> Float[Tensor, "B units"]:
    """Return one value in [-1, 1] per unit of the last layer of each cell, to be looked at; no memory has no units."""
    if isinstance(cell, MultiCell):
        states = cell.split(state)
        return torch.cat([unit_values(child, states[name]) for name, child in cell.cells.items()], dim=1)
    if state.is_empty():
        return torch.zeros(len(state), 0)
    bounded_state = type(cell).bounded_state
    leaf = next(iter(state.values())) if bounded_state is None else bounded_state(state)
    units = cast("Tensor", leaf).float()
    units = units.tanh() if bounded_state is None else units
    last_layer = units[:, -1] if units.dim() > 2 else units
    return last_layer.reshape(len(state), -1)


def _bounded_units(cell: Cell, state: TensorDict) -> Iterator[Tensor]:
    if isinstance(cell, MultiCell):
        states = cell.split(state)
        for name, child in cell.cells.items():
            yield from _bounded_units(child, states[name])
    elif (bounded_state := type(cell).bounded_state) is not None:
        yield bounded_state(state)
