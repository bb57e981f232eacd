"""When a loss or a gradient is not finite: what it was, whose, and when."""

import torch

from holdfast.experience import Segments
from holdfast.experience.finite import (
    NotFiniteError,
    agents_told,
    not_finite_in,
    require_finite_weights,
)
from holdfast.learn.objective import loss_of
from holdfast.learn.replay import replay
from holdfast.learn.targets import Targets
from holdfast.policies import LSTMWrapper
from holdfast.shapes import Int, Tensor
from holdfast.trainer_knobs import PPO
from holdfast.worlds.seen import leaves_of

KEPT = "the weights are those before this minibatch"


def tell_fault(
    policy: LSTMWrapper,
    segments: Segments,
    index: Int[Tensor, " rows"],
    targets: Targets,
    ppo: PPO,
    *,
    when: str,
) -> None:
    """Raise with the name of what is not finite in a minibatch, the steps and the agents.

    Looked at in the order of cause and effect: weights, what was stored, what was learnt from, what the
    policy says, the loss, the gradient.
    """
    policy.zero_grad(set_to_none=True)
    require_finite_weights(policy, when)
    chosen = segments.rows(index)
    seen = {f"env_obs.{n}": leaf for n, leaf in enumerate(leaves_of(chosen.steps["env_obs"]))}
    keys = ("rewards", "values", "act_log_prob")
    stored = {"env_obs" if len(seen) == 1 else name: leaf for name, leaf in seen.items()}
    stored |= {key: chosen.steps[key] for key in keys}
    learnt = {"advantages": targets.advantages, "returns": targets.returns}
    _tell_first(stored | learnt, chosen, segments, index, when)
    with torch.no_grad():
        again = replay(policy, chosen)
    _tell_first(
        {key: again[key] for key in ("act_log_prob", "values", "entropy")}, chosen, segments, index, when
    )
    loss, report, _ = loss_of(policy, chosen, targets, ppo)
    loss.backward()
    grads = {name: w.grad for name, w in policy.named_parameters() if w.grad is not None}
    policy.zero_grad(set_to_none=True)
    named = not_finite_in({name: term for name, term in report.items() if name.startswith("losses/")})
    named += [f"the gradient of {name}" for name in not_finite_in(grads)]
    whose = _rows_with_bad_gradients(policy, segments, index, targets, ppo)
    raise NotFiniteError(
        f"{when}: not finite: {', '.join(named[:4]) or 'the loss'}; {whose or 'no row of it alone'}; {KEPT}."
    )


def _tell_first(
    named: dict[str, Tensor], chosen: Segments, segments: Segments, index: Tensor, when: str
) -> None:
    """Raise for the first of some tensors `[B,T,...]` that is not finite where somebody acts."""
    valid = chosen.steps["valid"]
    for name, tensor in named.items():
        if not tensor.is_floating_point():
            continue
        bad = ~tensor.reshape(*valid.shape, -1).isfinite().all(-1) & valid
        if bool(bad.any()):
            row, step = (int(part) for part in bad.nonzero()[0])
            agents = sorted({int(each) // segments.each for each in index[bad.any(1)]})
            raise NotFiniteError(
                f"{when}: {name} is not finite: {agents_told(agents)}, first "
                f"{segments.place(int(index[row]), step)}; {KEPT}."
            )


def _rows_with_bad_gradients(
    policy: LSTMWrapper, segments: Segments, index: Tensor, targets: Targets, ppo: PPO
) -> str:
    """Find whose rows alone give a gradient that is not finite."""
    agents = set()
    for place, row in enumerate(index.tolist()):
        alone = torch.tensor([place], device=index.device)
        loss, _, _ = loss_of(policy, segments.rows(index[alone]), targets.rows(alone), ppo)
        loss.backward()
        if not all(bool(w.grad.isfinite().all()) for w in policy.parameters() if w.grad is not None):
            agents.add(row // segments.each)
        policy.zero_grad(set_to_none=True)
    return agents_told(sorted(agents)) if agents else ""
