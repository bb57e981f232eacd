"""LSTMWrapper: the memory of hand-written policies."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from holdfast.errors import ContractError
from holdfast.memory import Cell, MemoryInit, StateStore, make_cell
from holdfast.memory.episode_resets import ClearOn, reset_mask
from holdfast.memory.manual_lstm import ManualLSTM, StateView, from_pair, to_pair
from holdfast.policies.binding import Binding, load_names_before_weights
from holdfast.policies.distributions import ActionDistribution, Categorical
from holdfast.policies.normalization import ObsNormalizer, RunningStats
from holdfast.types import Bool, Float, Shaped, Tensor
from holdfast.worlds.obs import Obs, empty_obs
from holdfast.worlds.step import WorldSpec


def slice_start(td: TensorDictBase | Mapping[str, Any]) -> int:
    """Return the first agent of the slice a call is about."""
    if "training_env_id_start" not in td:
        raise ContractError(
            "The TensorDict has no training_env_id_start, so the agents whose memory to use are unknown. "
            'Set td["training_env_id_start"] to the first agent of the slice (0 if there is one).'
        )
    start = td["training_env_id_start"]
    return start if isinstance(start, int) else int(torch.as_tensor(start).flatten()[0])


def require_rows_and_steps(td: TensorDictBase, B: int, T: int) -> None:
    """Require that `batch` and `bptt`, where a TensorDict has them, are its rows B and steps T."""
    for key, number in (("bptt", T), ("batch", B)):
        if key in td and td.numel() and int(td[key].flatten()[0]) != number:
            raise ContractError(
                f"td[{key!r}] is {td[key].flatten()[0]}; this is a batch of {B} rows of {T} steps. Set it to {number}, "
                "or leave it out."
            )


Memory = tuple[dict[int, Tensor], ...]


class LSTMWrapper(nn.Module):
    """The memory of a recurrent policy: the LSTM, the state store, and the calls around them.

    A policy written by hand calls `_manage_lstm_state`, `self.lstm` and `_store_lstm_state`, once each
    and in this order; a missing call is an error, at the latest in the next forward pass. Inherit
    `RecurrentPolicy` and write `encode` and `decode` instead where you can.
    """

    actions: ActionDistribution = Categorical()
    """What the logits mean. For MultiDiscrete and Box set `self.actions = distribution_for(spec)`."""
    accepts_trimmed_obs: bool = False
    """Whether tokens may come without the padding that all rows end in."""
    rows_alone: int = 0
    """Rows of a step of the rollout if one of several ranks had all agents; 0: there is one."""
    translates_names: ClassVar[bool] = False
    """Whether observations and logits are translated in worlds with another order of names."""

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
        self.lstm = ManualLSTM(memory)
        self.store = StateStore(self.lstm.cell)
        self.binding = Binding()
        self.obs_norm: ObsNormalizer | None = None
        """Normalizes observations; none: they are read as they are."""
        self.value_norm: RunningStats | None = None
        """Statistics of returns, which values are scaled by; none: values are not scaled."""
        self.register_load_state_dict_pre_hook(load_names_before_weights)

    def bind(self, spec: WorldSpec, *, learn: bool = True) -> None:
        """Bind this policy to a world; `learn` adds unknown names. Layers may widen: make the optimizer afterwards."""
        self.binding.bind(self, spec, learn=learn, translate=self.translates_names)
        if isinstance(self.actions, Categorical) and spec.action is None:
            self.actions = Categorical(len(spec.action_names))

    def require_bound(self, spec: WorldSpec) -> None:
        """Bind a policy that is bound to no world yet; reject one bound to another interface."""
        if self.binding.spec is None:
            self.bind(spec)
        elif self.binding.spec.interface != spec.interface:
            raise ContractError(
                "This policy is bound to a world with other observations or actions; call "
                "policy.bind(world.spec) to learn this one's, or policy.bind(world.spec, learn=False)."
            )

    def env_actions(self, actions: Shaped[Tensor, "N ..."]) -> Shaped[Tensor, "N ..."]:
        """Return actions as the world takes them: those of a Box are scaled from [-1,1] to its bounds, and clipped."""
        return self.binding.scale_actions(actions)

    @property
    def value_scale(self) -> float | Float[Tensor, ""]:
        """The scale of values in the value loss."""
        return 1.0 if self.value_norm is None else self.value_norm.std.to(next(self.parameters()).dtype)

    @property
    def needs_statistics(self) -> bool:
        """Whether statistics are used and still empty."""
        return any(isinstance(module, RunningStats) and not bool(module.count) for module in self.modules())

    def update_statistics(self, obs: Obs, returns: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"]) -> None:
        """Add a rollout to the statistics of observations and returns: between two iterations, or replays differ."""
        if self.obs_norm is not None:
            self.obs_norm.update(obs, valid)
        if self.value_norm is not None:
            self.value_norm.update(returns, valid)

    def get_agent_experience_spec(self) -> TensorDict:
        """Return an empty TensorDict with the leaves of one step of experience: all that replaying it needs."""
        spec = self.binding.spec
        if spec is None:
            raise ContractError("This policy is bound to no world yet; call policy.bind(world.spec).")
        weight = next(self.parameters())
        flag, number = torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=weight.dtype)
        leaves: dict[str, Any] = {
            "env_obs": empty_obs(spec.observation_space),
            "rewards": torch.zeros(0),
            **dict.fromkeys(("dones", "truncateds", "first", "valid", "trial"), flag),
            "actions": torch.zeros(0, *self.actions.shape, dtype=self.actions.dtype or weight.dtype),
            "act_log_prob": number,
            "values": number,
        }
        return TensorDict(leaves, batch_size=[0]).to(weight.device)

    @property
    def lstm_h(self) -> StateView:
        """Hidden states: a mapping from a slice's first agent to `[L,B,H]`."""
        return StateView(self.store, "h")

    @property
    def lstm_c(self) -> StateView:
        """Cell states: a mapping from a slice's first agent to `[L,B,H]`."""
        return StateView(self.store, "c")

    @contextmanager
    def rounding_as_one_rank(self, rows_alone: int) -> Iterator[None]:
        """Within this context, a step gives each agent the same bits as one rank does that has all agents.

        A `forward` written by hand ignores it: its products of matrices may round differently on other ranks.
        """
        self.rows_alone = rows_alone
        try:
            yield
        finally:
            self.rows_alone = 0

    def has_memory(self) -> bool:
        """Return whether this policy has a recurrent state."""
        return bool(self.store.state_keys)

    def get_memory(self) -> Memory:
        """Copy the stored states: one dictionary for h, c, ... each, from a slice's first agent to `[L,B,H]`."""
        views = (StateView(self.store, key) for key in self.store.state_keys)
        return tuple({start: view[start].clone() for start in view} for view in views)

    def set_memory(self, memory: Memory) -> None:
        """Restore the states that `get_memory` returned; they are copied."""
        keys = self.store.state_keys
        if len(memory) != len(keys):
            raise ContractError(f"This memory holds {', '.join(keys) or 'nothing'}; {len(memory)} came.")
        if not self.store.allocated:
            self.store.close()
        for start in memory[0] if memory else ():
            leaves = {key: states[start].transpose(0, 1) for key, states in zip(keys, memory, strict=True)}
            self.store.write(start, TensorDict(leaves, batch_size=[memory[0][start].shape[1]]))

    def reset_memory(self) -> None:
        """Clear the memory of all agents."""
        self.store.reset()

    def reset_env_memory(self, env_id: int, agents: Tensor | list[int] | None = None) -> None:
        """Clear the memory of one slice, or of single agents in it; a slice that has none yet stays without."""
        if env_id in self.store.slices:
            self.store.reset_slice(env_id, agents)

    def replay(self, entry: TensorDict) -> AbstractContextManager[None]:
        """Start calls inside from `entry`, without reading or writing the state store."""
        return self.store.replaying(entry)

    def _manage_lstm_state(
        self, td: TensorDictBase, B: int, TT: int, device: torch.device | str
    ) -> tuple[Tensor, Tensor, int]:
        """Read the state of this call's agents, and pass the call's resets to `self.lstm`."""
        require_rows_and_steps(td, B, TT)
        clear_BT = reset_mask(td, self.clear_on).reshape(B, TT).to(device)
        valid_BT = td["valid"].bool().reshape(B, TT).to(device) if "valid" in td else None
        env_id = 0 if self.store.is_replaying else slice_start(td)
        self.lstm.set_resets(clear_BT, valid_BT)
        h, c = to_pair(self.store.read(env_id, B))
        return h, c, env_id

    def _store_lstm_state(self, lstm_h: Tensor, lstm_c: Tensor, env_id: int) -> None:
        """Write the state after a call to the store, detached."""
        self.lstm.mark_stored()
        self.store.write(env_id, from_pair(lstm_h, lstm_c))


RAW_OBS = "raw_obs"
"""Where a TensorDict keeps its observations while they are normalized."""


def normalize_by_hooks(policy: LSTMWrapper) -> None:
    """Let a `forward` written by hand read normalized observations and write normalized values."""
    policy.register_forward_pre_hook(_normalize_obs, with_kwargs=True)
    policy.register_forward_hook(_denormalize_values, with_kwargs=True)


def _batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> TensorDictBase:
    return args[0] if args else kwargs["td"]


def _normalize_obs(policy: LSTMWrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    normalizer = policy.obs_norm
    if normalizer is not None:
        td = _batch_of(args, kwargs)
        td[RAW_OBS], td["env_obs"] = td["env_obs"], normalizer(td["env_obs"])


def _denormalize_values(
    policy: LSTMWrapper, args: tuple[Any, ...], kwargs: dict[str, Any], output: TensorDictBase
) -> None:
    statistics = policy.value_norm
    if policy.obs_norm is not None:
        td = _batch_of(args, kwargs)
        td["env_obs"] = td.pop(RAW_OBS)
    for key in ("values", "value"):
        if statistics is not None and key in output:
            output[key] = statistics.denormalize(output[key])
