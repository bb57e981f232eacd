"""Playing: some agents with memories of their own, thinking with weights that do not change."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from holdfast.errors import ContractError
from holdfast.keep.memories import Memory, read_memory, write_memory
from holdfast.keep.shown import as_flags, as_seen, first_leaf, require_numbers
from holdfast.memory.store import Snapshot
from holdfast.policies import LSTMWrapper
from holdfast.shapes import Bool, Tensor

Agents = Sequence[int] | Sequence[bool] | Bool[Tensor, " A"] | np.ndarray
"""Some of the agents: by their numbers, or one True or False each."""


class Answer(NamedTuple):
    """What each agent does, and what it thinks: tensors, or arrays where NumPy was shown."""

    actions: Any
    """What is done: `[A]`, or `[A,n]` where an action has several parts."""
    log_prob: Any
    """How likely that was, `[A]`."""
    values: Any
    """What the agent expects, `[A]`."""
    told: Any
    """The whole distribution: log-probabilities of all actions, or means and log deviations."""


class Playing:
    """Agents that play: `act(obs, first)` answers an observation each, and remembers.

    The memories in it are nobody else's. They are looked at by `memory`, kept by `save` and `restore`,
    doubled by `fork`, changed by `edit` and emptied by `forget`.
    """

    def __init__(self, policy: LSTMWrapper, weights: str, agents: int, seed: int = 0) -> None:
        if agents < 1:
            raise ContractError(f"agents={agents}; somebody must play: give 1 or more.")
        if policy.binding.spec is None:
            raise ContractError("This policy is bound to no world yet; call policy.bind(world.spec).")
        # A module of its own around the same weights: whatever is kept on it is nobody else's.
        self._policy, self._weights = _around_the_same_weights(policy), weights
        self._policy.store.open({0: agents})
        self._sight = policy.binding.spec.sight
        self.agents, self._seed, self._clock = agents, seed, 0
        self._device = next(policy.parameters()).device
        self._agent = torch.arange(agents, device=self._device)

    def act(self, obs: Any, first: Any, *, greedy: bool = True, trial: Any = None, valid: Any = None) -> Any:
        """Answer an observation of each agent, and remember it; where `first` is true, forget before.

        `first` is true where the observation opens an episode: for everybody in the first call. `trial`
        is true where it opens a trial (for policies that clear on trials), `valid` false where nobody
        acts. Without `greedy` actions are drawn: the same ones for the same seed, agent and step.
        """
        return self.answer(obs, first, greedy=greedy, trial=trial, valid=valid).actions

    def answer(
        self, obs: Any, first: Any, *, greedy: bool = True, trial: Any = None, valid: Any = None
    ) -> Answer:
        """Act, and tell what was thought."""
        batch = self._batch(obs, first, trial, valid)
        before, clock = self._policy.store.snapshot(), self._clock
        try:
            told = _as_shown(self._think(batch, greedy), obs)
            self._clock += 1
        except BaseException:
            # Whatever failed, or whoever pressed Ctrl-C: nobody remembers half a step.
            self._policy.store.restore(before)
            self._clock = clock
            raise
        return told

    def think(
        self, obs: Any, first: Any, *, greedy: bool = True, trial: Any = None, valid: Any = None
    ) -> Answer:
        """Tell what `answer` would; nothing is remembered, and nobody grows older."""
        batch = self._batch(obs, first, trial, valid)
        with self._policy.replay(self._policy.store.snapshot().tree):
            return _as_shown(self._think(batch, greedy), obs)

    @property
    def memory(self) -> Memory:
        """A copy of what the agents remember: a tensor `[A,...]` by the name of each leaf."""
        tree = self._policy.store.snapshot().tree
        leaves = {str(name): leaf for name, leaf in tree.items()}
        return Memory(leaves, self._weights, self.agents, self._seed, self._clock)

    def save(self, file: str | Path) -> Path:
        """Write the memories, and where the draws stand, to a file of tensors."""
        write_memory(self.memory, Path(file))
        return Path(file)

    def restore(self, memory: Memory | str | Path) -> None:
        """Take back memories from a file or a copy, and go on from there; they must be these weights' own."""
        name = "These memories"
        if not isinstance(memory, Memory):
            name, memory = str(memory), read_memory(Path(memory))
        if memory.weights != self._weights:
            raise ContractError(
                f"{name} belong to the weights {memory.weights[:12]}; this player has {self._weights[:12]}. "
                "Memories mean nothing to other weights."
            )
        if memory.agents != self.agents:
            raise ContractError(
                f"{name} are those of {memory.agents} agents; here are {self.agents}. "
                f"Call player.start(agents={memory.agents})."
            )
        self._require_leaves(memory, self._policy.store.leaves, self.agents)
        tree = TensorDict(dict(memory.leaves), batch_size=[self.agents])
        self._policy.store.restore(Snapshot({0: self.agents}, tree))
        self._seed, self._clock = memory.seed, memory.clock

    def fork(self, seed: int | None = None) -> "Playing":
        """Make other agents that go on from here, on their own; with a `seed` they draw otherwise."""
        other = Playing(self._policy, self._weights, self.agents)
        other.restore(self.memory)
        other._seed = self._seed if seed is None else seed
        return other

    def edit(self, agents: Agents, leaves: Mapping[str, Any]) -> None:
        """Give some agents other memories: `edit([0, 2], {"h": tensor})` with a row for each of them."""
        rows = self._rows(agents)
        given = {name: torch.as_tensor(leaf) for name, leaf in leaves.items()}
        self._require_leaves(given, list(given), len(rows))
        live = self._policy.store.live(0)
        for name, leaf in given.items():
            live[name][rows] = leaf.to(self._device)

    def forget(self, agents: Agents | None = None) -> None:
        """Let some agents forget everything, or all."""
        rows = torch.arange(self.agents) if agents is None else self._rows(agents)
        self._policy.store.reset_slice(0, rows.cpu())

    def _batch(self, obs: Any, first: Any, trial: Any, valid: Any) -> TensorDict:
        """Check what was shown, and put it into the words that policies read."""
        seen = as_seen(obs, self._sight, self.agents, self._device)
        named = {"first": first, "trial": trial, "valid": valid}
        flags = {
            name: as_flags(flag, name, self.agents, self._device)
            for name, flag in named.items()
            if flag is not None or name == "first"
        }
        require_numbers(seen, flags.get("valid"))
        if not self._clock and not bool(flags["first"].all()):
            raise ContractError(
                "first must be true for every agent in the first call: nobody remembers anything yet. "
                "To go on with what was remembered before, call playing.restore."
            )
        if self._policy.clear_on == "trial" and trial is None:
            raise ContractError("This policy forgets when a trial opens; say trial=, True or False an agent.")
        uniform = self._policy.actions.uniform(self._seed, self._agent, self._clock)
        start = torch.zeros(self.agents, dtype=torch.long)
        told = {"env_obs": seen, **flags, "training_env_id_start": start, "draws": uniform}
        return TensorDict(told, batch_size=[self.agents])

    @torch.no_grad()
    def _think(self, batch: TensorDict, greedy: bool) -> Answer:
        kind, uniform = self._policy.actions, batch["draws"]
        td = self._policy(batch)
        told = td[kind.key]
        # Chosen here, whatever a policy written by hand draws from: a restored life must draw the same.
        actions = kind.greedy(told) if greedy else kind.sample(told, uniform)
        return Answer(actions, kind.log_prob(told, actions), td["values"], told)

    def _rows(self, agents: Agents) -> Tensor:
        rows = torch.as_tensor(agents)
        if rows.dtype == torch.bool and rows.shape == (self.agents,):
            rows = rows.nonzero().flatten()
        whole = rows.dim() == 1 and (rows.dtype in (torch.int32, torch.int64) or not rows.numel())
        if not whole or not all(0 <= row < self.agents for row in rows.tolist()):
            raise ContractError(f"agents={agents}; give numbers from 0 to {self.agents - 1}, or a flag each.")
        if len(set(rows.tolist())) < len(rows):
            raise ContractError(f"agents={rows.tolist()} names one of them twice; which memory is meant?")
        return rows.long().to(self._device)

    def _require_leaves(self, given: Mapping[str, Tensor], names: Sequence[str], rows: int) -> None:
        """Refuse memories that are not what this policy remembers."""
        live = self._policy.store.live(0)
        known = [str(name) for name, _ in live.items()]
        if sorted(given) != sorted(names) or not set(given) <= set(known):
            told = ", ".join(given) or "nothing"
            raise ContractError(f"The memories given are {told}; these are {', '.join(known) or 'none'}.")
        for name, leaf in given.items():
            wanted = live[name]
            shape = [rows, *wanted.shape[1:]]
            if list(leaf.shape) != shape or leaf.dtype != wanted.dtype:
                raise ContractError(
                    f"Memory {name!r} is {list(leaf.shape)} {leaf.dtype}; must be {shape} {wanted.dtype}."
                )
            if not bool(leaf.isfinite().all()):
                raise ContractError(f"Memory {name!r} is not finite; a NaN would stay for the whole episode.")


def _around_the_same_weights(policy: LSTMWrapper) -> LSTMWrapper:
    """Copy a policy but for its tensors; its store is copied empty."""
    shared = [*policy.parameters(), *policy.buffers()]
    return copy.deepcopy(policy, {id(tensor): tensor for tensor in shared})


def _as_shown(answer: Answer, obs: Any) -> Answer:
    """Give back what the caller speaks: arrays for arrays, tensors where the observation lies."""
    shown = first_leaf(obs)
    if not isinstance(shown, Tensor):
        return Answer(*(part.cpu().numpy() for part in answer))
    return Answer(*(part.to(shown.device) for part in answer))
