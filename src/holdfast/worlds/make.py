"""Worlds by name: those on tensors, Gymnasium's, yours, and several at once."""

import importlib.util
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import torch
from pydantic import TypeAdapter, ValidationError

from holdfast.errors import ConfigError, HoldfastError, did_you_mean
from holdfast.knobs import WorldKnobs
from holdfast.mettagrid_knobs import METTAGRID
from holdfast.named import find_named
from holdfast.values import first_complaint
from holdfast.which_world import ENVPOOL, GYM, MIXTURE, PETTINGZOO, POPGYM, Part, Parts, knobs_of
from holdfast.worlds import draws
from holdfast.worlds.arena import Arena
from holdfast.worlds.constant import Constant
from holdfast.worlds.envpool import envpool_world
from holdfast.worlds.forage import Forage
from holdfast.worlds.gym import GymWorld
from holdfast.worlds.key_value import KeyValue
from holdfast.worlds.mettagrid import MettaGridWorld
from holdfast.worlds.mixture import Mixture, share_out
from holdfast.worlds.n_back import NBack
from holdfast.worlds.parity import Parity
from holdfast.worlds.pettingzoo import PettingZooWorld
from holdfast.worlds.ragged import Ragged
from holdfast.worlds.recall import Recall
from holdfast.worlds.repeat_first import RepeatFirst
from holdfast.worlds.step import Closes, World
from holdfast.worlds.tmaze import TMaze

WORLDS: dict[str, Callable[..., World]] = {
    "recall": Recall,
    "repeat_first": RepeatFirst,
    "n_back": NBack,
    "tmaze": TMaze,
    "key_value": KeyValue,
    "parity": Parity,
    "forage": Forage,
    "arena": Arena,
    "ragged": Ragged,
    "constant": Constant,
}
"""The worlds on tensors."""


def make_world(name: str, agents: int = 64, **options: Any) -> World:
    """Build a world by its name: `make_world("recall", agents=64, delay=8, cues=4)`.

    Besides those in `WORLDS` there are `gym:ID`, `popgym:NAME`, `pettingzoo:MODULE`, `envpool:ID` and
    `mettagrid:NAME`, a class or function of your own by `package.module:Name`, and `mixture` with
    `parts="recall weight=3 + n_back back=3"`. Every world takes `seed` and `device`.
    """
    if name in WORLDS:
        return _made(WORLDS[name], name, agents, options)
    if name == MIXTURE:
        return _mixed(agents, **options)
    if name.startswith(GYM):
        return _made(GymWorld, name, agents, {"env": name.removeprefix(GYM), **options})
    if name.startswith(POPGYM):
        return _made(GymWorld, name, agents, {"env": _popgym_id(name.removeprefix(POPGYM)), **options})
    if name.startswith(METTAGRID):
        return _simulated(name, agents, options)
    if name.startswith(PETTINGZOO):
        return _made(PettingZooWorld, name, agents, {"env": name.removeprefix(PETTINGZOO), **options})
    if name.startswith(ENVPOOL):
        return _made(envpool_world, name, agents, {"env": name.removeprefix(ENVPOOL), **options})
    # Refuses names that mean nothing.
    knobs_of(name)
    kind = find_named(name, "world.name=")
    if isinstance(kind, type) and issubclass(kind, gymnasium.Env | gymnasium.vector.VectorEnv):
        return _made(GymWorld, name, agents, {"env": kind, **options})
    return _yours(kind, name, agents, options)


@contextmanager
def closing_world(world: World) -> Iterator[World]:
    """Close a world at the end, if it holds something open."""
    try:
        yield world
    finally:
        if isinstance(world, Closes):
            world.close()


def _made(kind: Callable[..., World], name: str, agents: int, options: dict[str, Any]) -> World:
    known = [key for key in inspect.signature(kind).parameters if key not in ("agents", "env")]
    for key in options.keys() - {"env"}:
        if key not in known:
            meant = did_you_mean(key, known, f"it has {', '.join(known)}.")
            raise ConfigError(f"The world {name!r} has no option {key!r}; {meant}")
    return kind(agents, **options)


