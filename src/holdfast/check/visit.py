"""A visit to a world: how it is made, the life that is lived in it first, and lives to compare with."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from holdfast.check.chance import shared_chance
from holdfast.check.life import Diary, Life, live, relive, script
from holdfast.errors import ConfigError, ContractError, HoldfastError
from holdfast.shapes import Tensor
from holdfast.worlds import World, WorldSpec
from holdfast.worlds.step import Closes

Make = Callable[[int, int], World]
"""Makes a world for so many agents from a seed."""

AGENTS = 24
FEW, MANY = 128, 1024
"""Steps that are lived at least and at most, unless somebody says how many."""
ENDS = 2
"""Episodes that each agent should end."""
SECONDS = 1.5
"""CPU time of the first life: about a dozen of them are lived."""
BYTES = 2**27
"""What the copy of a life may hold."""


def _close(world: World) -> None:
    if isinstance(world, Closes):
        world.close()


@dataclass
class Visit:
    """One world under test; lives are lived when they are asked for, and the first one is kept."""

    make: Make
    asked: int
    seed: int
    steps: int | None

    def __enter__(self) -> "Visit":
        return self

    def __exit__(self, *raised: object) -> None:
        _close(self.world)

    @cached_property
    def world(self) -> World:
        """The world of the first life."""
        with shared_chance(0):
            return self._made(self.asked, self.seed)

    @property
    def spec(self) -> WorldSpec:
        """What it says of itself."""
        return self.world.spec

    @property
    def agents(self) -> int:
        """How many there really are."""
        return self.world.agents

    @contextmanager
    def made(self, agents: int, seed: int) -> Iterator[World]:
        """Make a world to live in for a while."""
        world = self._made(agents, seed)
        try:
            yield world
        finally:
            _close(world)

    def _made(self, agents: int, seed: int) -> World:
        """Make a world, or say why there is none."""
        try:
            world = self.make(agents, seed)
        except HoldfastError:
            raise
        except Exception as error:
            told = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ConfigError(f"The world cannot be made for {agents} agents: {told}") from error
        if not isinstance(world, World) or not isinstance(world.spec, WorldSpec):
            raise ContractError(
                f"{type(world).__name__} is no world; it needs agents, spec (a WorldSpec), reset(), step()."
            )
        return world

    @cached_property
    def life(self) -> Life:
        """The first life: as long as was asked for, or until everybody's episodes ended some times."""
        actions = script(self.spec, self.agents, self.steps or MANY)
        with shared_chance(0):
            return live(self.world, self.agents, actions, Patience() if self.steps is None else None)

    @cached_property
    def again(self) -> Life:
        """The same in the same world, reset wherever it was."""
        # Asked for first: it leaves the world in the middle of a life.
        actions = self.life.actions
        with shared_chance(0):
            return relive(self.world, self.agents, actions)

    def twin(self, actions: Tensor, *, seed: int | None = None) -> Life:
        """Live in a world made anew."""
        with shared_chance(0), self.made(self.asked, self.seed if seed is None else seed) as world:
            return relive(world, self.agents, actions)


class Patience:
    """Says when a life was long enough to see many episodes end, or took too much time or room."""

    def __init__(self) -> None:
        self._begun, self._steps, self._ends = time.process_time(), 0, None

    def __call__(self, diary: Diary) -> bool:
        """Look at the last step; numbers are looked at once in a while."""
        told = diary.rows[-1]
        ended = (told["terminated"] | told["truncated"]).long()
        self._ends = ended if self._ends is None else self._ends + ended
        self._steps += 1
        if self._steps % 16:
            return False
        size = sum(leaf.numel() * leaf.element_size() for leaf in told.values())
        if time.process_time() - self._begun > SECONDS or self._steps * size > BYTES:
            return True
        return self._steps > FEW and int(self._ends.min()) >= ENDS
