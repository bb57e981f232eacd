"""Names of models that other libraries trained: `sb3:model.zip`, `rsl_rl:model.pt?activation=elu`."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qsl

import torch

from holdfast.checkpoint.run_dir import Log
from holdfast.errors import ConfigError
from holdfast.policies import FunctionalPolicy
from holdfast.types import Tensor

SB3, RSL_RL = "sb3:", "rsl_rl:"


def is_foreign(name: str | Path) -> bool:
    """Return whether a name is that of another library's model."""
    return str(name).startswith((SB3, RSL_RL))


def foreign_file(name: str) -> Path:
    """Return the file of a model."""
    return Path(name.partition(":")[2].partition("?")[0])


def require_finite(name: str, weights: Mapping[str, Tensor]) -> None:
    """Raise for weights that are not finite, which would act all the same."""
    for key, leaf in weights.items():
        if not bool(leaf.isfinite().all()):
            raise ConfigError(f"{name} has weights that are not finite, in {key}; use an earlier file.")


def load_foreign(name: str, device: torch.device, log: Log, trust_code: bool) -> FunctionalPolicy:
    """Load another library's model as a policy of ours."""
    file, options = foreign_file(name), dict(parse_qsl(name.partition("?")[2], keep_blank_values=True))
    names = () if name.startswith(SB3) else ("activation",)
    unknown = [key for key in options if key not in names]
    if unknown:
        raise ConfigError(f"{name}: there is no option {unknown[0]}; there is {', '.join(names) or 'none'}.")
    if name.startswith(SB3):
        from holdfast.play.sb3_policy import load_sb3

        return load_sb3(file, device, trust_code)
    from holdfast.play.rsl_rl_policy import load_rsl_rl

    return load_rsl_rl(file, device, log, **options)
