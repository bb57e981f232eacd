"""Long episodes, long segments, many rows: what eight agents and 32 steps do not show."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from holdfast.check.compare import BOUND, SHORT, State, expect_close, expect_nonzero
from holdfast.check.policy_copy import HORIZON, PolicyCopy
from holdfast.check.results import Measurement
from holdfast.check.script import Script, write_script
from holdfast.types import Float, Int, Tensor

if TYPE_CHECKING:
    from holdfast.check.context import CheckContext

LONG = 96
"""Steps of the long episodes."""
ROWS, FEW_ROWS = 64, 4
LARGE_OBS = 100
"""Numbers of an observation above which fewer rows are run."""
LATE = 70
"""The first step at which a long episode may end."""
VARIANTS = 6
"""Rolls of the observations, before an overwritten memory counts as forgetful."""
REACH = 8
"""Steps after a step within which an output must show what was before it."""


@dataclass(frozen=True)
class LongRun:
    """A script of long episodes and its chain of single steps."""

    policy: PolicyCopy
    script: Script
    columns: list[str]

    @staticmethod
    def of(context: "CheckContext") -> "LongRun":
        """Draw the script: no starts but the first, and one after step 70 for a quarter of the rows."""
        large = context.script.obs[0, 0].numel() > LARGE_OBS
        policy = context.as_trained if large else context.exact
        adapter, rows = policy.adapter, FEW_ROWS if large else ROWS
        script = write_script(
            adapter.random_obs, rows, LONG, share_of_starts=0.0, absences=False, act=adapter.random_actions, seed=1
        )
        first = torch.zeros_like(script.first)
        first[:, 0] = adapter.sees_first
        starting = torch.arange(rows // 4)
        if adapter.sees_first:
            first[starting, LATE + 3 * (starting % 8)] = True
        return LongRun(policy, script.with_starts(first), context.columns)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.script.agents

    @cached_property
    def chain(self) -> tuple[Float[Tensor, "A N K"], list[State]]:
        """Outputs and states of single steps."""
        return self.policy.steps(self.script)

    @cached_property
    def possible(self) -> bool:
        """Whether the policy runs as many steps at all."""
        try:
            return bool(self.chain[0].isfinite().all())
        except Exception:
            return False

    @property
    def options(self) -> dict[str, Any]:
        """Bound and columns of a comparison."""
        return {"bound": BOUND[self.policy.kind], "columns": self.columns}

    @property
    def short(self) -> str:
        """The name of the precision."""
        return SHORT[self.policy.kind]


def late_starts(run: LongRun, clears: bool) -> list[Measurement]:
    """An episode start after 70 and more steps clears the state."""
    if not (run.possible and clears and run.policy.adapter.sees_first):
        return []
    few = torch.arange(max(1, run.rows // 4))
    script = run.script[few]
    actual = run.chain[0][few]
    expected, _ = run.policy.steps(script, reset=script.first)
    what = f"episodes that start after {LATE} steps against a run from the initial state, {run.short}"
    return [expect_close(what, actual, expected, path="late start", **run.options)]


def late_memory(run: LongRun) -> list[Measurement]:
    """Information crosses every step of a long episode."""
    if not run.possible or run.policy.has_no_memory:
        return []
    results = [_forgotten(run, steps) for steps in _examined(run)]
    bad = [step for steps, _ in results for step in steps]
    size = 0.0 if bad else min(smallest for _, smallest in results)
    step = min(bad, default=0)
    finding = f"no observation before step {step} of an episode changes an output from there on"
    return [expect_nonzero("information across each step of a long episode", size, finding, "late memory")]


def _examined(run: LongRun) -> list[Int[Tensor, " A"]]:
    """Return the step that each row examines, run by run: together all steps; a sample where there are few rows."""
    rows = run.rows - run.rows // 4
    steps = torch.arange(2, LONG - REACH + 1)
    if rows < REACH:
        return [steps[32 :: len(steps[32:]) // rows][:rows]]
    return [torch.arange(at, at + rows).clamp(max=int(steps[-1])) for at in range(2, int(steps[-1]) + 1, rows)]


def _forgotten(run: LongRun, steps: Int[Tensor, " A"]) -> tuple[list[int], float]:
    """Return the steps that nothing crosses whatever the observations are, and the smallest change after the others."""
    forgotten, smallest = torch.ones(len(steps), dtype=torch.bool), 0.0
    for script in (run.script, *variants(run.script)):
        crossing = _crossings(run, script, steps)
        smallest = max(smallest, float(crossing[crossing > 0].min()) if bool((crossing > 0).any()) else 0.0)
        forgotten &= crossing == 0
        if not bool(forgotten.any()):
            break
    return steps[forgotten].tolist(), smallest


def variants(script: Script) -> Iterator[Script]:
    """Yield the script with other observations: some may overwrite a memory entirely, and not all do."""
    yield script.swapped()
    for _ in range(VARIANTS):
        script = script.rolled()
        yield script
        yield script.swapped()


def _crossings(run: LongRun, script: Script, steps: Int[Tensor, " A"]) -> Float[Tensor, " A"]:
    """Change what each row observed before a step of its own; return the change after it."""
    rows = torch.arange(run.rows // 4, run.rows)
    script = script[rows]
    before = torch.arange(LONG + 1)[None] < steps[:, None]
    base = run.chain[0][rows] if script.obs.equal(run.script[rows].obs) else run.policy.steps(script)[0]
    changed, _ = run.policy.steps(script.changed(before))
    diff = (changed - base).abs().amax(-1)
    after = torch.arange(LONG)[None]
    near = (after >= steps[:, None]) & (after < steps[:, None] + REACH)
    return (diff * near).amax(1)


def long_segments(run: LongRun) -> list[Measurement]:
    """A segment of 96 steps gives the outputs of single steps."""
    if not run.possible or not run.policy.adapter.reads_segments:
        return []
    few = torch.arange(min(6, run.rows))
    expected, states = run.chain
    try:
        actual = run.policy.replay(run.script.step_batches(0, LONG)[few], run.policy.rows.pick(states[0], few))
    except Exception:
        # A policy may have a longest segment.
        return []
    what = f"one segment of {LONG} steps against single steps, {run.short}"
    return [expect_close(what, actual, expected[few], path="long segment", **run.options)]


def other_sizes(context: "CheckContext") -> list[Measurement]:
    """Segments of other numbers of rows and steps, neither equal nor powers of two, give the same outputs."""
    policy, script = context.exact, context.script
    expected, states = policy.steps(script)
    parts = []
    for rows, length, start in ((3, 7, HORIZON + 1), (7, 3, 5)):
        few = torch.arange(rows)
        batch = script.step_batches(start, start + length)[few]
        actual = policy.replay(batch, policy.rows.pick(states[start], few))
        what = f"{rows} segments of {length} steps against single steps, {SHORT[policy.kind]}"
        right = expected[few, start : start + length]
        options: dict[str, Any] = {"columns": context.columns, "path": "other sizes"}
        parts.append(expect_close(what, actual, right, BOUND[policy.kind], **options))
    return parts


def many_rows(run: LongRun, starts: bool) -> list[Measurement]:
    """64 rows give the outputs of eight rows at a time."""
    steps, policy = 3 if run.rows < ROWS else 6, run.policy
    script = run.script
    if run.rows < ROWS:
        script = script[torch.arange(ROWS) % run.rows]
        script = (
            replace(script, obs=script.obs * (1 + 0.01 * torch.arange(ROWS).reshape(-1, *[1] * (script.obs.dim() - 1))))
            if script.obs.is_floating_point()
            else script
        )
    first = script.first.clone()
    if starts:
        first[:, 1:steps] |= torch.rand(ROWS, steps - 1, generator=torch.Generator().manual_seed(5)) < 0.3
    script = script.with_starts(first)
    chunks = torch.arange(ROWS).split(HORIZON)
    # States before the steps are those of small batches, so that a bug of large ones shows in both paths.
    small = [policy.steps(script[rows], stop=steps) for rows in chunks]
    expected = torch.cat([outputs for outputs, _ in small])
    actual, _ = policy.steps(script, stop=steps)
    entry = policy.rows.cat([states[1] for _, states in small])
    replayed = policy.replay(script.step_batches(1, steps), entry)
    return [
        expect_close(
            f"{ROWS} agents against {HORIZON} at a time, {run.short}", actual, expected, path="many rows", **run.options
        ),
        expect_close(
            f"{ROWS} segments against {HORIZON} agents at a time, {run.short}",
            replayed,
            expected[:, 1:],
            path="many rows",
            **run.options,
        ),
    ]
