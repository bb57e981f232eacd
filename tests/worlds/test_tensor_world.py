"""The contract of a step, on all built-in worlds."""

from dataclasses import replace

import pytest
import torch

from helpers.oracles import ORACLES
from helpers.play_world import ALL, FLAGS, anything, live, returns_of, stacked
from helpers.recorded_graph import RecordedWorld, capture_on_cpu
from holdfast.config.worlds import WORLD_CONFIGS
from holdfast.errors import ConfigError, ContractError
from holdfast.worlds import World, make_world
from holdfast.worlds.obs import check_actions

NAMES = sorted(WORLD_CONFIGS)
# Short episodes, so that few steps show many.
SHORT = {
    "recall": {"delay": (0, 3)},
    "repeat_first": {"length": (3, 7)},
    "n_back": {"length": 9},
    "tmaze": {"corridor": 1, "limit": 6},
    "key_value": {"pairs": 3},
    "parity": {"length": 7},
    "forage": {"reach": 1, "trials": 3},
    "arena": {"size": 12, "length": 9, "regrow": 3},
    "ragged": {"delay": (0, 3), "absent": (0, 4)},
    "constant": {"length": 6},
}
TRUNCATING = [name for name in NAMES if "truncate" in WORLD_CONFIGS[name].model_fields]


def make(name, crowds=1, **options):
    return make_world(name, agents=24 * crowds, **{**SHORT[name], **options})


def same(a, b, rows=None, names=ALL):
    return all(
        torch.equal(getattr(x, name), getattr(y, name)[:rows]) for x, y in zip(a, b, strict=True) for name in names
    )


def test_every_builtin_world_is_covered():
    assert set(SHORT) == set(WORLD_CONFIGS)
    assert set(ORACLES) == {name for name in NAMES if make(name).spec.best_return is not None}
    assert sorted(set(WORLD_CONFIGS) - set(ORACLES)) == ["arena"]
    assert sorted(set(NAMES) - set(TRUNCATING)) == ["forage", "tmaze"]


@pytest.mark.parametrize("name", NAMES)
def test_every_step_keeps_the_contract(name):
    world = make(name)
    assert isinstance(world, World)
    steps = live(world, 40, anything(world))
    for step in steps:
        assert (step.obs.shape, step.obs.dtype) == ((24, *world.spec.obs_shape), torch.uint8)
        assert (step.reward.shape, step.reward.dtype) == ((24,), torch.float32)
        for flag in FLAGS:
            assert (getattr(step, flag).shape, getattr(step, flag).dtype) == ((24,), torch.bool)
        assert step.last_obs is None
    assert bool(steps[0].first.all() & steps[0].valid.all())
    assert not (steps[0].terminated | steps[0].truncated | steps[0].trial).any()
    assert not steps[0].reward.any()
    assert len(returns_of(steps)) > 24


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_declared_features(name):
    world = make(name)
    sizes = torch.tensor([feature.normalization for feature in world.spec.features])
    obs = stacked(live(world, 40, anything(world)), "obs").flatten(0, 2).long()
    padding = (obs == 0xFF).all(1)
    assert torch.equal(padding, obs[:, 0] == 0xFF)
    obs = obs[~padding]
    assert set(obs[:, 1].tolist()) == set(range(len(sizes)))
    assert bool((obs[:, 2] <= sizes[obs[:, 1]]).all())
    if name != "constant":  # which counts
        assert torch.equal(obs[:, 2].float(), sizes[obs[:, 1]])
    rows, columns = world.spec.window
    placed = obs[obs[:, 0] != 0xFE, 0]
    assert bool(((placed >> 4) < rows).all() & ((placed & 15) < columns).all())


@pytest.mark.parametrize("name", NAMES)
def test_first_follows_every_end(name):
    world = make(name)
    steps = live(world, 40, anything(world))
    ended, first, valid = (stacked(steps[1:], key) for key in ("terminated", "first", "valid"))
    if name == "ragged":
        assert not (ended & valid & ~first).any()
        assert not (first & ~valid).any()
        assert bool((~valid).any())
    else:
        assert torch.equal(first, ended)
        assert bool(valid.all())
    trial = stacked(steps, "trial")
    assert bool(trial.any()) == (name == "forage")
    assert not (trial[1:] & first).any()


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_everything(name):
    def rollout(seed):
        world = make(name, seed=seed)
        return live(world, 25, anything(world))

    assert same(rollout(3), rollout(3))
    # Everything in `constant` is, so no seed changes it.
    assert same(rollout(3), rollout(4)) == (name == "constant")


@pytest.mark.parametrize("name", NAMES)
def test_reset_repeats_the_same_steps(name):
    world = make(name, seed=2)
    once = live(world, 13, anything(world))
    assert same(once, live(world, 13, anything(world)))


@pytest.mark.parametrize("name", NAMES)
def test_agents_are_independent_of_their_number(name):
    def rollout(crowds):
        world = make(name, crowds, seed=5)
        return live(world, 25, lambda obs, first: torch.arange(24 * crowds) % len(world.spec.action_names))

    assert same(rollout(1), rollout(3), rows=24)


