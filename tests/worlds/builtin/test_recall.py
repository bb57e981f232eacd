from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ConfigError, ContractError
from holdfast.worlds import Recall, World, make_world
from holdfast.worlds.obs import check_actions

PADDING = [0xFF, 0xFF, 0xFF]
QUERY = [0xFE, 0, 1]
FLAGS = ("terminated", "truncated", "first", "valid", "trial")

delays = st.one_of(
    st.integers(0, 6), st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda d: (d[0], d[0] + d[1]))
)


def cue_token(cue):
    return [0x45, 1 + cue, 255]


def live(world, steps, act=None):
    """Reset and take `steps` steps; return all Steps and the actions between them."""
    history, actions = [world.reset()], []
    for t in range(steps):
        generator = torch.Generator().manual_seed(t)
        choice = torch.randint(world.cues, (world.agents,), generator=generator)
        actions.append(choice if act is None else act(history[-1]))
        history.append(world.step(actions[-1]))
    return history, actions


def episodes_of(steps, agent):
    """Cut an agent's steps into whole episodes of (index, Step) pairs, by `first`."""
    starts = [t for t, step in enumerate(steps) if step.first[agent]]
    return [list(range(a, b)) for a, b in pairwise(starts)]


class Oracle:
    """Reads the tokens, remembers each agent's last cue, and names it always."""

    def __init__(self, agents):
        self.remembered = torch.zeros(agents, dtype=torch.long)

    def __call__(self, step):
        location, feature, _ = step.obs[:, 0].long().unbind(-1)
        self.remembered = torch.where(location == 0x45, feature - 1, self.remembered)
        return self.remembered


def returns_of(steps):
    ended = torch.stack([step.terminated | step.truncated for step in steps])
    rewards = torch.stack([step.reward for step in steps])
    return rewards[ended]


def test_make_world_recall():
    world = make_world("recall", agents=3, delay=2, cues=5)
    assert isinstance(world, World)
    assert isinstance(world, Recall)
    assert world.agents == 3
    assert len(world.spec.action_names) == 5


@settings(max_examples=30)
@given(delays, st.integers(2, 9), st.integers(1, 5), st.booleans(), st.integers(-5, 5))
def test_every_step_keeps_the_contract(delay, cues, agents, truncate, seed):
    world = make_world("recall", agents=agents, delay=delay, cues=cues, truncate=truncate, seed=seed)
    steps, _ = live(world, 12)
    for step in steps:
        assert step.obs.shape == (agents, *world.spec.obs_shape)
        assert step.obs.dtype == torch.uint8
        assert (step.reward.shape, step.reward.dtype) == ((agents,), torch.float32)
        for flag in FLAGS:
            assert (getattr(step, flag).shape, getattr(step, flag).dtype) == ((agents,), torch.bool)
        assert bool(step.valid.all())
        assert not step.trial.any()
        assert bool(((step.reward == 0) | (step.reward == 1)).all())
        assert not (step.terminated & step.truncated).any()


@settings(max_examples=30)
@given(st.integers(0, 7), st.integers(2, 6), st.booleans())
def test_an_episode_lasts_delay_plus_two_steps(delay, cues, truncate):
    world = make_world("recall", agents=4, delay=delay, cues=cues, truncate=truncate)
    steps, _ = live(world, 4 * (delay + 2))
    for t, step in enumerate(steps):
        opens = t % (delay + 2) == 0
        assert step.first.tolist() == [opens] * 4
        ended = step.terminated | step.truncated
        assert ended.tolist() == [opens and t > 0] * 4


@settings(max_examples=30)
@given(delays, st.integers(2, 9), st.integers(0, 1000))
def test_recall_observation_sequence(delay, cues, seed):
    world = make_world("recall", agents=3, delay=delay, cues=cues, seed=seed)
    steps, _ = live(world, 40)
    for agent in range(3):
        for episode in episodes_of(steps, agent):
            observations = [steps[t].obs[agent].tolist() for t in episode]
            assert observations[0] in [[cue_token(cue), *[PADDING] * 3] for cue in range(cues)]
            assert observations[1:-1] == [[PADDING] * 4] * (len(episode) - 2)
            assert observations[-1] == [QUERY, *[PADDING] * 3]


