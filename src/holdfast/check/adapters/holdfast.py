"""Adapter of Holdfast policies: run by the collector, the update and the evaluation of the trainer."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torch import nn

from holdfast import rng
from holdfast.check.adapters import holdfast_extras
from holdfast.check.adapters.base import Outputs, PolicyAdapter, RolloutAndReplay, end_all_episodes, flat
from holdfast.check.adapters.generic import random_box
from holdfast.check.compare import State
from holdfast.check.script import Script, StepBatch
from holdfast.errors import ConfigError
from holdfast.evaluation.evaluate import evaluate
from holdfast.learn import Learner, replay
from holdfast.memory import MultiCell
from holdfast.policies import LSTMWrapper, make_policy
from holdfast.policies.recurrent_policy import PolicyBatch
from holdfast.rollout import Collector, Segments, bootstrap_value
from holdfast.rollout.segments import policy_td
from holdfast.types import Float, Shaped, Tensor
from holdfast.worlds import Step, World, WorldSpec, make_world
from holdfast.worlds.obs import Obs, space_bounds, subspaces

Path = tuple[str, ...]
MAX_RANGE = 1 << 20
"""Largest range of integers drawn: float32 represents them exactly."""


class RandomObs:
    """Draws observations of a world.

    Scripts index and replace observations as tensors. A Dict or Tuple is drawn as one tensor of all leaves,
    `[*size, numbers]`; `show` converts it to the structure a policy reads.
    """

    def __init__(self, spec: WorldSpec) -> None:
        self.spec, self.leaves = spec, _leaves(spec.observation_space, ())
        self.is_tree = bool(subspaces(spec.observation_space))

    def draw(self, size: tuple[int, ...], generator: torch.Generator) -> Shaped[Tensor, "..."]:
        """Draw observations `[*size,...]`."""
        if self.spec.features:
            return _draw_tokens(self.spec, size, generator)
        leaves = [_draw(space, size, generator) for space in self.leaves.values()]
        if not self.is_tree:
            return leaves[0]
        dtype = torch.float32 if any(leaf.is_floating_point() for leaf in leaves) else torch.int64
        return torch.cat([leaf.reshape(*size, -1).to(dtype) for leaf in leaves], dim=-1)

    def show(self, drawn: Shaped[Tensor, "..."]) -> Obs:
        """Convert drawn observations to the structure a policy reads."""
        if not self.is_tree:
            return drawn
        batch = drawn.shape[:-1]
        sizes = [math.prod(space.shape or ()) for space in self.leaves.values()]
        obs = TensorDict({}, batch_size=batch)
        for (path, space), leaf in zip(self.leaves.items(), drawn.split(sizes, -1), strict=True):
            dtype, leaf = _integer_dtype(space), leaf.reshape(*batch, *(space.shape or ()))
            if dtype is not None:
                # Laws scale observations; an integer outside its space has no embedding.
                low, high = (torch.tensor(bound).to(leaf) for bound in space_bounds(space))
                leaf = leaf.round().clamp(low, high).to(dtype)
            obs[path] = leaf
        return obs


def _leaves(space: spaces.Space[Any], path: Path) -> dict[Path, spaces.Space[Any]]:
    """List the leaves of a tree of spaces by path, in a fixed order."""
    children = subspaces(space)
    if not children:
        return {path: space}
    leaves: dict[Path, spaces.Space[Any]] = {}
    for name, child in children.items():
        leaves |= _leaves(child, (*path, name))
    return leaves


def _integer_dtype(space: spaces.Space[Any]) -> torch.dtype | None:
    """Return the dtype of an integer space, or None for floating-point."""
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        return None
    return torch.uint8 if space.dtype == np.uint8 else torch.int64


def _draw(space: spaces.Space[Any], size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw from a space without subspaces."""
    dtype = _integer_dtype(space)
    if isinstance(space, spaces.Box) and dtype is None:
        return random_box(space)(torch.randn(*size, *space.shape, generator=generator))
    low, high = (bound.astype(float) for bound in space_bounds(space))
    count = torch.tensor(np.minimum(high - low + 1, MAX_RANGE))
    share = torch.rand(*size, *count.shape, generator=generator, dtype=torch.float64)
    return (torch.tensor(low) + (share * count).floor()).to(dtype)


