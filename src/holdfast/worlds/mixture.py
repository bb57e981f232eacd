"""Several worlds at once: each has its share of the agents, and all are seen through one spec."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from holdfast.errors import ConfigError, ContractError
from holdfast.saved import misfit, taken
from holdfast.shapes import Shaped, Tensor, UInt8
from holdfast.worlds import tokens
from holdfast.worlds.going_on import put_back, state_of, unread
from holdfast.worlds.seen import Seen
from holdfast.worlds.step import Anew, Closes, Feature, Step, World, WorldSpec, check_actions
from holdfast.worlds.watched import Watched

NOOP = "noop"
AGAIN = "it lives its first episodes again"


def share_out(agents: int, weights: Sequence[float], unit: int = 1) -> list[int]:
    """Share agents out by weight, in whole crowds of `unit`, at least one to each."""
    if agents % unit:
        near = max(len(weights), round(agents / unit)) * unit
        raise ConfigError(f"world.agents={agents} is not a multiple of {unit}; try {near}.")
    crowds = agents // unit
    if crowds < len(weights):
        raise ConfigError(
            f"world.agents={agents} is too few for {len(weights)} worlds; try {len(weights) * unit} or more."
        )
    wanted = [crowds * weight / sum(weights) for weight in weights]
    got = [max(1, int(want)) for want in wanted]
    while sum(got) != crowds:
        step = 1 if sum(got) < crowds else -1
        # Who lacks most gets one more; who has most too many, and more than one, gives one back.
        who = max(
            (n for n in range(len(got)) if step > 0 or got[n] > 1),
            key=lambda n: step * (wanted[n] - got[n]),
        )
        got[who] += step
    return [each * unit for each in got]


class Mixture:
    """Worlds side by side. Rows come in the order of the parts, `spec.parts` says how many each has.

    Worlds with tokens are put together by name: there are all features and all actions of all of them, and
    observations are as long as the longest. In a world that does not know an action, it is its `noop`, or
    if it has none, its first action. Worlds that show or take anything else must have the same spaces.

    `remake` makes the world of a number with a seed that goes with a count of steps: a world that cannot say
    where it was is made anew by it, and does not live its first episodes again.
    """

    def __init__(
        self,
        worlds: Sequence[World],
        labels: Sequence[str],
        remake: Callable[[int, int], World] | None = None,
    ) -> None:
        twice = sorted({label for label in labels if list(labels).count(label) > 1})
        if twice:
            raise ConfigError(f"world.parts: {twice[0]} is there twice; say it once, with weight=2.")
        self.worlds = list(worlds)
        self.agents = sum(world.agents for world in worlds)
        self.spec = _joined([world.spec for world in worlds], labels)
        named = zip(labels, (world.agents for world in worlds), strict=True)
        self.spec = replace(self.spec, name="mixture", parts=tuple(named))
        self._views = [_View(world.spec, self.spec) for world in worlds]
        begins = [sum(world.agents for world in worlds[:number]) for number in range(len(worlds))]
        # Each is guarded by its own spec.
        self._guarded = [Watched(*each) for each in zip(worlds, labels, begins, strict=True)]
        self._named = list(zip(labels, begins, strict=True))
        self._remake, self._clock = remake, 0

    def reset(self) -> Step:
        """Start every agent's first episode."""
        self._clock = 0
        return self._together([world.reset() for world in self._guarded])

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Let everybody act in its own world."""
        wanted = len(self.spec.action_names) if self.spec.action is None else self.spec.action
        check_actions(actions, self.agents, wanted)
        self._clock += 1
        each = actions.split([world.agents for world in self.worlds])
        return self._together(
            [
                world.step(view.actions(mine))
                for world, view, mine in zip(self._guarded, self._views, each, strict=True)
            ]
        )

    def state(self) -> dict[str, Any]:
        """Say where each of the worlds is; None of those that cannot."""
        return {"parts": [state_of(world) for world in self._guarded], "clock": self._clock}

    def restore(self, state: Mapping[str, Any]) -> Anew | None:
        """Put the worlds back one by one."""
        parts = taken(state, "parts", list)
        if len(parts) != len(self._guarded):
            raise misfit(f"it was kept of {len(parts)} worlds, and there are {len(self._guarded)}")
        self._clock = taken(state, "clock", int)
        found = [self._put_back(*each) for each in enumerate(parts)]
        told = [anew for anew in found if anew is not None]
        if not told:
            return None
        device = told[0].who.device
        steps = [
            unread(world.spec, world.agents, device) if anew is None else anew.step
            for world, anew in zip(self._guarded, found, strict=True)
        ]
        who = [
            torch.zeros(world.agents, dtype=torch.bool, device=device) if anew is None else anew.who
            for world, anew in zip(self._guarded, found, strict=True)
        ]
        named = zip(self._guarded, found, strict=True)
        why = "; ".join(f"{world.name}: {anew.why}" for world, anew in named if anew is not None)
        return Anew(torch.cat(who), self._together(steps), why)

    def _put_back(self, number: int, state: Mapping[str, Any] | None) -> Anew | None:
        """Put one world back; if it cannot be, put another one in its place, which begins otherwise."""
        if state is None and self._remake is not None:
            _close(self.worlds[number])
            self.worlds[number] = self._remake(number, self._clock)
            self._guarded[number] = Watched(self.worlds[number], *self._named[number])
        anew = put_back(self._guarded[number], state)
        if state is not None or anew is None or self._remake is not None:
            return anew
        return replace(anew, why=f"{anew.why}; {AGAIN}")

    def settle(self) -> None:
        """Raise if a step of one of the worlds was wrong."""
        for world in self._guarded:
            world.settle()

    def close(self) -> None:
        """Close the worlds that hold something open."""
        for world in self.worlds:
            _close(world)

    def _together(self, steps: list[Step]) -> Step:
        said = {
            name: torch.cat([getattr(step, name) for step in steps])
            for name in ("reward", "terminated", "truncated", "first", "valid", "trial")
        }
        shown = zip(self._views, steps, strict=True)
        obs = [view.obs(step.obs) for view, step in shown]
        last = None
        if self.spec.truncates != "never":
            last = torch.cat([self._last(*each) for each in zip(self._views, steps, obs, strict=True)])
        return Step(obs=torch.cat(obs), last_obs=last, **said)

    @staticmethod
    def _last(view: "_View", step: Step, obs: Seen) -> Seen:
        """Show what was last seen; a world that never truncates shows anything: nobody reads it."""
        return obs if step.last_obs is None else view.obs(step.last_obs)


class _View:
    """How one world looks from outside: its tokens and actions in the words of all."""

    def __init__(self, own: WorldSpec, whole: WorldSpec) -> None:
        self._own, self._whole = own, whole
        self._same = own.words == whole.words
        if self._same:
            return
        ids = {feature.name: place for place, feature in enumerate(whole.features)}
        table = torch.arange(256)
        for feature, number in zip(own.features, own.feature_ids, strict=True):
            table[number] = ids[feature.name]
        self._ids = table.to(torch.uint8)
        known = {name: number for number, name in enumerate(own.action_names)}
        otherwise = known.get(NOOP, 0)
        self._actions = torch.tensor([known.get(name, otherwise) for name in whole.action_names])

    def obs(self, obs: Seen) -> Seen:
        return obs if self._same else self._translated(obs)

    def _translated(self, obs: UInt8[Tensor, "A M 3"]) -> UInt8[Tensor, "A M2 3"]:
        self._ids = self._ids.to(obs.device)
        place, feature, value = obs.unbind(-1)
        short = self._whole.obs_shape[0] - obs.shape[1]
        # Padding is 255 in every byte, and no feature's id.
        said = torch.stack([place, self._ids[feature.long()], value], dim=-1)
        return torch.nn.functional.pad(said, (0, 0, 0, short), value=tokens.PADDING)

    def actions(self, actions: Tensor) -> Tensor:
        if self._same:
            return actions
        self._actions = self._actions.to(actions.device)
        return self._actions[actions.long()]


def _close(world: World) -> None:
    if isinstance(world, Closes):
        world.close()


def _joined(specs: list[WorldSpec], labels: Sequence[str]) -> WorldSpec:
    """Put specs together; what cannot be seen through one pair of eyes is refused."""
    truncates = "always" if any(spec.truncates != "never" for spec in specs) else "never"
    crowd = math.lcm(*(spec.crowd for spec in specs))
    first = replace(specs[0], truncates=truncates, crowd=crowd, best_return=None)
    first = replace(first, best_return_without_memory=None)
    if all(spec.words == specs[0].words for spec in specs):
        return first
    for label, spec in zip(labels, specs, strict=True):
        if spec.words != first.words and not (
            _speaks(spec) and _speaks(first) and spec.window == first.window
        ):
            raise ConfigError(
                f"world.parts: {label} and {labels[0]} cannot be mixed: they show or take different things. "
                "Mixed are worlds with tokens and named actions in one window, or with the same spaces."
            )
    features = _features(specs, labels)
    return replace(
        first,
        obs_shape=(max(spec.obs_shape[0] for spec in specs), 3),
        features=features,
        action_names=tuple(dict.fromkeys(name for spec in specs for name in spec.action_names)),
    )


def _speaks(spec: WorldSpec) -> bool:
    """Say whether all that is seen and done has a name."""
    return bool(spec.features) and spec.action is None


def _features(specs: list[WorldSpec], labels: Sequence[str]) -> tuple[Feature, ...]:
    found: dict[str, tuple[Feature, str]] = {}
    for label, spec in zip(labels, specs, strict=True):
        for feature in spec.features:
            known, where = found.setdefault(feature.name, (replace(feature, id=None), label))
            if known.normalization != feature.normalization:
                raise ContractError(
                    f"{where} divides {feature.name} by {known.normalization} and {label} by "
                    f"{feature.normalization}; a feature must mean the same in all worlds of a mixture."
                )
    return tuple(feature for feature, _ in found.values())
