"""Session: agents that act by a loaded policy, and the conversion of their observations."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase

from holdfast.errors import ContractError
from holdfast.memory.state_store import Snapshot
from holdfast.play.saved_memory import SavedMemory, read_memory, write_memory
from holdfast.policies import LSTMWrapper
from holdfast.rollout.segments import policy_td
from holdfast.types import Bool, Tensor
from holdfast.worlds.obs import Obs, empty_obs, out_of_range, subspaces, tensors_of

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def to_obs(obs: Any, space: spaces.Space[Any], agents: int, device: torch.device) -> Obs:
    """Convert a batch of observations to tensors with the dtypes of a space, and check it."""
    batch = _convert(obs, space, agents, device, "obs")
    outside = out_of_range(batch, space)
    if bool(outside.any()):
        rows = outside.nonzero().flatten().tolist()
        raise ContractError(f"obs of agents {rows} is outside the observation space {space}.")
    return batch


def require_finite(obs: Obs, valid: Bool[Tensor, " A"] | None) -> None:
    """Reject NaN and Inf where `valid`: they would stay in memory until the episode ends."""
    for leaf in tensors_of(obs):
        bad = ~leaf.reshape(len(leaf), -1).isfinite().all(1)
        bad = bad if valid is None else bad & valid
        if bool(bad.any()):
            rows = bad.nonzero().flatten().tolist()
            raise ContractError(f"obs of agents {rows} is not finite; it must not contain NaN or Inf.")


def to_flags(flags: Any, name: str, agents: int, device: torch.device) -> Bool[Tensor, " A"]:
    """Convert one boolean per agent to a tensor."""
    if isinstance(flags, Tensor):
        tensor = flags
    else:
        array = np.asarray(flags)
        tensor = torch.from_numpy(array.copy()) if array.dtype == np.bool_ else None
    if tensor is None or tensor.dtype != torch.bool or tensor.shape != (agents,):
        actual = f"{list(tensor.shape)} {tensor.dtype}" if tensor is not None else repr(flags)
        raise ContractError(f"{name} is {actual}; must be one True or False for each of {agents} agents.")
    return tensor.to(device)


def _convert(obs: Any, space: spaces.Space[Any], agents: int, device: torch.device, name: str) -> Obs:
    fields = subspaces(space)
    if not fields:
        return _convert_leaf(obs, empty_obs(space), agents, device, name)
    if isinstance(obs, tuple | list):
        obs = {str(index): item for index, item in enumerate(obs)}
    keys = sorted(map(str, obs.keys())) if isinstance(obs, Mapping | TensorDictBase) else None
    if keys != sorted(fields):
        actual = type(obs).__name__ if keys is None else f"of keys {', '.join(keys) or 'none'}"
        raise ContractError(f"{name} is {actual}; must have the keys {', '.join(sorted(fields))}.")
    items = {str(key): item for key, item in obs.items()}
    leaves = {key: _convert(items[key], field, agents, device, f"{name}[{key!r}]") for key, field in fields.items()}
    return TensorDict(leaves, batch_size=[agents])


def _convert_leaf(obs: Any, empty: Any, agents: int, device: torch.device, name: str) -> Tensor:
    shape = [agents, *empty.shape[1:]]
    must = f"must be {shape} {str(empty.dtype).removeprefix('torch.')}, a row for each of {agents} agents"
    if isinstance(obs, Tensor):
        leaf = obs
    else:
        array = np.asarray(obs)
        if array.dtype.kind not in "fiub":
            raise ContractError(f"{name} is {type(obs).__name__} of {array.dtype}; {must}.")
        # A copy: the caller's array may be overwritten, or not be writable, which torch warns of.
        leaf = torch.from_numpy(array.copy())
    if list(leaf.shape) != shape or not _can_cast(leaf.dtype, empty.dtype):
        raise ContractError(f"{name} is {list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}; {must}.")
    return leaf.to(device, empty.dtype)


def _can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether a dtype may be cast to a space's: floats not to integers, only uint8 to uint8."""
    if target.is_floating_point:
        return source.is_floating_point or source in INTEGERS
    return source == target if target == torch.uint8 else source in INTEGERS


Agents = Sequence[int] | Sequence[bool] | Bool[Tensor, " A"] | np.ndarray
"""A subset of the agents: indices, or a boolean mask."""