def test_recall_feature_ids():
    world = make_world("recall", agents=1, cues=3)
    names = [feature.name for feature in world.spec.features]
    assert names == ["query", "cue_0", "cue_1", "cue_2"]
    # Every token speaks at the full size of its feature's normalization.
    assert [feature.normalization for feature in world.spec.features] == [1.0, 255.0, 255.0, 255.0]
    assert (QUERY[2], cue_token(0)[2]) == (1, 255)


def test_recall_with_100_cues():
    world = make_world("recall", agents=2000, delay=0, cues=100)
    cues = world.reset().obs[:, 0, 1].long()
    assert (int(cues.min()), int(cues.max())) == (1, 100)


@settings(max_examples=30)
@given(delays, st.integers(2, 5), st.booleans(), st.integers(0, 99))
def test_recall_reward(delay, cues, truncate, seed):
    world = make_world("recall", agents=4, delay=delay, cues=cues, truncate=truncate, seed=seed)
    steps, actions = live(world, 40)
    for agent in range(4):
        paid = {t: float(steps[t].reward[agent]) for t in range(len(steps))}
        for episode in episodes_of(steps, agent):
            cue = int(steps[episode[0]].obs[agent, 0, 1]) - 1
            named = int(actions[episode[-1]][agent])
            assert paid.pop(episode[-1] + 1) == float(named == cue)
        assert not any(paid.values())


def test_recall_no_reward_before_the_query():
    world = make_world("recall", agents=50, delay=3, cues=2)
    cue = world.reset().obs[:, 0, 1].long() - 1
    rewards = [world.step(cue if t < 4 else 1 - cue).reward.sum() for t in range(5)]
    assert rewards == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("truncate", [False, True])
def test_first_is_set_by_reset_and_with_every_end(truncate):
    steps, _ = live(make_world("recall", agents=6, delay=(0, 5), truncate=truncate), 60)
    assert bool(steps[0].first.all())
    assert not (steps[0].terminated | steps[0].truncated).any()
    assert not steps[0].reward.any()
    ended = torch.stack([step.terminated | step.truncated for step in steps[1:]])
    assert torch.equal(torch.stack([step.first for step in steps[1:]]), ended)
    assert 60 < int(ended.sum()) < 180


def test_truncation_has_flag_and_last_obs():
    steps, _ = live(make_world("recall", agents=3, delay=2, truncate=True), 12)
    assert make_world("recall", agents=3, truncate=True).spec.truncates == "always"
    assert not torch.stack([step.terminated for step in steps]).any()
    assert int(torch.stack([step.truncated for step in steps]).sum()) == 9
    for step in steps:
        # After the answer there is nothing more to see.
        assert step.last_obs is not None
        assert step.last_obs.tolist() == [[PADDING] * 4] * 3


def test_termination_has_no_last_obs():
    steps, _ = live(make_world("recall", agents=3, delay=2), 12)
    assert make_world("recall", agents=3).spec.truncates == "never"
    assert not torch.stack([step.truncated for step in steps]).any()
    assert int(torch.stack([step.terminated for step in steps]).sum()) == 9
    assert all(step.last_obs is None for step in steps)


def test_truncate_changes_only_flags():
    options = {"agents": 5, "delay": (1, 4), "seed": 8}
    plain, _ = live(make_world("recall", **options), 40)
    cut, _ = live(make_world("recall", truncate=True, **options), 40)
    for a, b in zip(plain, cut, strict=True):
        assert torch.equal(a.obs, b.obs)
        assert torch.equal(a.reward, b.reward)
        assert torch.equal(a.terminated, b.truncated)


def test_delays_are_uniform():
    steps, _ = live(make_world("recall", agents=100, delay=(2, 5), seed=3), 120)
    lengths = [len(episode) for agent in range(100) for episode in episodes_of(steps, agent)]
    shares = {length: lengths.count(length) / len(lengths) for length in set(lengths)}
    assert set(shares) == {4, 5, 6, 7}
    # About 2,100 episodes, deviation 0.0095 each; short ones are a little ahead at the end.
    assert all(abs(share - 0.25) < 0.05 for share in shares.values())


