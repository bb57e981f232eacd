"""Record what recurrent modules and heads compute while a trainer runs, row by row, by observation."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from holdfast.check.trainer.script import ACTIONS, NONE, TrainerScript
from holdfast.errors import ContractError
from holdfast.types import Float, Int, Tensor

Kind = Literal["act", "learn", "recompute"]
NEAR = 1e-5
"""Distance, relative to max(1, |x|), up to which two rows are the same."""


@dataclass(frozen=True)
class RecurrentCall:
    """One call of a recurrent module."""

    kind: Kind
    time: int
    """Steps of the environments before it."""
    ids: Int[Tensor, "B T"]
    entry: Float[Tensor, "B S"]
    y: Float[Tensor, "B T H"]
    exit: Float[Tensor, "B S"]

    def rows(self) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Yield observation, entry, output and exit of a call of one step."""
        for row, number in enumerate(self.ids[:, 0].tolist()):
            if number != NONE:
                yield number, self.entry[row], self.y[row, 0], self.exit[row]


@dataclass
class HeadCall:
    """One call of a linear layer that gives a value or logits."""

    kind: Kind
    time: int
    ids: Int[Tensor, " N"]
    output: Float[Tensor, "N K"]
    gradient: Tensor | None = None
    """Of the loss, by row, once it was computed."""


class RowTable:
    """Rows of numbers by observation; finds the observation of a row."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}
        self._stacked: tuple[Tensor, Tensor] | None = None

    def add(self, ids: Int[Tensor, " N"], rows: Float[Tensor, "N F"]) -> None:
        """Store rows; an observation's latest row counts."""
        for number, row in zip(ids.tolist(), rows, strict=True):
            if number != NONE:
                self._rows[number] = row
        self._stacked = None

    def add_missing(self, ids: Int[Tensor, " N"], rows: Float[Tensor, "N F"]) -> None:
        """Store rows of observations that have none."""
        self.add(torch.tensor([NONE if number in self._rows else number for number in ids.tolist()]), rows)

    def find(self, rows: Float[Tensor, "N F"]) -> Int[Tensor, " N"]:
        """Return the observation whose row is the same up to rounding; NONE where there is none."""
        if not self._rows:
            return torch.full((len(rows),), NONE)
        if self._stacked is None:
            fitting = [number for number, row in self._rows.items() if row.shape == rows.shape[1:]]
            if not fitting:
                return torch.full((len(rows),), NONE)
            self._stacked = torch.tensor(fitting), torch.stack([self._rows[number] for number in fitting])
        ids, table = self._stacked
        if table.shape[1:] != rows.shape[1:]:
            return torch.full((len(rows),), NONE)
        distance, at = torch.cdist(rows, table, compute_mode="donot_use_mm_for_euclid_dist").min(1)
        limit = NEAR * rows.abs().amax(1).clamp(min=1) * rows.shape[1] ** 0.5
        return torch.where(distance <= limit, ids[at], NONE)


