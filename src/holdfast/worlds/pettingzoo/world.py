"""PettingZoo's parallel environments as one world of many agents."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from holdfast.shapes import Shaped, Tensor
from holdfast.worlds.going_on import put_back, state_of
from holdfast.worlds.gym.find import Wrap
from holdfast.worlds.inputs import with_inputs
from holdfast.worlds.pettingzoo.crowds import Crowds
from holdfast.worlds.pettingzoo.find import find_parallel
from holdfast.worlds.step import Anew, Step


class PettingZooWorld:
    """Environments that several agents share, all in one process.

    `env` is a module with `parallel_env` (`mpe2.simple_spread_v3`), a function or class that makes a
    `ParallelEnv` (itself, or by `package.module:function`). It is made with `options` and wrapped in
    `wrappers`, innermost first. `agents` is a multiple of those who may be in one environment
    (`possible_agents`); they are the rows, in that order.

    `keep` lists which numbers of a vector are shown; none: all. The action and the reward before, and whether
    an episode begins, can be shown too.

    Every episode is seeded by (seed, number of the environment, number of the episode) alone.
    """

    def __init__(
        self,
        agents: int,
        *,
        env: str | Callable[..., Any],
        seed: int = 0,
        device: str | torch.device = "cpu",
        options: Mapping[str, Any] | None = None,
        wrappers: Sequence[Wrap] = (),
        keep: Sequence[int] = (),
        previous_action: bool = False,
        previous_reward: bool = False,
        tell_first: bool = False,
    ) -> None:
        found = find_parallel(env, options or {}, wrappers)
        self._crowds = Crowds(found, agents, seed=seed, device=device, keep=keep)
        self._world = with_inputs(
            self._crowds,
            previous_action=previous_action,
            previous_reward=previous_reward,
            tell_first=tell_first,
        )
        self.agents, self.spec, self.name = agents, self._world.spec, found.name

    def count_from(self, first_agent: int) -> None:
        """Draw for agents `first_agent` and on, who begin a crowd; said before `reset()`."""
        self._crowds.count_from(first_agent)

    def reset(self) -> Step:
        """Open the first episode of every environment, the same one each time."""
        return self._world.reset()

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Take an action an agent, `[A]` or `[A,n]`; those of who is away do nothing."""
        return self._world.step(actions)

    def state(self) -> dict[str, Any] | None:
        """Say where every environment is, by how it got there."""
        return state_of(self._world)

    def restore(self, state: Mapping[str, Any]) -> Anew | None:
        """Let every environment live its episode again, up to where it was."""
        return put_back(self._world, state)

    def close(self) -> None:
        """Close the environments."""
        self._crowds.close()