def _simulated(name: str, agents: int, options: dict[str, Any]) -> World:
    """Make a world of mettagrid: what is no option of every one of them is one of its game."""
    own = [key for key in inspect.signature(MettaGridWorld).parameters if key not in ("agents", "env")]
    asked = {**options.get("options", {}), **{key: options[key] for key in options if key not in own}}
    given = {key: options[key] for key in options if key in own and key != "options"}
    return MettaGridWorld(agents, env=name.removeprefix(METTAGRID), options=asked, **given)


def _yours(kind: Callable[..., Any], name: str, agents: int, options: dict[str, Any]) -> World:
    """Make a world of a user's class; it is told the seed and the device if it asks for them."""
    if isinstance(kind, type) and not {"reset", "step"} <= set(dir(kind)):
        raise ConfigError(f"{name} is {kind!r}; a world has agents, spec, reset() and step(actions).")
    takes = inspect.signature(kind).parameters
    if any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        takes = {**takes, **dict.fromkeys(("seed", "device"))}
    asked = {key: value for key, value in options.items() if key in takes or key not in ("seed", "device")}
    try:
        world = kind(agents=agents, **asked)
    except HoldfastError:
        raise
    except Exception as error:
        raise ConfigError(f"world.name={name} cannot be made: {type(error).__name__}: {error}") from error
    if isinstance(world, gymnasium.Env | gymnasium.vector.VectorEnv):
        raise ConfigError(f"{name} makes a Gymnasium environment; write world=gym:{name}.")
    if not isinstance(world, World):
        raise ConfigError(f"{name} makes {world!r}; a world has agents, spec, reset() and step(actions).")
    if world.agents != agents:
        raise ConfigError(f"{name} has {world.agents} agents; {agents} were asked for.")
    return world


def _popgym_id(name: str) -> str:
    """Write an id of popgym from its short name, or take it whole."""
    short = name.removeprefix("popgym-").removesuffix("-v0")
    # That it is not installed is told when it is made.
    if importlib.util.find_spec("popgym") is not None:
        importlib.import_module("popgym")
        known = [each for each in map(str, gymnasium.registry) if each.startswith("popgym-")]
        names = [each.removeprefix("popgym-").removesuffix("-v0") for each in known]
        if short not in names:
            meant = did_you_mean(short, names, f"there is {', '.join(names)}.")
            raise ConfigError(f"world.name=popgym:{name}: popgym has no such environment; {meant}")
    return f"popgym:popgym-{short}-v0"


def _mixed(agents: int, *, parts: Any, seed: int = 0, device: str | torch.device = "cpu") -> World:
    try:
        several: tuple[Part, ...] = TypeAdapter(Parts).validate_python(parts)
    except ValidationError as error:
        raise ConfigError(first_complaint(error, "parts")) from None
    unit = math.lcm(*(part.world.crowd for part in several))
    counts = share_out(agents, [part.weight for part in several], unit)

    def made(number: int, seed: int) -> World:
        knobs = several[number].world
        # A seed each: the same world twice lives two lives.
        own = draws.seed_of(seed, draws.STREAM_PART, number)
        return make_world(knobs.name, counts[number], seed=own, device=device, **options_of(knobs))

    def remade(number: int, clock: int) -> World:
        return made(number, draws.seed_of(seed, draws.STREAM_RESUMED, clock))

    worlds = [made(number, seed) for number in range(len(several))]
    return Mixture(worlds, [part.label for part in several], remade)


def options_of(knobs: WorldKnobs) -> dict[str, Any]:
    """List what a world is made with besides agents, seed and device."""
    return {key: getattr(knobs, key) for key in type(knobs).model_fields if key not in ("name", "agents")}
