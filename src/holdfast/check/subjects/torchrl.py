"""Policies of TorchRL under test: lived by its `Collector`, replayed in its recurrent mode."""

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from holdfast.check.script import Moments, Script
from holdfast.check.subject import Answer, Life, Subject, flat
from holdfast.check.subjects.sight import Sight, imagine
from holdfast.check.tree import State
from holdfast.errors import ConfigError
from holdfast.shapes import Bool, Float, Tensor


class TorchRL(Subject):
    """A TensorDict policy with an `LSTMModule` or `GRUModule`, in the hands of TorchRL's own collector.

    `outputs` are the keys it is judged by: name what does not depend on a drawn action, as logits and values.
    Without `primer` the world is not told of the recurrent states: what a user gets who forgets it.
    """

    recuts = True

    def __init__(
        self,
        policy: Any,
        obs: Sight = None,
        *,
        outputs: Sequence[str] = ("logits", "state_value"),
        obs_key: str = "observation",
        primer: bool = True,
    ) -> None:
        self.module, self.outputs, self.obs_key, self.primer = policy, tuple(outputs), obs_key, primer
        self._draw = imagine(obs, policy)
        if not _memories(policy):
            raise ConfigError(
                f"TorchRL checks policies with an LSTMModule or GRUModule; {type(policy).__name__} has none."
            )
        if obs_key not in policy.in_keys:
            raise ConfigError(f"The policy does not read {obs_key!r}; choose obs_key= from {policy.in_keys}.")
        unsaid = set(self.outputs) - set(policy.out_keys)
        if unsaid:
            raise ConfigError(
                f"The policy does not write {sorted(unsaid)}; choose outputs= from {policy.out_keys}."
            )

    def imagine(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw what it was said to see."""
        return self._draw(size, generator)

    def initial(self, rows: int) -> State:
        """Ask the policy's primers, which put zeros into a world at its reset."""
        return {
            key: spec.expand(rows, *spec.shape).zero()
            for each in _memories(self.module)
            for key, spec in each.make_tensordict_primer().primers.items()
        }

    def act(self, moment: Moments, state: State) -> tuple[Answer, State]:
        """Call the policy in step mode, and read the next state from where it puts it."""
        stored = state if self.primer else {}
        td = self.module(self._told(moment, stored))
        return self._answer(td), {key: td["next", key] for key in state}

    def replay(self, moments: Moments, state: State) -> Answer:
        """Call the policy in recurrent mode on a segment as the collector would have stored it."""
        stored = self._stored(moments.first, state) if self.primer else {}
        with self._recurrently():
            return self._answer(self.module(self._told(moments, stored)))

    def live(self, script: Script) -> Life:
        """Collect the script with `Collector`, and go over what it stored in recurrent mode."""
        length = script.steps // self.rollouts
        collector = part("torchrl.collectors").Collector(
            self._world(script),
            self.module,
            frames_per_batch=script.agents * length,
            total_frames=script.agents * script.steps,
        )
        lived, replayed = [], []
        try:
            for data in collector:
                lived.append(flat(self._answer(data), 2))
                rows = data.reshape(script.agents * self.segments, length // self.segments)
                with self._recurrently():
                    again = self._answer(self.module(rows.exclude(*self.outputs)))
                replayed.append(flat(again, 2).reshape(script.agents, length, -1))
        finally:
            collector.shutdown()
        return Life(torch.cat(lived, dim=1), torch.cat(replayed, dim=1))

    def evaluate(self, script: Script) -> Float[Tensor, "A N K"]:
        """Play the script with the world's own `rollout`, through all of its episodes."""
        played = self._world(script).rollout(script.steps, self.module, break_when_any_done=False)
        return flat(self._answer(played), 2)

    def _world(self, script: Script) -> Any:
        """Put the script into a world that tracks starts and, with a primer, knows of recurrent states."""
        envs, world = part("torchrl.envs"), _world_class()(script, self.obs_key)
        transforms = [envs.InitTracker()]
        if self.primer:
            transforms += [each.make_tensordict_primer() for each in _memories(self.module)]
        return envs.TransformedEnv(world, envs.Compose(*transforms))

    def _told(self, moments: Moments, stored: dict[str, Tensor]) -> TensorDict:
        td = {self.obs_key: moments.obs, "is_init": moments.first[..., None], **stored}
        return TensorDict({key: leaf.clone() for key, leaf in td.items()}, batch_size=moments.batch)

    def _stored(self, first: Bool[Tensor, "B T"], state: State) -> dict[str, Tensor]:
        """Lay states out over time as they are collected: the entry first, the primer's zeros at starts.

        A replay reads no other places: it resets to what is stored where an episode begins, not to zero.
        """
        stored = {}
        for key, leaf in state.items():
            starts = first[:, 0].reshape(-1, *[1] * (leaf.dim() - 1))
            entry = torch.where(starts, torch.zeros_like(leaf), leaf)
            rest = torch.zeros_like(leaf)[:, None].expand(-1, first.shape[1] - 1, *leaf.shape[1:])
            stored[key] = torch.cat([entry[:, None], rest], dim=1)
        return stored

    def _answer(self, td: TensorDictBase) -> Answer:
        return {name: td[name] for name in self.outputs}

    def _recurrently(self) -> AbstractContextManager[None]:
        return part("torchrl.modules").set_recurrent_mode(True)


def part(name: str) -> Any:
    """Import a part of TorchRL, or say how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError("Checking such policies needs TorchRL: pip install 'holdfast[torchrl]'.") from error


def _memories(policy: Any) -> list[Any]:
    modules = part("torchrl.modules")
    return [each for each in policy.modules() if isinstance(each, modules.LSTMModule | modules.GRUModule)]


@cache
def _world_class() -> Any:
    """Define a TorchRL world that reads from a script, whatever the agents do."""
    base, specs = part("torchrl.envs").EnvBase, part("torchrl.data")

    class ScriptedEnv(base):
        def __init__(self, script: Script, obs_key: str) -> None:
            agents, shape = script.agents, script.obs.shape[2:]
            super().__init__(device="cpu", batch_size=[agents])
            self.script, self.obs_key, self.clock = script, obs_key, 0
            seen = specs.Unbounded((agents, *shape), dtype=script.obs.dtype)
            self.observation_spec = specs.Composite({obs_key: seen}, shape=[agents])
            self.action_spec = specs.Unbounded((agents, 1))
            self.reward_spec = specs.Unbounded((agents, 1))
            flag = specs.Categorical(2, shape=(agents, 1), dtype=torch.bool)
            flags = {name: flag.clone() for name in ("done", "terminated", "truncated")}
            self.done_spec = specs.Composite(flags, shape=[agents])

        def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDict:
            # TorchRL takes from this the rows that start, and keeps the others.
            return self._tell(self.script.obs, torch.zeros_like(self.script.first))

        def _step(self, tensordict: TensorDictBase) -> TensorDict:
            self.clock += 1
            first = self.script.first
            where = first.reshape(*first.shape, *[1] * (self.script.obs.dim() - 2))
            td = self._tell(torch.where(where, self.script.other_obs, self.script.obs), first)
            return td.set("reward", torch.ones(td.shape[0], 1))

        def _tell(self, obs: Tensor, done: Bool[Tensor, "A N1"]) -> TensorDict:
            truncated = done & self.script.truncated & ~self.script.terminated
            told = {"done": done, "truncated": truncated, "terminated": done & ~truncated}
            flags = {name: flag[:, self.clock, None].clone() for name, flag in told.items()}
            return TensorDict({self.obs_key: obs[:, self.clock].clone(), **flags}, self.batch_size)

        def _set_seed(self, seed: int | None) -> None:
            """Nothing is drawn."""

    return ScriptedEnv
