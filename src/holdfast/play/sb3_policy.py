"""A model of sb3-contrib's `RecurrentPPO`, from the zip that `model.save` writes, as a policy to play and export."""

import base64
import io
import json
import pickle
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from holdfast.errors import ConfigError, TrustError, error_text, one_line
from holdfast.install import install_command
from holdfast.memory import LSTM, MultiCell
from holdfast.memory.cell import Cell, Mask
from holdfast.memory.rnn import StackedRNN
from holdfast.play.foreign import require_finite
from holdfast.policies import FunctionalPolicy
from holdfast.policies.distributions import distribution_for
from holdfast.policies.recurrent_policy import PolicyOutput, PolicyStep
from holdfast.types import Tensor
from holdfast.worlds import WorldSpec
from holdfast.worlds.obs import Obs

POLICIES = "sb3_contrib.common.recurrent.policies"
ENTRIES = ("policy_class", "policy_kwargs", "observation_space", "action_space")
"""Entries of a zip's data that decide what the policy is; each may be a pickle."""
LARGEST = {"data": 1 << 27, "policy.pth": 1 << 32}
"""Bytes of the entries that are read, unpacked."""
UNREADABLE = (OSError, EOFError, LookupError, ValueError, RuntimeError, zlib.error, zipfile.BadZipFile)
"""What a damaged zip and its JSON raise."""
ALLOWED = {
    POLICIES: ("RecurrentActorCriticPolicy", "RecurrentActorCriticCnnPolicy", "RecurrentMultiInputActorCriticPolicy"),
    "holdfast.integrations.sb3": ("MlpLstmPolicy", "CnnLstmPolicy", "MultiInputLstmPolicy"),
    "stable_baselines3.common.torch_layers": ("NatureCNN", "FlattenExtractor", "CombinedExtractor"),
    "torch.nn.modules.activation": ("ReLU", "Tanh", "ELU", "GELU", "SiLU", "LeakyReLU", "Sigmoid", "SELU", "Mish"),
    "torch.optim.adam": ("Adam",),
    "torch.optim.adamw": ("AdamW",),
    "torch.optim.rmsprop": ("RMSprop",),
    "stable_baselines3.common.sb2_compat.rmsprop_tf_like": ("RMSpropTFLike",),
    "gymnasium.spaces.box": ("Box",),
    "gymnasium.spaces.dict": ("Dict",),
    "gymnasium.spaces.discrete": ("Discrete",),
    "gymnasium.spaces.multi_binary": ("MultiBinary",),
    "gymnasium.spaces.multi_discrete": ("MultiDiscrete",),
    "collections": ("OrderedDict",),
    "numpy": ("dtype", "ndarray"),
    **{f"numpy.{core}.multiarray": ("_reconstruct", "scalar") for core in ("core", "_core")},
    **{f"numpy.{core}.numeric": ("_frombuffer",) for core in ("core", "_core")},
    "numpy.random._pcg64": ("PCG64",),
    "numpy.random._pickle": ("__bit_generator_ctor", "__generator_ctor"),
    "numpy.random.bit_generator": ("SeedSequence", "__pyx_unpickle_SeedSequence"),
}
"""What the pickles of a zip may name without trust: spaces, arrays, and the parts of sb3's own policies."""


