"""The kernel of draws, in Triton's interpreter where there is no GPU, against torch's operations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import triton_interpreter
from holdfast import kernel_support, rng

triton_interpreter.repair()
CPU = torch.device("cpu")
integers = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.skipif(kernel_support.refused_on(CPU) is not None, reason="Triton cannot run here")
@settings(max_examples=25)
@given(integers, integers, st.booleans(), st.integers(1, 2**31), st.sampled_from([(7,), (3, 1), (1,)]))
def test_kernel_draws_the_same_numbers(seed, step, is_tensor, limit, shape):
    from holdfast import rng_kernel

    agent = 3 * torch.arange(100, 100 + torch.Size(shape).numel()).reshape(shape)
    at = torch.tensor(step) if is_tensor else step
    expected = {
        "bits": rng.random_bits(seed, rng.STREAM_WORLD, agent, at),
        "uniform": rng.uniform(seed, rng.STREAM_WORLD, agent, at),
        "randint": rng.randint(limit, seed, rng.STREAM_WORLD, agent, at),
    }
    for kind, numbers in expected.items():
        drawn = rng_kernel.draw(kind, agent, at, seed=seed, stream=rng.STREAM_WORLD, limit=limit)
        assert drawn.dtype == numbers.dtype
        assert torch.equal(drawn, numbers)


@pytest.mark.skipif(kernel_support.refused_on(CPU) is not None, reason="Triton cannot run here")
def test_kernel_draws_all_steps_of_all_agents():
    from holdfast import rng_kernel

    agent, steps = torch.arange(50, 57)[:, None], torch.arange(1000, 1013)
    for kind, draw in (("uniform", rng.uniform), ("bits", rng.random_bits)):
        numbers = rng_kernel.draw(kind, agent, steps, seed=9, stream=rng.STREAM_ACTION)
        assert torch.equal(numbers, draw(9, rng.STREAM_ACTION, agent, steps))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1000,), (5, 1)])
def test_draws_on_a_gpu_are_those_of_the_cpu(shape):
    agent = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for step in (3, torch.tensor(-(2**40))):
        at = step.cuda() if isinstance(step, torch.Tensor) else step
        assert torch.equal(rng.uniform(5, 2, agent.cuda(), at).cpu(), rng.uniform(5, 2, agent, step))
        assert torch.equal(rng.randint(9, 5, 2, agent.cuda(), at).cpu(), rng.randint(9, 5, 2, agent, step))
