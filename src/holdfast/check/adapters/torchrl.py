"""Adapter of TorchRL policies: run by its `Collector`, replayed in its recurrent mode."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from holdfast.check.adapters.base import Outputs, PolicyAdapter, RolloutAndReplay, flat, import_library
from holdfast.check.adapters.generic import ObsShape, random_obs
from holdfast.check.compare import State
from holdfast.check.script import Script, StepBatch
from holdfast.errors import ConfigError
from holdfast.types import Bool, Float, Tensor

import_torchrl = partial(import_library, library="TorchRL", extra="torchrl")


class TorchRL(PolicyAdapter):
    """A TensorDict policy with an `LSTMModule` or `GRUModule`, run by TorchRL's collector.

    `outputs` are the keys to compare: name what does not depend on a sampled action, as logits and values.
    `primer=False` leaves the recurrent states out of the environment, as if the user forgot the primer.
    """

    def __init__(
        self,
        policy: Any,
        obs: ObsShape = None,
        *,
        outputs: Sequence[str] = ("logits", "state_value"),
        obs_key: str = "observation",
        primer: bool = True,
    ) -> None:
        self.module, self.outputs, self.obs_key, self.primer = policy, tuple(outputs), obs_key, primer
        self._draw = random_obs(obs, policy)
        if not _memories(policy):
            raise ConfigError(
                f"TorchRL checks policies with an LSTMModule or GRUModule; {type(policy).__name__} has none."
            )
        if obs_key not in policy.in_keys:
            raise ConfigError(f"The policy does not read {obs_key!r}; choose obs_key= from {policy.in_keys}.")
        missing = set(self.outputs) - set(policy.out_keys)
        if missing:
            raise ConfigError(f"The policy does not write {sorted(missing)}; choose outputs= from {policy.out_keys}.")

    @classmethod
    def fits(cls, policy: Any) -> bool:
        """Whether it is a TensorDict module."""
        return isinstance(policy, TensorDictModuleBase)

    def initial(self, rows: int) -> State:
        """Make the zeros that the policy's primers put into an environment at its reset."""
        return {
            key: spec.expand(rows, *spec.shape).zero()
            for memory in _memories(self.module)
            for key, spec in memory.make_tensordict_primer().primers.items()
        }

    def act(self, step: StepBatch, state: State) -> tuple[Outputs, State]:
        """Call the policy in step mode, and read the next state from `next`."""
        td = self.module(self._inputs(step, state if self.primer else {}))
        return self._select(td), {key: td["next", key] for key in state}

    def replay(self, batch: StepBatch, state: State) -> Outputs:
        """Call the policy in recurrent mode on a segment as the collector stores it."""
        stored = self._stored(batch.first, state) if self.primer else {}
        with import_torchrl("torchrl.modules").set_recurrent_mode(True):
            return self._select(self.module(self._inputs(batch, stored)))

    def rollout_and_replay(self, script: Script) -> RolloutAndReplay:
        """Collect the script with `Collector`, and replay what it stored in recurrent mode."""
        length = script.steps // self.rollouts
        collector = import_torchrl("torchrl.collectors").Collector(
            self._env(script),
            self.module,
            frames_per_batch=script.agents * length,
            total_frames=script.agents * script.steps,
        )
        outputs, replayed = [], []
        try:
            for data in collector:
                outputs.append(flat(self._select(data), 2))
                segments = data.reshape(script.agents * self.segments, length // self.segments)
                with import_torchrl("torchrl.modules").set_recurrent_mode(True):
                    replay = self._select(self.module(segments.exclude(*self.outputs)))
                replayed.append(flat(replay, 2).reshape(script.agents, length, -1))
        finally:
            collector.shutdown()
        return RolloutAndReplay(torch.cat(outputs, dim=1), torch.cat(replayed, dim=1))

    def evaluate(self, script: Script) -> Float[Tensor, "A N K"]:
        """Run the script with the environment's `rollout`, through all of its episodes."""
        data = self._env(script).rollout(script.steps, self.module, break_when_any_done=False)
        return flat(self._select(data), 2)

    def _env(self, script: Script) -> Any:
        """Make an environment of the script, with `InitTracker` and primers."""
        envs, env = import_torchrl("torchrl.envs"), _env_class()(script, self.obs_key)
        transforms = [envs.InitTracker()]
        if self.primer:
            transforms += [memory.make_tensordict_primer() for memory in _memories(self.module)]
        return envs.TransformedEnv(env, envs.Compose(*transforms))

    def _inputs(self, batch: StepBatch, state: dict[str, Tensor]) -> TensorDict:
        td = {self.obs_key: batch.obs, "is_init": batch.first[..., None], **state}
        return TensorDict({key: leaf.clone() for key, leaf in td.items()}, batch_size=batch.batch)

    def _stored(self, first: Bool[Tensor, "B T"], state: State) -> dict[str, Tensor]:
        """Lay states out over time as they are collected: the entry first, the primer's zeros at starts.

        A replay reads no other steps: at an episode start it resets to the stored state, not to zero.
        """
        stored = {}
        for key, leaf in state.items():
            stored[key] = leaf.new_zeros(*first.shape, *leaf.shape[1:])
            stored[key][~first[:, 0], 0] = leaf[~first[:, 0]]
        return stored

    def _select(self, td: TensorDictBase) -> Outputs:
        return {name: td[name] for name in self.outputs}


def _memories(policy: Any) -> list[Any]:
    modules = import_torchrl("torchrl.modules")
    return [module for module in policy.modules() if isinstance(module, modules.LSTMModule | modules.GRUModule)]


@cache
def _env_class() -> Any:
    """Define a TorchRL environment that plays a script, whatever the actions."""
    base, specs = import_torchrl("torchrl.envs").EnvBase, import_torchrl("torchrl.data")

    class TorchRLScriptEnv(base):
        def __init__(self, script: Script, obs_key: str) -> None:
            agents, shape = script.agents, script.obs.shape[2:]
            super().__init__(device="cpu", batch_size=[agents])
            self.script, self.obs_key, self.clock = script, obs_key, 0
            obs_spec = specs.Unbounded((agents, *shape), dtype=script.obs.dtype)
            self.observation_spec = specs.Composite({obs_key: obs_spec}, shape=[agents])
            self.action_spec = specs.Unbounded((agents, 1))
            self.reward_spec = specs.Unbounded((agents, 1))
            flag = specs.Categorical(2, shape=(agents, 1), dtype=torch.bool)
            flags = {name: flag.clone() for name in ("done", "terminated", "truncated")}
            self.done_spec = specs.Composite(flags, shape=[agents])

        def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDict:
            # TorchRL takes the rows that start from this, and keeps the others.
            return self._read(self.script.obs, torch.zeros_like(self.script.first))

        def _step(self, tensordict: TensorDictBase) -> TensorDict:
            self.clock += 1
            first = self.script.first
            td = self._read(self.script.changed(first).obs, first)
            return td.set("reward", torch.ones(td.shape[0], 1))

        def _read(self, obs: Tensor, done: Bool[Tensor, "A N1"]) -> TensorDict:
            truncated = done & self.script.truncated & ~self.script.terminated
            columns = {"done": done, "truncated": truncated, "terminated": done & ~truncated}
            flags = {name: flag[:, self.clock, None].clone() for name, flag in columns.items()}
            return TensorDict({self.obs_key: obs[:, self.clock].clone(), **flags}, self.batch_size)

        def _set_seed(self, seed: int | None) -> None:
            """Do nothing: the script is fixed."""

    return TorchRLScriptEnv