def test_cues_are_uniform_per_episode():
    steps, _ = live(make_world("recall", agents=100, delay=0, cues=4, seed=1), 80)
    shown = torch.stack([step.obs[:, 0, 1].long() - 1 for step in steps[::2]])
    shares = torch.bincount(shown.flatten(), minlength=4) / shown.numel()
    assert float((shares - 0.25).abs().max()) < 0.04
    again = (shown[1:] == shown[:-1]).float().mean()
    assert abs(float(again) - 0.25) < 0.04
    beside = (shown[:, 1:] == shown[:, :-1]).float().mean()
    assert abs(float(beside) - 0.25) < 0.04


def test_cue_and_delay_are_independent():
    steps, _ = live(make_world("recall", agents=200, delay=(0, 1), cues=2, seed=2), 60)
    table = torch.zeros(2, 2)
    for agent, cue in product(range(200), range(2)):
        for episode in episodes_of(steps, agent):
            if int(steps[episode[0]].obs[agent, 0, 1]) - 1 == cue:
                table[cue, len(episode) - 2] += 1
    shares = table / table.sum()
    assert float((shares - 0.25).abs().max()) < 0.03


@settings(max_examples=20)
@given(delays, st.integers(2, 20), st.booleans(), st.integers(-9, 9))
def test_recall_oracle_return(delay, cues, truncate, seed):
    world = make_world("recall", agents=16, delay=delay, cues=cues, truncate=truncate, seed=seed)
    steps, _ = live(world, 60, Oracle(16))
    returns = returns_of(steps)
    assert len(returns) >= 16 * 60 // 10
    assert returns.tolist() == [1.0] * len(returns)
    assert world.spec.best_return == 1.0


@pytest.mark.parametrize("cues", [2, 4, 7])
def test_recall_memoryless_return(cues):
    # Every function of the present observation says one fixed action at the query, for the query looks
    # the same whatever the cue was; so the fixed actions are all the policies there are without memory.
    world = make_world("recall", agents=200, delay=(0, 2), cues=cues, seed=5)
    for action in range(cues):

        def act(step, action=action):
            location, feature, _ = step.obs[:, 0].long().unbind(-1)
            saw_cue = location == 0x45
            return torch.where(saw_cue, feature - 1, action)

        returns = returns_of(live(world, 60, act)[0])
        deviation = ((1 - 1 / cues) / cues / len(returns)) ** 0.5
        assert len(returns) > 3000
        assert abs(float(returns.mean()) - 1 / cues) < 5 * deviation
    assert world.spec.best_return_without_memory == 1 / cues


def test_all_fixed_actions_together_get_exactly_one():
    # On the same episodes exactly one of the fixed actions is right, so their mean is 1/cues, exactly.
    world = make_world("recall", agents=50, delay=1, cues=4)
    total = sum(returns_of(live(world, 30, lambda step, a=a: torch.full((50,), a))[0]) for a in range(4))
    assert total.tolist() == [1.0] * 500


def same_world_told(a, b):
    return all(
        torch.equal(getattr(x, name), getattr(y, name))
        for x, y in zip(a, b, strict=True)
        for name in ("obs", "reward", *FLAGS)
    )


def test_a_seed_decides_everything():
    def rollout(seed):
        return live(make_world("recall", agents=20, delay=(0, 3), seed=seed), 20)[0]

    assert same_world_told(rollout(4), rollout(4))
    assert not same_world_told(rollout(4), rollout(5))
    assert not same_world_told(rollout(4), rollout(-5))


def test_recall_reset_repeats():
    world = make_world("recall", agents=20, delay=(0, 3))
    before, _ = live(world, 13)
    assert same_world_told(before, live(world, 13)[0])


@settings(max_examples=20)
@given(st.integers(1, 30), st.integers(1, 30), delays, st.booleans())
def test_recall_independent_of_agent_count(few, more, delay, truncate):
    def rollout(agents):
        world = make_world("recall", agents=agents, delay=delay, truncate=truncate, seed=1)
        return live(world, 15, lambda step: torch.arange(agents) % 2)[0]

    alone, crowd = rollout(few), rollout(few + more)
    for a, b in zip(alone, crowd, strict=True):
        for name in ("obs", "reward", *FLAGS):
            assert torch.equal(getattr(a, name), getattr(b, name)[:few])


def test_recall_independent_of_other_agents():
    world = make_world("recall", agents=4, delay=1, cues=2, seed=2)
    one, _ = live(world, 20, lambda step: torch.tensor([0, 0, 0, 0]))
    other, _ = live(world, 20, lambda step: torch.tensor([0, 1, 1, 1]))
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.obs, b.obs)
        assert a.reward[0] == b.reward[0]
    assert not torch.equal(torch.stack([s.reward for s in one]), torch.stack([s.reward for s in other]))


