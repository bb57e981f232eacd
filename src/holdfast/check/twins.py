"""What two lives say of a world: the same ones must be the same, and others must not be felt."""

import torch

from holdfast.check.chance import fingerprint, shared_chance
from holdfast.check.episodes import absent
from holdfast.check.life import Life, relive, same, script
from holdfast.check.results import Measurement
from holdfast.check.visit import Visit
from holdfast.errors import ConfigError
from holdfast.shapes import Bool, Int, Tensor
from holdfast.worlds import WorldSpec


def equal(what: str, life: Life, other: Life, agents: Bool[Tensor, " A"] | None = None) -> Measurement:
    """Demand that some agents are told the same in two lives, bit for bit, wherever it counts.

    What is seen where nobody acts, and a last observation where nothing is truncated, do not count.
    """
    unlike = _unlike(life, other)
    if agents is not None:
        unlike = {key: where & agents for key, where in unlike.items()}
    anywhere = torch.stack(list(unlike.values())).any(0)
    count, place = int(anywhere.sum()), ""
    if count:
        step, agent = anywhere.nonzero()[0].tolist()
        names = [key for key, where in unlike.items() if bool(where[step, agent])]
        place = f"agent {agent}, step {step}, {', '.join(names)}"
    return Measurement(what, float(count), 0.0, finding=place)


def _unlike(life: Life, other: Life) -> dict[str, Bool[Tensor, "N A"]]:
    """Say where two lives differ, by name."""
    found, counts = dict[str, Tensor](), (life["valid"], life["truncated"])
    for key, told in life.told.items():
        unlike = ~same(told, other.told[key])
        unlike = unlike.flatten(2).any(2) if unlike.dim() > 2 else unlike
        if key.startswith(("obs", "last_obs")):
            unlike = unlike & counts[key.startswith("last_obs")]
        found[key] = unlike
    return found


def repeat(visit: Visit) -> list[Measurement]:
    """Demand that seed and actions decide everything, and that the seed does."""
    life, again = visit.life, visit.again
    # Whether first is set there is another law's business.
    told = again.told | {"first": torch.cat([life["first"][:1], again["first"][1:]])}
    twin = visit.twin(life.actions)
    found = [
        equal("rows that differ in a world made anew, same seed", life, twin),
        equal("rows that differ after another reset()", life, Life(**{**vars(again), "told": told})),
    ]
    stranger = visit.twin(life.actions, seed=visit.seed + 1)
    unlike = torch.stack(list(_unlike(life, stranger).values()))
    if not bool(unlike.any()) and _draws_nothing(visit):
        told = "with another seed, and all agents who do the same are told the same"
        return [*found, absent(f"it draws nothing: nothing differs {told}")]
    do = "nothing differs, though agents differ from each other; draw from the seed that is given"
    differing = float(unlike.any(0).sum())
    return [*found, Measurement("rows that differ with another seed", differing, 0.0, "more than", do)]


def _draws_nothing(visit: Visit) -> bool:
    """Say whether everybody (each crowd) lives the same life if everybody does the same."""
    crowd, life = visit.spec.crowd, visit.life
    actions = life.actions[:, :crowd]
    everybody = torch.cat([actions] * (visit.agents // crowd), dim=1)
    alike = visit.twin(everybody)
    ones = {
        key: torch.cat([told[:, :crowd]] * (visit.agents // crowd), dim=1) for key, told in alike.told.items()
    }
    differs = _unlike(alike, Life(**{**vars(alike), "told": ones}))
    return not bool(torch.stack(list(differs.values())).any())


def isolate(visit: Visit) -> list[Measurement]:
    """Demand that nobody feels what those do who share no place with them, nor how many they are."""
    crowd, agents, life = visit.spec.crowd, visit.agents, visit.life
    if agents <= crowd:
        do = f"all {agents} agents share one place; check with {2 * crowd} agents"
        return [_among_more(visit), absent("nobody lives in another place", do)]
    place = torch.arange(agents, device=life["first"].device) // crowd
    others = script(visit.spec, agents, len(life.actions), 1, life.actions.device)
    neighbours, found = "agents" if crowd == 1 else f"crowds of {crowd}", []
    for parity, who in enumerate(("odd", "even")):
        mine = place % 2 == parity
        actions = torch.where(mine.view(1, agents, *[1] * (others.dim() - 2)), life.actions, others)
        found.append(equal(f"rows that feel what {who} {neighbours} do", life, visit.twin(actions), mine))
    return [*found, _among_more(visit)]


def _among_more(visit: Visit) -> Measurement:
    """Live among twice as many, who do something else."""
    life, many = visit.life, 2 * visit.agents
    actions = script(visit.spec, many, len(life.actions), 1, life.actions.device)
    try:
        with shared_chance(0), visit.made(many, visit.seed) as world:
            if world.agents != many:
                return absent(f"asked for {many} agents, it has {world.agents}")
            mine = places_among(visit.spec, world.spec, visit.agents)
            actions[:, mine] = life.actions
            among = relive(world, many, actions)
    except ConfigError as error:
        return absent(f"it cannot be made for {many} agents", str(error))
    told = {key: leaf[:, mine] for key, leaf in among.told.items()}
    return equal(f"rows that differ among {many} agents", life, Life(**{**vars(among), "told": told}))


def places_among(few: WorldSpec, many: WorldSpec, agents: int) -> Int[Tensor, " A"]:
    """Say in which rows of a larger world the agents of a smaller one live.

    In the same ones; but where a world has parts, `(name, agents)` each, one after the other, in the first
    rows of their part.
    """
    if not few.parts:
        return torch.arange(agents)
    begin, found = 0, list[Tensor]()
    for (name, count), (_, more) in zip(few.parts, many.parts, strict=True):
        if more < count:
            raise ConfigError(f"In {name} there are {more} agents then, and {count} before.")
        found.append(begin + torch.arange(count))
        begin += more
    return torch.cat(found)


def idle(visit: Visit) -> Measurement:
    """Demand that what is done where nobody acts changes nothing."""
    life = visit.life
    valid = life["valid"][:-1]
    if bool(valid.all()):
        return absent("there is no row in which nobody acts")
    others = script(visit.spec, visit.agents, len(life.actions), 1, life.actions.device)
    mask = valid.reshape(*valid.shape, *[1] * (others.dim() - 2))
    actions = torch.where(mask, life.actions, others)
    return equal("rows that feel what is done where nobody acts", life, visit.twin(actions))


def pure(visit: Visit) -> list[Measurement]:
    """Demand that the randomness a whole program shares is neither felt nor used up."""
    life = visit.life
    with shared_chance(12345):
        before = fingerprint()
        with visit.made(visit.asked, visit.seed) as world:
            twin = relive(world, visit.agents, life.actions)
        after = fingerprint()
    used = [name for name in before if before[name] != after[name]]
    do = f"it draws from the shared generator of {', '.join(used)}; draw from one of its own, by its seed"
    return [
        Measurement("shared generators it draws from", float(len(used)), 0.0, finding=do),
        equal("rows that feel the program's shared randomness", life, twin),
    ]
