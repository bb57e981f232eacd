"""A guard around a world: what it says must be what its spec says, and its flags must tell one story."""

import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch

from holdfast.errors import ContractError, HoldfastError
from holdfast.saved import taken, tensor_like
from holdfast.shapes import Bool, Int, Shaped, Tensor
from holdfast.worlds.going_on import put_back, state_of
from holdfast.worlds.kind import Kinds
from holdfast.worlds.seen import Seen, choices_outside, leaves_of
from holdfast.worlds.step import Anew, Step, World
from holdfast.worlds.turns import EVERYBODY, TakesTurns, Turn

T = TypeVar("T")
STORIES = {
    "reward": "got a reward that is not finite",
    "obs": "sees something that is not finite",
    "outside": "sees a choice that its observation space does not have",
    "last_obs": "was truncated, and its last_obs is not finite",
    "never": "was truncated, but the world declares truncates='never'; declare 'always' and give last_obs",
    "again": "is told of an end (terminated, truncated), but its episode was over already: tell it once",
    "no end": "begins an episode (first), but the one it acted in has not ended (terminated or truncated)",
    "no first": "acts on after its episode has ended: set first where the next one begins, valid=False until",
}
"""What can be wrong with an agent's row."""
NOTED = {
    "over": torch.bool,
    "acts": torch.bool,
    "lives": torch.bool,
    "wrong": torch.long,
    "when": torch.long,
}
"""What is noted of every agent: is its episode over, does it act now, has it acted in this episode; what was
wrong, and when."""


@runtime_checkable
class Settles(Protocol):
    """Something that notes what is wrong, and tells it when it is asked."""

    def settle(self) -> None:
        """Raise if something was wrong."""
        ...


class Guarded:
    """A world that stops at the first step that breaks the contract."""


class Watched(Guarded):
    """Lives in a world as anybody would, and stops at the first step that breaks the contract.

    On the CPU every step is looked at at once. On a GPU looking would make the host wait, so what is wrong
    is noted there, and told by `settle()`, which collecting calls once a rollout.
    """

    def __init__(self, world: World, name: str = "", first_agent: int = 0) -> None:
        self.world, self.agents, self.spec = world, world.agents, world.spec
        self.name = name or world.spec.name or type(world).__name__
        # In a world of several, agents are counted over all of them.
        self._first_agent = first_agent
        self._kinds = Kinds(world.spec, world.agents)
        self._steps = -1
        self._over = self._acts = self._lives = self._wrong = self._when = torch.zeros(0)

    def reset(self) -> Step:
        """Start anew; everybody's first episode begins."""
        step = self._said(self.world.reset)
        self._steps = 0
        self._over = torch.ones_like(step.first)
        self._acts, self._lives = torch.zeros_like(step.first), torch.zeros_like(step.first)
        self._wrong = torch.zeros(self.agents, dtype=torch.long, device=step.reward.device)
        self._when = torch.full_like(self._wrong, -1)
        if not bool(step.first.all()):
            agent = int((~step.first).nonzero()[0])
            raise self._error(
                f"agent {self._first_agent + agent} is not told that its first episode begins: first is false"
            )
        if bool((step.terminated | step.truncated).any()):
            agent = int((step.terminated | step.truncated).nonzero()[0])
            raise self._error(
                f"agent {self._first_agent + agent} is told of an end (terminated, truncated) by reset()"
            )
        return self._looked_at(step)

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Take everybody's action."""
        self._steps += 1
        return self._looked_at(self._said(partial(self.world.step, actions)))

    def state(self) -> dict[str, Any] | None:
        """Say where the world is, and what was noted of everybody."""
        world = state_of(self.world)
        if world is None:
            return None
        if self._steps < 0:
            raise self._error("call reset() before state()")
        noted = {name: vars(self)[f"_{name}"].clone() for name in NOTED}
        return {"world": world, "steps": self._steps, **noted}

    def restore(self, state: Mapping[str, Any]) -> Anew | None:
        """Put the world back, and guard it as if it had never stopped."""
        steps = taken(state, "steps", int)
        likes = {name: torch.zeros(self.agents, dtype=dtype) for name, dtype in NOTED.items()}
        noted = {f"_{name}": tensor_like(state, name, like) for name, like in likes.items()}
        anew = put_back(self.world, taken(state, "world", dict))
        self._steps = steps
        vars(self).update(noted)
        if anew is not None:
            self._lie_on(anew.who.device)
            self._over = self._over & ~anew.who
            self._acts = torch.where(anew.who, anew.step.valid, self._acts)
            self._lives = torch.where(anew.who, anew.step.valid, self._lives)
        return anew

    def settle(self) -> None:
        """Raise if a step before was wrong."""
        if isinstance(self.world, Settles):
            self.world.settle()
        wrong = self._wrong != 0
        if not bool(wrong.any()):
            return
        first = torch.where(wrong, self._when, torch.iinfo(torch.long).max)
        agent = int(first.argmin())
        bits = int(self._wrong[agent])
        # The lowest bit that is set: the first story that is true.
        story = list(STORIES.values())[(bits & -bits).bit_length() - 1]
        self._steps = int(first[agent])
        raise self._error(f"agent {self._first_agent + agent} {story}")

    def _said(self, ask: Callable[[], Step]) -> Step:
        """Ask the world, and see to it that the answer is a step of the right kinds."""
        step = self._asked(ask)
        self._require(step, self._kinds)
        return step

    def _asked(self, ask: Callable[[], T]) -> T:
        """Ask the world something; what it raises is told as its fault."""
        try:
            return ask()
        except HoldfastError:
            raise
        except Exception as error:
            told = f"{type(error).__name__}: {' '.join(str(error).split())}"
            *_, last = traceback.extract_tb(error.__traceback__)
            where = f"{Path(last.filename).name}, line {last.lineno}"
            raise self._error(f"it raised {told} ({where})") from error

    def _require(self, step: Step, kinds: Kinds) -> None:
        """Refuse a step that is of another kind than the spec says."""
        fault, _ = kinds.fault_of(step)
        if not fault and self.spec.truncates == "always":
            if step.last_obs is None:
                fault = "there is no last_obs, and the world declares truncates='always'; give the last "
                fault += "observation of truncated episodes, or declare truncates='never'"
            else:
                fault, _ = kinds.seen_fault(step.last_obs, "last_obs")
        if fault:
            raise self._error(fault)

    def _looked_at(self, step: Step, who: slice | Tensor = EVERYBODY) -> Step:
        """Note whose row is wrong; where looking costs nothing, tell it at once."""
        self._lie_on(step.reward.device)
        ends = step.terminated | step.truncated
        was_over, acts, lives = self._over[who], self._acts[who], self._lives[who]
        over = was_over | ends
        rows = {
            "reward": acts & ~step.reward.isfinite(),
            "obs": step.valid & _not_finite(step.obs),
            "outside": step.valid & choices_outside(step.obs, self.spec.sight),
            "last_obs": _last_not_finite(step),
            "never": step.truncated if self.spec.truncates == "never" else torch.zeros_like(ends),
            "again": ends & was_over,
            "no end": step.first & lives & ~over,
            "no first": step.valid & over & ~step.first,
        }
        self._over[who], self._acts[who] = over & ~step.first, step.valid
        self._lives[who] = (lives & ~step.first) | step.valid
        bit = 1 << torch.arange(len(rows), device=ends.device)
        wrong = (torch.stack([*rows.values()], dim=1) * bit).sum(1)
        new = (self._wrong[who] == 0) & (wrong != 0)
        self._wrong[who] = torch.where(new, wrong, self._wrong[who])
        self._when[who] = torch.where(new, self._steps, self._when[who])
        if step.reward.device.type == "cpu":
            self.settle()
        return step

    def _lie_on(self, device: torch.device) -> None:
        """Go to where the world speaks: a state may have been kept elsewhere."""
        if self._over.device != device:
            vars(self).update({f"_{name}": vars(self)[f"_{name}"].to(device) for name in NOTED})

    def _error(self, story: str) -> ContractError:
        when = "reset()" if self._steps <= 0 else f"step {self._steps}"
        return ContractError(f"World {self.name}, {when}: {story}.")