@final
class SB3Policy(FunctionalPolicy):
    """A recurrent policy of sb3-contrib: extractor, LSTMs of actor and critic, and heads.

    Images are scaled to [0,1] and discrete observations are one-hot, as in sb3. An observation is that of the
    environment the model was trained in: images have their channels first, and `VecNormalize` has its statistics in
    another file than the model.
    """

    compiled_methods = ()

    def __init__(self, policy: Any) -> None:
        critic = policy.lstm_critic
        actor_cell = _cell_of(policy.lstm_actor)
        cell = actor_cell if critic is None else MultiCell({"actor": actor_cell, "critic": _cell_of(critic)})
        super().__init__(cell.input_size, cell.hidden_size, cell.num_layers, memory=cell)
        space, action = policy.observation_space, policy.action_space
        self.preparation = _preparation(space, policy.normalize_images)
        shares = policy.share_features_extractor
        self.extractors = nn.ModuleList(
            [policy.features_extractor] if shares else [policy.pi_features_extractor, policy.vf_features_extractor]
        )
        self.critic_layer, self.has_critic_memory = policy.critic, critic is not None
        self.heads = policy.mlp_extractor
        self.action_net, self.value_net = policy.action_net, policy.value_net
        self.log_std = policy.log_std if isinstance(action, spaces.Box) else None
        bounds = np.stack([action.low, action.high]) if isinstance(action, spaces.Box) else np.zeros((2, 0), np.float32)
        self.register_buffer("bounds", torch.from_numpy(bounds), persistent=False)
        self.bounds: Tensor
        spec = WorldSpec(
            obs_shape=() if isinstance(space, spaces.Dict) else cast("tuple[int, ...]", space.shape),
            action_names=_action_names(action),
            observation=space,
            action=None if isinstance(action, spaces.Discrete) else action,
        )
        self.actions = distribution_for(spec)
        self.bind(spec)

    def unroll(self, obs: Obs, first: Mask, state: Any, valid: Mask | None = None) -> PolicyStep:
        """Extract features of all steps, run the LSTMs over time, and compute the heads."""
        batch = first.shape
        obs = self._prepare(obs, valid)
        obs = obs if len(batch) == 1 else obs.flatten(0, 1)
        inputs: Any = _preprocessed(obs, self.preparation)
        features = [extractor(inputs) for extractor in self.extractors]
        pi, vf = features[0], features[-1]
        x = torch.cat([pi, vf], -1) if self.has_critic_memory else pi
        y, state = self.lstm.cell(x.unflatten(0, batch), state, first, valid)
        y = y if len(batch) == 1 else y.flatten(0, 1)
        hidden = y.chunk(2, -1) if self.has_critic_memory else (y, y)
        latent_vf = hidden[1] if self.critic_layer is None else self.critic_layer(vf)
        logits = self._logits(self.action_net(self.heads.forward_actor(hidden[0])))
        values = self.value_net(self.heads.forward_critic(latent_vf))[:, 0]
        return self._finish(PolicyOutput(logits.unflatten(0, batch), values.unflatten(0, batch))), state

    def _logits(self, output: Tensor) -> Tensor:
        """Return the logits; of a Box, which sb3 wants finite, in units in which it is [-1,1]."""
        if self.log_std is None:
            return output
        low, high = self.bounds
        half = (high - low) / 2
        return torch.cat([(output - (low + high) / 2) / half, (self.log_std - half.log()).expand_as(output)], -1)


def load_sb3(file: Path, device: torch.device, trust_code: bool) -> SB3Policy:
    """Load the policy of a zip; pickles that name other code than sb3's own need trust."""
    try:
        import sb3_contrib  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"{error}; an sb3 model needs sb3-contrib: {install_command('sb3')}.") from error
    if not file.is_file():
        raise ConfigError(f"sb3:{file}: there is no such file; give the zip that model.save wrote.")
    if trust_code:
        try:
            policy = sb3_contrib.RecurrentPPO.load(file, device=device).policy
        except Exception as error:
            raise ConfigError(f"sb3:{file} cannot be loaded: {error_text(error)}") from error
    else:
        policy = _build(file, device)
    _require_support(file, policy)
    require_finite(f"sb3:{file}", policy.state_dict())
    return SB3Policy(policy.to(device).requires_grad_(False).eval()).to(device)


def _build(file: Path, device: torch.device) -> Any:
    """Build the policy from a zip's JSON and weights; its pickles may name nothing but `ALLOWED`."""
    try:
        with zipfile.ZipFile(file) as archive:
            for name, limit in LARGEST.items():
                if archive.getinfo(name).file_size > limit:
                    raise ValueError(f"{name} unpacks to more than {limit:,} bytes")
            data: Any = json.loads(archive.read("data"))
            weights = io.BytesIO(archive.read("policy.pth"))
    except UNREADABLE as error:
        raise ConfigError(f"sb3:{file} is not a zip that model.save wrote: {one_line(error)}") from error
    if not isinstance(data, Mapping) or not set(ENTRIES) <= set(data):
        raise ConfigError(f"sb3:{file} is not a zip that model.save wrote: its data lacks {', '.join(ENTRIES)}.")
    entries = {name: _read_entry(file, name, data[name]) for name in ENTRIES}
    kind, options = entries["policy_class"], entries["policy_kwargs"] or {}
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        raise ConfigError(
            f"sb3:{file} has the policy {kind!r}; a recurrent one of sb3-contrib's RecurrentPPO is needed."
        )
    if data.get("use_sde"):
        raise ConfigError(f"sb3:{file}: models with use_sde=True draw noise from their features; they are not played.")
    try:
        saved = torch.load(weights, map_location=device, weights_only=True)
        _require_sizes(saved, entries)
        build: Any = kind
        policy = build(entries["observation_space"], entries["action_space"], lambda _: 0.0, use_sde=False, **options)
        policy.load_state_dict(saved)
    except Exception as error:
        raise ConfigError(f"sb3:{file} cannot be loaded: {error_text(error)}") from error
    return policy


def _require_sizes(weights: Mapping[str, Tensor], entries: Mapping[str, Any]) -> None:
    """Refuse sizes larger than any of the weights, before something of that size is built."""
    limit = max([len(weights), *(size for leaf in weights.values() for size in leaf.shape)])
    numbers = [("policy_kwargs", number) for number in _integers(entries["policy_kwargs"])]
    numbers += [(name, choices) for name in ENTRIES[2:] for choices in _choices(entries[name])]
    for name, number in numbers:
        if number > limit:
            raise ValueError(f"{name} has the size {number:,}, but the weights have at most {limit:,}")


