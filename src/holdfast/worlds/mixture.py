"""Mixture: several worlds at once, each with its share of the agents, seen through one spec."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from holdfast import rng
from holdfast.config.base import first_error_message
from holdfast.config.world_names import MixturePart, Parts
from holdfast.errors import ConfigError, ContractError
from holdfast.state_tree import get_field, mismatch
from holdfast.types import Shaped, Tensor, UInt8
from holdfast.worlds import tokens
from holdfast.worlds.checked_world import CheckedWorld
from holdfast.worlds.make import close_world, make_world, world_options
from holdfast.worlds.obs import FLAGS, Obs, check_actions
from holdfast.worlds.save_restore import placeholder_step, restore_world, save_world
from holdfast.worlds.step import Device, Feature, Restarted, Step, World, WorldSpec

NOOP = "noop"


def mixture_world(agents: int, *, parts: Any, seed: int = 0, device: Device = "cpu") -> "Mixture":
    """Build a mixture from `parts`, as text or as validated configs."""
    try:
        configs: tuple[MixturePart, ...] = TypeAdapter(Parts).validate_python(parts)
    except ValidationError as error:
        raise ConfigError(first_error_message(error, "parts")) from None
    unit = math.lcm(*(part.world.agents_per_env for part in configs))
    counts = split_agents(agents, [part.weight for part in configs], unit)

    def make(number: int, seed: int) -> World:
        config = configs[number].world
        # Each part has its own seed, so that the same world twice has different episodes.
        part_seed = rng.derive_seed(seed, rng.STREAM_PART, number)
        return make_world(config.name, counts[number], seed=part_seed, device=device, **world_options(config))

    def remake(number: int, clock: int) -> World:
        return make(number, rng.derive_seed(seed, rng.STREAM_RESUMED, clock))

    worlds = [make(number, seed) for number in range(len(configs))]
    return Mixture(worlds, [part.label for part in configs], remake)


def split_agents(agents: int, weights: Sequence[float], unit: int = 1) -> list[int]:
    """Divide agents by weight, in multiples of `unit`, at least one unit each."""
    if agents % unit:
        near = max(len(weights), round(agents / unit)) * unit
        raise ConfigError(f"world.agents={agents} is not a multiple of {unit}; try {near}.")
    units = agents // unit
    if units < len(weights):
        raise ConfigError(f"world.agents={agents}: {len(weights)} worlds need {len(weights) * unit} or more.")
    exact = [units * weight / sum(weights) for weight in weights]
    counts = [max(1, int(count)) for count in exact]
    while sum(counts) != units:
        step = 1 if sum(counts) < units else -1
        # The part furthest below its exact share gains a unit; the one furthest above, with more than one, loses it.
        candidates = [n for n in range(len(counts)) if step > 0 or counts[n] > 1]
        number = max(candidates, key=lambda n: step * (exact[n] - counts[n]))
        counts[number] += step
    return [count * unit for count in counts]


class Mixture:
    """Worlds side by side; rows are in the order of the parts, and `spec.parts` has their sizes.

    Token worlds are merged by name: the spec has all their features and actions, and the longest observation. An action
    that a world does not have is its `noop`, or its first action. Other worlds must have equal spaces.

    `remake(number, clock)` builds a part again with a seed that depends on the clock. It replaces a part that
    cannot be restored, so that it does not repeat its first episodes.
    """

    def __init__(self, worlds: Sequence[World], labels: Sequence[str], remake: Callable[[int, int], World]) -> None:
        duplicates = sorted({label for label in labels if list(labels).count(label) > 1})
        if duplicates:
            raise ConfigError(f"world.parts: {duplicates[0]} is there twice; name it once, with weight=2.")
        self.worlds = list(worlds)
        sizes = [world.agents for world in worlds]
        self.agents = sum(sizes)
        spec = _merge_specs([world.spec for world in worlds], labels)
        self.spec = replace(spec, name="mixture", parts=tuple(zip(labels, sizes, strict=True)))
        self._views = [_View(world.spec, self.spec) for world in worlds]
        offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        self._names_and_offsets = list(zip(labels, offsets, strict=True))
        # Each part is checked against its own spec.
        self._checked = [
            CheckedWorld(world, *args) for world, args in zip(worlds, self._names_and_offsets, strict=True)
        ]
        self._remake, self._clock = remake, 0

    def reset(self) -> Step:
        """Start every agent's first episode."""
        self._clock = 0
        return self._concat([world.reset() for world in self._checked])

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Step every world with the actions of its agents."""
        action_space = len(self.spec.action_names) if self.spec.action is None else self.spec.action
        check_actions(actions, self.agents, action_space)
        self._clock += 1
        parts = zip(self._checked, self._views, actions.split([world.agents for world in self.worlds]), strict=True)
        return self._concat([world.step(view.actions(part)) for world, view, part in parts])

    def state(self) -> dict[str, Any]:
        """Return the state of every world, None for those that have none."""
        return {"parts": [save_world(world) for world in self._checked], "clock": self._clock}

    def restore(self, state: Mapping[str, Any]) -> Restarted | None:
        """Restore the worlds one by one."""
        parts = get_field(state, "parts", list)
        if len(parts) != len(self._checked):
            raise mismatch(f"it was saved of {len(parts)} worlds, and there are {len(self._checked)}")
        self._clock = get_field(state, "clock", int)
        results = [self._restore_part(number, part) for number, part in enumerate(parts)]
        device = next((restarted.mask.device for restarted in results if restarted is not None), None)
        if device is None:
            return None
        steps, masks, reasons = list[Step](), list[Tensor](), list[str]()
        for world, restarted in zip(self._checked, results, strict=True):
            if restarted is None:
                steps.append(placeholder_step(world.spec, world.agents, device))
                masks.append(torch.zeros(world.agents, dtype=torch.bool, device=device))
            else:
                steps.append(restarted.step)
                masks.append(restarted.mask)
                reasons.append(f"{world.name}: {restarted.reason}")
        return Restarted(torch.cat(masks), self._concat(steps), "; ".join(reasons))

    def _restore_part(self, number: int, state: Mapping[str, Any] | None) -> Restarted | None:
        """Restore one world; without a state, replace it by one with another seed."""
        if state is None:
            close_world(self.worlds[number])
            self.worlds[number] = self._remake(number, self._clock)
            self._checked[number] = CheckedWorld(self.worlds[number], *self._names_and_offsets[number])
        return restore_world(self._checked[number], state)

    def raise_violations(self) -> None:
        """Raise if a step of one of the worlds broke the contract."""
        for world in self._checked:
            world.raise_violations()

    def close(self) -> None:
        """Close the worlds that are Closeable."""
        for world in self.worlds:
            close_world(world)

    def _concat(self, steps: list[Step]) -> Step:
        columns = {name: torch.cat([getattr(step, name) for step in steps]) for name in ("reward", *FLAGS)}
        obs = [view.obs(step.obs) for view, step in zip(self._views, steps, strict=True)]
        last_obs = None
        if self.spec.truncates != "never":
            # Rows of a world that never truncates are not read.
            parts = zip(self._views, steps, obs, strict=True)
            last_obs = torch.cat(
                [now if step.last_obs is None else view.obs(step.last_obs) for view, step, now in parts]
            )
        return Step(obs=torch.cat(obs), last_obs=last_obs, **columns)


class _View:
    """Translates the observations and actions of one world to and from the merged spec."""

    def __init__(self, local: WorldSpec, joint: WorldSpec) -> None:
        self._joint = joint
        self._same = local.interface == joint.interface
        if self._same:
            return
        ids = {feature.name: number for number, feature in enumerate(joint.features)}
        table = torch.arange(256)
        for feature, number in zip(local.features, local.feature_ids, strict=True):
            table[number] = ids[feature.name]
        self._ids = table.to(torch.uint8)
        numbers = {name: number for number, name in enumerate(local.action_names)}
        noop = numbers.get(NOOP, 0)
        self._actions = torch.tensor([numbers.get(name, noop) for name in joint.action_names])

    def obs(self, obs: Obs) -> Obs:
        return obs if self._same else self._translate(obs)

    def _translate(self, obs: UInt8[Tensor, "A M 3"]) -> UInt8[Tensor, "A M2 3"]:
        self._ids = self._ids.to(obs.device)
        location, feature, value = obs.unbind(-1)
        padding = self._joint.obs_shape[0] - obs.shape[1]
        # Padding is 255 in every byte, and no feature's id.
        translated = torch.stack([location, self._ids[feature.long()], value], dim=-1)
        return torch.nn.functional.pad(translated, (0, 0, 0, padding), value=tokens.PADDING)

    def actions(self, actions: Tensor) -> Tensor:
        if self._same:
            return actions
        self._actions = self._actions.to(actions.device)
        return self._actions[actions.long()]


def _merge_specs(specs: list[WorldSpec], labels: Sequence[str]) -> WorldSpec:
    """Merge specs by the names of features and actions; equal interfaces stay as they are."""
    first = replace(
        specs[0],
        truncates="always" if any(spec.truncates != "never" for spec in specs) else "never",
        agents_per_env=math.lcm(*(spec.agents_per_env for spec in specs)),
        best_return=None,
        best_return_without_memory=None,
    )
    if all(spec.interface == specs[0].interface for spec in specs):
        return first
    for label, spec in zip(labels, specs, strict=True):
        have_names = all(part.features and part.action is None for part in (first, spec))
        if spec.interface != first.interface and not (have_names and spec.window == first.window):
            raise ConfigError(
                f"world.parts: {label} and {labels[0]} cannot be mixed: their spaces differ. "
                "Mix worlds with tokens and named actions in one window, or with the same spaces."
            )
    return replace(
        first,
        obs_shape=(max(spec.obs_shape[0] for spec in specs), 3),
        features=_merge_features(specs, labels),
        action_names=tuple(dict.fromkeys(name for spec in specs for name in spec.action_names)),
    )


def _merge_features(specs: list[WorldSpec], labels: Sequence[str]) -> tuple[Feature, ...]:
    features: dict[str, tuple[Feature, str]] = {}
    for label, spec in zip(labels, specs, strict=True):
        for feature in spec.features:
            first, owner = features.setdefault(feature.name, (replace(feature, id=None), label))
            if first.normalization != feature.normalization:
                raise ContractError(
                    f"{owner} divides {feature.name} by {first.normalization} and {label} by "
                    f"{feature.normalization}; a feature must mean the same in all worlds of a mixture."
                )
    return tuple(feature for feature, _ in features.values())
