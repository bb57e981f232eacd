"""Agent trace: every number in its lines equals the stored one."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from helpers import broken_policies as own
from helpers.monitored_policies import POLICIES, T, scripted, world_for
from helpers.scripted_world import Scripted, make_reader, random_script
from helpers.small_policy import make_small
from holdfast.errors import ConfigError
from holdfast.learn import replay
from holdfast.memory.episode_resets import reset_mask
from holdfast.monitor import AgentTrace, shapes
from holdfast.policies import make_policy
from holdfast.rollout import Collector
from holdfast.worlds import make_world


def trace_rollouts(policy, world, agent, rollouts=2, segments=2, **options):
    """Collect some rollouts; return each one's lines, its segments and the live state after it."""
    collector = Collector(world, policy, length=segments * T, horizon=T, seed=0)
    trace, records = AgentTrace(policy, world.agents, agent, **options), []
    for iteration in range(rollouts):
        rows = collector.rollout(iteration)
        copied = type(rows)(rows.steps.clone(), rows.entry_state.clone(), rows.tail.clone(), rows.version)
        records.append((trace.rollout(rows, iteration), copied, policy.store.snapshot().tree))
    return records


def length_of(state):
    return float(torch.cat([leaf.flatten() for leaf in state.values()]).norm())


def read(lines):
    """Parse the lines: (step, event) pairs, and state norms by step."""
    events, sizes = set(), {}
    for line in lines:
        match = re.match(r"[├└]─ (?:edge after )?steps? (\d+)(?:-(\d+))?: (.*)", line)
        if not match:
            continue
        first, last, what = int(match[1]), int(match[2] or match[1]), match[3]
        if "inactive" in what:
            events |= {(step, "away") for step in range(first, last + 1)}
        elif "ended" in what:
            events.add((first, re.search(r"ended \((.*)\), reward (.*)", what).groups()))
        elif "starts" in what:
            events.add((first, re.match(r"(\w+) starts, memory (cleared|kept)", what).groups()))
            size = re.search(r"\|state\| (\S+) → 0", what)
            sizes |= {(first, "before"): float(size[1])} if size else {}
        elif "state carried over" in what:
            sizes[first, "edge"] = float(re.search(r"\|state\| (\S+);", what)[1])
    return events, sizes


def by_hand(segments, agent, agents, start, clear_on="episode"):
    """The same from the stored steps."""
    count, events = len(segments) // agents, set()
    clear = reset_mask(segments.steps, clear_on)
    for k in range(count):
        row, begin = agent * count + k, start + k * T
        step = {key: segments.steps[key][row].tolist() for key in segments.steps.keys() if key != "env_obs"}  # noqa: SIM118
        for t in range(T):
            if not step["valid"][t]:
                events.add((begin + t, "away"))
            flags = [w for w, key in (("terminated", "dones"), ("truncated", "truncateds")) if step[key][t]]
            if flags:
                events.add((begin + t, (" and ".join(flags), f"{step['rewards'][t]:.4g}")))
            if step["first"][t] or clear[row, t]:
                word = "episode" if step["first"][t] else "trial"
                events.add((begin + t, (word, "cleared" if clear[row, t] else "kept")))
    return events


def state_before(policy, segments, row, t):
    """Run a row step by step up to step t, from its entry state; return the state there."""
    one = segments.rows(torch.tensor([row]))
    policy.store.close()
    policy.store.write(0, one.entry_state)
    for k in range(t):
        td = one.steps[:, k].select("env_obs", "first", "valid", "trial", "actions")
        td["training_env_id_start"] = torch.zeros(1, dtype=torch.long)
        with torch.no_grad():
            policy(td, action=td["actions"])
    return length_of(policy.store.view(0))


@pytest.mark.parametrize("clear_on", ["episode", "trial", "never"])
@pytest.mark.parametrize("kind", POLICIES)
def test_trace_has_stored_starts_ends_and_invalid_steps(kind, clear_on):
    policy = POLICIES[kind](clear_on=clear_on)
    for iteration, (lines, segments, _) in enumerate(trace_rollouts(policy, world_for(policy), agent=2)):
        events, _ = read(lines)
        assert events == by_hand(segments, 2, 6, iteration * 2 * T, clear_on)
        assert events


