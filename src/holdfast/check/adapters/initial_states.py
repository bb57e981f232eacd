"""Initial states of policies: made by a method of theirs, or zeros of the shapes of their layers."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from holdfast.check.compare import State, register_dataclasses
from holdfast.types import Tensor

INITIAL_METHODS = [
    "initial_state",
    "get_initial_state",
    "init_state",
    "get_init_state",
    "initialize_state",
    "zero_state",
    "initial_states",
    "init_hidden",
    "initial_hidden",
    "initialize_hidden",
    "get_initial_hidden",
    "initial_hidden_state",
    "initialize_carry",
    "initial",
]
SIZE_WORDS = ("hidden", "state", "mem", "size", "dim", "width", "units")
MOST_SIZES = 12
"""Sizes of a state that are tried."""


def initial_from_method(module: Any, rows: int) -> Any:
    """Call the module's own method that makes an initial state; None if it has none."""
    for name in INITIAL_METHODS:
        method = getattr(module, name, None)
        if callable(method):
            try:
                state = register_dataclasses(method(rows))
            except Exception:
                # A method of that name may take something else; other ways to make a state remain.
                continue
            if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(state)):
                return state
    return None


def recurrent_layers(module: nn.Module) -> list[Any]:
    """List PyTorch's recurrent layers and cells in a module."""
    return [layer for layer in module.modules() if isinstance(layer, nn.RNNBase | nn.RNNCellBase)]


def zero_state(core: Any, rows: int) -> State:
    """Make the zeros that a recurrent layer of PyTorch starts from."""
    weight, layers = next(core.parameters()), ()
    if isinstance(core, nn.RNNBase):
        layers = (core.num_layers * (2 if core.bidirectional else 1),)
    hidden = core.proj_size or core.hidden_size if isinstance(core, nn.RNNBase) else core.hidden_size
    h, c = (torch.zeros(*layers, rows, size, dtype=weight.dtype) for size in (hidden, core.hidden_size))
    has_cell = core.mode == "LSTM" if isinstance(core, nn.RNNBase) else isinstance(core, nn.LSTMCell)
    return (h, c) if has_cell else h


def zero_states(module: nn.Module) -> Iterator[Callable[[Any, int], State]]:
    """List functions `(module, rows)` that make zeros as a policy that accepts no None may want them."""
    layers = recurrent_layers(module)
    if layers:
        yield lambda module, rows: zero_state(recurrent_layers(module)[0], rows)
    if len(layers) > 1:
        yield lambda module, rows: tuple(zero_state(layer, rows) for layer in recurrent_layers(module))
        yield lambda module, rows: [zero_state(layer, rows) for layer in recurrent_layers(module)]
    sizes = [number for name, number in vars(module).items() if _is_size(name, number)]
    sizes += [layer.out_features for layer in module.modules() if isinstance(layer, nn.Linear)]
    for size in list(dict.fromkeys(sizes))[:MOST_SIZES]:
        yield partial(_rows_of_zeros, 1, size)
        yield partial(_rows_of_zeros, 2, size)


def _is_size(name: str, number: Any) -> bool:
    is_named = len(name) == 1 or any(word in name.lower() for word in SIZE_WORDS)
    return isinstance(number, int) and not isinstance(number, bool) and 1 < number <= 4096 and is_named


def _rows_of_zeros(tensors: int, size: int, module: nn.Module, rows: int) -> State:
    weight = next((leaf for leaf in module.parameters() if leaf.is_floating_point()), torch.zeros(1))
    zeros = [torch.zeros(rows, size, dtype=weight.dtype) for _ in range(tensors)]
    return zeros[0] if tensors == 1 else tuple(zeros)