class WatchedTurns(Watched):
    """Guards a world in which some are answered while others act."""

    def __init__(self, world: TakesTurns) -> None:
        super().__init__(world)
        self._turning, self.shares, self._turns = world, world.shares, 0

    def answer(self, rows: Int[Tensor, " N"], actions: Shaped[Tensor, "N ..."]) -> None:
        """Let some act."""
        self._asked(partial(self._turning.answer, rows, actions))

    def turn(self) -> Turn:
        """Hear what some are told."""
        # Everybody's turn is one step.
        self._steps += self._turns % len(self.shares) == 0
        self._turns += 1
        turn = self._asked(self._turning.turn)
        if bool((turn.rows.bincount(minlength=self.agents) > 1).any()) or int(turn.rows.max()) >= self.agents:
            raise self._error(
                f"it is the turn of {turn.rows.tolist()}; there are agents 0 to {self.agents - 1}"
            )
        self._require(turn.step, Kinds(self.spec, len(turn.rows)))
        self._looked_at(turn.step, turn.rows.to(turn.step.reward.device))
        return turn


def watched(world: World) -> World:
    """Guard a world; one that is guarded stays as it is."""
    if isinstance(world, Guarded):
        return cast("World", world)
    return WatchedTurns(world) if isinstance(world, TakesTurns) else Watched(world)


def settle(world: World) -> None:
    """Raise if a guarded world was wrong."""
    if isinstance(world, Settles):
        world.settle()


def _not_finite(obs: Seen) -> Bool[Tensor, " A"]:
    masks = [
        ~leaf.isfinite().reshape(len(leaf), -1).all(1) for leaf in leaves_of(obs) if leaf.is_floating_point()
    ]
    if not masks:
        leaf = leaves_of(obs)[0]
        return torch.zeros(len(leaf), dtype=torch.bool, device=leaf.device)
    return torch.stack(masks).any(0)


def _last_not_finite(step: Step) -> Bool[Tensor, " A"]:
    return (
        torch.zeros_like(step.first) if step.last_obs is None else step.truncated & _not_finite(step.last_obs)
    )
