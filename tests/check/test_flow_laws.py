"""The laws cut, carry, clear and isolate: a right policy obeys each, and a broken one breaks it."""

from functools import cache

import pytest
import torch
from torch import nn

from helpers import foreign_policies as foreign
from holdfast.check import flow_laws
from holdfast.check.adapters import CleanRL, RawModule
from holdfast.check.context import prepare

pytestmark = pytest.mark.usefixtures("annotations_asleep")


@cache
def context_of(kind):
    torch.manual_seed(0)
    return prepare(RawModule(kind(), obs=5))


def agent_context(kind):
    torch.manual_seed(0)
    return prepare(CleanRL(kind(), obs=4, actions=3))


def broken(parts):
    return [part.what for part in parts if not part.ok]


@pytest.mark.parametrize("law", [flow_laws.cut, flow_laws.carry, flow_laws.clear, flow_laws.isolate])
def test_right_policy_obeys_the_law(law):
    parts = law(context_of(foreign.Stepper))
    assert len(parts) >= 3
    assert broken(parts) == []


def test_cut_finds_a_graph_kept_in_the_rollout():
    torch.manual_seed(0)
    adapter = foreign.functions()
    adapter.rollout_has_grad = True
    parts = flow_laws.cut(prepare(adapter))
    assert "gradient from act into an earlier act" in broken(parts)
    assert "gradient from replay into an earlier replay" not in broken(parts)


def test_cut_requires_a_gradient_through_time():
    findings = broken(flow_laws.cut(agent_context(foreign.CutsEveryStep)))
    assert "gradient from step to step of a segment" in findings
    assert "gradient of value to earlier observations against finite differences" in findings
    assert broken(flow_laws.cut(agent_context(foreign.Agent))) == []


class ClearsEveryFourthStep(foreign.Stepper):
    """Counts steps in its state, and resets both every fourth step."""

    def forward(self, x, state, first):
        state = x.new_zeros(len(x), 17) if state is None else state
        age = torch.where(first, 0.0, state[:, 16])
        y, after = super().forward(x, state[:, :16], first | (age >= 4))
        return y, torch.cat([after, torch.where(age >= 4, 1.0, age + 1)[:, None]], 1)


@pytest.mark.parametrize("kind", [foreign.IgnoresState, ClearsEveryFourthStep])
def test_carry_finds_a_policy_that_forgets(kind):
    parts = flow_laws.carry(context_of(kind))
    assert broken(parts)[:2] == [
        "information across segment edges, rollout",
        "information across segment edges, replay",
    ]
    assert ("information from step to step, evaluation" in broken(parts)) is (kind is foreign.IgnoresState)
    longest = 0 if kind is foreign.IgnoresState else 3
    assert f"the longest reach is {longest} steps" in parts[0].finding


def test_carry_is_not_measured_without_memory():
    torch.manual_seed(0)
    (part,) = flow_laws.carry(prepare(foreign.without_memory()))
    assert (part.what, part.ok, part.path) == ("nothing: the policy has no memory", True, "n/a")


def test_clear_finds_information_across_starts():
    parts = {part.what: part for part in flow_laws.clear(context_of(foreign.ClearsAfterReading))}
    across = parts["information across episode starts, rollout"]
    assert not across.ok
    assert "input step" in across.finding
    assert parts["information within episodes, rollout"].ok
    assert not parts["episodes against a rollout from the initial state, f32"].ok


def test_clear_is_not_measured_without_episode_flags():
    torch.manual_seed(0)
    (part,) = flow_laws.clear(prepare(RawModule(nn.GRU(5, 16))))
    assert part.what == "cannot clear: the policy gets no episode starts"


class NormalizesRows(foreign.Stepper):
    """Subtracts the mean of the batch."""

    def forward(self, x, state, first):
        return super().forward(x - x.mean(0), state, first)


class ReadsTheRowNumber(foreign.Stepper):
    """Adds the index of the row, as if rows were agents."""

    def forward(self, x, state, first):
        return super().forward(x + torch.arange(len(x)).to(x)[:, None], state, first)


def test_isolate_finds_rows_that_mix():
    parts = broken(flow_laws.isolate(context_of(NormalizesRows)))
    assert "other rows of the batch changed, rollout, f64" in parts
    assert {"half of the agents alone", "one agent alone"} <= set(parts)


def test_isolate_finds_outputs_that_depend_on_the_order_of_rows():
    parts = broken(flow_laws.isolate(context_of(ReadsTheRowNumber)))
    assert {"rows permuted, rollout", "rows permuted, replay"} <= set(parts)
    assert not any("other rows" in what for what in parts)


class AnswersLater(foreign.Stepper):
    """Returns the output of the step before."""

    def forward(self, x, state, first):
        state = x.new_zeros(len(x), 19) if state is None else torch.where(first[:, None], 0.0, state)
        y, after = super().forward(x, state[:, :16], first)
        return y + state[:, 16:], torch.cat([after, y], 1)


class Quantizes(foreign.Stepper):
    """Rounds its state to eighths."""

    def forward(self, x, state, first):
        y, state = super().forward(4 * x, state, first)
        return y, (8 * state).round() / 8


@pytest.mark.parametrize("kind", [AnswersLater, Quantizes])
def test_memories_that_answer_late_or_round_carry(kind):
    assert broken(flow_laws.carry(context_of(kind))) == []


class Frozen(foreign.Stepper):
    """Trains its last layer only."""

    def __init__(self):
        super().__init__()
        self.inwards.requires_grad_(False)
        self.cell.requires_grad_(False)


def test_frozen_weights_are_no_error():
    assert broken(flow_laws.cut(context_of(Frozen))) == []


def replay_three_rows_at_a_time(module, obs, actions, state, first):
    """Calls the core with batches of other sizes, as packed sequences do."""
    parts = [
        foreign.replay_in_pieces(
            module, *(leaf[rows] for leaf in (obs, actions)), {"h": state["h"][:, rows]}, first[rows]
        )["y"]
        for rows in torch.arange(len(obs)).split(3)
    ]
    return {"y": torch.cat(parts)}


def test_repacked_rows_may_round():
    torch.manual_seed(0)
    assert broken(flow_laws.isolate(prepare(foreign.functions(replay=replay_three_rows_at_a_time)))) == []
