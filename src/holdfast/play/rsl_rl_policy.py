"""The actor of a checkpoint that rsl_rl's runner writes, as a policy to play and export; rsl_rl is not needed."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import torch
import yaml
from gymnasium import spaces
from torch import nn

from holdfast.checkpoint.run_dir import Log
from holdfast.config.base import SafeLoader
from holdfast.errors import ConfigError, did_you_mean, error_text
from holdfast.memory import GRU, LSTM
from holdfast.memory.cell import Mask
from holdfast.memory.rnn import StackedRNN
from holdfast.play.foreign import require_finite
from holdfast.policies import FunctionalPolicy
from holdfast.policies.distributions import distribution_for
from holdfast.policies.recurrent_policy import PolicyOutput, PolicyStep
from holdfast.types import Tensor
from holdfast.worlds import WorldSpec
from holdfast.worlds.obs import Obs

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "selu": nn.SELU,
    "relu": nn.ReLU,
    "crelu": nn.CELU,
    "lrelu": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "gelu": nn.GELU,
    "swish": nn.SiLU,
    "mish": nn.Mish,
    "identity": nn.Identity,
}
"""Activations by the names of rsl_rl."""
DEFAULT = "elu"
EPSILON = 1e-2
"""What rsl_rl's normalization adds to standard deviations."""
SMALLEST_STD = 1e-6
LARGEST_CONFIG = 1 << 20
"""Bytes of an `agent.yaml` that is read."""
Weights = Mapping[str, Tensor]


@final
class RslRlPolicy(FunctionalPolicy):
    """A recurrent actor of rsl_rl: normalization, LSTM or GRU, MLP; its sizes are those of the weights.

    An observation is the concatenation of the actor's groups. Actions are not clipped. The critic reads other
    observations, so there are no values.
    """

    compiled_methods = ()
    has_values = False

    def __init__(self, weights: Weights, activation: type[nn.Module]) -> None:
        rnn = _rnn_of(weights)
        cell = (LSTM if rnn.mode == "LSTM" else GRU).__new__(LSTM if rnn.mode == "LSTM" else GRU)
        StackedRNN.__init__(cell, rnn)
        super().__init__(rnn.input_size, rnn.hidden_size, rnn.num_layers, memory=cell)
        self.mlp = _mlp_of(weights, activation)
        for name in ("mean", "std"):
            self.register_buffer(name, weights.get(f"obs_normalizer._{name}"))
        self.mean: Tensor | None
        self.std: Tensor | None
        log_std = weights.get("distribution.log_std_param")
        log_std = weights["distribution.std_param"].clamp(min=SMALLEST_STD).log() if log_std is None else log_std
        self.register_buffer("log_std", log_std)
        self.log_std: Tensor
        action = spaces.Box(-np.inf, np.inf, (len(self.log_std),), np.float32)
        spec = WorldSpec(obs_shape=(rnn.input_size,), action_names=(), action=action)
        self.actions = distribution_for(spec)
        self.bind(spec)

    def unroll(self, obs: Obs, first: Mask, state: Any, valid: Mask | None = None) -> PolicyStep:
        """Normalize all steps, run the memory over time, and compute the means."""
        x = cast("Tensor", self._prepare(obs, valid)).float()
        if self.mean is not None and self.std is not None:
            x = (x - self.mean) / (self.std + EPSILON)
        y, state = self.lstm.cell(x, state, first, valid)
        mean = self.mlp(y)
        logits = torch.cat([mean, self.log_std.expand_as(mean)], -1)
        values = torch.full(first.shape, torch.nan, device=mean.device, dtype=mean.dtype)
        return self._finish(PolicyOutput(logits, values)), state


def load_rsl_rl(file: Path, device: torch.device, log: Log, activation: str | None = None) -> RslRlPolicy:
    """Load the actor of a checkpoint; nothing of it is executed."""
    weights = _read(file)
    for key in ("rnn.rnn.weight_ih_l0", "mlp.0.weight"):
        if key not in weights:
            raise ConfigError(f"rsl_rl:{file}: the actor has no {key}; that of an RNNModel is needed.")
    if not {"distribution.std_param", "distribution.log_std_param"} & set(weights):
        raise ConfigError(f"rsl_rl:{file}: the actor has no GaussianDistribution; other distributions are not played.")
    if activation is None:
        activation = _configured_activation(file)
    if activation is None:
        activation = DEFAULT
        log(
            f"rsl_rl:{file}: the weights do not say the activation of the MLP; it is taken to be {DEFAULT}, rsl_rl's "
            f"default. To choose another: rsl_rl:{file}?activation=relu."
        )
    if activation.lower() not in ACTIVATIONS:
        hint = did_you_mean(activation, ACTIVATIONS, f"choose from {', '.join(ACTIVATIONS)}.")
        raise ConfigError(f"rsl_rl:{file}: activation={activation}: there is no such activation; {hint}")
    try:
        policy = RslRlPolicy(weights, ACTIVATIONS[activation.lower()])
        first = torch.ones(1, dtype=torch.bool)
        policy.unroll(torch.zeros(1, policy.input_size), first, policy.lstm.cell.initial(1))
    except (RuntimeError, KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"rsl_rl:{file}: the weights do not fit together: {error_text(error)}") from error
    return policy.requires_grad_(False).eval().to(device)