class ActResult(NamedTuple):
    """Actions and the policy's outputs: tensors, or arrays if the observations are NumPy arrays."""

    actions: Any
    """`[A]`, or `[A,n]` for MultiDiscrete and Box; always inside of the action space."""
    log_prob: Any
    """Log-probability of the actions, `[A]`."""
    values: Any
    """Value estimates, `[A]`."""
    distribution: Any
    """Distribution parameters: log-probabilities of all actions, or means and log standard deviations."""


class Session:
    """Agents that act by a loaded policy: `act(obs, first)` returns actions and updates the memory.

    Each session has its own memory: `memory` copies it, `save` and `restore` store it, `fork` duplicates
    the session, `edit` overwrites and `reset` clears the memory of agents.
    """

    def __init__(self, policy: LSTMWrapper, weights: str, agents: int, seed: int = 0) -> None:
        if agents < 1:
            raise ContractError(f"agents={agents}; must be 1 or more.")
        if policy.binding.spec is None:
            raise ContractError("This policy is bound to no world yet; call policy.bind(world.spec).")
        # A module of its own that shares the weights: all other attributes are copied, the store empty.
        shared = [*policy.parameters(), *policy.buffers()]
        self._policy = copy.deepcopy(policy, {id(tensor): tensor for tensor in shared})
        self._policy.store.allocate({0: agents})
        self._obs_space = policy.binding.spec.observation_space
        self.agents, self._weights, self._seed, self._clock = agents, weights, seed, 0
        self._device = next(policy.parameters()).device
        self._agent = torch.arange(agents, device=self._device)

    def act(self, obs: Any, first: Any, *, greedy: bool = True, trial: Any = None, valid: Any = None) -> Any:
        """Return the actions for one observation of each agent, and update the memory.

        `first` is true where the observation starts an episode, as all of the first call do: memory is
        cleared before it reads. `trial` is true where it starts a trial (for policies that clear on
        trials), `valid` false where the agent does not act. Without `greedy`, actions are sampled: the same
        for the same seed, agent and step.
        """
        return self.step(obs, first, greedy=greedy, trial=trial, valid=valid).actions

    def step(self, obs: Any, first: Any, *, greedy: bool = True, trial: Any = None, valid: Any = None) -> ActResult:
        """Act, and return the policy's outputs with the actions."""
        batch = self._batch(obs, first, trial, valid)
        before, clock = self._policy.store.snapshot(), self._clock
        try:
            result = _to_caller(self._forward(batch, greedy), obs)
            self._clock += 1
        except BaseException:
            # Any error, and Ctrl-C too, undoes the whole step.
            self._policy.store.restore(before)
            self._clock = clock
            raise
        return result

    def distribution(
        self, obs: Any, first: Any, *, greedy: bool = True, trial: Any = None, valid: Any = None
    ) -> ActResult:
        """Return what `step` would, without updating the memory or the step count."""
        batch = self._batch(obs, first, trial, valid)
        with self._policy.replay(self._policy.store.snapshot().tree):
            return _to_caller(self._forward(batch, greedy), obs)

    @property
    def memory(self) -> SavedMemory:
        """A copy of the hidden states of all agents: a tensor `[A,...]` by state key."""
        tree = self._policy.store.snapshot().tree
        leaves = {str(name): leaf for name, leaf in tree.items()}
        return SavedMemory(leaves, self._weights, self.agents, self._seed, self._clock)

    def save(self, file: str | Path) -> Path:
        """Write the memory, seed and step count to a file of tensors."""
        write_memory(self.memory, Path(file))
        return Path(file)

    def restore(self, memory: SavedMemory | str | Path) -> None:
        """Restore memory, seed and step count from a file or a copy, made with the same weights."""
        name = "This memory"
        if not isinstance(memory, SavedMemory):
            name, memory = str(memory), read_memory(Path(memory))
        if memory.weights != self._weights:
            raise ContractError(
                f"{name} belongs to the weights {memory.weights[:12]}; this player has {self._weights[:12]}. "
                "Hidden states are only valid with the weights that made them."
            )
        if memory.agents != self.agents:
            raise ContractError(
                f"{name} is that of {memory.agents} agents; this session has {self.agents}. "
                f"Call player.start(agents={memory.agents})."
            )
        self._require_leaves(memory, self._policy.store.state_keys, self.agents)
        tree = TensorDict(dict(memory.leaves), batch_size=[self.agents])
        self._policy.store.restore(Snapshot({0: self.agents}, tree))
        self._seed, self._clock = memory.seed, memory.clock

    def fork(self, seed: int | None = None) -> "Session":
        """Return an independent copy of this session; with a `seed` it samples other actions."""
        copied = Session(self._policy, self._weights, self.agents)
        copied.restore(self.memory)
        copied._seed = self._seed if seed is None else seed
        return copied

    def edit(self, agents: Agents, leaves: Mapping[str, Any]) -> None:
        """Overwrite the memory of agents: `edit([0, 2], {"h": tensor})` with a row for each of them."""
        rows = self._rows(agents)
        tensors = {name: torch.as_tensor(leaf) for name, leaf in leaves.items()}
        self._require_leaves(tensors, list(tensors), len(rows))
        states = self._policy.store.view(0)
        for name, leaf in tensors.items():
            states[name][rows] = leaf.to(self._device)

    def reset(self, agents: Agents | None = None) -> None:
        """Clear the memory of `agents`, or of all."""
        rows = torch.arange(self.agents) if agents is None else self._rows(agents)
        self._policy.store.reset_slice(0, rows.cpu())

    def _batch(self, obs: Any, first: Any, trial: Any, valid: Any) -> TensorDict:
        """Convert and check the inputs, and return the TensorDict a policy reads."""
        env_obs = to_obs(obs, self._obs_space, self.agents, self._device)
        inputs = {"first": first, "trial": trial, "valid": valid}
        flags = {
            name: to_flags(flag, name, self.agents, self._device)
            for name, flag in inputs.items()
            if flag is not None or name == "first"
        }
        require_finite(env_obs, flags.get("valid"))
        if not self._clock and not bool(flags["first"].all()):
            raise ContractError(
                "first must be true for every agent in the first call: memory is empty. "
                "To continue from a saved memory, call session.restore."
            )
        if self._policy.clear_on == "trial" and trial is None:
            raise ContractError("This policy clears its memory on trials; pass trial=, one flag per agent.")
        uniform = self._policy.actions.draws_for(self._seed, self._agent, self._clock)
        return policy_td({"env_obs": env_obs, **flags}, start=0, draws=uniform)

    @torch.no_grad()
    def _forward(self, batch: TensorDict, greedy: bool) -> ActResult:
        actions, uniform = self._policy.actions, batch["draws"]
        td = self._policy(batch)
        params = td[actions.key]
        # Sampled here: a hand-written policy may use other random numbers, which restore could not repeat.
        action = actions.greedy(params) if greedy else actions.sample(params, uniform)
        log_prob = actions.log_prob(params, action)
        return ActResult(self._policy.env_actions(action), log_prob, td["values"], params)

    def _rows(self, agents: Agents) -> Tensor:
        rows = torch.as_tensor(agents)
        if rows.dtype == torch.bool and rows.shape == (self.agents,):
            rows = rows.nonzero().flatten()
        is_index = rows.dim() == 1 and (rows.dtype in (torch.int32, torch.int64) or not rows.numel())
        if not is_index or not all(0 <= row < self.agents for row in rows.tolist()):
            raise ContractError(f"agents={agents}; give indices from 0 to {self.agents - 1}, or one flag per agent.")
        if len(set(rows.tolist())) < len(rows):
            raise ContractError(f"agents={rows.tolist()} contains duplicates; give each index once.")
        return rows.long().to(self._device)

    def _require_leaves(self, leaves: Mapping[str, Tensor], names: Sequence[str], rows: int) -> None:
        """Reject states whose keys, shapes or dtypes are not this policy's."""
        states = self._policy.store.view(0)
        keys = [str(name) for name, _ in states.items()]
        if sorted(leaves) != sorted(names) or not set(leaves) <= set(keys):
            actual = ", ".join(leaves) or "none"
            raise ContractError(f"The state keys are {actual}; must be {', '.join(keys) or 'none'}.")
        for name, leaf in leaves.items():
            state = states[name]
            shape = [rows, *state.shape[1:]]
            if list(leaf.shape) != shape or leaf.dtype != state.dtype:
                raise ContractError(
                    f"State {name!r} is {list(leaf.shape)} {leaf.dtype}; must be {shape} {state.dtype}."
                )
            if not bool(leaf.isfinite().all()):
                raise ContractError(f"State {name!r} is not finite; a NaN would stay in memory until the episode ends.")


def _to_caller(result: ActResult, obs: Any) -> ActResult:
    """Return arrays if the first leaf of `obs` is an array, else tensors on its device."""
    while isinstance(obs, Mapping | TensorDictBase | tuple | list) and len(obs):
        obs = obs[0] if isinstance(obs, tuple | list) else next(iter(obs.values()))
    if not isinstance(obs, Tensor):
        return ActResult(*(tensor.cpu().numpy() for tensor in result))
    return ActResult(*(tensor.to(obs.device) for tensor in result))
