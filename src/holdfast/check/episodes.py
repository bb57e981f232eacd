"""What one life says of itself: kinds, firsts, ends, last observations, and rows where nobody acts."""

import torch

from holdfast.check.life import Life, same
from holdfast.check.results import Measurement
from holdfast.check.sense import outside
from holdfast.shapes import Bool, Int, Tensor
from holdfast.worlds import WorldSpec

CHANCE = 1e-6
"""What happens by chance less often than this did not happen by chance."""


def absent(what: str, do: str = "") -> Measurement:
    """Say that there was nothing to measure, and what to do about it if there is something."""
    return Measurement(what, 0.0, 0.0, finding=do, about="n/a")


def too_short(what: str, steps: int) -> Measurement:
    """Say that nothing of a kind happened in so many steps."""
    longer = 10 * max(steps, 100)
    return absent(f"{what} in {steps} steps", f"live longer by --steps {longer}, or steps={longer} in Python")


def rows(what: str, bad: Bool[Tensor, "N A"], told: str = "") -> Measurement:
    """Count rows that must not be; a finding names the first one."""
    count, place = int(bad.sum()), ""
    if count:
        step, agent = bad.nonzero()[0].tolist()
        place = f"agent {agent}, step {step}"
    return Measurement(what, float(count), 0.0, finding=f"{place}{told and f'; {told}'}")


def kind(life: Life, spec: WorldSpec, asked: int, agents: int) -> list[Measurement]:
    """Demand kinds of tensors and observations that the spec says, and rewards that are numbers."""
    number, fault = next(iter(life.faults.items()), (0, ""))
    found = [
        Measurement(
            "agents more or fewer than asked",
            float(abs(asked - agents)),
            0.0,
            finding=f"asked {asked}, is {agents}",
        ),
        Measurement(
            "steps of the wrong kind", float(len(life.faults)), 0.0, finding=f"step {number}: {fault}"
        ),
    ]
    if life.raised:
        found.append(Measurement("living", float("inf"), 0.0, finding=life.raised, about="raised"))
    if not life.told:
        return found
    for bad, told in outside(spec, life.leaves("obs"), "obs"):
        found.append(rows("observations that the spec says cannot be", bad & life["valid"], told))
    found.append(rows("rewards that are no finite number", ~life["reward"].isfinite()))
    return found


def first(life: Life, again: Life) -> list[Measurement]:
    """Demand that everybody's episode opens at a reset, wherever the world was."""
    do = "set first everywhere in reset()"
    return [
        rows("rows without first after reset()", ~life["first"][:1], do),
        rows(
            "rows without first after another reset()",
            ~again["first"][:1],
            f"{do}, in the middle of a life too",
        ),
    ]


def flags(life: Life, spec: WorldSpec) -> list[Measurement]:
    """Demand that ends and firsts take turns, and that nobody acts in between."""
    ended, first, valid = life.ended, life["first"], life["valid"]
    inside, later = _inside(first, ended), torch.ones_like(first)
    acted = _acted(first, valid)
    later[0] = False
    end = "set terminated or truncated in the row of the last reward, also if the next episode opens in it"
    start = "set first where the next episode opens, and valid=False until then"
    found = [
        rows("firsts without an end before", later & first & inside & acted & ~ended, end),
        rows(
            "rows that act after an end and before the next first",
            later & valid & ~first & (~inside | ended),
            start,
        ),
        rows("ends of no episode", ended & ~inside & valid.roll(1, 0), "it had ended before"),
        rows("ends in reset()", ended & ~later),
        rows("trials where first is", life["trial"] & first, "a new episode is no new trial inside of one"),
    ]
    if spec.truncates == "never":
        do = 'write truncates="always" in its spec'
        found.append(rows("truncations, though its spec says never", life["truncated"], do))
    if not bool(ended.any()):
        return [too_short("no episode ended", len(first) - 1), *found]
    return found


def _inside(first: Bool[Tensor, "N A"], ended: Bool[Tensor, "N A"]) -> Bool[Tensor, "N A"]:
    """Say who was in an episode when each row came; after a reset everybody is, whatever it says."""
    now, found = torch.ones_like(first[0]), []
    for opens, ends in zip(first, ended, strict=True):
        found.append(now)
        now = opens | (now & ~ends)
    return torch.stack(found)


def _acted(first: Bool[Tensor, "N A"], valid: Bool[Tensor, "N A"]) -> Bool[Tensor, "N A"]:
    """Say who had acted since its last first when each row came: who is away at first may begin later."""
    now, found = torch.zeros_like(first[0]), []
    for opens, acts in zip(first, valid, strict=True):
        found.append(now)
        now = (now & ~opens) | acts
    return torch.stack(found)


