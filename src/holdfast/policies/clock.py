"""When memory forgets: the one clock, read from a TensorDict."""

from typing import Literal

import torch
from tensordict import TensorDictBase

from holdfast.errors import ContractError
from holdfast.shapes import Bool, Tensor

ClearOn = Literal["episode", "trial", "never"]


def clears(td: TensorDictBase, clear_on: ClearOn) -> Bool[Tensor, "..."]:
    """Say where memory is emptied before it reads.

    `first` says it; `dones | truncateds` stand in where it is absent, either of them alone too: in
    worlds that restart in the same step, the observation that comes with a flag opens an episode.
    """
    flags = [td[key] for key in ("first",) if key in td]
    flags = flags or [td[key] for key in ("dones", "truncateds") if key in td]
    if not flags:
        raise ContractError(
            "The TensorDict has none of first, dones, truncateds, so nobody knows where episodes "
            'start. Set td["first"]: true where the observation opens an episode.'
        )
    clear = flags[0].bool()
    for flag in flags[1:]:
        clear = clear | flag.bool()
    if clear_on == "never":
        return torch.zeros_like(clear)
    if clear_on == "trial":
        if "trial" not in td:
            raise ContractError('memory.clear_on=trial needs td["trial"]: true where a new trial opens.')
        clear = clear | td["trial"].bool()
    return clear


def slice_start(td: TensorDictBase) -> int:
    """Say which slice of agents a call is about."""
    if "training_env_id_start" not in td:
        raise ContractError(
            "The TensorDict has no training_env_id_start, so nobody knows whose memories these are. "
            'Set td["training_env_id_start"] to the first agent of the slice (0 if there is one).'
        )
    return int(torch.as_tensor(td["training_env_id_start"]).flatten()[0])
