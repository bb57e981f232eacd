"""World laws on one recording: a right recording passes, and a changed one breaks its law."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdfast
from helpers.broken_worlds import SABOTAGES, Around, changed, telling
from helpers.scripted_world import Scripted
from holdfast import rng
from holdfast.check import world_laws
from holdfast.check.results import Law
from holdfast.check.world_recording import WorldUnderTest, record
from holdfast.worlds import Step, WorldSpec, make_world

pytestmark = pytest.mark.usefixtures("annotations_asleep")
AGENTS, STEPS = 3, 9


def broken(laws):
    return {name: law.finding for name, law in laws.items() if not law.ok}


def parts_of(law, path=""):
    return [part.what for part in law.parts if part.path == path]


def flags(*places):
    """A table `[A,S]` that is true at (agent, step)."""
    table = torch.zeros(AGENTS, STEPS, dtype=torch.bool)
    for agent, step in places:
        table[agent, step] = True
    return table


def scripted(**tables):
    """Agent 0 terminates at step 4, agent 1 is truncated at step 5 and invalid until step 7."""
    defaults = {
        "terminated": flags((0, 4)),
        "truncated": flags((1, 5)),
        "first": flags((0, 0), (1, 0), (2, 0), (0, 4), (1, 7)),
        "valid": ~flags((1, 5), (1, 6)),
    }
    return Scripted(AGENTS, STEPS, **{**defaults, **tables})


def recorded(**steps):
    """The world above with its recording, in which tensors `[N,A]` are replaced."""
    world = scripted()
    recording = record(world, AGENTS, torch.zeros(STEPS - 1, AGENTS, dtype=torch.long))
    # A reward after an invalid row is a fault; the numbers of this world pay every row.
    reward = recording["reward"].clone()
    reward[0], reward[6:8, 1] = 0, 0
    recording = replace(recording, steps={**recording.steps, "reward": reward, **steps})
    return under_test(world, recording)


def under_test(world, recording, *, requested=AGENTS):
    """A world with the same recording always: after another reset, and with other actions."""
    target = WorldUnderTest(lambda agents, seed: world, agents=requested)
    target.recording = target.after_reset = recording
    target.rerun = lambda actions: recording
    return target


def with_spec(target, **changes):
    world = scripted()
    world.spec = replace(target.spec, **changes)
    return under_test(world, target.recording)


def with_changes(*changes):
    steps = {name: tensor.clone() for name, tensor in recorded().recording.steps.items()}
    for name, step, agent, value in changes:
        steps[name][step, agent] = value
    return recorded(**steps)


def finding(parts):
    return Law("x", parts, diagnosed=False).finding


def findings(parts):
    return [f"{part.what}: {part.finding}" for part in parts if not part.ok]


def test_right_recording_obeys_the_laws():
    target = recorded()
    for law in (world_laws.kind, world_laws.first, world_laws.flags, world_laws.dead, world_laws.still):
        assert finding(law(target)) == ""
    assert all(part.ok for part in world_laws.last(target))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("first", 3, 2, True)], "firsts without an end before: agent 2, step 3"),
        ([("first", 7, 1, False)], "valid rows after an end and before the next first: agent 1, step 7"),
        ([("valid", 5, 1, True), ("terminated", 6, 1, True)], "ends outside an episode: agent 1, step 6"),
        ([("truncated", 0, 0, True)], "ends in reset(): agent 0, step 0"),
        ([("trial", 4, 0, True)], "trials where first is: agent 0, step 4"),
    ],
)
def test_flags_finds_ends_and_firsts_that_do_not_alternate(changes, message):
    lines = findings(world_laws.flags(with_changes(*changes)))
    assert any(line.startswith(message) for line in lines), lines


def test_truncation_contradicts_a_spec_that_says_never():
    parts = world_laws.flags(with_spec(recorded(), truncates="never"))
    assert "truncations, though its spec says never: agent 1, step 5" in finding(parts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("reward", 6, 1, 1.0), "rewards after invalid rows: agent 1, step 6"),
        (("truncated", 7, 1, True), "ends after invalid rows: agent 1, step 7"),
        (("valid", 4, 0, False), "invalid rows with first: agent 0, step 4"),
    ],
)
def test_dead_finds_rewards_and_ends_of_invalid_rows(change, message):
    lines = findings(world_laws.dead(with_changes(change)))
    assert any(line.startswith(message) for line in lines), lines


def test_first_is_required_after_every_reset():
    wrong = with_changes(("first", 0, 1, False))
    wrong.after_reset = recorded().recording
    assert "rows without first after reset(): agent 1, step 0" in finding(world_laws.first(wrong))
    wrong.recording, wrong.after_reset = wrong.after_reset, wrong.recording
    assert "another reset(): agent 1, step 0" in finding(world_laws.first(wrong))


def test_kind_finds_observations_outside_the_space():
    box = with_spec(recorded(), observation=spaces.Box(0.0, 2000.0, (1,)))
    assert "agent 2, step 1; obs is 2001, must be finite, from 0 to 2000" in finding(world_laws.kind(box))
    more = under_test(scripted(), recorded().recording, requested=4)
    assert "requested 4, is 3" in finding(world_laws.kind(more))
    infinite = with_changes(("reward", 2, 0, torch.inf))
    assert "rewards that are not finite" in finding(world_laws.kind(infinite))


def test_last_needs_an_observation_for_every_truncation():
    target = recorded()
    target.recording = replace(target.recording, has_last_obs=[False] * STEPS)
    assert "truncations without a last observation: agent 1, step 5" in finding(world_laws.last(target))


def test_still_names_the_overwritten_step():
    target = recorded()
    target.recording = replace(target.recording, overwritten=["step 2, obs", "step 3, obs"])
    text = finding(world_laws.still(target))
    assert text.startswith("steps modified after they were returned: step 2, obs; return new tensors")


@pytest.mark.parametrize("name", ["recall", "ragged"])
def test_last_is_not_measured_if_all_observations_are_equal(name):
    def blind(self, step, actions):
        last = step.last_obs if step.last_obs is None else torch.full_like(step.last_obs, 255)
        return {"obs": torch.full_like(step.obs, 255), "last_obs": last}

    laws = holdfast.check_world(telling(blind, name))
    assert broken(laws) == {}
    assert len(parts_of(laws["last"], "n/a")) == 2


def test_last_is_not_measured_with_few_truncations():
    make, _, _ = SABOTAGES["last is the next first"]
    few = holdfast.check_world(make, agents=2, steps=11)
    assert few["last"].ok
    assert len(parts_of(few["last"], "n/a")) == 2


def test_observations_of_invalid_rows_may_be_anything():
    class Anything(Around):
        def tell(self, step, actions):
            self.drawn = np.random.default_rng()  # unseeded
            noise = torch.from_numpy(self.drawn.integers(0, 256, tuple(step.obs.shape), np.uint8))
            rows = step.valid[:, None, None]
            cut = step.truncated[:, None, None]
            last = torch.where(cut, step.last_obs, noise)
            return changed(step, obs=torch.where(rows, step.obs, noise), last_obs=last)

    def make(agents, seed):
        return Anything(make_world("ragged", agents, seed=seed, truncate=True))

    assert broken(holdfast.check_world(make)) == {}


class Latecomers:
    """Odd agents are invalid for three rows; then all have episodes of five steps."""

    spec = WorldSpec(obs_shape=(1,), action_names=("stay", "go"))

    def __init__(self, agents, seed):
        self.agents, self.seed, self.agent = agents, seed, torch.arange(agents)
        self.late = 3 * (self.agent % 2)

    def reset(self):
        self.t = 0
        return self.tell()

    def step(self, actions):
        self.t += 1
        return self.tell()

    def tell(self):
        age = self.t - self.late
        first, never = (age >= 0) & (age % 5 == 0), torch.zeros(self.agents, dtype=torch.bool)
        obs = rng.uniform(self.seed, rng.STREAM_WORLD, self.agent, self.t)[:, None]
        ended = first & (age > 0)
        return Step(obs, (age > 0).float(), ended, never, first | (self.t == 0), age >= 0, never)


def test_invalid_agents_may_join_later():
    laws = holdfast.check_world(Latecomers)
    assert laws.ok, broken(laws)
