"""The contract of a world, measured: nine laws of what a `Step` says, on any class that claims to keep it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.check import episodes, twins
from holdfast.check.episodes import absent
from holdfast.check.results import Law, Laws, Measurement
from holdfast.check.visit import AGENTS, Make, Visit
from holdfast.errors import ConfigError, CrowdError, HoldfastError
from holdfast.worlds import make_world

WORLD_LAWS: dict[str, Callable[[Visit], list[Measurement]]] = {
    "kind": lambda visit: episodes.kind(visit.life, visit.spec, visit.asked, visit.agents),
    "first": lambda visit: episodes.first(visit.life, visit.again),
    "flags": lambda visit: episodes.flags(visit.life, visit.spec),
    "last": lambda visit: episodes.last(visit.life, visit.spec),
    "dead": lambda visit: [twins.idle(visit), *episodes.dead(visit.life)],
    "still": lambda visit: episodes.still(visit.life),
    "repeat": twins.repeat,
    "isolate": twins.isolate,
    "pure": twins.pure,
}


@dataclass(frozen=True)
class WorldToCheck:
    """How a world is made, and how it is to be lived in."""

    make: Make
    agents: int | None = None
    """None: so many that there are two crowds."""
    steps: int | None = None
    """None: until everybody's episodes ended some times, within a limit."""
    seed: int = 0


def check_world(
    world: Make | str, *, agents: int | None = None, steps: int | None = None, seed: int = 0, **options: Any
) -> Laws:
    """Measure every law of a world on anybody's; `laws.ok` says whether all hold.

    `world` is a class that is made as `Class(agents, seed=seed, **options)`, a function
    `make(agents, seed) -> World`, or the name of a world with its options:
    `check_world("recall", delay=4)`. It is made about a dozen times, for 24 agents or two crowds unless
    `agents` says otherwise, and lived in with scripted actions until every agent ended some episodes, within
    1,024 steps and a limit of time, or for exactly `steps` steps.
    """
    return examine_world(WorldToCheck(_maker(world, options), agents, steps, seed))


def _maker(world: Make | str, options: dict[str, Any]) -> Make:
    if isinstance(world, str):
        return lambda agents, seed: make_world(world, agents=agents, seed=seed, **options)
    if isinstance(world, type):
        return lambda agents, seed: world(agents, seed=seed, **options)
    if not callable(world):
        raise ConfigError(f"{world!r} is made already; give its class, or a function that makes one anew.")
    if options:
        raise ConfigError(
            f"{', '.join(options)}: options go with a world's name; a function that makes one knows its own."
        )
    return world


def examine_world(given: WorldToCheck, tell: Callable[[str], None] = lambda doing: None) -> Laws:
    """Measure every law on a world, and tell what is being done."""
    for name, number in (("agents", given.agents), ("steps", given.steps)):
        if number is not None and number < 1:
            raise ConfigError(f"{name}={number}: give at least 1, or leave it out.")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tell("meeting the world")
        with _enter(given) as visit:
            return _examined(visit, tell)
    finally:
        torch.set_num_threads(threads)


def _examined(visit: Visit, tell: Callable[[str], None]) -> Laws:
    tell("living a first life")
    lived = len(visit.life.actions)
    found: list[Law] = []
    for number, name in enumerate(WORLD_LAWS, 1):
        tell(f"measuring {name} ({number} of {len(WORLD_LAWS)}), {lived} steps a life")
        found.append(Law(name, _measured(visit, name), sought=False))
    return Laws(found, notes=_notes(visit, found), of="a world")


def _enter(given: WorldToCheck) -> Visit:
    """Make the world for as many agents as show that crowds do not feel each other."""
    agents = given.agents or AGENTS
    if given.agents is None:
        crowd = _crowd_of(given)
        agents = max(AGENTS // crowd, 2) * crowd
    return Visit(given.make, agents, given.seed, given.steps)


def _crowd_of(given: WorldToCheck) -> int:
    try:
        with Visit(given.make, AGENTS, given.seed, given.steps) as first:
            return first.spec.crowd
    except CrowdError as error:
        return error.crowd


def _measured(visit: Visit, name: str) -> list[Measurement]:
    """Measure one law; a world that raises in it breaks it."""
    life = visit.life
    if name != "kind" and (life.unreadable or not life.told):
        return [absent("nothing, since kind is broken", "mend kind first")]
    try:
        return WORLD_LAWS[name](visit)
    except Exception as error:
        told = " ".join(str(error).split())[:300]
        if not isinstance(error, HoldfastError):
            told = f"{type(error).__name__}: {told}"
        return [Measurement(f"measuring {name}", float("inf"), 0.0, finding=told, about="raised")]


def _notes(visit: Visit, laws: list[Law]) -> list[str]:
    """Tell what was lived, and of what could not be measured, what to do about it."""
    life = visit.life
    if not life.told:
        return []
    ended, cut = int(life.ended.sum()), int(life["truncated"].sum())
    lived = (
        f"{visit.agents} agents lived {len(life.actions)} steps; {ended} episodes ended, {cut} by truncation"
    )
    asked = [
        f"{law.name}: {part.what}; {part.finding}"
        for law in laws
        for part in law.parts
        if part.about == "n/a" and part.finding and not life.unreadable
    ]
    return [lived, *dict.fromkeys(asked)]
