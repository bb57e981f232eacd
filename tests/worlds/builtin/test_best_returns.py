"""Each oracle gets its world's best return; the best without memory is computed by enumeration."""

from collections import Counter
from functools import cache
from itertools import permutations, product

import pytest
import torch

from helpers.oracles import ORACLES
from helpers.play_world import anything, is_mean_of, live, returns_of
from holdfast.worlds import make_world
from holdfast.worlds.builtin.mazes import best_with_memory

CASES = [
    ("recall", {}),
    ("repeat_first", {"length": 9}),
    ("repeat_first", {"symbols": 3, "length": (4, 12), "truncate": True}),
    ("n_back", {"length": 12}),
    ("n_back", {"back": 1, "symbols": 2, "length": 7, "truncate": True}),
    ("n_back", {"back": 5, "symbols": 7, "length": 6}),
    ("tmaze", {}),
    ("tmaze", {"corridor": 1, "limit": 2}),
    ("key_value", {}),
    ("key_value", {"pairs": 1, "values": 2, "truncate": True}),
    ("key_value", {"pairs": 7, "values": 3}),
    ("parity", {"length": 12}),
    ("parity", {"length": 2, "truncate": True}),
    ("ragged", {}),
    ("ragged", {"absent": 0, "cues": 3, "truncate": True}),
    ("constant", {"length": 7}),
    ("constant", {"length": 7, "truncate": True}),
]


def of_all_worlds(case):
    return f"{case[0]}-{'-'.join(map(str, case[1].values()))}"


def play(name, options, act, agents=400, steps=130, seed=0):
    world = make_world(name, agents=agents, seed=seed, **options)
    return world.spec, returns_of(live(world, steps, act(world)), each=5)


@pytest.mark.parametrize(("name", "options"), CASES, ids=list(map(of_all_worlds, CASES)))
def test_oracle_reaches_best_return(name, options):
    spec, returns = play(name, options, ORACLES[name], agents=40)
    assert len(returns) >= 40
    assert torch.allclose(returns, torch.full_like(returns, spec.best_return), atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"arms": 2, "reach": 1, "trials": 2}, {"arms": 3, "trials": 2}])
def test_forage_oracle_reaches_best_mean_return(options):
    spec, returns = play("forage", options, ORACLES["forage"])
    assert is_mean_of(returns, spec.best_return)
    # An arm found in its j-th trial pays in all from there on: nothing else is ever returned.
    arms, trials = options.get("arms", 4), options.get("trials", 8)
    paid = {round(trials * float(value), 4) for value in returns.unique()}
    assert paid == {float(max(trials - j, 0)) for j in range(arms)}


@pytest.mark.parametrize(("arms", "trials"), list(product((2, 3, 4), (1, 2, 3, 5, 8))))
def test_forage_best_return_matches_belief_planning(arms, trials):
    @cache
    def worth(left, ruled_out, goal_known):
        """Try every kind of arm: the known one, one ruled out, one that may be it."""
        if not left:
            return 0.0
        if goal_known:
            return 1 + worth(left - 1, ruled_out, True)
        waste = worth(left - 1, ruled_out, False) if ruled_out else 0.0
        chance = 1 / (arms - ruled_out)
        miss = worth(left - 1, ruled_out + 1, False) if chance < 1 else 0.0
        return max(waste, chance * (1 + worth(left - 1, ruled_out, True)) + (1 - chance) * miss)

    assert best_with_memory(arms, trials) == pytest.approx(worth(trials, 0, False) / trials, abs=1e-12)


def best_by_sight(episodes):
    """The best mean return of any function of what is seen, where what is done changes nothing that is seen.

    `episodes` are all there can be, equally likely, as lists of (obs, right answer, its pay). The mean is
    then a sum over what can be seen, and chance among answers is no better than the best one.
    """
    episodes, table = list(episodes), Counter()
    for episode in episodes:
        for obs, answer, pay in episode:
            table[obs, answer] += pay
    each = {obs: max(pay for (there, _), pay in table.items() if there == obs) for obs, _ in table}
    return sum(each.values()) / len(episodes)


def sequences(symbols, length, judge):
    """All sequences of symbols; judge(sequence, t) is the right answer there, or none."""
    for shown in product(range(symbols), repeat=length):
        answers = [judge(shown, t) for t in range(length)]
        count = sum(answer is not None for answer in answers)
        yield [(shown[t], answers[t], 1 / count) for t in range(length) if answers[t] is not None]


@pytest.mark.parametrize("symbols", [2, 3])
@pytest.mark.parametrize("length", [2, 3, 6])
def test_best_return_without_memory_by_enumeration(symbols, length):
    def without(name, **options):
        return pytest.approx(make_world(name, **options).spec.best_return_without_memory, abs=1e-9)

    first = best_by_sight(sequences(symbols, length, lambda shown, t: shown[0]))
    assert first == without("repeat_first", symbols=symbols, length=length)
    for back in range(1, length):
        before = best_by_sight(sequences(symbols, length, lambda s, t, k=back: s[t - k] if t >= k else None))
        assert before == without("n_back", symbols=symbols, length=length, back=back)
    parity = best_by_sight(sequences(2, length, lambda shown, t: sum(shown[: t + 1]) % 2 if t else None))
    assert parity == without("parity", length=length)


@pytest.mark.parametrize("asks", [1, 2, 3])
def test_key_value_best_return_without_memory(asks):
    episodes = (
        [(f"ask {key}", values[key], 1 / asks) for key in order[:asks]]
        for values in product(range(3), repeat=3)
        for order in permutations(range(3))
    )
    spec = make_world("key_value", pairs=3, values=3).spec
    assert best_by_sight(episodes) == pytest.approx(spec.best_return_without_memory, abs=1e-9)