def _integers(tree: Any) -> Iterator[int]:
    if isinstance(tree, int | np.integer):
        yield int(tree)
    elif isinstance(tree, Mapping | list | tuple):
        for leaf in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _integers(leaf)


def _choices(space: Any) -> Iterator[int]:
    """Yield the choices of discrete spaces, each of which has a weight."""
    if isinstance(space, spaces.Dict):
        for part in space.spaces.values():
            yield from _choices(part)
    elif isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        yield int(np.sum(space.n if isinstance(space, spaces.Discrete) else space.nvec))


def _read_entry(file: Path, name: str, entry: Any) -> Any:
    if not isinstance(entry, Mapping) or ":serialized:" not in entry:
        return entry
    try:
        return _AllowedOnly(io.BytesIO(base64.b64decode(entry[":serialized:"])), file, name).load()
    except TrustError:
        raise
    except Exception as error:
        raise ConfigError(f"sb3:{file}: {name} cannot be read: {error_text(error)}") from error


class _AllowedOnly(pickle.Unpickler):
    """Reads a pickle that names nothing but `ALLOWED`."""

    def __init__(self, stream: io.BytesIO, file: Path, name: str) -> None:
        super().__init__(stream)
        self._file, self._name = file, name

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Import a global that is allowed."""
        if global_name not in ALLOWED.get(module_name, ()):
            raise TrustError(
                f"sb3:{self._file} holds a pickle ({self._name}) that would import and may call "
                f"{module_name}.{global_name}. If you trust its author, pass --trust-code; in Python, trust_code=True."
            )
        return super().find_class(module_name, global_name)


def _require_support(file: Path, policy: Any) -> None:
    """Reject what cannot be played."""
    if not isinstance(getattr(policy, "lstm_actor", None), nn.RNNBase):
        raise ConfigError(f"sb3:{file} has no LSTM; a model of sb3-contrib's RecurrentPPO is needed.")
    lstm, action = policy.lstm_actor, policy.action_space
    if lstm.proj_size or lstm.bidirectional:
        raise ConfigError(f"sb3:{file} has an LSTM with a projection or two directions, which cannot be played.")
    if policy.use_sde:
        raise ConfigError(f"sb3:{file}: models with use_sde=True draw noise from their features; they are not played.")
    is_flat_box = isinstance(action, spaces.Box) and len(action.shape) == 1
    if not isinstance(action, spaces.Discrete | spaces.MultiDiscrete) and not is_flat_box:
        raise ConfigError(f"sb3:{file} has the actions {action}; Discrete, MultiDiscrete and flat Boxes are played.")


def _cell_of(lstm: Any) -> Cell:
    """Return a cell that runs the weights of a `torch.nn.LSTM`, or of ours."""
    names = ("input_size", "hidden_size", "num_layers", "bias")
    reference = nn.LSTM(**{name: getattr(lstm, name) for name in names}, device=lstm.weight_ih_l0.device)
    reference.load_state_dict(lstm.state_dict())
    cell = LSTM.__new__(LSTM)
    StackedRNN.__init__(cell, reference)
    return cell


def _action_names(action: spaces.Space[Any]) -> tuple[str, ...]:
    if not isinstance(action, spaces.Discrete):
        return ()
    return tuple(str(number) for number in range(int(action.start), int(action.start) + int(action.n)))


def _preparation(space: spaces.Space[Any], normalize_images: bool) -> Any:
    """Return how observations are prepared, in plain numbers, which an export can record.

    The counts of one-hot columns of a discrete space, a divisor of others, a dictionary of both for a Dict.
    """
    if isinstance(space, spaces.Dict):
        return {key: _preparation(part, normalize_images) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.tolist()
    return 255.0 if normalize_images and _is_image(space) else 1.0


def _preprocessed(obs: Any, preparation: Any) -> Any:
    """Return what sb3's `preprocess_obs` does: floats, images in [0,1], one-hot discrete observations."""
    if isinstance(preparation, dict):
        return {key: _preprocessed(obs[key], part) for key, part in preparation.items()}
    if isinstance(preparation, list):
        columns = zip(obs.long().reshape(len(obs), -1).unbind(1), preparation, strict=True)
        return torch.cat([nn.functional.one_hot(column, count).float() for column, count in columns], -1)
    return obs.float() / preparation


def _is_image(space: Any) -> bool:
    """Whether sb3 takes a space as an image: three axes of bytes from 0 to 255."""
    is_bytes = isinstance(space, spaces.Box) and len(space.shape) == 3 and space.dtype == "uint8"
    return bool(is_bytes and space.low.max() == 0 and space.high.min() == 255)