@dataclass
class TrainerRecording:
    """All calls of a training, by module."""

    script: TrainerScript
    recurrent: dict[nn.Module, list[RecurrentCall]] = field(default_factory=lambda: defaultdict(list))
    values: dict[nn.Module, list[HeadCall]] = field(default_factory=lambda: defaultdict(list))
    logits: dict[nn.Module, list[HeadCall]] = field(default_factory=lambda: defaultdict(list))
    weights: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    unidentified: Counter[nn.Module] = field(default_factory=Counter)
    """Calls of recurrent modules with gradients whose rows belong to no observation."""
    _inputs: dict[nn.Module, RowTable] = field(default_factory=lambda: defaultdict(RowTable))
    _outputs: RowTable = field(default_factory=RowTable)
    """What recurrent modules gave for observations when acting."""
    _heads: dict[nn.Module, None] = field(default_factory=dict)
    """Heads that were called for observations."""
    _raw: Tensor | None = None
    """The observations that entered a module last."""
    _raw_time: int = NONE

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watch every module that is called."""
        before = hooks.register_module_forward_pre_hook(self._before)
        after = hooks.register_module_forward_hook(self._after, with_kwargs=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def changed_weight(self) -> float:
        """Return the largest change of a weight since its module's first call."""
        changes = [(_plain(now) - old).abs().max() for now, old in self.weights.items() if now.numel()]
        return float(torch.stack(changes).max()) if changes else 0.0

    def _before(self, module: nn.Module, args: Any) -> None:
        for weight in module.parameters(recurse=False):
            if weight not in self.weights:
                self.weights[weight] = _plain(weight).clone()
        for x in _tensors(args):
            if (ids := self.script.read_ids(x)) is not None:
                self._raw, self._raw_time = ids, len(self.script.transitions)
                break
        dropout = module.p if isinstance(module, nn.Dropout) else getattr(module, "dropout", 0.0)
        if module.training and isinstance(dropout, float) and dropout > 0:
            self.notes[f"{type(module).__name__} drops inputs at random (p={dropout}); train without dropout"] = None
        if module.training and isinstance(module, nn.modules.batchnorm._BatchNorm):
            self.notes[f"{type(module).__name__} depends on the batch; train without it"] = None

    def _after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            names = ("input", "hx")
            x, hx = [*args, *(kwargs.get(name) for name in names[len(args) :])][:2]
            self._add_recurrent(module, *_read_call(module, x, hx, output))
        elif isinstance(module, nn.Linear) and module.out_features in (1, ACTIONS) and self.recurrent:
            self._add_head(module, args[0], output)

    def _add_recurrent(self, module: nn.Module, x: Tensor, entry: Tensor, y: Tensor, exit_state: Tensor) -> None:
        B, T = x.shape[:2]
        ids = self._identify(module, x.flatten(0, 1), in_order=T == 1).reshape(B, T)
        kind = self._kind(ids)
        if kind == "act":
            self._inputs[module].add(ids[:, 0], x[:, 0])
            self._outputs.add(ids[:, 0], y[:, 0])
        else:
            # Such as final observations, which are valued and not acted on.
            self._outputs.add_missing(ids.flatten(), y.flatten(0, 1))
        if not bool((ids != NONE).any()):
            self.unidentified[module] += torch.is_grad_enabled()
            return
        self.recurrent[module].append(RecurrentCall(kind, self._time, ids, entry, y, exit_state))

    def _add_head(self, module: nn.Module, x: Tensor, output: Tensor) -> None:
        flat, rows = _plain(output).flatten(0, -2), _plain(x).flatten(0, -2)
        ids = self._identify(module, rows)
        if not bool((ids != NONE).any()) and not (output.requires_grad and module in self._heads):
            return
        self._heads[module] = None
        kind = self._kind(ids[:, None])
        if kind == "act":
            self._inputs[module].add(ids, rows)
        call = HeadCall(kind, self._time, ids, flat)
        (self.values if output.shape[-1] == 1 else self.logits)[module].append(call)
        if output.requires_grad:
            output.register_hook(lambda gradient: _add_gradient(call, gradient))

    @property
    def _time(self) -> int:
        return len(self.script.transitions)

    def _identify(self, module: nn.Module, rows: Float[Tensor, "N F"], *, in_order: bool = True) -> Int[Tensor, " N"]:
        """Return the observation of each row: read from it, by its position, or by an equal row of the rollout."""
        ids = self.script.read_ids(rows)
        if ids is not None:
            return ids
        raw = None if self._raw is None else self._raw
        if raw is not None and raw.dim() == 2 and raw.numel() != len(rows) == len(raw):
            # The output of a window is that of its last step.
            raw = raw[:, -1]
        raw = raw.flatten() if raw is not None and raw.numel() == len(rows) else None
        if raw is not None and self._raw_time == self._time and self._kind(raw[:, None]) == "act":
            return raw
        unread = self._raw_time < self._time and not torch.is_grad_enabled()
        if raw is None and unread and len(rows) == self.script.envs:
            # No module received this step's observations unchanged.
            return torch.from_numpy(self.script.current).clone()
        has_acted = module in self._inputs
        equal = self._inputs[module].find(rows) if has_acted else self._outputs.find(rows)
        if raw is None or not in_order:
            return equal
        if not has_acted and bool(((equal == raw) | (equal == NONE)).all()):
            # A head that computes whole rollouts never acted: its rows are in the order of the observations.
            return raw
        same_order = bool((equal == raw).any() & ((equal == raw) | (equal == NONE)).all())
        return raw if same_order else equal

    def _kind(self, ids: Int[Tensor, "B T"]) -> Kind:
        """Acting is a call of one step for observations that the environments have just returned, or were acted on."""
        learning, script = torch.is_grad_enabled(), self.script
        now = [script.current, script.latest_final]
        # Some trainers compute the values of a step after it was taken.
        now += [script.transitions[-1].ids] if script.transitions and not learning else []
        present = ids[ids != NONE]
        if ids.shape[1] == 1 and len(present) and np.isin(present.numpy(), np.concatenate(now)).all():
            return "act"
        return "learn" if learning else "recompute"


