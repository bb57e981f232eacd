from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from helpers.small_policy import SPEC
from holdfast.config.run import Config
from holdfast.config.worlds import RecallConfig
from holdfast.evaluation.held_out import AGENTS, FINAL, PERIODIC, EvalSettings, held_out_seed, num_agents_for

SOME = st.integers(1, 5000)


@given(episodes=SOME, seeds=st.integers(1, 40))
def test_episodes_are_spread_evenly_over_the_seeds(episodes, seeds):
    shares = [EvalSettings(episodes=episodes, seeds=seeds).episodes_of(number) for number in range(seeds)]
    assert sum(shares) == episodes
    assert max(shares) - min(shares) <= 1


@given(episodes=SOME, crowd=st.integers(1, 30), parts=st.integers(0, 3))
def test_num_agents_for_full_environments(episodes, crowd, parts):
    spec = replace(SPEC, agents_per_env=crowd, parts=tuple((str(part), crowd) for part in range(parts)))
    agents = num_agents_for(RecallConfig(), spec, episodes)
    assert agents % crowd == 0
    assert agents >= crowd * max(1, parts)
    assert agents <= max(AGENTS + crowd, crowd * parts)
    if crowd == 1 and parts < 2:
        rounds = -(-episodes // agents)
        # Nobody plays in vain but to fill up the last round.
        assert 0 <= agents * rounds - episodes < rounds


def test_held_out_seeds_are_distinct():
    numbers = [*range(FINAL, 20), PERIODIC]
    seeds = {held_out_seed(Config(seed=seed), number) for seed in (0, 1) for number in numbers}
    assert len(seeds) == 42