@pytest.mark.parametrize("kind", POLICIES)
def test_trace_state_norms_match_rollout(kind):
    policy = POLICIES[kind]()
    records = trace_rollouts(policy, world_for(policy), agent=3)
    for iteration, (lines, segments, live) in enumerate(records):
        _, sizes = read(lines)
        start = iteration * 2 * T
        entries = [length_of(segments.entry_state[6 + k]) for k in range(2)]
        came = [line for line in lines if "entry state" in line]
        for line, entry in zip(came, entries, strict=True):
            assert line.endswith(f"|state| {entry:.4g}" if entry else "zeros")
        assert sizes[start + T - 1, "edge"] == pytest.approx(entries[1], rel=1e-3)
        assert sizes[start + 2 * T - 1, "edge"] == pytest.approx(length_of(live[3]), rel=1e-3)
        before = {step: size for (step, which), size in sizes.items() if which == "before"}
        assert before
        for step, size in before.items():
            k, t = divmod(step - start, T)
            assert size == pytest.approx(state_before(policy, segments, 6 + k, t), rel=1e-3, abs=1e-9)


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.integers(0, 3))
def test_trace_of_any_episode_pattern(seed, agent):
    script = random_script(4, 60, seed, ends=0.1)
    for iteration, (lines, segments, _) in enumerate(trace_rollouts(make_reader(), script, agent)):
        if "episodes of" not in "".join(lines):
            assert read(lines)[0] == by_hand(segments, agent, 4, iteration * 2 * T)
        assert all(len(line) <= 100 for line in lines)
        when = [int(step) for line in lines for step in re.findall(r"─ (?:edge after )?steps? (\d+)", line)]
        assert when == sorted(when)


def test_trace_of_segments_and_entry_state():
    (first, _, _), (second, _, _) = trace_rollouts(make_small(), scripted(starts=0.0, absences=False), agent=5)
    assert first[0] == f"Agent 5 · rollout 1 · steps 0-{2 * T - 1} · weights of version 0"
    assert first[1:4] == [
        f"Steps 0-{T - 1}: segment 1 of 2",
        "├─ entry state: zeros",
        "├─ step 0: episode starts, memory cleared: |state| 0 → 0",
    ]
    assert second[0] == f"Agent 5 · rollout 2 · steps {2 * T}-{4 * T - 1} · weights of version 1"
    assert [line[:2] for line in second] == ["Ag", "St", "├─", "└─", "St", "├─", "└─"]


def test_trace_groups_equal_episodes():
    ended = torch.zeros(2, 80, dtype=torch.bool)
    ended[1, [5, 7, 9, 11, 13, 14]] = True
    script = Scripted(2, 80, terminated=ended)
    collector = Collector(script, make_reader(), length=16, horizon=16, seed=0)
    policy, rows = collector.policy, collector.rollout(0)
    lines = AgentTrace(policy, 2, 1).rollout(rows, 0)
    sizes = [state_before(policy, rows, 1, t) for t in (5, 7, 9, 11)]
    span = f"{min(sizes):.4g}..{max(sizes):.4g} → 0"
    assert [line.partition(", memory")[0] for line in lines[2:-1]] == [
        "├─ entry state: zeros",
        "├─ step 0: episode starts",
        "├─ step 5: episode ended (terminated), reward 1005",
        # Two rewards each, such as 1006 + 1007.
        "├─ steps 5-12: 4 episodes of 2 steps, terminated, mean return 2019",
        "├─ steps 5-12: 4 times memory cleared: |state| " + span,
        "├─ step 13: episode starts",
        "├─ step 14: episode ended (terminated), reward 1014",
        "├─ step 14: episode starts",
    ]


def test_trace_separates_different_episodes():
    ended, cut = torch.zeros(1, 80, dtype=torch.bool), torch.zeros(1, 80, dtype=torch.bool)
    ended[0, [2, 4, 6]] = cut[0, [8, 10]] = True
    world = Scripted(1, 80, terminated=ended, truncated=cut)
    collector = Collector(world, make_reader(), length=16, horizon=16, seed=0)
    lines = AgentTrace(collector.policy, 1, 0).rollout(collector.rollout(0), 0)
    assert sum("3 episodes of 2 steps, terminated" in line for line in lines) == 1
    assert sum("episode ended (truncated)" in line for line in lines) == 2