def _add_gradient(call: HeadCall, gradient: Tensor) -> None:
    rows = _plain(gradient).flatten(0, -2)
    call.gradient = rows if call.gradient is None else call.gradient + rows


def _plain(x: Tensor) -> Tensor:
    """Copy a tensor to the CPU in float64, without its graph."""
    with torch.inference_mode(False), torch.no_grad():
        return x.to("cpu", torch.float64, copy=True)


def _tensors(args: Any) -> Iterator[Tensor]:
    for arg in args if isinstance(args, tuple | list) else [args]:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, PackedSequence):
            yield arg.data
        elif isinstance(arg, dict):
            yield from _tensors(list(arg.values()))
        elif isinstance(arg, tuple | list):
            yield from _tensors(arg)


def _read_call(module: nn.Module, x: Any, hx: Any, output: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inputs `[B,T,F]`, entry `[B,S]`, outputs `[B,T,H]` and exit `[B,S]` of a call of a torch module."""
    if isinstance(module, nn.RNNCellBase):
        y = output[0] if isinstance(output, tuple) else output
        x, y = (_plain(part).reshape(-1, 1, part.shape[-1]) for part in (x, y))
        exit_state = _state(output, cell=True)
        return x, torch.zeros_like(exit_state) if hx is None else _state(hx, cell=True), y, exit_state
    y, state = output
    if isinstance(x, PackedSequence):
        # Padded rows are zeros, which are no observation.
        x, y = (_plain(pad_packed_sequence(part, batch_first=True)[0]) for part in (x, y))
    else:
        x, y = _plain(x), _plain(y)
        if x.dim() == 2:
            x, y = x[None], y[None]
        elif not getattr(module, "batch_first", False):
            x, y = x.transpose(0, 1), y.transpose(0, 1)
    exit_state = _state(state)
    return x, torch.zeros_like(exit_state) if hx is None else _state(hx), y, exit_state


def _state(state: Any, *, cell: bool = False) -> Float[Tensor, "B S"]:
    """Return a state, of tensors `[L,B,H]` or a cell's `[B,H]`, as one row of numbers for each row of the batch."""
    parts = state if isinstance(state, tuple | list) else (state,)
    if not all(isinstance(part, Tensor) for part in parts):
        raise ContractError(f"A recurrent module received {type(state).__name__} as its state; give tensors.")
    rows = []
    for part in map(_plain, parts):
        if cell:
            rows.append(part.reshape(-1, part.shape[-1]))
        else:
            rows.append(part.transpose(0, 1).flatten(1) if part.dim() == 3 else part.reshape(1, -1))
    return torch.cat(rows, dim=1)
