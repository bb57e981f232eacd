from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import Config
from holdfast.unseen import AGENTS, FINAL, ON_THE_WAY, Asked, good_number, unseen_seed
from small import SPEC

SOME = st.integers(1, 5000)


@given(episodes=SOME, seeds=st.integers(1, 40))
def test_episodes_are_spread_evenly_over_the_seeds(episodes, seeds):
    shares = [Asked(episodes=episodes, seeds=seeds).share(number) for number in range(seeds)]
    assert sum(shares) == episodes
    assert max(shares) - min(shares) <= 1


@given(episodes=SOME, crowd=st.integers(1, 30), parts=st.integers(0, 3))
def test_agents_come_in_whole_crowds_and_each_plays_equally_many(episodes, crowd, parts):
    spec = replace(SPEC, crowd=crowd, parts=tuple((str(part), crowd) for part in range(parts)))
    agents = good_number(spec, episodes)
    assert agents % crowd == 0
    assert agents >= crowd * max(1, parts)
    assert agents <= max(AGENTS + crowd, crowd * parts)
    if crowd == 1 and parts < 2:
        rounds = -(-episodes // agents)
        # Nobody plays in vain but to fill up the last round.
        assert 0 <= agents * rounds - episodes < rounds


def test_every_number_has_episodes_of_its_own_and_so_has_every_run():
    numbers = [*range(FINAL, 20), ON_THE_WAY]
    seeds = {unseen_seed(Config(seed=seed), number) for seed in (0, 1) for number in numbers}
    assert len(seeds) == 42
