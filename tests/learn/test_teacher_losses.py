import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.learn.losses import teacher_action_loss, teacher_value_loss
from holdfast.learn.teachers import anneal_teacher
from holdfast.policies.distributions import Categorical, Gaussian, MultiCategorical


def numbers(*row):
    return torch.tensor([row], dtype=torch.float64)


def mask(*row):
    return torch.tensor([row], dtype=torch.bool)


def test_the_action_loss_by_hand():
    # The teacher: 1/4 and 3/4, then certain of the second. The student: 1/2 and 1/2, then 1/4 and 3/4.
    # -(1/4 log 1/2 + 3/4 log 1/2) = log 2;  -log 3/4. The third step is nobody's.
    teacher = numbers([0.25, 0.75], [0.0, 1.0], [0.5, 0.5]).log().clamp(min=-1e9)
    student = numbers([0.5, 0.5], [0.25, 0.75], [1e-9, 1.0]).log()
    loss = teacher_action_loss(Categorical(2), teacher, student, mask(1, 1, 0))
    assert float(loss) == pytest.approx((math.log(2) - math.log(0.75)) / 2, rel=1e-12)


def test_the_value_loss_by_hand():
    # ((1 - 3)^2 + (2 - 2)^2) / 2; the third step is nobody's.
    assert float(teacher_value_loss(numbers(3, 2, 50), numbers(1, 2, 0), mask(1, 1, 0))) == 2.0


@pytest.mark.parametrize("kind", [Categorical(4), MultiCategorical((3, 2)), Gaussian(2)])
def test_a_student_that_follows_the_action_loss_becomes_its_teacher(kind):
    generator = torch.Generator().manual_seed(0)
    teacher = kind.parameters(torch.randn(2, 3, kind.size, generator=generator, dtype=torch.float64))
    scores = torch.zeros(2, 3, kind.size, dtype=torch.float64, requires_grad=True)
    valid = torch.ones(2, 3, dtype=torch.bool)
    optimizer = torch.optim.Adam([scores], lr=0.05)
    for _ in range(600):
        optimizer.zero_grad()
        teacher_action_loss(kind, teacher, kind.parameters(scores), valid).backward()
        optimizer.step()
    torch.testing.assert_close(kind.parameters(scores), teacher, rtol=0, atol=1e-3)


def test_the_value_loss_pulls_towards_the_teacher():
    # d/dv mean (v - t)^2 = 2 (v - t) / 2
    values = numbers(1, 2, 0).requires_grad_()
    teacher_value_loss(numbers(3, 2, 50), values, mask(1, 1, 0)).backward()
    assert values.grad.tolist() == [[-2.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("step", "counts"), [(0, 1.0), (349, 1.0), (350, 1.0), (675, 0.5), (935, 0.1), (1000, 0.0), (5000, 0.0)]
)
def test_anneal_teacher_by_hand(step, counts):
    # Of 1000 steps the last 65 % lead down: from step 350, by 1/650 a step.
    assert anneal_teacher(step, 1000, 0.65) == pytest.approx(counts, abs=1e-12)


@pytest.mark.parametrize(("share", "half"), [(0.0, 1.0), (1.0, 0.5)])
def test_anneal_teacher_shares_zero_and_one(share, half):
    assert anneal_teacher(500, 1000, share) == half
    assert anneal_teacher(0, 1000, share) == 1.0
    assert anneal_teacher(1000, 1000, share) == 0.0


@given(steps=st.integers(1, 10**9), share=st.floats(0, 1), part=st.floats(0, 1.2))
def test_anneal_teacher_is_monotonic(steps, share, part):
    step = int(part * steps)
    now, then = anneal_teacher(step, steps, share), anneal_teacher(step + 1, steps, share)
    assert 0 <= then <= now <= 1
