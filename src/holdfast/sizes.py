"""The arithmetic of batches: whole segments in minibatches, whole minibatches in a batch, no remainder."""

import math

PROPOSALS = 3


def misfit(*, agents: int, horizon: int, batch: int, minibatch: int, accumulate: int) -> str:
    """Say what does not fit and which three sizes do, or nothing if all steps are trained on."""
    rows = agents * horizon
    if batch % rows:
        product = f"world.agents * trainer.bptt_horizon = {agents} * {horizon} = {rows}"
        return _batch_misfit(product, agents, horizon, batch, minibatch)
    if minibatch % horizon:
        return (
            f"trainer.minibatch_size={minibatch} is not a multiple of trainer.bptt_horizon={horizon}; "
            f"try trainer.minibatch_size={_either(_minibatches(horizon, batch, minibatch))}."
        )
    if batch % minibatch:
        return _batch_misfit(f"trainer.minibatch_size={minibatch}", agents, horizon, batch, minibatch)
    segments = minibatch // horizon
    if segments % accumulate:
        fit = _nearest(_divisors(segments), accumulate)
        return (
            f"trainer.accumulate={accumulate} does not divide the {segments} segments of a minibatch "
            f"({minibatch} / {horizon}); try trainer.accumulate={_either(fit)}."
        )
    return ""


def _batch_misfit(what: str, agents: int, horizon: int, batch: int, minibatch: int) -> str:
    fitting = minibatch
    if minibatch % horizon:
        fitting = horizon * min(_divisors(agents), key=lambda size: abs(size - minibatch / horizon))
    whole = math.lcm(agents * horizon, fitting)
    first = max(1, batch // whole)
    sizes = [whole * (first + more) for more in range(PROPOSALS)]
    also = "" if fitting == minibatch else f" with trainer.minibatch_size={fitting}"
    return (
        f"trainer.batch_size={batch} is not a multiple of {what}, so some steps would never be trained on; "
        f"try trainer.batch_size={_either(sizes)}{also}."
    )


def _minibatches(horizon: int, batch: int, minibatch: int) -> list[int]:
    """Find the nearest sizes that hold whole segments and divide the batch."""
    return [size * horizon for size in _nearest(_divisors(batch // horizon), minibatch / horizon)]


def _nearest(sizes: list[int], wanted: float) -> list[int]:
    return sorted(sorted(sizes, key=lambda size: abs(size - wanted))[:PROPOSALS])


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _either(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes))
