"""Step a world, and sum the returns of finished episodes."""

from itertools import pairwise

import torch

FLAGS = ("terminated", "truncated", "first", "valid", "trial")
ALL = ("obs", "reward", *FLAGS)


def anything(world, seed=0):
    """Random actions."""
    generator = torch.Generator().manual_seed(seed)
    count = len(world.spec.action_names)
    return lambda obs, first: torch.randint(count, (len(first),), generator=generator)


def live(world, steps, act):
    """Reset and take `steps` steps with `act(obs, first)`; return all steps."""
    transitions = [world.reset()]
    for _ in range(steps):
        transitions.append(world.step(act(transitions[-1].obs, transitions[-1].first)))
    return transitions


def stacked(transitions, name):
    return torch.stack([getattr(step, name) for step in transitions])


def returns_of(transitions, each=None):
    """The returns of finished episodes, without rewards of invalid rows.

    With `each`, of that many episodes per agent, so that short ones are not over-represented.
    """
    total, returns = torch.zeros_like(transitions[0].reward, dtype=torch.float64), []
    count = torch.zeros_like(transitions[0].first, dtype=torch.long)
    for before, step in pairwise(transitions):
        total += torch.where(before.valid, step.reward, 0.0)
        ended = step.terminated | step.truncated
        returns.append(total[ended if each is None else ended & (count < each)])
        count += ended
        total = torch.where(ended, 0.0, total)
    assert each is None or int(count.min()) >= each, "take more steps"
    return torch.cat(returns)


def is_mean_of(returns, expected, deviations=5.0):
    """Whether a mean is within some standard errors of its expectation."""
    error = float(returns.std()) / len(returns) ** 0.5
    assert error < 0.02, f"{len(returns)} episodes are too few: deviation {error:.3f}"
    return abs(float(returns.mean()) - expected) <= deviations * error + 1e-6
