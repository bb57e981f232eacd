"""A recurrent model for rsl_rl that runs whole segments with resets where padded trajectories would take longer.

    train_cfg["actor"]["class_name"] = "holdfast.integrations.rsl_rl:RNNModel"

Options, weights, their names and results are those of rsl_rl's own `RNNModel`.
"""

import copy
from typing import Any, cast, final

import torch
from torch import nn

from holdfast.errors import ConfigError, ContractError
from holdfast.install import install_command
from holdfast.nn import GRU, LSTM
from holdfast.types import Bool, Tensor

try:
    from rsl_rl.models import RNNModel as ReferenceModel  # pyright: ignore[reportMissingImports]
    from rsl_rl.modules import RNN  # pyright: ignore[reportMissingImports]
    from rsl_rl.utils import unpad_trajectories  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ConfigError(
        f"{error}; holdfast.integrations.rsl_rl needs rsl-rl-lib 5: {install_command('rsl-rl')}."
    ) from error

__all__ = ["RNNModel"]

Hidden = Tensor | tuple[Tensor, ...] | list[Tensor]
"""`h [L,B,H]` of a GRU, `(h, c)` of an LSTM, which the storage of rsl-rl-lib 5.4 makes a list."""
KINDS: dict[str, type[LSTM] | type[GRU]] = {"lstm": LSTM, "gru": GRU}
FEW = 1.2
"""With so many trajectories a segment or fewer, padding them takes less time than putting them together."""


@final
class RNNModel(ReferenceModel):
    """`rsl_rl.models.RNNModel` with `holdfast.nn.LSTM` or `GRU`."""

    def __init__(self, *args: Any, rnn_type: str = "lstm", **kwargs: Any) -> None:
        if rnn_type.lower() not in KINDS:
            raise ConfigError(f"rnn_type={rnn_type!r}: give one of {', '.join(KINDS)}.")
        super().__init__(*args, rnn_type=rnn_type, **kwargs)
        self.rnn = _SegmentRNN(self.rnn)

    def as_jit(self) -> nn.Module:
        """Return the model for TorchScript, as rsl_rl exports it."""
        return ReferenceModel.as_jit(_with_torch_rnn(self))

    def as_onnx(self, verbose: bool = False) -> nn.Module:
        """Return the model for ONNX, as rsl_rl exports it."""
        return ReferenceModel.as_onnx(_with_torch_rnn(self), verbose)


@final
class _SegmentRNN(RNN):
    """`rsl_rl.modules.RNN` by our modules; an update runs a segment of each environment, or padding where few end."""

    rnn: Any
    hidden_state: Hidden | None

    def __init__(self, reference: Any) -> None:
        nn.Module.__init__(self)
        rnn = reference.rnn
        # The initial weights are those of the reference; drawing others must not advance the generator.
        with torch.random.fork_rng(devices=[]):
            self.rnn = KINDS[rnn.mode.lower()](rnn.input_size, rnn.hidden_size, rnn.num_layers)
        self.rnn.load_state_dict(rnn.state_dict())
        self.hidden_state = None

    def forward(self, input: Tensor, masks: Tensor | None = None, hidden_state: Hidden | None = None) -> Tensor:
        """Run a step of all environments and keep their state, or with `masks` replay a minibatch."""
        if masks is None:
            y, self.hidden_state = self.rnn(input.unsqueeze(0), self.hidden_state)
            return y
        if hidden_state is None:
            raise ContractError("An update replays from the hidden states of the rollout; there are none.")
        first_TE, is_entry_N = find_segments(masks)
        leaves = tuple(hidden_state) if isinstance(hidden_state, tuple | list) else (hidden_state,)
        if len(is_entry_N) <= FEW * first_TE.shape[1]:
            y_TNH, _ = self.rnn(input, leaves if leaves[1:] else leaves[0])
            return unpad_trajectories(y_TNH, masks)
        entry = tuple(leaf[:, is_entry_N] for leaf in leaves)
        y_TEH, _ = self.rnn(unpad_trajectories(input, masks), entry if entry[1:] else entry[0], first_TE)
        return y_TEH

    def reset(self, dones: Tensor | None = None, hidden_state: Hidden | None = None) -> None:
        """Clear the states where `dones` is true; without `dones` set all states, to None by default."""
        if dones is None:
            self.hidden_state = hidden_state
            return
        if hidden_state is not None:
            raise ContractError("reset(dones, hidden_state): give one of them.")
        if self.hidden_state is not None:
            ended_B1 = dones.reshape(-1, 1) == 1
            # A new tensor: the state may be one that the caller keeps. Not a product: 0 x NaN is NaN.
            state = self.hidden_state
            if isinstance(state, Tensor):
                self.hidden_state = torch.where(ended_B1, 0.0, state)
            else:
                self.hidden_state = tuple(torch.where(ended_B1, 0.0, leaf) for leaf in state)


def find_segments(masks: Bool[Tensor, "T N"]) -> tuple[Bool[Tensor, "T E"], Bool[Tensor, " N"]]:
    """Return `first[T,E]` of the segments that N trajectories were cut from, and which trajectories open a segment.

    rsl_rl cuts the `T` steps of each environment after every `done`, and pads each trajectory to `T` steps.
    """
    steps = len(masks)
    ends = masks.sum(0).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    first = torch.zeros(int(masks.sum()), dtype=torch.bool, device=masks.device)
    first[starts] = True
    is_entry = starts % steps == 0
    first_ET = first.unflatten(0, (-1, steps)).clone()
    # A segment continues from its entry state, which rsl_rl has cleared where an episode starts.
    first_ET[:, 0] = False
    return first_ET.T, is_entry


def _with_torch_rnn(model: RNNModel) -> RNNModel:
    """Return the model with torch's recurrent layer, which the exporters of rsl_rl know; they copy its parts."""
    ours = cast("Any", model.rnn.rnn)
    holder, kind = nn.Module(), nn.LSTM if isinstance(ours, LSTM) else nn.GRU
    holder.rnn = kind(ours.input_size, ours.hidden_size, ours.num_layers)
    holder.rnn.load_state_dict(ours.state_dict())
    # Not a deep copy: a state with a graph cannot be copied.
    copied = copy.copy(model)
    copied._modules = {**model._modules, "rnn": holder}
    return copied