def names_what_it_sees(world):
    return lambda obs, first: obs[:, 0, 1].long()


def always(action):
    return lambda world: lambda obs, first: torch.full((len(obs),), action)


def goes_north(world):
    return lambda obs, first: torch.where(((obs[..., 0] == 0x45) & (obs[..., 1] == 0)).any(1), 3, 0)


REACTIVE = [
    ("repeat_first", {"symbols": 3, "length": (4, 9)}, names_what_it_sees),
    ("n_back", {"symbols": 3, "length": 9}, always(1)),
    ("n_back", {"symbols": 3, "length": 9}, names_what_it_sees),
    ("parity", {"length": 9}, names_what_it_sees),
    ("key_value", {"values": 3}, always(2)),
    ("tmaze", {}, goes_north),
    ("forage", {"trials": 4}, always(0)),
    ("ragged", {}, always(3)),
    ("constant", {"length": 5}, always(1)),
]


@pytest.mark.parametrize(("name", "options", "act"), REACTIVE)
def test_memoryless_oracle_reaches_best_return_without_memory(name, options, act):
    spec, returns = play(name, options, act, agents=1500)
    assert is_mean_of(returns, spec.best_return_without_memory)
    assert spec.best_return_without_memory < spec.best_return or name == "constant"


@pytest.mark.parametrize(("name", "options"), [case[:2] for case in REACTIVE])
def test_random_actions_stay_below_best_returns(name, options):
    spec, returns = play(name, options, anything, agents=1500)
    deviation = float(returns.std()) / len(returns) ** 0.5
    assert float(returns.mean()) <= spec.best_return_without_memory + 5 * deviation
    if name in ("repeat_first", "tmaze", "forage"):
        assert float(returns.mean()) < spec.best_return_without_memory - 5 * deviation


def exact_returns(world, hidden, values, act):
    """Play one episode for every value of what is hidden; return the mean of each agent, exactly."""
    total = torch.zeros(world.agents)
    for value in values:
        step = world.reset()
        setattr(world, hidden, torch.full((world.agents,), value))
        obs, alive = world._observe(step.first), torch.ones(world.agents, dtype=torch.bool)
        while alive.any():
            step = world.step(act(obs))
            total += torch.where(alive, step.reward, 0.0)
            obs, alive = step.obs, alive & ~step.first
    return total / len(values)


def every_function(number_of, sights):
    """Every deterministic function of what is seen, one an agent."""
    tables = torch.tensor(list(product(range(4), repeat=sights)))
    return len(tables), lambda obs: tables.gather(1, number_of(obs)[:, None])[:, 0]


def sight_of_tmaze(obs):
    """The start with either cue, the corridor, or the junction."""
    here = [(obs[..., 1] == 1 + cue).any(1) for cue in range(2)]
    here.append(((obs[..., 0] == 0x45) & (obs[..., 1] == 0)).any(1))
    return torch.stack([*here, torch.ones(len(obs), dtype=torch.bool)], 1).int().argmax(1)


def sight_of_forage(obs):
    """Either arm, or the hub. (At its end an arm may show the goal, but what is done there does nothing.)"""
    arms = [(obs[..., 1] == 2 + arm).any(1) for arm in range(2)]
    return torch.stack([*arms, torch.ones(len(obs), dtype=torch.bool)], 1).int().argmax(1)


def test_tmaze_best_return_without_memory():
    count, act = every_function(sight_of_tmaze, 4)
    world = make_world("tmaze", agents=count, corridor=2, limit=6)
    means = exact_returns(world, "_cue", [0, 1], act)
    assert count == 256
    assert means.unique().tolist() == [-1.0, 0.0]
    # East through the corridor, north at its end and east from the start if told north; told south, all four
    # are the same: the wrong arm costs what staying home costs. And the other way round.
    assert int((means == 0).sum()) == 8
    assert world.spec.best_return_without_memory == 0.0


def test_forage_best_return_without_memory():
    count, act = every_function(sight_of_forage, 3)
    world = make_world("forage", agents=count, arms=2, reach=2, trials=3)
    means = exact_returns(world, "_goal", [3, 4], act)
    assert count == 64
    assert float(means.max()) == pytest.approx(0.5, abs=1e-6) == world.spec.best_return_without_memory
    assert float(means.min()) == 0.0


@pytest.mark.parametrize(
    ("wrong", "most"),
    [
        (lambda first, before: before, 0.5),  # a step late
        (lambda first, before: torch.zeros_like(first), 0.5),  # never
        (lambda first, before: torch.ones_like(first), 0.36),  # always
    ],
)
def test_repeat_first_detects_late_clear(wrong, most):
    world = make_world("repeat_first", agents=300, symbols=4, length=(8, 12))
    oracle, before = ORACLES["repeat_first"](world), torch.zeros(300, dtype=torch.bool)

    def act(obs, first):
        nonlocal before
        cleared, before = wrong(first, before), first
        return oracle(obs, cleared)

    assert float(returns_of(live(world, 130, act), each=5).mean()) < most


def test_forage_detects_clear_on_trial():
    world = make_world("forage", agents=1500)
    oracle, step, steps = ORACLES["forage"](world), world.reset(), []
    for _ in range(120):
        steps.append(step)
        step = world.step(oracle(step.obs, step.first | step.trial))
    assert is_mean_of(returns_of([*steps, step], each=5), world.spec.best_return_without_memory)