def test_returned_steps_are_not_overwritten():
    world = make_world("recall", agents=5, delay=(0, 2), truncate=True)
    steps = [world.reset()]
    copies = [{name: getattr(steps[0], name).clone() for name in ("obs", "reward", *FLAGS)}]
    for _ in range(10):
        steps.append(world.step(torch.zeros(5, dtype=torch.long)))
        copies.append({name: getattr(steps[-1], name).clone() for name in ("obs", "reward", *FLAGS)})
    for step, copy in zip(steps, copies, strict=True):
        assert all(torch.equal(getattr(step, name), then) for name, then in copy.items())


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta"])
def test_recall_device(device):
    # `meta` holds no numbers; it shows that nothing is made elsewhere and nobody waits for a value.
    world = make_world("recall", agents=3, delay=(1, 3), truncate=True, device=device)
    actions = torch.zeros(3, dtype=torch.long, device=device)
    for step in (world.reset(), world.step(actions), world.step(actions)):
        for name in ("obs", "reward", "last_obs", *FLAGS):
            assert getattr(step, name).device == torch.device(device)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_actions_may_have_any_integer_dtype(dtype):
    world = make_world("recall", agents=30, delay=0, cues=4)
    cue = world.reset().obs[:, 0, 1].long() - 1
    world.step(cue.to(dtype))
    assert world.step(cue.to(dtype)).reward.tolist() == [1.0] * 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"agents": 0}, "world.agents=0: there must be at least 1"),
        ({"agents": -3}, "world.agents=-3: there must be at least 1"),
        ({"delay": -1}, r"world.delay=-1: give a number from 0 on or a range such as 4\.\.9"),
        ({"delay": (5, 4)}, r"world.delay=\(5, 4\): give a number from 0 on or a range"),
        ({"delay": (-1, 4)}, r"world.delay=\(-1, 4\): give a number from 0 on or a range"),
        ({"cues": 1}, "world.cues=1: give a number from 2 to 100"),
        ({"cues": 101}, "world.cues=101: give a number from 2 to 100"),
        ({"dellay": 3}, "no option 'dellay'; did you mean delay"),
    ],
)
def test_invalid_world_option_errors_say_what_to_type(options, message):
    with pytest.raises(ConfigError, match=message):
        make_world("recall", **options)


def test_an_unknown_world_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"world.name=recal: there is no such world; did you mean recall"):
        make_world("recal")


def test_step_rejects_wrong_number_of_actions():
    world = make_world("recall", agents=4)
    world.reset()
    with pytest.raises(ContractError, match=r"actions are \(3,\) torch.int64; this world has 4 agents"):
        world.step(torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize("actions", [torch.zeros(4), torch.zeros(4, 1, dtype=torch.long), torch.tensor(0)])
def test_step_rejects_wrong_action_dtype(actions):
    # Called directly: in tests the annotations of `step` refuse these before the world can.
    with pytest.raises(ContractError, match="needs 4 integers below 3"):
        check_actions(actions, 4, 3)


@pytest.mark.parametrize(("actions", "agent", "taken"), [([2, 7], 1, 7), ([-1, 0], 0, -1), ([3, 9], 0, 3)])
def test_step_rejects_actions_out_of_range(actions, agent, taken):
    world = make_world("recall", agents=2, cues=3)
    world.reset()
    with pytest.raises(ContractError, match=f"agent {agent} took action {taken}; there are actions 0 to 2"):
        world.step(torch.tensor(actions))


def test_step_before_reset_is_an_error():
    world = make_world("recall", agents=2)
    with pytest.raises(ContractError, match=r"Call reset\(\) before the first step"):
        world.step(torch.tensor([0, 0]))
    world.reset()
    world.step(torch.tensor([0, 0]))


def test_rejected_actions_do_not_advance_the_world():
    world = make_world("recall", agents=2, delay=0, cues=2)
    cue = world.reset().obs[:, 0, 1].long() - 1
    world.step(cue)
    for refused in ([0, 0, 0], [0, 2], [-1, 0]):
        with pytest.raises(ContractError):
            world.step(torch.tensor(refused))
    assert world.step(cue).reward.tolist() == [1.0, 1.0]