def dead(life: Life) -> list[Measurement]:
    """Demand that nothing comes of a row in which nobody acted, and that who begins is there."""
    acted = life["valid"].roll(1, 0)
    acted[0] = False
    later = torch.ones_like(acted)
    later[0] = False
    return [
        rows("rewards for no action", ~acted & (life["reward"] != 0), "nobody acted in the row before"),
        rows("ends where nobody acted", later & ~acted & life.ended, "nobody acted in the row before"),
        rows("firsts of nobody", later & life["first"] & ~life["valid"], "set valid where first is"),
    ]


def last(life: Life, spec: WorldSpec) -> list[Measurement]:
    """Demand a last observation of every truncated episode, and that it is not one of another step."""
    cut = life["truncated"]
    if not bool(cut.any()):
        if spec.truncates == "never":
            return [absent("nothing is truncated in this world")]
        return [too_short("no episode was truncated", len(cut) - 1)]
    step, fault = next(iter(life.last_faults.items()), (0, ""))
    missing = cut & ~life.given.to(cut.device)[:, None]
    found = [
        rows("truncations without a last observation", missing, "give last_obs"),
        Measurement(
            "last_obs of the wrong kind", float(len(life.last_faults)), 0.0, finding=f"step {step}: {fault}"
        ),
    ]
    for bad, told in outside(spec, life.leaves("last_obs"), "last_obs"):
        found.append(rows("last observations that the spec says cannot be", bad & cut & ~missing, told))
    return [*found, *(_not_another(life) if not bool(missing.any()) and not life.last_faults else [])]


def _not_another(life: Life) -> list[Measurement]:
    """Demand that last observations are not always those of the step before or of the next episode.

    Both can happen in some rows of a right world. So it is asked how often it happens elsewhere that two such
    observations look alike; only if all being alike would be a wonder, it counts as one.
    """
    cut, valid = life["truncated"], life["valid"]
    step, agent = (cut & (_next_first(life["first"]) >= 0)).nonzero().unbind(1)
    opening = _next_first(life["first"])[step, agent]
    inner = (valid[1:] & valid[:-1] & ~life["first"][1:] & ~life.ended[1:]).nonzero()
    usual = _alike(life, (inner[:, 0] + 1, inner[:, 1]), "obs", inner[:, 0])
    before = _alike(life, (step, agent), "last_obs", step - 1)
    ahead = _alike(life, (step, agent), "last_obs", opening)
    chance = _alike(life, (step - 1, agent), "obs", opening)
    return [
        _wonder(
            "last observations unlike the next episode's first one", ahead, chance, "the first of the next"
        ),
        _wonder("last observations unlike the one before", before, usual, "the one before the last action"),
    ]


def _wonder(what: str, alike: Bool[Tensor, " K"], usual: Bool[Tensor, " n"], which: str) -> Measurement:
    # One more of each kind than was seen, so that a few are no proof.
    share = (float(usual.sum()) + 1) / (len(usual) + 2)
    if not len(alike) or share ** len(alike) > CHANCE:
        return absent(f"{what}: these often look alike, or truncations are few")
    told = f"all {len(alike)} are {which}; last_obs is what the last action led to"
    return Measurement(what, float((~alike).sum()), 0.0, "more than", told)


def _alike(
    life: Life, where: tuple[Tensor, Tensor], name: str, other: Int[Tensor, " K"]
) -> Bool[Tensor, " K"]:
    """Say whether what is told in some rows looks like the observation of another step of the same agent."""
    alike = torch.ones_like(other, dtype=torch.bool)
    for key, leaf in life.leaves("obs").items():
        told = life.told[key if name == "obs" else f"last_{key}"][where]
        alike &= (
            same(told, leaf[other, where[1]]).flatten(1).all(1)
            if leaf.dim() > 2
            else same(told, leaf[other, where[1]])
        )
    return alike


def _next_first(first: Bool[Tensor, "N A"]) -> Int[Tensor, "N A"]:
    """Say in which row, this one or a later one, the next episode opens; -1: in none."""
    N = len(first)
    at = torch.where(first, torch.arange(N, device=first.device)[:, None], N)
    nearest = at.flip(0).cummin(0).values.flip(0)
    return torch.where(nearest == N, -1, nearest)


def still(life: Life) -> list[Measurement]:
    """Demand that what was handed out stays as it was, and what was handed in too."""
    told = f"{life.overwritten[0]}; hand out tensors of their own" if life.overwritten else ""
    return [
        Measurement("steps written to after they were told", float(len(life.overwritten)), 0.0, finding=told)
    ]
