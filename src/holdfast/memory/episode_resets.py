"""Where recurrent state is reset: at episode starts, at trials, or never.

The cells apply the mask: reset first, then read (`cell(x, state, clear)`).
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from tensordict import TensorDictBase

from holdfast.errors import ContractError
from holdfast.types import Bool, Tensor

ClearOn = Literal["episode", "trial", "never"]


def reset_mask(td: TensorDictBase | Mapping[str, Any], clear_on: ClearOn) -> Bool[Tensor, "..."]:
    """Return where memory is cleared before it reads.

    That is `first`, or without it `dones | truncateds`, or either of them alone: in worlds that
    reset in the same step, the observation that comes with a flag starts an episode.
    """
    flags = [td[key] for key in ("first",) if key in td]
    flags = flags or [td[key] for key in ("dones", "truncateds") if key in td]
    if not flags:
        raise ContractError(
            "The TensorDict has none of first, dones, truncateds, so episode starts are unknown. "
            'Set td["first"]: true where the observation starts an episode.'
        )
    clear = flags[0].bool()
    for flag in flags[1:]:
        clear = clear | flag.bool()
    if clear_on == "never":
        return torch.zeros_like(clear)
    if clear_on == "trial":
        if "trial" not in td:
            raise ContractError('memory.clear_on=trial needs td["trial"]: true where a new trial starts.')
        clear = clear | td["trial"].bool()
    return clear