def test_trace_of_invalid_steps():
    step = torch.arange(80)[None]
    ended, first, valid = step % 3 == 2, step % 3 == 0, step % 3 != 2
    world = Scripted(1, 80, terminated=ended, first=first, valid=valid)
    collector = Collector(world, make_reader(), length=12, horizon=12, seed=0)
    lines = AgentTrace(collector.policy, 1, 0).rollout(collector.rollout(0), 0)
    # Steps 1 and 2 pay, 4 and 5, 7 and 8, 10 and 11.
    assert lines[3] == "├─ steps 0-11: 4 episodes of 2 steps and 1 inactive, terminated, mean return 12"


def test_trace_of_recall_fits_a_terminal():
    world = make_world("recall", agents=43)
    policy = make_policy("fast", world, hidden_size=16)
    collector = Collector(world, policy, length=128, horizon=64, seed=0)
    lines = AgentTrace(policy, 43).rollout(collector.rollout(0), 0)
    assert any("6 episodes of 10 steps, terminated" in line for line in lines)
    assert len(lines) < 16
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("sabotage", "keeps_memory", "odd"),
    [(own.NoClear, True, False), (own.LateClear, True, True)],
    ids=["never", "late"],
)
def test_trace_of_policy_that_does_not_clear(sabotage, keeps_memory, odd):
    policy = make_small(sabotage)
    lines = [line for each, _, _ in trace_rollouts(policy, scripted(absences=False), agent=0) for line in each]
    starts = [line for line in lines if "episode starts" in line]
    assert starts
    assert any("memory kept" in line for line in starts) == keeps_memory
    assert any("nothing starts, memory cleared" in line for line in lines) == odd


def test_trace_of_foreign_memory_uses_flags():
    torch.manual_seed(0)
    lines = [line for each, _, _ in trace_rollouts(own.NoDetach(), scripted(), agent=0) for line in each]
    assert any(line.endswith("episode starts, memory cleared") for line in lines)


def test_trace_without_memory():
    text = "\n".join(
        line for each, _, _ in trace_rollouts(make_small(memory="none"), scripted(), agent=0) for line in each
    )
    assert "the policy has no memory" in text
    assert "episode starts\n" in text
    assert "|state|" not in text
    assert "cleared" not in text


@pytest.mark.parametrize("kind", [*POLICIES, "drops out"])
def test_trace_has_no_side_effects(kind):
    policy = make_small(own.UsesDropout) if kind == "drops out" else POLICIES[kind]()
    collector = Collector(world_for(policy), policy, length=2 * T, horizon=T, seed=0)
    segments = collector.rollout(0)
    live, steps = policy.store.snapshot().tree, segments.steps.clone()
    replay(policy, segments)["values"].sum().backward()
    grads = [None if each.grad is None else each.grad.clone() for each in policy.parameters()]
    generator = torch.get_rng_state()
    AgentTrace(policy, 6, 1).rollout(segments, 0)
    assert torch.equal(generator, torch.get_rng_state())
    assert (policy.store.snapshot().tree == live).all()
    assert (segments.steps == steps).all()
    for each, grad in zip(policy.parameters(), grads, strict=True):
        assert each.grad is None if grad is None else torch.equal(each.grad, grad)


@pytest.mark.parametrize("agent", [-1, 4])
def test_trace_of_missing_agent_is_an_error(agent):
    with pytest.raises(ConfigError, match=f"no agent {agent} to trace; there are agents 0 to 3"):
        AgentTrace(make_small(), 4, agent)


def test_trace_of_an_update():
    trace = AgentTrace(make_small(), 4, 0)
    assert trace.update(2, 3) == ["Update · weights changed: version 2 → 3"]
    assert trace.update(2, 3, {"memory/drift": 0.01234567, "memory/stale_kl": 0.5}) == [
        "Update · weights changed: version 2 → 3",
        "├─ memory/drift 0.01235",
        "└─ memory/stale_kl 0.5",
    ]


def test_shapes_name_every_tensor():
    tree = TensorDict(
        {"env_obs": {"image": torch.zeros(2, 3, 4, 4, dtype=torch.uint8)}, "first": torch.zeros(2, 3).bool()},
        [2, 3],
    )
    assert shapes(tree) == ["env_obs.image  [2, 3, 4, 4] uint8", "first          [2, 3] bool"]
    assert shapes(TensorDict({}, [2])) == []
