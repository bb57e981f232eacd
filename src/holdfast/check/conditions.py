"""Under which conditions a policy is measured: where, what its layers compute in, and by whose kernel."""

from dataclasses import dataclass
from typing import Any

import torch

from holdfast.errors import ConfigError
from holdfast.memory import Kernel, use_kernel
from holdfast.policies import LSTMWrapper, PurePolicy
from holdfast.policies.precision import Precision


@dataclass(frozen=True)
class Conditions:
    """What practice is like; proof is in float64 by torch's own kernels, at the same place."""

    device: str = "cpu"
    precision: Precision | None = None
    """None: what the policy computes in by itself."""
    kernel: Kernel | None = None
    """None: the one the policy has."""

    def require_possible(self, module: Any) -> None:
        """Refuse what cannot be had here, or not of this policy."""
        for word, given, known in (
            ("device", self.device, ("cpu", "cuda")),
            ("precision", self.precision, ("float32", "bfloat16", None)),
            ("kernel", self.kernel, ("auto", "torch", "triton", None)),
        ):
            if given not in known:
                told = ", ".join(each for each in known if each is not None)
                raise ConfigError(f"--{word} {given}: there is {told}.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device cuda, but torch finds no GPU here; leave it out.")
        name = type(module).__name__
        if not isinstance(module, LSTMWrapper) and self != Conditions():
            raise ConfigError(
                f"--device, --precision and --kernel are for policies of Holdfast; {name} is measured on the "
                "CPU, in float64 and float32. Leave them out."
            )
        if self.precision == "bfloat16" and not isinstance(module, PurePolicy):
            raise ConfigError(f"--precision bfloat16 needs a RecurrentPolicy; {name} is none.")

    def computes_in(self, module: Any) -> torch.dtype:
        """Say what the layers of a policy compute in, in practice."""
        own = module.precision if isinstance(module, PurePolicy) else "float32"
        return torch.bfloat16 if (self.precision or own) == "bfloat16" else torch.float32

    def impose(self, module: Any, *, proof: bool) -> None:
        """Put a copy of the policy under these conditions."""
        if not isinstance(module, LSTMWrapper):
            return
        module.to(self.device)
        kernel = "torch" if proof else self.kernel
        if kernel is not None:
            use_kernel(module, kernel)
        if isinstance(module, PurePolicy):
            rounded = not proof and self.computes_in(module) == torch.bfloat16
            module.precision = "bfloat16" if rounded else "float32"

    def note(self, module: Any) -> str | None:
        """Tell what is not as usual."""
        told = []
        if self.device == "cuda":
            told.append(f"measured on {torch.cuda.get_device_name()}")
        if self.computes_in(module) == torch.bfloat16:
            told.append("practice in bfloat16, with stirred weights: a newborn's words drown in rounding")
        if self.kernel is not None:
            told.append(f"kernel {self.kernel}")
        return "; ".join(told) or None
