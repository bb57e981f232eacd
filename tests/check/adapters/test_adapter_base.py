"""The interface that the check calls policies through."""

import pytest
import torch
from gymnasium import spaces
from torch import nn

from holdfast.check.adapters.base import SINGLE_STEPS, PolicyAdapter, flat
from holdfast.check.script import write_script


class Counter(PolicyAdapter):
    """Counts the steps of each episode and multiplies the count by a weight."""

    def __init__(self):
        self.module = nn.Linear(1, 1, bias=False)
        self.calls = []

    def random_obs(self, size, generator):
        return torch.rand(*size, 1, generator=generator)

    def initial(self, rows):
        return torch.zeros(rows)

    def act(self, step, state):
        self.calls.append("act")
        state = torch.where(step.first, 0.0, state) + 1
        return {"count": self.module(state[:, None])}, state

    def replay(self, batch, state):
        outputs = []
        for t in range(batch.batch[1]):
            outputs_t, state = self.act(batch[:, t], state)
            outputs.append(outputs_t["count"])
        return {"count": torch.stack(outputs, 1)}

    def advance(self, batch, state):
        self.calls.append(f"advance {batch.batch[1]}")
        return state + batch.batch[1]


class ReplaysFromZeros(Counter):
    def replay(self, batch, state):
        return super().replay(batch, torch.zeros_like(state))


def make_script(adapter, steps=16):
    options = {"share_of_starts": 0.0, "absences": False, "act": adapter.random_actions}
    return write_script(adapter.random_obs, 3, steps, **options)


@torch.no_grad()
def test_rollout_carries_the_state_and_replay_starts_from_entries():
    adapter = Counter()
    outputs = adapter.rollout_and_replay(make_script(adapter))
    count = outputs.rollout[0, :, 0] / adapter.module.weight[0, 0]
    assert torch.allclose(count, torch.arange(1.0, 17.0))
    assert outputs.replay.equal(outputs.rollout)
    assert adapter.evaluate(make_script(adapter)).equal(outputs.rollout)
    wrong = ReplaysFromZeros()
    outputs = wrong.rollout_and_replay(make_script(wrong))
    equal = torch.isclose(outputs.replay, outputs.rollout)[0, :, 0]
    assert equal.tolist() == [True] * 4 + [False] * 12, "four segments, of which one starts from zeros"


@torch.no_grad()
@pytest.mark.parametrize("steps", [SINGLE_STEPS, SINGLE_STEPS + 8])
def test_long_runs_are_segments_and_then_single_steps(steps):
    adapter = Counter()
    adapter.run_steps(make_script(adapter), adapter.initial(3), steps)
    segments = ["advance 4", "advance 4"] if steps > SINGLE_STEPS else []
    calls = [call for call in adapter.calls if call != "act"]
    assert calls == segments
    assert adapter.calls[-SINGLE_STEPS:] == ["act"] * SINGLE_STEPS


def test_call_replaces_the_weights_for_one_call():
    adapter = Counter()
    before, state = adapter.module.weight.clone(), adapter.initial(3)
    weight = torch.full((1, 1), 7.0, requires_grad=True)
    outputs, _ = adapter.call({"weight": weight}, "act", make_script(adapter).at(0), state)
    assert outputs["count"].tolist() == [[7.0]] * 3
    assert outputs["count"].grad_fn is not None
    assert adapter.module.weight.equal(before)


def test_copy_in_another_precision_leaves_the_original_alone():
    adapter = Counter()
    adapter.module.eval()
    copy = adapter.in_precision(torch.float64)
    assert (copy.module.weight.dtype, copy.module.training) == (torch.float64, True)
    assert (adapter.module.weight.dtype, adapter.module.training) == (torch.float32, False)


@pytest.mark.parametrize(
    ("actions", "shape", "dtype"),
    [
        (4, (5, 2), torch.int64),
        (spaces.MultiDiscrete([2, 3]), (5, 2, 2), torch.int64),
        (spaces.Box(-1, 1, (3,)), (5, 2, 3), torch.float32),
    ],
)
def test_random_actions_have_the_shape_of_the_space(actions, shape, dtype):
    adapter = Counter()
    adapter.actions = actions
    drawn = adapter.random_actions((5, 2), torch.Generator().manual_seed(0))
    assert (drawn.shape, drawn.dtype) == (shape, dtype)


def test_flat_concatenates_outputs_in_order():
    outputs = {"value": torch.tensor([1.0, 2.0]), "logits": torch.tensor([[3.0, 4.0], [5.0, 6.0]])}
    assert flat(outputs, 1).tolist() == [[1.0, 3.0, 4.0], [2.0, 5.0, 6.0]]
    assert flat({"y": torch.zeros(2, 3, 4, 5)}, 2).shape == (2, 3, 20)