def _draw_tokens(spec: WorldSpec, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    shape = (*size, spec.obs_shape[0])
    rows, columns = (torch.randint(side, shape, generator=generator) for side in spec.window)
    feature = torch.randint(len(spec.features), shape, generator=generator)
    norm = torch.tensor([feature.normalization for feature in spec.features])
    share = 0.25 + 0.75 * torch.rand(shape, generator=generator)
    value = (norm[feature] * share).ceil().clamp(max=255)
    return torch.stack([rows << 4 | columns, feature, value.long()], dim=-1).to(torch.uint8)


Flags = Literal["first", "dones", "truncateds"]


class HoldfastPolicy(PolicyAdapter):
    """An `LSTMWrapper`, run by Holdfast's collector, update and evaluation."""

    handles_invalid = True
    rollout_has_grad = True
    module: LSTMWrapper
    collector: type[Collector] = Collector
    replay_fn: Callable[[LSTMWrapper, Segments], PolicyBatch] = staticmethod(replay)
    learner: type[Learner] = Learner
    evaluate_fn: Callable[..., object] = staticmethod(evaluate)

    def __init__(self, policy: LSTMWrapper, spec: WorldSpec) -> None:
        if policy.binding.spec is None:
            # Binding modifies a policy, so an unbound one is copied first.
            policy = copy.deepcopy(policy)
        policy.require_bound(spec)
        self.module, self.spec = policy, spec
        self.clear_on, self.observations = policy.clear_on, RandomObs(spec)
        self.actions = len(spec.action_names) if spec.action is None else spec.action

    @classmethod
    def fits(cls, policy: Any) -> bool:
        """Whether it is a Holdfast policy or the name of one."""
        return isinstance(policy, str | LSTMWrapper)

    @classmethod
    def make(cls, policy: Any, world: World | None, **options: Any) -> PolicyAdapter:
        """Build the policy if it is a name, in `recall` if no world is given."""
        world = world or make_world("recall", agents=1)
        if not isinstance(getattr(world, "spec", None), WorldSpec):
            raise ConfigError(f"{world!r} is no world; write holdfast.check(policy, holdfast.make_world(env)).")
        policy = make_policy(policy, world, seed=0) if isinstance(policy, str) else policy
        return cls(policy, **{"spec": world.spec, **options})

    def random_obs(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw from the observation space; a tree is drawn as one tensor."""
        return self.observations.draw(size, generator)

    def as_td(self, batch: StepBatch, start: int | None, flags: Flags = "first") -> TensorDict:
        """Build the TensorDict a policy reads; `flags` is the key that carries the episode starts."""
        starts = batch.first if flags == "first" else batch.terminated | batch.truncated
        td: dict[str, Any] = {flags: starts, "trial": batch.trial, "valid": batch.valid}
        td["env_obs"] = self.observations.show(batch.obs)
        draws = torch.zeros(batch.action.shape, device=batch.first.device)
        return policy_td({key: leaf.clone() for key, leaf in td.items()}, start=start, draws=draws)

    def outputs(self, td: PolicyBatch) -> Float[Tensor, "*batch K"]:
        """Concatenate the value and the action parameters."""
        return flat(self._select(td), td["values"].dim())

    def _select(self, td: PolicyBatch) -> Outputs:
        key = self.module.actions.key
        return {"values": td["values"], key: td[key]}

    def initial(self, rows: int) -> State:
        """Make the cell's initial state."""
        return dict(self.module.lstm.cell.initial(rows).items())

    def act(self, step: StepBatch, state: State) -> tuple[Outputs, State]:
        """Act over the live store."""
        td, state = self._call_live(step, state)
        return self._select(td), state

    def advance(self, batch: StepBatch, state: State) -> State:
        """Run a segment in one call."""
        return self._call_live(batch, state)[1]

    def _call_live(self, batch: StepBatch, state: State) -> tuple[TensorDictBase, State]:
        """Write the state into the live store, call the policy, and read the next state."""
        store = self.module.store
        store.close()
        store.write(0, TensorDict(state, batch_size=[len(batch.first)]))
        td = self.module(self.as_td(batch, 0))
        return td, {key: leaf.clone() for key, leaf in store.view(0).items()}

    def replay(self, batch: StepBatch, state: State) -> Outputs:
        """Replay from the entry state, as the update does."""
        td = self.as_td(batch, None)
        with self.module.replay(TensorDict(state, batch_size=[len(batch.first)])):
            return self._select(self.module(td, action=batch.action))

    def value(self, step: StepBatch, state: State) -> Outputs:
        """Compute the bootstrap value as the collector does."""
        entry, obs = TensorDict(state, batch_size=[len(step.first)]), self.observations.show(step.obs)
        return {"values": bootstrap_value(self.module, entry, obs, step.first, step.trial, step.valid)}

    @contextmanager
    def _recorded_outputs(self) -> Iterator[list[Tensor]]:
        """Record the outputs of every call that is not a replay."""
        outputs: list[Tensor] = []

        def append(module: nn.Module, arguments: tuple[Any, ...], td: PolicyBatch) -> None:
            if not self.module.store.is_replaying:
                outputs.append(self.outputs(td).clone())

        handle = self.module.register_forward_hook(append)
        try:
            yield outputs
        finally:
            handle.remove()

    @torch.no_grad()
    def rollout_and_replay(self, script: Script) -> RolloutAndReplay:
        """Run a script with the trainer's collector, and replay it as its update does."""
        policy, length = self.module, script.steps // self.rollouts
        world, replayed = ScriptedWorld(self.spec, script), []
        policy.store.close()
        collector = self.collector(world, policy, length=length, horizon=length // self.segments, seed=0)
        try:
            with self._recorded_outputs() as outputs:
                for version in range(self.rollouts):
                    segments = self.outputs(self.replay_fn(policy, collector.rollout(version)))
                    replayed.append(segments.reshape(script.agents, length, -1))
        finally:
            policy.store.close()
        return RolloutAndReplay(torch.stack(outputs, dim=1), torch.cat(replayed, dim=1))

    def evaluate(self, script: Script) -> Float[Tensor, "A N K"]:
        """Run the trainer's evaluation on the script, up to its last step, where every episode ends."""
        script, episodes = end_all_episodes(script)
        with self._recorded_outputs() as outputs:
            self.evaluate_fn(self.module, ScriptedWorld(self.spec, script), episodes=episodes)
        return torch.stack(outputs, dim=1)

    def scripted_world(self, script: Script, first_agent: int) -> "ScriptedWorld":
        """Make a world that plays a script to some agents, of which the first has a number."""
        return ScriptedWorld(self.spec, script, first_agent)

    def memory_modules(self) -> Sequence[nn.Module]:
        """Return the cells, which read encoded observations."""
        cell = self.module.lstm.cell
        return list(cell.cells.values()) if isinstance(cell, MultiCell) else [cell]

    def extra_measurements(self, law: str, context: Any) -> list[Any]:
        """Measure the live store, every flag, saving, compiled parts and the cell against its reference."""
        return holdfast_extras.OF_LAW[law](context) if law in holdfast_extras.OF_LAW else []


class ScriptedWorld:
    """A world that plays a script, whatever the actions."""

    def __init__(self, spec: WorldSpec, script: Script, first_agent: int = 0) -> None:
        self._first_agent = first_agent
        self.agents, self.script, self._observations = script.agents, script, RandomObs(spec)
        self.spec = replace(spec, truncates="always" if bool(script.truncated.any()) else "never")
        self._clock = 0

    def reset(self) -> Step:
        """Return the first step."""
        self._clock = 0
        return self._read()

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Return the next step."""
        self._clock += 1
        return self._read()

    def _read(self) -> Step:
        t, batch = self._clock, self.script.at(self._clock)
        agent = self._first_agent + torch.arange(self.agents, device=batch.first.device)
        return Step(
            obs=self._observations.show(batch.obs),
            reward=rng.uniform(0, rng.STREAM_WORLD, agent, t),
            terminated=batch.terminated,
            truncated=batch.truncated,
            first=batch.first,
            valid=batch.valid,
            trial=batch.trial,
            last_obs=self._observations.show(self.script.other_obs[:, t]),
        )