def _read(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise ConfigError(f"rsl_rl:{file}: there is no such file; give a model_*.pt of rsl_rl's runner.")
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(
            f"rsl_rl:{file} is not a file of tensors, which alone are read: {error_text(error, 200)}"
        ) from error
    actor = saved.get("actor_state_dict") if isinstance(saved, Mapping) else None
    if not isinstance(actor, Mapping) or not all(isinstance(leaf, Tensor) for leaf in actor.values()):
        keys = ", ".join(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
        raise ConfigError(f"rsl_rl:{file} has {keys}; a checkpoint of rsl-rl-lib 5 has actor_state_dict.")
    for key, leaf in actor.items():
        _require_numbers(f"rsl_rl:{file}", key, leaf)
    require_finite(f"rsl_rl:{file}", actor)
    if bool((actor.get("obs_normalizer._std", torch.zeros(1)) < 0).any()):
        raise ConfigError(f"rsl_rl:{file}: obs_normalizer._std has negative numbers, which are no standard deviations.")
    return dict(actor)


def _require_numbers(name: str, key: Any, leaf: Tensor) -> None:
    """Require that a tensor has as many numbers in the file as its shape says, and is of a plain kind."""
    if not isinstance(key, str) or leaf.layout != torch.strided or leaf.is_meta or leaf.is_complex():
        raise ConfigError(f"{name}: {key!r} of the actor is not a dense tensor of real numbers.")
    if leaf.numel() * leaf.element_size() > leaf.untyped_storage().nbytes():
        raise ConfigError(f"{name}: {key} is {list(leaf.shape)}, but the file has fewer numbers.")


def _configured_activation(file: Path) -> str | None:
    """Read the activation from `params/agent.yaml`, which Isaac Lab and mjlab write beside checkpoints."""
    path = file.parent / "params" / "agent.yaml"
    if not path.is_file() or path.stat().st_size > LARGEST_CONFIG:
        return None
    try:
        # A subclass of the safe loader, with limits.
        config: Any = yaml.load(path.read_text(), Loader=SafeLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    for key in ("actor", "policy"):
        part = config.get(key) if isinstance(config, Mapping) else None
        if isinstance(part, Mapping) and isinstance(part.get("activation"), str):
            return part["activation"]
    return None


def _rnn_of(weights: Weights) -> nn.RNNBase:
    """Build the recurrent layers by the shapes of their weights: an LSTM has four gates, a GRU three."""
    own = {name.removeprefix("rnn.rnn."): leaf for name, leaf in weights.items() if name.startswith("rnn.rnn.")}
    gates, hidden = own["weight_hh_l0"].shape
    kind = {4 * hidden: nn.LSTM, 3 * hidden: nn.GRU}.get(gates)
    if kind is None:
        raise ValueError(f"weight_hh_l0 is [{gates}, {hidden}]: neither an LSTM nor a GRU")
    layers = sum(name.startswith("weight_hh_l") for name in own)
    rnn = kind(own["weight_ih_l0"].shape[1], hidden, layers)
    rnn.load_state_dict(own)
    return rnn


def _mlp_of(weights: Weights, activation: type[nn.Module]) -> nn.Sequential:
    """Build the MLP by its weights, with an activation after each layer but the last."""
    numbers = sorted(int(match[1]) for name in weights if (match := re.fullmatch(r"mlp\.(\d+)\.weight", name)))
    layers: list[nn.Module] = []
    for number in numbers:
        weight, bias = weights[f"mlp.{number}.weight"], weights[f"mlp.{number}.bias"]
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        layer.load_state_dict({"weight": weight, "bias": bias})
        layers += [layer, activation()]
    return nn.Sequential(*layers[:-1])
