"""Gymnasium's environments as one world of many agents."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import torch
from gymnasium.vector import VectorEnv

from holdfast.shapes import Shaped, Tensor
from holdfast.worlds.going_on import put_back, state_of
from holdfast.worlds.gym.build import Autoreset, Vector, build
from holdfast.worlds.gym.find import Wrap
from holdfast.worlds.gym.vector_world import VectorWorld
from holdfast.worlds.inputs import with_inputs
from holdfast.worlds.step import Anew, Step


class GymWorld:
    """An environment for every agent, all in one process.

    `env` is an id (`CartPole-v1`, `module:ID`), a class or function (itself, or by `package.module:Class`),
    or a vector environment that is ready. It is made with `options` and wrapped in `wrappers`, innermost
    first. `vector=native` asks Gymnasium for the vector environment that somebody wrote. `autoreset` is how
    it restarts: what is told is the same in all three ways, but for rows that are not `valid`; with auto
    that is same_step for those made here, and what others say of themselves.

    `keep` lists which numbers of a vector are shown; none: all. The action and the reward before, and whether
    an episode begins, can be shown too.

    Agent i's environment is seeded by (seed, i) alone; a native vector environment takes one seed for all.
    """

    def __init__(
        self,
        agents: int,
        *,
        env: str | Callable[..., gymnasium.Env[Any, Any]] | VectorEnv[Any, Any, Any],
        seed: int = 0,
        device: str | torch.device = "cpu",
        vector: Vector = "sync",
        autoreset: Autoreset = "auto",
        options: Mapping[str, Any] | None = None,
        wrappers: Sequence[Wrap] = (),
        keep: Sequence[int] = (),
        previous_action: bool = False,
        previous_reward: bool = False,
        tell_first: bool = False,
    ) -> None:
        built = build(
            env, agents, vector=vector, autoreset=autoreset, options=options or {}, wrappers=wrappers
        )
        self._vector = VectorWorld(built, seed=seed, device=device, keep=keep)
        self._world = with_inputs(
            self._vector,
            previous_action=previous_action,
            previous_reward=previous_reward,
            tell_first=tell_first,
        )
        self.agents, self.spec, self.name = agents, self._world.spec, built.name

    def count_from(self, first_agent: int) -> None:
        """Seed every environment as a share of more of them does; said before `reset()`."""
        self._vector.count_from(first_agent)

    def reset(self) -> Step:
        """Start every agent's first episode, the same one each time."""
        return self._world.reset()

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Take an action an agent, `[A]` or `[A,n]`."""
        return self._world.step(actions)

    def state(self) -> dict[str, Any] | None:
        """Say where every environment is, by how it got there."""
        return state_of(self._world)

    def restore(self, state: Mapping[str, Any]) -> Anew | None:
        """Let every environment live its episode again, up to where it was."""
        return put_back(self._world, state)

    def close(self) -> None:
        """Close the environments."""
        self._vector.close()