@pytest.mark.parametrize("name", NAMES)
def test_agents_are_independent_of_other_actions(name):
    world = make(name, 2, seed=6)
    actions = torch.randint(len(world.spec.action_names), (25, 48))
    others = torch.randint(len(world.spec.action_names), (25, 48))
    others[:, :24] = actions[:, :24]  # a whole crowd: those of an arena do notice each other
    one, other = iter(actions), iter(others)
    a = live(world, 25, lambda obs, first: next(one))
    b = live(world, 25, lambda obs, first: next(other))
    for x, y in zip(a, b, strict=True):
        assert all(torch.equal(getattr(x, key)[:24], getattr(y, key)[:24]) for key in ALL)
    assert same(a, b) == (name == "constant")


@pytest.mark.parametrize("name", NAMES)
def test_returned_steps_are_not_overwritten(name):
    world = make(name)
    act, steps, copies = anything(world), [world.reset()], []
    for _ in range(15):
        copies.append({key: getattr(steps[-1], key).clone() for key in ALL})
        steps.append(world.step(act(steps[-1].obs, steps[-1].first)))
    for step, copy in zip(steps, copies, strict=False):
        assert all(torch.equal(getattr(step, key), then) for key, then in copy.items())


@pytest.mark.parametrize("name", NAMES)
def test_step_does_not_synchronize(name):
    # `meta` holds no numbers: looking at one is an error there.
    options = {"truncate": True} if name in TRUNCATING else {}
    world = make(name, device="meta", **options)
    actions = torch.zeros(24, dtype=torch.long, device="meta")
    for step in (world.reset(), world.step(actions), world.step(actions)):
        for key in (*ALL, *(["last_obs"] if options else [])):
            assert getattr(step, key).device.type == "meta"
        assert step.obs.shape == (24, *world.spec.obs_shape)


@pytest.mark.parametrize("name", TRUNCATING)
def test_truncate_sets_flag_and_last_obs(name):
    plain, cut = make(name, seed=8), make(name, seed=8, truncate=True)
    assert (plain.spec.truncates, cut.spec.truncates) == ("never", "always")
    a, b = live(plain, 25, anything(plain)), live(cut, 25, anything(cut))
    assert same(a, b, names=("obs", "reward", "first", "valid", "trial"))
    assert torch.equal(stacked(a, "terminated"), stacked(b, "truncated"))
    assert not stacked(b, "terminated").any()
    last, ended = stacked(b, "last_obs"), stacked(b, "truncated")
    assert last.shape == stacked(b, "obs").shape
    assert bool((last[~ended] == 0xFF).all())
    # Where an answer ends the episode there is nothing left to see; elsewhere the world went on.
    empty = name in ("recall", "ragged", "key_value")
    assert bool((last[ended] == 0xFF).all()) == empty


@pytest.mark.parametrize("name", ["repeat_first", "n_back", "parity"])
def test_last_obs_does_not_leak_the_next_episode(name):
    world = make_world(name, agents=1024, truncate=True, **SHORT[name])
    steps = live(world, 30, anything(world))
    ended = stacked(steps, "truncated")
    last, opening = stacked(steps, "last_obs")[ended][:, 0, 1], stacked(steps, "obs")[ended][:, 0, 1]
    count = len(world.spec.features)
    # As often alike as two draws are; the deviation of a share of so many is below 0.01.
    assert len(last) > 3000
    assert abs(float((last == opening).float().mean()) - 1 / count) < 0.05
    assert set(last.tolist()) == set(range(count))


