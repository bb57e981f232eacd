"""The check inside a run uses stored segments, and stops a broken run."""

import json

import pytest
import torch

import holdfast
from helpers import broken_policies as own
from helpers.small_policy import SPEC, Small, make_small
from holdfast.check.adapters.holdfast import ScriptedWorld
from holdfast.check.script import write_script
from holdfast.errors import ContractError
from holdfast.monitor.replay_check import check_segments
from holdfast.rollout import Collector

SHORT = {
    "trainer.total_timesteps": 256,
    "trainer.batch_size": 64,
    "trainer.minibatch_size": 32,
    "trainer.bptt_horizon": 16,
    "report": "off",
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


def test_correct_policy_passes_replay_check():
    policy = make_small()
    metrics = check_segments(policy, stored(policy))
    assert metrics["memory/check_replay"] <= 1e-6
    assert metrics["memory/check_clear"] == 0


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
def test_broken_memory_stops_with_law_and_location(sabotage, law):
    policy = make_small(sabotage)
    with pytest.raises(
        ContractError, match=rf"broken \({law}\).*agent \d, step \d+.*holdfast check.*trainer.check=off"
    ):
        check_segments(policy, stored(policy))


def in_bfloat16(kind=Small):
    """A policy with outputs large enough to distinguish rounding from lost states."""
    policy = make_small(kind, seed=3)
    with torch.no_grad():
        for weight in policy.parameters():
            weight *= 3
    policy.precision = "bfloat16"
    return policy


def test_bfloat16_rounding_passes_replay_check(monkeypatch):
    policy = in_bfloat16()
    segments = stored(policy)
    # As another order of adding would: far more than float32 may, and too little for a broken memory.
    segments.steps["values"] += 1e-3 * torch.randn(segments.steps["values"].shape)
    metrics = check_segments(policy, segments)
    assert metrics["memory/check_replay"] > 1e-3
    assert metrics["memory/check_clear"] == 0


@pytest.mark.parametrize(
    ("sabotage", "law"),
    [(own.ZeroEntry, "replay"), (own.TimeAndBatchSwapped, "replay"), (own.NoClear, "clear")],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_a_broken_memory_in_bfloat16_is_stopped(sabotage, law):
    policy = in_bfloat16(sabotage)
    with pytest.raises(ContractError, match=rf"broken \({law}\).*agent \d, step \d+"):
        check_segments(policy, stored(policy))


def test_replay_check_has_no_side_effects():
    policy = make_small()
    segments = stored(policy)
    steps, live = segments.steps.clone(), policy.store.snapshot().tree
    check_segments(policy, segments)
    assert all((segments.steps[key] == steps[key]).all() for key in sorted(steps.keys()))
    assert all(leaf.equal(policy.store.snapshot().tree[key]) for key, leaf in live.items())


def test_clear_check_needs_a_reset_inside():
    policy = make_small()
    metrics = check_segments(policy, stored(policy, share_of_starts=0.0))
    assert set(metrics) == {"memory/check_replay"}


@pytest.mark.parametrize(("when", "looked"), [("first", [1, 2]), ("every:3", [1, 2, 4]), ("off", [])])
def test_run_checks_at_its_interval(tmp_path, when, looked):
    run = holdfast.train("recall", {**SHORT, "runs_dir": str(tmp_path), "trainer.check": when})
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if "memory/check_replay" in line] == looked
    assert all(line["memory/check_clear"] == 0 for line in lines if "memory/check_clear" in line)


class Forgets(holdfast.Fast):
    """`fast` trained from zeros, with large outputs: at initialization they are too small for float32."""

    def __init__(self, spec, **options):
        super().__init__(spec, **options)
        with torch.no_grad():
            for weight in self.parameters():
                weight.mul_(3)

    def replay(self, entry):
        return super().replay(entry.apply(torch.zeros_like))


def test_run_with_broken_memory_stops(tmp_path):
    broken = {**SHORT, "policy.name": f"{__name__}:Forgets", "runs_dir": str(tmp_path), "world.delay": 40}
    with pytest.raises(ContractError, match="broken"):
        holdfast.train("recall", broken)
    assert holdfast.train("recall", {**broken, "trainer.check": "off"}).finished


class SaysNaN(own.Small):
    """Is not a number where it is replayed."""

    def decode(self, features):
        thoughts = super().decode(features)
        return thoughts._replace(values=thoughts.values * torch.nan) if self.store.is_replaying else thoughts


def test_nan_outputs_stop_the_run():
    policy = make_small(SaysNaN)
    with pytest.raises(ContractError, match="are not finite"):
        check_segments(policy, stored(policy))
