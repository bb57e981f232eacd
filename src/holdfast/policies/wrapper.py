"""`LSTMWrapper`: the face that hand-written policies inherit; the memory package does the work."""

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from holdfast.errors import ContractError
from holdfast.memory import Cell, LiveStore, MemoryInit, make_cell
from holdfast.memory.time_major import LeafBySlice, TimeMajorLSTM, from_pair, to_pair
from holdfast.policies.actions import Actions, Categorical
from holdfast.policies.binding import Binding, adopt_before_loading
from holdfast.policies.clock import ClearOn, clears, slice_start
from holdfast.shapes import Tensor
from holdfast.worlds.seen import blank
from holdfast.worlds.step import WorldSpec

Memory = tuple[dict[int, Tensor], ...]


class LSTMWrapper(nn.Module):
    """A recurrent policy's memory: the LSTM, the live store, and the calls around them.

    A policy written by hand calls, once each and in this order, `_manage_lstm_state`, `self.lstm` and
    `_store_lstm_state`; leaving one out is an error, at the latest in the next call. Better: inherit
    `RecurrentPolicy`, write `encode` and `decode`, and have nothing to forget.
    """

    actions: Actions = Categorical()
    """What the scores mean. For MultiDiscrete and Box actions set `self.actions = actions_of(spec)`."""
    any_length: bool = False
    """Whether tokens may come without the padding that all rows end in: then less of it is computed."""
    hears_by_name: ClassVar[bool] = False
    """Whether observations and scores are translated when the policy lives in another world."""

    def __init__(
        self,
        input_size: int = 128,
        hidden_size: int = 128,
        num_layers: int = 2,
        *,
        memory: str | Cell = "lstm",
        memory_init: MemoryInit = "standard",
        clear_on: ClearOn = "episode",
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.clear_on: ClearOn = clear_on
        if isinstance(memory, str):
            memory = make_cell(memory, input_size, hidden_size, num_layers, memory_init)
        self.lstm = TimeMajorLSTM(memory)
        self.store = LiveStore(self.lstm.cell)
        self.binding = Binding()
        self.register_load_state_dict_pre_hook(adopt_before_loading)

    def bind(self, spec: WorldSpec, *, learn: bool = True) -> None:
        """Bind this policy to a world; with `learn`, features and actions it has not met become its own.

        Layers may be widened by that, so an optimizer is made afterwards.
        """
        self.binding.bind(self, spec, learn=learn, translate=self.hears_by_name)
        if isinstance(self.actions, Categorical) and spec.action is None:
            self.actions = Categorical(len(spec.action_names))

    def require_bound(self, spec: WorldSpec) -> None:
        """Bind a policy that was bound to nothing yet; refuse one that lives in another world."""
        if self.binding.spec is None:
            self.bind(spec)
        elif self.binding.spec.words != spec.words:
            raise ContractError(
                "This policy is bound to a world with other observations or actions; call "
                "policy.bind(world.spec) to learn this one's, or policy.bind(world.spec, learn=False)."
            )

    def get_agent_experience_spec(self) -> TensorDict:
        """Say what a step of experience holds: an empty TensorDict with the leaves of one step.

        Everything that judging the step again needs is there: the observation, what came with it and
        tells of episodes, the action, and what the policy thought.
        """
        spec = self.binding.spec
        if spec is None:
            raise ContractError("This policy is bound to no world yet; call policy.bind(world.spec).")
        weight = next(self.parameters())
        flag, number = torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=weight.dtype)
        leaves: dict[str, Any] = {
            "env_obs": blank(spec.sight),
            "rewards": torch.zeros(0),
            **dict.fromkeys(("dones", "truncateds", "first", "valid", "trial"), flag),
            "actions": torch.zeros(0, *self.actions.shape, dtype=self.actions.dtype or weight.dtype),
            "act_log_prob": number,
            "values": number,
        }
        return TensorDict(leaves, batch_size=[0]).to(weight.device)

    @property
    def lstm_h(self) -> LeafBySlice:
        """Hidden states: a mapping from a slice's first agent to `[L,B,H]`."""
        return LeafBySlice(self.store, "h")

    @property
    def lstm_c(self) -> LeafBySlice:
        """Cell states: a mapping from a slice's first agent to `[L,B,H]`."""
        return LeafBySlice(self.store, "c")

    @property
    def _leaves(self) -> dict[str, LeafBySlice]:
        """Each leaf of the live store as a mapping: for an LSTM h and c."""
        return {leaf: LeafBySlice(self.store, leaf) for leaf in self.store.leaves}

    def has_memory(self) -> bool:
        """Say whether this policy remembers."""
        return bool(self._leaves)

    def get_memory(self) -> Memory:
        """Copy the live memories: `(h, c)`, each a dictionary from a slice's first agent to `[L,B,H]`.

        A memory that is no LSTM has a dictionary for each tensor it remembers.
        """
        return tuple({start: leaf[start].clone() for start in leaf} for leaf in self._leaves.values())

    def set_memory(self, memory: Memory) -> None:
        """Bring back copied memories; what is given is copied, not kept."""
        keys = list(self._leaves)
        if len(memory) != len(keys):
            raise ContractError(f"This memory remembers {', '.join(keys) or 'nothing'}; {len(memory)} came.")
        if not self.store.declared:
            self.store.close()
        for start in memory[0] if memory else ():
            leaves = {key: part[start].transpose(0, 1) for key, part in zip(keys, memory, strict=True)}
            self.store.write(start, TensorDict(leaves, batch_size=[memory[0][start].shape[1]]))

    def reset_memory(self) -> None:
        """Make every agent forget."""
        self.store.reset()

    def reset_env_memory(self, env_id: int, agents: Tensor | list[int] | None = None) -> None:
        """Make one slice forget, or single agents of it."""
        self.store.reset_slice(env_id, agents)

    def replay(self, entry: TensorDict) -> AbstractContextManager[None]:
        """Let calls inside start from `entry` and leave the live memories alone."""
        return self.store.replaying(entry)

    def _manage_lstm_state(
        self, td: TensorDictBase, B: int, TT: int, device: torch.device | str
    ) -> tuple[Tensor, Tensor, int]:
        """Fetch the state of this call's agents and leave the call's clears for `self.lstm`."""
        clear_BT = clears(td, self.clear_on).reshape(B, TT).to(device)
        valid_BT = td["valid"].bool().reshape(B, TT).to(device) if "valid" in td else None
        env_id = 0 if self.store.is_replaying else slice_start(td)
        self.lstm.expect(clear_BT, valid_BT)
        h, c = to_pair(self.store.read(env_id, B))
        return h, c, env_id

    def _store_lstm_state(self, lstm_h: Tensor, lstm_c: Tensor, env_id: int) -> None:
        """Remember the state after a call, cut from its graph."""
        self.lstm.stored()
        self.store.write(env_id, from_pair(lstm_h, lstm_c))