@pytest.mark.parametrize("name", NAMES)
def test_step_errors(name):
    world = make(name)
    count = len(world.spec.action_names)
    with pytest.raises(ContractError, match=r"Call reset\(\) before the first step"):
        world.step(torch.zeros(24, dtype=torch.long))
    world.reset()
    with pytest.raises(ContractError, match="this world has 24 agents"):
        world.step(torch.zeros(3, dtype=torch.long))
    with pytest.raises(ContractError, match=f"agent 0 took action {count}; there are actions 0 to {count - 1}"):
        world.step(torch.full((24,), count))
    check_actions(torch.zeros(24, dtype=torch.int32), 24, count)
    assert world.step(torch.zeros(24, dtype=torch.int32)).obs.dtype == torch.uint8


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *((name, {"agents": 0}, "world.agents=0: there must be at least 1") for name in NAMES if name != "arena"),
        ("arena", {"agents": 0}, "world.agents=0 is not a multiple of 24; try 24"),
        ("repeat_first", {"symbols": 1}, "world.symbols=1: give a number from 2 to 100"),
        ("repeat_first", {"length": 1}, "world.length=1: give a number from 2 on or a range"),
        ("repeat_first", {"length": (9, 8)}, r"world.length=\(9, 8\): give a number from 2 on or a range"),
        ("n_back", {"back": 0}, "world.back=0: give a number from 1 to 1000"),
        ("n_back", {"symbols": 101}, "world.symbols=101: give a number from 2 to 100"),
        ("n_back", {"back": 5, "length": 5}, r"world.length=5: give a number from back \+ 1 = 6 on"),
        ("tmaze", {"corridor": 0}, "world.corridor=0: give a number from 1 to 1000"),
        ("tmaze", {"corridor": 7, "limit": 7}, "world.limit=7: the arms are 8 steps away"),
        ("key_value", {"pairs": 61}, "world.pairs=61: give a number from 1 to 60"),
        ("key_value", {"values": 1}, "world.values=1: give a number from 2 to 60"),
        ("parity", {"length": 1}, "world.length=1: give a number from 2"),
        ("forage", {"arms": 5}, "world.arms=5: give a number from 2 to 4"),
        ("forage", {"reach": 0}, "world.reach=0: give a number from 1"),
        ("forage", {"trials": 0}, "world.trials=0: give a number from 1"),
        ("arena", {"agents": 64}, "world.agents=64 is not a multiple of 24; try 48 or 72"),
        ("arena", {"agents": 5}, "world.agents=5 is not a multiple of 24; try 24"),
        ("arena", {"size": 11}, "world.size=11: give a number from 12 to 1000"),
        ("arena", {"walls": 51}, "world.walls=51: give a number from 0 to 50"),
        ("arena", {"resources": -1}, "world.resources=-1: give a number from 0 to 100"),
        ("arena", {"regrow": 0}, "world.regrow=0: give a number from 1"),
        ("arena", {"sight": 0}, "world.sight=0: give a number from 1"),
        ("arena", {"length": 0}, "world.length=0: give a number from 1"),
        ("ragged", {"absent": -1}, "world.absent=-1: give a number from 0 on or a range"),
        ("ragged", {"delay": (2, 1)}, r"world.delay=\(2, 1\): give a number from 0 on"),
        ("ragged", {"cues": 1}, "world.cues=1: give a number from 2 to 100"),
        ("constant", {"length": 256}, "world.length=256: give a number from 1 to 255"),
        ("parity", {"lenght": 3}, "no option 'lenght'; did you mean length"),
    ],
)
def test_invalid_world_option_errors_say_what_to_type(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_world(name, **{"agents": 24, **options})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", WORLD_CONFIGS)
@pytest.mark.parametrize("truncate", [False, True])
def test_cuda_graph_equals_eager(name, truncate, device, monkeypatch):
    """On the CPU the operations of the capture are recorded and run again."""
    options = {"truncate": True} if truncate else {}
    if truncate and name in ("tmaze", "forage"):
        options = {}
    here = make_world(name, agents=48, seed=3, **options)
    there = make_world(name, agents=48, seed=3, device=device, **options)
    if device == "cpu":
        capture_on_cpu(monkeypatch)
        there = RecordedWorld(there)
    dice = torch.Generator().manual_seed(0)
    for _ in range(2):
        eager, recorded, pairs = here.reset(), there.reset(), []
        for _ in range(120 if device == "cuda" else 15):
            for key in (*ALL, *(["last_obs"] if eager.last_obs is not None else [])):
                assert torch.equal(getattr(eager, key), getattr(recorded, key).cpu()), key
            pairs.append((eager, recorded))
            actions = torch.randint(len(here.spec.action_names), (48,), generator=dice)
            eager, recorded = here.step(actions), there.step(actions.to(device))
        # Later steps do not overwrite earlier ones.
        for one, other in pairs:
            assert torch.equal(one.obs, other.obs.cpu())
            assert torch.equal(one.reward, other.reward.cpu())


class ReadsOnTheHost(type(make_world("recall", agents=2))):
    """A world that waits for the device in its step."""

    def _transition(self, actions):
        outcome = super()._transition(actions)
        if outcome.ended.any():
            self._clock += 1
        return outcome


class ForgetsState(type(make_world("recall", agents=2))):
    """A world whose state is no tensor, which a replay does not change."""

    count = 0

    def _transition(self, actions):
        self.count += 1
        outcome = super()._transition(actions)
        return replace(outcome, reward=outcome.reward + self.count)


def test_world_that_reads_on_the_host_cannot_be_captured(monkeypatch):
    capture_on_cpu(monkeypatch)
    world = RecordedWorld(ReadsOnTheHost(4))
    world.reset()
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing: _local_scalar_dense"):
        world.step(torch.zeros(4).long())


def test_state_that_is_no_tensor_is_not_replayed(monkeypatch):
    capture_on_cpu(monkeypatch)
    world, eager = RecordedWorld(ForgetsState(4)), ForgetsState(4)
    for each in (world, eager):
        each.reset()
    actions = torch.zeros(4).long()
    rewards = [[each.step(actions).reward.tolist() for _ in range(3)] for each in (world, eager)]
    assert rewards[0] != rewards[1]
