"""Stale states: after weights changed, what is stored is not what they would remember."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase

from holdfast.experience import Lead, Segments
from holdfast.experience.segments import READ
from holdfast.learn.replay import replay
from holdfast.policies import LSTMWrapper
from holdfast.shapes import Float, Tensor
from holdfast.worlds import Step
from holdfast.worlds.seen import leaves_of

LOOKED_AT = 16
"""One in so many agents is looked at, and no more than so many: enough for a mean, and cheap."""


@dataclass(frozen=True)
class Fresh:
    """What current weights remember of a rollout."""

    entry: TensorDict
    """`[A,S]`: at the entry of each segment."""
    after: TensorDict
    """`[A]`: after the last one."""


@torch.no_grad()
def state_after(policy: LSTMWrapper, steps: TensorDictBase, state: TensorDict) -> TensorDict:
    """Run steps `[B,T]` from a state with current weights; the live memories are left alone."""
    with policy.store.aside(len(steps)):
        policy.store.write(0, state)
        td = steps.select(*READ)
        td["training_env_id_start"] = torch.zeros(td.batch_size, dtype=torch.long)
        policy(td, action=steps["actions"])
        return policy.store.read(0, len(steps)).clone()


@torch.no_grad()
def recompute(policy: LSTMWrapper, segments: Segments, *, at_once: int) -> Fresh:
    """Run each agent's segments in order again, from the state the rollout began with."""
    shape = segments.by_agent
    steps, entry = (
        segments.steps.select(*READ, "actions").unflatten(0, shape),
        segments.entry.unflatten(0, shape),
    )
    entries, after = [], []
    for some, state in zip(steps.split(at_once), entry[:, 0].split(at_once), strict=True):
        states = [state]
        for k in range(segments.each):
            states.append(state_after(policy, some[:, k], states[-1]))
        entries.append(torch.stack(states[:-1], dim=1))
        after.append(states[-1])
    return Fresh(torch.cat(entries), torch.cat(after))


@torch.no_grad()
def warmed(policy: LSTMWrapper, segments: Segments) -> Segments:
    """Let rows begin with a state warmed up by the steps before them."""
    assert segments.lead is not None, "warming up needs the steps before each row"
    entry = state_after(policy, segments.lead.steps, segments.lead.entry)
    return Segments(segments.steps, entry, segments.tail, segments.version)


@torch.no_grad()
def warm_live(policy: LSTMWrapper, lead: Lead, *, at_once: int) -> None:
    """Warm up the live memories by the steps before the next rollout."""
    parts = zip(lead.steps.split(at_once), lead.entry.split(at_once), strict=True)
    states = [state_after(policy, steps, entry) for steps, entry in parts]
    policy.store.write(0, cast("TensorDict", torch.cat(list[Any](states))))


@torch.no_grad()
def staleness(policy: LSTMWrapper, segments: Segments, pending: Step) -> dict[str, float]:
    """Measure, on some agents, how far stored states are from fresh ones, and what that does.

    `memory/drift` is |stored - fresh| / |fresh|, mean over the entries of all segments but the first and
    over the live states. `memory/stale_kl` is the mean KL, in nats, between what the policy says from
    fresh states and from stored ones, with the same weights: in these segments, and of the pending step.
    """
    if not policy.has_memory():
        return {}
    agents, _ = segments.by_agent
    count = min(LOOKED_AT, max(1, agents // LOOKED_AT))
    chosen = torch.arange(count, device=segments.version.device) * (agents // count)
    rows = (chosen[:, None] * segments.each + torch.arange(segments.each, device=chosen.device)).flatten()
    picked = segments.rows(rows)
    some = Segments(picked.steps, picked.entry, picked.tail, picked.version, len(chosen))
    fresh = recompute(policy, some, at_once=len(chosen))
    entry = some.entry.unflatten(0, (len(chosen), segments.each))[:, 1:]
    live = policy.store.read(0, agents)[chosen]
    stored = torch.cat([entry, live[:, None]], dim=1)
    now = torch.cat([fresh.entry[:, 1:], fresh.after[:, None]], dim=1)
    found = {"memory/drift": float(_relative(stored, now).mean())}
    kl = [_kl_ahead(policy, live, fresh.after, pending, chosen)]
    if segments.each > 1:
        kl.append(_kl_within(policy, some, fresh))
    sums = torch.stack(kl).sum(0)
    return found | {"memory/stale_kl": max(0.0, float(sums[0] / sums[1].clamp(min=1)))}


def _relative(stored: Any, fresh: Any) -> Float[Tensor, "A S"]:
    size = torch.sqrt(_squares(fresh))
    return torch.sqrt(_squares(stored.apply(torch.sub, fresh))) / size.clamp(min=1e-6)


def _squares(tree: TensorDictBase) -> Tensor:
    return torch.stack([leaf.square().flatten(2).sum(-1) for leaf in leaves_of(tree)]).sum(0)


def _kl_within(policy: LSTMWrapper, some: Segments, fresh: Fresh) -> Float[Tensor, " 2"]:
    """Add up KL and count, over the rows whose entry can be stale."""
    later = torch.arange(len(some), device=some.version.device).unflatten(0, some.by_agent)[:, 1:]
    rows = some.rows(later.flatten())
    from_stored = replay(policy, rows)
    anew = Segments(rows.steps, fresh.entry[:, 1:].flatten(0, 1), rows.tail, rows.version)
    from_fresh = replay(policy, anew)
    return _summed_kl(policy, from_fresh, from_stored, rows.steps["valid"])


def _kl_ahead(
    policy: LSTMWrapper, live: TensorDict, after: TensorDict, pending: Step, chosen: Tensor
) -> Float[Tensor, " 2"]:
    def said(state: TensorDict) -> TensorDictBase:
        td = TensorDict(
            {
                "env_obs": pending.obs[chosen],
                "first": pending.first[chosen],
                "trial": pending.trial[chosen],
                "valid": pending.valid[chosen],
                "draws": policy.actions.idle(len(chosen), chosen.device),
            },
            batch_size=[len(chosen)],
        )
        with policy.replay(state):
            return policy(td)

    return _summed_kl(policy, said(after), said(live), pending.valid[chosen])


def _summed_kl(policy: LSTMWrapper, one: TensorDictBase, other: TensorDictBase, valid: Tensor) -> Tensor:
    told = policy.actions.key
    kl = policy.actions.kl(one[told], other[told])
    return torch.stack([torch.where(valid, kl, 0.0).sum(), valid.sum().to(kl.dtype)])
