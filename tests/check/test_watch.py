"""The check inside a run looks at what was really stored, and stops what is broken."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from check import own
from holdfast.check.script import write_script
from holdfast.check.subjects.wrapper import ScriptedWorld
from holdfast.check.watch import look
from holdfast.errors import ConfigError, ContractError
from holdfast.experience import Collector
from holdfast.values import due
from small import SPEC, Small, make_small

SHORT = {
    "trainer.total_timesteps": 256,
    "trainer.batch_size": 64,
    "trainer.minibatch_size": 32,
    "trainer.bptt_horizon": 16,
    "trainer.eval_episodes": 4,
    "world.agents": 4,
    "world.delay": 2,
}


def no_action(size, generator):
    return torch.zeros(size, dtype=torch.long)


def stored(policy, share_of_starts=0.2):
    def imagine(size, generator):
        return torch.randn(*size, 5, generator=generator)

    script = write_script(imagine, 6, 40, share_of_starts=share_of_starts, absences=True, act=no_action)
    world = ScriptedWorld(SPEC, script)
    collector = Collector(world, policy, length=16, horizon=8, seed=0)
    collector.rollout(0)
    return collector.rollout(1)


@given(n=st.integers(1, 50), iteration=st.integers(0, 500))
def test_when_it_is_due(n, iteration):
    assert due(f"every:{n}", iteration) == (iteration % n == 0 or iteration < 2)
    assert due("first", iteration) == (iteration < 2)
    assert not due("off", iteration)


def test_a_right_policy_is_found_right():
    policy = make_small()
    found = look(policy, stored(policy), 6)
    assert found["memory/check_replay"] <= 1e-6
    assert found["memory/check_clear"] == 0


@pytest.mark.parametrize(
    ("sabotage", "law"),
    [
        (own.ZeroEntry, "replay"),
        (own.UpdateIgnoresClears, "replay"),
        (own.TimeAndBatchSwapped, "replay"),
        (own.NoClear, "clear"),
    ],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_a_broken_one_is_stopped_with_the_law_the_place_and_what_to_type(sabotage, law):
    policy = make_small(sabotage)
    with pytest.raises(
        ContractError, match=rf"broken \({law}\).*agent \d, step \d+.*holdfast check.*trainer.check=off"
    ):
        look(policy, stored(policy), 6)


def in_bfloat16(kind=Small):
    """A policy that says enough to tell rounding from forgetting."""
    policy = make_small(kind, seed=3)
    with torch.no_grad():
        for weight in policy.parameters():
            weight *= 3
    policy.precision = "bfloat16"
    return policy


def test_rounding_to_bfloat16_is_no_alarm(monkeypatch):
    policy = in_bfloat16()
    segments = stored(policy)
    # As another order of adding would: far more than float32 may, and too little for a broken memory.
    segments.steps["values"] += 1e-3 * torch.randn(segments.steps["values"].shape)
    found = look(policy, segments, 6)
    assert found["memory/check_replay"] > 1e-3
    assert found["memory/check_clear"] == 0


@pytest.mark.parametrize(
    ("sabotage", "law"),
    [(own.ZeroEntry, "replay"), (own.TimeAndBatchSwapped, "replay"), (own.NoClear, "clear")],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_a_broken_memory_in_bfloat16_is_stopped(sabotage, law):
    policy = in_bfloat16(sabotage)
    with pytest.raises(ContractError, match=rf"broken \({law}\).*agent \d, step \d+"):
        look(policy, stored(policy), 6)


def test_nothing_is_touched():
    policy = make_small()
    segments = stored(policy)
    steps, live = segments.steps.clone(), policy.store.snapshot().tree
    look(policy, segments, 6)
    assert all((segments.steps[key] == steps[key]).all() for key in sorted(steps.keys()))
    assert all(leaf.equal(policy.store.snapshot().tree[key]) for key, leaf in live.items())


def test_without_a_start_inside_there_is_nothing_to_cross():
    policy = make_small()
    found = look(policy, stored(policy, share_of_starts=0.0), 6)
    assert set(found) == {"memory/check_replay"}


@pytest.mark.parametrize(("when", "looked"), [("first", [1, 2]), ("every:3", [1, 2, 4]), ("off", [])])
def test_a_run_looks_when_it_is_told_to(tmp_path, when, looked):
    run = holdfast.train("recall", {**SHORT, "runs_dir": str(tmp_path), "trainer.check": when})
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if "memory/check_replay" in line] == looked
    assert all(line["memory/check_clear"] == 0 for line in lines if "memory/check_clear" in line)


@pytest.mark.parametrize("value", ["second", "every:0", "every:x", "every"])
def test_a_misspelt_value_says_what_to_give(value):
    with pytest.raises(ConfigError, match="every:"):
        holdfast.train("recall", {"trainer.check": value})


class Forgets(holdfast.Fast):
    """`fast`, learning from zeros, and loud: a newborn `fast` says too little for float32 to tell."""

    def __init__(self, spec, **options):
        super().__init__(spec, **options)
        with torch.no_grad():
            for weight in self.parameters():
                weight.mul_(3)

    def replay(self, entry):
        return super().replay(entry.apply(torch.zeros_like))


def test_a_run_with_broken_memory_stops_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.setitem(holdfast.policies.POLICIES, "forgets", Forgets)
    broken = {**SHORT, "policy.name": "forgets", "runs_dir": str(tmp_path), "world.delay": 40}
    with pytest.raises(ContractError, match="broken"):
        holdfast.train("recall", broken)
    assert holdfast.train("recall", {**broken, "trainer.check": "off"}).finished


class SaysNaN(own.Small):
    """Is not a number where it is replayed."""

    def decode(self, features):
        thoughts = super().decode(features)
        return thoughts._replace(values=thoughts.values * torch.nan) if self.store.is_replaying else thoughts


def test_what_is_not_a_number_is_stopped():
    policy = make_small(SaysNaN)
    with pytest.raises(ContractError, match="is not finite"):
        look(policy, stored(policy), 6)
