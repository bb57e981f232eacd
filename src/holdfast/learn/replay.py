"""Replay segments; refresh stale states by recomputation or burn-in."""

from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase

from holdfast import ranks
from holdfast.policies import LSTMWrapper
from holdfast.policies.recurrent_policy import PolicyBatch
from holdfast.rollout.segments import POLICY_INPUTS, BurnIn, Segments, policy_batch, policy_inputs
from holdfast.types import Float, Int, Tensor
from holdfast.worlds import Step
from holdfast.worlds.obs import tensors_of


def replay(policy: LSTMWrapper, segments: Segments) -> PolicyBatch:
    """Evaluate the stored actions of segments with current weights, from the entry states."""
    batch = policy_batch(policy, policy_inputs(segments.steps))
    with policy.replay(segments.entry_state):
        return policy(batch, action=segments.steps["actions"])


STALENESS_AGENTS = 16
"""Staleness is measured on one in this many agents, and on at most this many."""


@torch.no_grad()
def state_after(policy: LSTMWrapper, steps: TensorDictBase, state: TensorDict) -> TensorDict:
    """Return the state after steps `[B,T]`, with current weights; the live states do not change."""
    with policy.store.scratch(len(steps)):
        policy.store.write(0, state)
        policy(policy_batch(policy, policy_inputs(steps), start=0), action=steps["actions"])
        return policy.store.read(0, len(steps)).clone()


@torch.no_grad()
def recompute(policy: LSTMWrapper, segments: Segments, *, batch_size: int) -> tuple[TensorDict, TensorDict]:
    """Recompute states with current weights: `[A,S]` before each segment, and `[A]` after the last one.

    Starts from the first entry state of the rollout, `batch_size` agents a call.
    """
    shape = segments.agent_shape
    steps = segments.steps.select(*POLICY_INPUTS, "actions").unflatten(0, shape)
    entry = segments.entry_state.unflatten(0, shape)
    entries, after = [], []
    for batch, state in zip(steps.split(batch_size), entry[:, 0].split(batch_size), strict=True):
        states = [state]
        for k in range(segments.segments_per_agent):
            states.append(state_after(policy, batch[:, k], states[-1]))
        entries.append(torch.stack(states[:-1], dim=1))
        after.append(states[-1])
    return cast("TensorDict", torch.cat(entries)), cast("TensorDict", torch.cat(after))


@torch.no_grad()
def burn_in_rows(policy: LSTMWrapper, segments: Segments) -> Segments:
    """Replace entry states by those after the burn-in steps."""
    assert segments.burn_in is not None, "burn-in needs the steps before each row"
    entry = state_after(policy, segments.burn_in.steps, segments.burn_in.entry_state)
    return Segments(segments.steps, entry, segments.tail, segments.version)


@torch.no_grad()
def burn_in_live(policy: LSTMWrapper, burn_in: BurnIn, *, batch_size: int) -> None:
    """Replace the live states by those after the burn-in steps before the next rollout."""
    batches = zip(burn_in.steps.split(batch_size), burn_in.entry_state.split(batch_size), strict=True)
    states = [state_after(policy, steps, entry) for steps, entry in batches]
    policy.store.write(0, cast("TensorDict", torch.cat(list[Any](states))))


@torch.no_grad()
def measure_staleness(policy: LSTMWrapper, segments: Segments, next_step: Step) -> dict[str, float]:
    """Measure, on a sample of agents, how far stored states are from fresh ones, and the effect.

    `memory/drift` is |stored - fresh| / |fresh|, mean over the entry states of all segments but the first
    and over the live states. `memory/stale_kl` is the mean KL, in nats, from the action distribution of
    fresh states to that of stored ones, with the same weights: in these segments, and at the next step.
    """
    if not policy.has_memory():
        return {}
    sample = staleness_sample(segments.agent_shape[0]).to(segments.version.device)
    return staleness_metrics(staleness_sums(policy, segments, next_step, sample))


def staleness_metrics(sums: Float[Tensor, " 4"]) -> dict[str, float]:
    """Return the metrics of `measure_staleness`, over all ranks, from their sums."""
    drift, num_states, kl, num_steps = ranks.reduce(sums).tolist()
    return {"memory/drift": drift / num_states, "memory/stale_kl": max(0.0, kl / max(1, num_steps))}


