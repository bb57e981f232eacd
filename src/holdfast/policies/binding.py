"""Binding a policy to a world: features and actions are identified by name, whatever their ids."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from holdfast.errors import ContractError
from holdfast.types import Float, Shaped, Tensor, UInt8
from holdfast.worlds.obs import Obs, zero_obs
from holdfast.worlds.step import Feature, WorldSpec
from holdfast.worlds.tokens import PADDING

IDS = 256
NEVER = -1e4
"""Logit of an action that is never taken: its probability is exactly 0, its logarithm finite."""


class NamedModule(nn.Module, ABC):
    """A module whose rows or channels are indexed by the policy's own list of features or actions."""

    named_kind: ClassVar[Literal["features", "actions"]]

    @abstractmethod
    def require_room(self, features: Sequence[Feature], actions: Sequence[str]) -> None:
        """Reject lists that do not fit, before anything is changed."""

    @abstractmethod
    def set_names(self, features: Sequence[Feature], actions: Sequence[str]) -> None:
        """Adopt the policy's lists: names may have been added, normalizations changed."""


@final
class Binding(nn.Module):
    """The features and actions of a policy by name, and their ids in the current world.

    The first world a policy is bound to gives it its own lists: features in the order of its channels
    or embeddings, actions in the order of its logits. In a later world the same names may have other
    ids and places. Unknown features are masked and unknown actions never taken, unless the policy is
    bound with `learn`: then they are added to its lists. The lists are saved with the weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spec: WorldSpec | None = None
        self.features: tuple[Feature, ...] = ()
        self.actions: tuple[str, ...] = ()
        self.blank: Obs | None = None
        """One blank observation `[1,...]`, shown where `valid` is false; None for tokens."""
        self.register_buffer("_feature_index", None, persistent=False)
        self.register_buffer("_action_index", None, persistent=False)
        self.register_buffer("_action_bounds", None, persistent=False)
        self._feature_index: Tensor | None
        self._action_index: Tensor | None
        self._action_bounds: Tensor | None

    def translate_obs(self, obs: Obs) -> Obs:
        """Translate the feature ids of tokens into the policy's own; unknown features become padding."""
        if self._feature_index is None or not isinstance(obs, Tensor):
            return obs
        location, feature, value = obs.unbind(-1)
        return torch.stack([location, self._feature_index[feature.int()], value], -1)

    def translate_logits(self, logits: Float[Tensor, "*batch own"]) -> Float[Tensor, "*batch actions"]:
        """Put the policy's logits into the world's order of actions; unknown actions are never taken."""
        if self._action_index is None:
            return logits
        # One more logit than there are actions: that of the actions the policy does not have.
        never = torch.full_like(logits[..., :1], NEVER)
        return torch.cat([logits, never], -1).index_select(-1, self._action_index)

    def scale_actions(self, actions: Shaped[Tensor, "N ..."]) -> Shaped[Tensor, "N ..."]:
        """Scale actions of a Box from [-1,1] to its bounds and clip them; without two bounds they are only clipped."""
        if self._action_bounds is None:
            return actions
        low, high = self._action_bounds.to(actions.dtype)
        scaled = (low + high) / 2 + (high - low) / 2 * actions
        return torch.where((high - low).isfinite(), scaled, actions).clamp(low, high)

    def bind(self, policy: nn.Module, spec: WorldSpec, *, learn: bool, translate: bool = True) -> None:
        """Adopt a world's names; with `learn`, new ones are added to the policy's lists.

        Errors are raised before anything is changed. Without `translate`, a world that needs translation is rejected.
        """
        features, actions = spec.features, spec.named_actions
        if self.spec is not None or self.features or self.actions:
            self._require_same_kind(spec)
            features, actions = self._merge(spec, learn=learn)
        tables = _index_tables(features, actions, spec, next(policy.parameters()).device)
        if not translate and any(table is not None for table in tables):
            raise ContractError(
                f"{type(policy).__name__} is written by hand and reads the world as it is; features or "
                "actions have other indices in this world. Inherit RecurrentPolicy for that."
            )
        self._set_names(policy, features, actions)
        self.spec, (self._feature_index, self._action_index) = spec, tables
        self.blank = None if spec.features else zero_obs(spec.observation_space, rows=1)
        self._action_bounds = None
        if isinstance(spec.action, spaces.Box):
            bounds = torch.from_numpy(np.stack([spec.action.low, spec.action.high]))
            self._action_bounds = bounds.to(next(policy.parameters()).device)

    def _set_names(self, policy: nn.Module, features: tuple[Feature, ...], actions: tuple[str, ...]) -> None:
        """Adopt lists, if all named modules have room for them."""
        modules = _named_modules(policy)
        names = {feature.name for feature in self.features}
        if names or self.actions:
            new = [feature.name for feature in features if feature.name not in names]
            _require_module("features", new, modules)
            _require_module("actions", [name for name in actions if name not in self.actions], modules)
        for module in modules:
            module.require_room(features, actions)
        for module in modules:
            module.set_names(features, actions)
        self.features, self.actions = features, actions

    def load_names(self, policy: nn.Module, data: Tensor) -> None:
        """Adopt the lists saved with weights that are about to be loaded."""
        try:
            lists = json.loads(bytes(data.tolist()).decode())
            features = tuple(Feature(str(name), float(size)) for name, size in lists["features"])
            actions = tuple(map(str, lists["actions"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ContractError("The weights have a list of features and actions that cannot be read.") from error
        if not features and not actions:
            return
        for module in _named_modules(policy):
            module.require_room(features, actions)
        self.features, self.actions = (), ()
        self._set_names(policy, features, actions)
        if self.spec is not None:
            self.bind(policy, self.spec, learn=False)

    def get_extra_state(self) -> UInt8[Tensor, " bytes"]:
        """Return the lists as bytes: weight files hold tensors only."""
        features = [[feature.name, feature.normalization] for feature in self.features]
        text = json.dumps({"features": features, "actions": self.actions})
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Do nothing: `load_names_before_weights` has adopted the lists already."""

    def _require_same_kind(self, spec: WorldSpec) -> None:
        if bool(spec.features) != bool(self.features):
            kind = "tokens" if self.features else "no tokens"
            raise ContractError(f"This policy reads {kind}, unlike the world it is being bound to.")
        old = self.spec
        if old is None:
            return
        if spec.features:
            own_window, other_window = (f"{rows}x{columns}" for rows, columns in (old.window, spec.window))
            observation = ("has a window of", own_window, other_window)
        else:
            observation = ("reads", old.observation_space, spec.observation_space)
        for verb, own, other in (observation, ("takes", old.action, spec.action)):
            if own != other:
                raise ContractError(f"This policy {verb} {own}; the world it is bound to now has {other}.")

    def _merge(self, spec: WorldSpec, *, learn: bool) -> tuple[tuple[Feature, ...], tuple[str, ...]]:
        """Return the policy's lists with the world's normalizations, and with new names if `learn`."""
        sizes = {feature.name: feature.normalization for feature in spec.features}
        features = tuple(
            replace(feature, normalization=sizes.get(feature.name, feature.normalization), id=None)
            for feature in self.features
        )
        if learn:
            names = {feature.name for feature in features}
            features += tuple(replace(new, id=None) for new in spec.features if new.name not in names)
            return features, self.actions + tuple(name for name in spec.named_actions if name not in self.actions)
        if self.actions and not set(spec.named_actions) & set(self.actions):
            own, other = (", ".join(names) for names in (self.actions, spec.named_actions))
            raise ContractError(f"This policy has none of the world's actions {other}; it has {own}.")
        return features, self.actions


def _named_modules(policy: nn.Module) -> list[NamedModule]:
    return [module for module in policy.modules() if isinstance(module, NamedModule)]


def _index_tables(
    features: tuple[Feature, ...], actions: tuple[str, ...], spec: WorldSpec, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Map the world's feature ids and actions to indices of a policy's lists; None: the identity."""
    ids = [PADDING] * IDS
    index = {feature.name: number for number, feature in enumerate(features)}
    for number, feature in zip(spec.feature_ids, spec.features, strict=True):
        ids[number] = index.get(feature.name, PADDING)
    same = ids[: len(index)] == list(range(len(index))) and set(ids[len(index) :]) <= {PADDING}
    # An unknown action has the logit after all of the policy's own.
    rows = [actions.index(name) if name in actions else len(actions) for name in spec.named_actions]
    return (
        None if same else torch.tensor(ids, dtype=torch.uint8, device=device),
        None if rows == list(range(len(actions))) else torch.tensor(rows, dtype=torch.long, device=device),
    )


def _require_module(kind: Literal["features", "actions"], new: Sequence[str], modules: Sequence[NamedModule]) -> None:
    if new and not any(module.named_kind == kind for module in modules):
        raise ContractError(
            f"This policy cannot learn new {kind} ({', '.join(new)}): none of its modules has them by name. "
            "Bind it with learn=False to leave them out."
        )


def load_names_before_weights(policy: nn.Module, weights: dict[str, Any], prefix: str, *_: Any) -> None:
    """Adopt the saved lists before weights are loaded, so that all of them fit."""
    data = weights.get(f"{prefix}binding._extra_state")
    binding = policy.get_submodule("binding")
    if isinstance(data, Tensor) and isinstance(binding, Binding):
        binding.load_names(policy, data)
