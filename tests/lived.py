"""Living in a world for some steps, and adding up what finished episodes returned."""

from itertools import pairwise

import torch

FLAGS = ("terminated", "truncated", "first", "valid", "trial")
ALL = ("obs", "reward", *FLAGS)


def anything(world, seed=0):
    """Actions that are drawn and look at nothing."""
    generator = torch.Generator().manual_seed(seed)
    count = len(world.spec.action_names)
    return lambda obs, first: torch.randint(count, (len(first),), generator=generator)


def live(world, steps, act):
    """Reset and take `steps` steps with `act(obs, first)`; return all that was told."""
    told = [world.reset()]
    for _ in range(steps):
        told.append(world.step(act(told[-1].obs, told[-1].first)))
    return told


def stacked(told, name):
    return torch.stack([getattr(step, name) for step in told])


def returns_of(told, each=None):
    """The returns of whole episodes; rewards where nobody acted before count for nothing.

    With `each`, of so many episodes of each agent: short ones do not crowd out long ones.
    """
    total, found = torch.zeros_like(told[0].reward, dtype=torch.float64), []
    count = torch.zeros_like(told[0].first, dtype=torch.long)
    for before, step in pairwise(told):
        total += torch.where(before.valid, step.reward, 0.0)
        ended = step.terminated | step.truncated
        found.append(total[ended if each is None else ended & (count < each)])
        count += ended
        total = torch.where(ended, 0.0, total)
    assert each is None or int(count.min()) >= each, "live longer"
    return torch.cat(found)


def is_mean_of(returns, expected, deviations=5.0):
    """Whether a mean is as near to what is expected as its own deviation allows, and that is near."""
    error = float(returns.std()) / len(returns) ** 0.5
    assert error < 0.02, f"{len(returns)} episodes are too few: deviation {error:.3f}"
    return abs(float(returns.mean()) - expected) <= deviations * error + 1e-6