def staleness_sample(agents: int) -> Int[Tensor, " N"]:
    """Choose the agents to measure staleness on, over all ranks; return those of this one."""
    total, first_agent = agents * ranks.count(), agents * ranks.rank()
    num_sampled = min(STALENESS_AGENTS, max(1, total // STALENESS_AGENTS))
    sample = torch.arange(num_sampled) * (total // num_sampled) - first_agent
    return sample[(sample >= 0) & (sample < agents)]


@torch.no_grad()
def staleness_sums(
    policy: LSTMWrapper, segments: Segments, next_step: Step, sample: Int[Tensor, " N"]
) -> Float[Tensor, " 4"]:
    """Sum of the drift and number of states, sum of the KL and number of steps, of a sample of agents."""
    if not len(sample):
        return torch.zeros(4, dtype=torch.double, device=sample.device)
    (agents, count), num_sampled = segments.agent_shape, len(sample)
    rows = segments.rows((sample[:, None] * count + torch.arange(count, device=sample.device)).flatten())
    rows = Segments(rows.steps, rows.entry_state, rows.tail, rows.version, num_sampled)
    fresh_entry, fresh_live = recompute(policy, rows, batch_size=num_sampled)
    entry = rows.entry_state.unflatten(0, (num_sampled, count))[:, 1:]
    live = policy.store.read(0, agents)[sample]
    stored = torch.cat([entry, live[:, None]], dim=1)
    current = torch.cat([fresh_entry[:, 1:], fresh_live[:, None]], dim=1)
    distance = _relative_distance(stored, current)
    kl = [_next_step_kl(policy, live, fresh_live, next_step, sample)]
    if count > 1:
        kl.append(_segment_kl(policy, rows, fresh_entry))
    drift = torch.stack([distance.sum(), torch.full_like(distance.sum(), distance.numel())])
    return torch.cat([drift, torch.stack(kl).sum(0)]).double()


def _relative_distance(stored: Any, fresh: Any) -> Float[Tensor, "A S"]:
    size = torch.sqrt(_squares(fresh))
    return torch.sqrt(_squares(stored.apply(torch.sub, fresh))) / size.clamp(min=1e-6)


def _squares(tree: TensorDictBase) -> Tensor:
    return torch.stack([leaf.square().flatten(2).sum(-1) for leaf in tensors_of(tree)]).sum(0)


def _segment_kl(policy: LSTMWrapper, segments: Segments, fresh_entry: TensorDict) -> Float[Tensor, " 2"]:
    """Sum and count of the KL over the rows whose entry state can be stale."""
    index = torch.arange(len(segments), device=segments.version.device)
    rows = segments.rows(index.unflatten(0, segments.agent_shape)[:, 1:].flatten())
    fresh_rows = Segments(rows.steps, fresh_entry[:, 1:].flatten(0, 1), rows.tail, rows.version)
    from_stored = replay(policy, rows)
    return _kl_sums(policy, replay(policy, fresh_rows), from_stored, rows.steps["valid"])


def _next_step_kl(
    policy: LSTMWrapper, live: TensorDict, after: TensorDict, step: Step, sample: Tensor
) -> Float[Tensor, " 2"]:
    fields = {"env_obs": step.obs, "first": step.first, "trial": step.trial, "valid": step.valid}
    rows = {key: field[sample] for key, field in fields.items()}
    draws = policy.actions.no_draws(len(sample), sample.device)

    def outputs(state: TensorDict) -> PolicyBatch:
        with policy.replay(state):
            return policy(policy_batch(policy, rows, draws=draws))

    return _kl_sums(policy, outputs(after), outputs(live), step.valid[sample])


def _kl_sums(policy: LSTMWrapper, fresh: PolicyBatch, stored: PolicyBatch, valid: Tensor) -> Tensor:
    key = policy.actions.key
    kl = policy.actions.kl(fresh[key], stored[key])
    return torch.stack([torch.where(valid, kl, 0.0).sum(), valid.sum().to(kl.dtype)])
