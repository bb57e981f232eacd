"""Holdfast's own policies under test: lived by the trainer's collector, replayed by its update."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from holdfast.check.script import Moments, Script
from holdfast.check.subject import Answer, Life, Subject
from holdfast.check.subjects import measures
from holdfast.check.subjects.imagined import Sights
from holdfast.check.tree import State
from holdfast.experience import Collector, Segments, evaluate, value_of
from holdfast.learn import replay
from holdfast.memory import Bundle
from holdfast.policies import LSTMWrapper
from holdfast.shapes import Float, Shaped, Tensor
from holdfast.worlds import Step, WorldSpec, draws

Flags = Literal["first", "dones", "truncateds"]


class Wrapped(Subject):
    """An `LSTMWrapper`, in the hands of Holdfast's collector, update and evaluation."""

    knows_absence = True
    cuts_itself = True
    module: LSTMWrapper
    collector: type[Collector] = Collector
    """Who collects: the trainer's collector, or one that somebody derived from it."""
    again: Callable[[LSTMWrapper, Segments], TensorDictBase] = staticmethod(replay)
    """Who replays."""
    play: Callable[..., object] = staticmethod(evaluate)
    """Who evaluates."""

    def __init__(self, policy: LSTMWrapper, spec: WorldSpec) -> None:
        if policy.binding.spec is None:
            # The policy under test is left alone: who is bound to nothing yet is bound as a copy.
            policy = copy.deepcopy(policy)
        policy.require_bound(spec)
        self.module, self.spec = policy, spec
        self.clear_on, self.sights = policy.clear_on, Sights(spec)
        self.actions = len(spec.action_names) if spec.action is None else spec.action

    def imagine(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw what the world could show; a tree is drawn as one tensor."""
        return self.sights.draw(size, generator)

    def as_td(self, moments: Moments, start: int | None, flags: Flags = "first") -> TensorDict:
        """Put moments into the words that policies read; some flag alone may tell of the starts."""
        batch = moments.batch
        told = moments.first if flags == "first" else moments.terminated | moments.truncated
        td: dict[str, Any] = {flags: told, "trial": moments.trial, "valid": moments.valid}
        td["env_obs"] = self.sights.show(moments.obs)
        td["draws"] = torch.zeros(moments.action.shape, device=moments.first.device)
        if start is not None:
            td["training_env_id_start"] = torch.full(batch, start)
        return TensorDict({key: leaf.clone() for key, leaf in td.items()}, batch_size=batch)

    def said(self, td: TensorDictBase) -> Float[Tensor, "*batch K"]:
        """Lay the value and what tells of all actions side by side."""
        return torch.cat([td["values"][..., None], td[self.module.actions.key]], dim=-1)

    def _answer(self, td: TensorDictBase) -> Answer:
        key = self.module.actions.key
        return {"values": td["values"], key: td[key]}

    def initial(self, rows: int) -> State:
        """Ask the cell."""
        return dict(self.module.lstm.cell.initial(rows).items())

    def act(self, moment: Moments, state: State) -> tuple[Answer, State]:
        """Put the state into the live store, call the policy, and take the state out again."""
        policy, rows = self.module, len(moment.first)
        policy.store.close()
        policy.store.write(0, TensorDict(state, batch_size=[rows]))
        said = self._answer(policy(self.as_td(moment, 0)))
        return said, {key: leaf.clone() for key, leaf in policy.store.live(0).items()}

    def replay(self, moments: Moments, state: State) -> Answer:
        """Replay from the entry state, as the update does."""
        td = self.as_td(moments, None)
        with self.module.replay(TensorDict(state, batch_size=[len(moments.first)])):
            return self._answer(self.module(td, action=moments.action))

    def value(self, moment: Moments, state: State) -> Answer:
        """Ask as the collector's bootstrap does."""
        entry = TensorDict(state, batch_size=[len(moment.first)])
        rest = (self.sights.show(moment.obs), moment.first, moment.trial, moment.valid)
        return {"values": value_of(self.module, entry, *rest)}

    @torch.no_grad()
    def live(self, script: Script) -> Life:
        """Live a script through the trainer's own collector, and replay it through its own update path."""
        policy, length = self.module, script.steps // self.rollouts
        said: list[Tensor] = []

        def listen(module: nn.Module, arguments: tuple[Any, ...], td: TensorDictBase) -> None:
            if not policy.store.is_replaying:
                said.append(self.said(td).clone())

        world = ScriptedWorld(self.spec, script)
        policy.store.close()
        collector = self.collector(world, policy, length=length, horizon=length // self.segments, seed=0)
        replayed = []
        handle = policy.register_forward_hook(listen)
        try:
            for version in range(self.rollouts):
                again = self.said(self.again(policy, collector.rollout(version)))
                replayed.append(again.reshape(script.agents, length, -1))
        finally:
            handle.remove()
            policy.store.close()
        return Life(torch.stack(said, dim=1), torch.cat(replayed, dim=1))

    def evaluate(self, script: Script) -> Float[Tensor, "A N K"]:
        """Let the evaluation of runs play the script, up to its last step, where every episode ends."""
        said: list[Tensor] = []

        def listen(module: nn.Module, arguments: tuple[Any, ...], td: TensorDictBase) -> None:
            said.append(self.said(td).clone())

        over, first = script.terminated.clone(), script.first.clone()
        over[:, -1] = ~script.truncated[:, -1]
        first[:, -1] = True
        world = ScriptedWorld(self.spec, replace(script, terminated=over, first=first))
        fewest = int((over | script.truncated).sum(1).min())
        handle = self.module.register_forward_hook(listen)
        try:
            self.play(self.module, world, episodes=fewest * script.agents)
        finally:
            handle.remove()
        return torch.stack(said, dim=1)

    def over(self, moments: Moments, state: State) -> State:
        """Live a segment in one call."""
        policy = self.module
        policy.store.close()
        policy.store.write(0, TensorDict(state, batch_size=moments.batch[:1]))
        policy(self.as_td(moments, 0))
        return {key: leaf.clone() for key, leaf in policy.store.live(0).items()}

    def entrances(self) -> Sequence[nn.Module]:
        """The cells read what was encoded."""
        cell = self.module.lstm.cell
        return list(cell.cells.values()) if isinstance(cell, Bundle) else [cell]

    def beyond(self, law: str, bench: Any) -> list[Any]:
        """Measure the live store, every flag, saving, compiled parts and the cell against its reference."""
        return measures.OF_LAW[law](bench) if law in measures.OF_LAW else []


class ScriptedWorld:
    """A world that reads from a script, whatever the agents do."""

    def __init__(self, spec: WorldSpec, script: Script) -> None:
        self.agents, self.script, self._sights = script.agents, script, Sights(spec)
        self.spec = replace(spec, truncates="always" if bool(script.truncated.any()) else "never")
        self._clock = 0

    def reset(self) -> Step:
        """Read the first line."""
        self._clock = 0
        return self._tell()

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Read the next line."""
        self._clock += 1
        return self._tell()

    def _tell(self) -> Step:
        t, now = self._clock, self.script.at(self._clock)
        agent = torch.arange(self.agents, device=now.first.device)
        return Step(
            obs=self._sights.show(now.obs),
            reward=draws.uniform(0, draws.STREAM_WORLD, agent, t),
            terminated=now.terminated,
            truncated=now.truncated,
            first=now.first,
            valid=now.valid,
            trial=now.trial,
            last_obs=self._sights.show(self.script.other_obs[:, t]),
        )
