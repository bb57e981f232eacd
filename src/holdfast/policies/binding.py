"""Binding a policy to a world: features and actions are known by name, wherever a world puts them."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, final

import torch
from torch import nn

from holdfast.errors import ContractError
from holdfast.shapes import Float, Tensor, UInt8
from holdfast.worlds.seen import Seen, nothing_seen
from holdfast.worlds.step import Feature, WorldSpec
from holdfast.worlds.tokens import PADDING

IDS = 256
NEVER = -1e4
"""The score of an action that is never taken: its probability is exactly 0, its logarithm finite."""


class ByName(nn.Module, ABC):
    """A part of a policy that knows features or actions by their places in the policy's own lists."""

    knows: ClassVar[Literal["features", "actions"]]

    @abstractmethod
    def require_room(self, features: Sequence[Feature], actions: Sequence[str]) -> None:
        """Refuse lists that do not fit; nothing is changed yet."""

    @abstractmethod
    def know(self, features: Sequence[Feature], actions: Sequence[str]) -> None:
        """Hear the policy's own lists anew: names may have been added, features may be sized otherwise."""


@final
class Binding(nn.Module):
    """What a policy knows by name, and how the world it lives in calls it.

    The first world a policy is bound to gives it its own lists: features in the order of its channels
    or embeddings, actions in the order of its scores. In a later world the same names may have other
    ids and places. A feature the policy does not know is not seen and an action it does not know is
    never taken, unless the policy is bound to learn: then they are added to its lists. The lists are
    saved with the weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spec: WorldSpec | None = None
        self.features: tuple[Feature, ...] = ()
        self.actions: tuple[str, ...] = ()
        self.nothing: Seen | None = None
        """What an observation of nothing looks like; tokens need none."""
        self.register_buffer("_id_of", None, persistent=False)
        self.register_buffer("_score_of", None, persistent=False)
        self._id_of: Tensor | None
        self._score_of: Tensor | None

    @property
    def translates(self) -> bool:
        """Whether the world's words are not the policy's own."""
        return self._id_of is not None or self._score_of is not None

    def heard(self, obs: Seen) -> Seen:
        """Translate the features of a world's tokens into the policy's own; the unknown become padding."""
        return obs if self._id_of is None or not isinstance(obs, Tensor) else _renamed(obs, self._id_of)

    def said(self, scores: Float[Tensor, "*batch own"]) -> Float[Tensor, "*batch actions"]:
        """Put scores of the policy's own actions into the world's order; the unknown are never taken."""
        if self._score_of is None:
            return scores
        # One more score than there are actions: that of what is never done.
        never = torch.full_like(scores[..., :1], NEVER)
        return torch.cat([scores, never], -1).index_select(-1, self._score_of)

    def bind(self, policy: nn.Module, spec: WorldSpec, *, learn: bool, translate: bool = True) -> None:
        """Learn a world's words; with `learn` new ones are added to the policy's own.

        Whatever is refused is refused before anything is changed. Without `translate` a world that needs
        translation is refused.
        """
        features, actions = spec.features, spec.choices
        if self.spec is not None or self.features or self.actions:
            self._require_same_kind(spec)
            features, actions = self._met(spec, learn=learn)
        tables = _tables(features, actions, spec, next(policy.parameters()).device)
        if not translate and any(table is not None for table in tables):
            raise ContractError(
                f"{type(policy).__name__} is written by hand and reads the world as it is; here features or "
                "actions have other places than where it was bound first. Inherit RecurrentPolicy for that."
            )
        self._take(policy, features, actions)
        self.spec, (self._id_of, self._score_of) = spec, tables
        self.nothing = None if spec.features else nothing_seen(spec.sight, rows=1)

    def _take(self, policy: nn.Module, features: tuple[Feature, ...], actions: tuple[str, ...]) -> None:
        """Make lists the policy's own, if all its parts have room for them."""
        parts = [part for part in policy.modules() if isinstance(part, ByName)]
        known = {feature.name for feature in self.features}
        if known or self.actions:
            new = [feature.name for feature in features if feature.name not in known]
            _require_room("features", new, parts)
            _require_room("actions", [name for name in actions if name not in self.actions], parts)
        for part in parts:
            part.require_room(features, actions)
        for part in parts:
            part.know(features, actions)
        self.features, self.actions = features, actions

    def adopt(self, policy: nn.Module, told: Tensor) -> None:
        """Take over the lists saved with weights that are about to be loaded."""
        try:
            lists = json.loads(bytes(told.tolist()).decode())
            features = tuple(Feature(str(name), float(size)) for name, size in lists["features"])
            actions = tuple(map(str, lists["actions"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ContractError(
                "The weights have a list of features and actions that cannot be read."
            ) from error
        if not features and not actions:
            return
        for part in policy.modules():
            if isinstance(part, ByName):
                part.require_room(features, actions)
        self.features, self.actions = (), ()
        self._take(policy, features, actions)
        if self.spec is not None:
            self.bind(policy, self.spec, learn=False)

    def get_extra_state(self) -> UInt8[Tensor, " bytes"]:
        """Save the lists as bytes: files of weights hold tensors only."""
        features = [[feature.name, feature.normalization] for feature in self.features]
        text = json.dumps({"features": features, "actions": self.actions})
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Do nothing: the lists were adopted before any weight was loaded."""

    def _require_same_kind(self, spec: WorldSpec) -> None:
        old = self.spec
        if bool(spec.features) != bool(self.features):
            is_what = "tokens" if self.features else "no tokens"
            raise ContractError(f"This policy reads {is_what}; the world it is bound to now differs in that.")
        if old is None:
            return
        if not spec.features and spec.obs_shape != old.obs_shape:
            raise ContractError(
                f"This policy reads observations {list(old.obs_shape)}; those of the world it is bound to "
                f"now are {list(spec.obs_shape)}."
            )
        for is_what, was, now in (("reads", old.sight, spec.sight), ("takes", old.action, spec.action)):
            if was != now and not (is_what == "reads" and spec.features):
                raise ContractError(f"This policy {is_what} {was}; the world it is bound to now has {now}.")
        if spec.features and spec.window != old.window:
            raise ContractError(
                f"This policy looks through a window of {old.window[0]}x{old.window[1]}; the world it is "
                f"bound to now has {spec.window[0]}x{spec.window[1]}."
            )

    def _met(self, spec: WorldSpec, *, learn: bool) -> tuple[tuple[Feature, ...], tuple[str, ...]]:
        """Size what is known as the world says, and add what is new if it is to be learnt."""
        sizes = {feature.name: feature.normalization for feature in spec.features}
        features = tuple(
            replace(feature, normalization=sizes.get(feature.name, feature.normalization), id=None)
            for feature in self.features
        )
        if learn:
            known = {feature.name for feature in features}
            features += tuple(replace(each, id=None) for each in spec.features if each.name not in known)
            return features, self.actions + tuple(name for name in spec.choices if name not in self.actions)
        if self.actions and not set(spec.choices) & set(self.actions):
            raise ContractError(
                f"This policy knows none of the world's actions {', '.join(spec.choices)}; "
                f"it knows {', '.join(self.actions)}."
            )
        return features, self.actions


def _tables(
    features: tuple[Feature, ...], actions: tuple[str, ...], spec: WorldSpec, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Look up each of the world's feature ids and actions in a policy's lists; None: all the same."""
    ids = [PADDING] * IDS
    own = {feature.name: number for number, feature in enumerate(features)}
    for number, feature in zip(spec.feature_ids, spec.features, strict=True):
        ids[number] = own.get(feature.name, PADDING)
    same = ids[: len(own)] == list(range(len(own))) and set(ids[len(own) :]) <= {PADDING}
    # An unknown action has the score after all of the policy's own.
    rows = [actions.index(name) if name in actions else len(actions) for name in spec.choices]
    return (
        None if same else torch.tensor(ids, dtype=torch.uint8, device=device),
        None if rows == list(range(len(actions))) else torch.tensor(rows, dtype=torch.long, device=device),
    )


def _renamed(obs: UInt8[Tensor, "*rows 3"], id_of: UInt8[Tensor, "256"]) -> UInt8[Tensor, "*rows 3"]:
    location, feature, value = obs.unbind(-1)
    return torch.stack([location, id_of[feature.int()], value], -1)


def _require_room(what: Literal["features", "actions"], new: Sequence[str], parts: Sequence[ByName]) -> None:
    if new and not any(part.knows == what for part in parts):
        raise ContractError(
            f"This policy cannot learn new {what} ({', '.join(new)}): none of its parts knows them by name. "
            "Bind it with learn=False to leave them out."
        )


def adopt_before_loading(policy: nn.Module, weights: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hear the saved lists before weights are loaded, so that there is room for all of them."""
    told = weights.get(f"{prefix}binding._extra_state")
    binding = policy.get_submodule("binding")
    if isinstance(told, Tensor) and isinstance(binding, Binding):
        binding.adopt(policy, told)
