"""Our kernels against the float64 reference: compiled on a GPU, interpreted elsewhere."""

import copy
import itertools
from dataclasses import astuple
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import triton_interpreter
from holdfast import cuda_graphs
from holdfast.memory import GRU, LSTM, reference, use_kernel
from holdfast.memory.kernels import autotune, ops
from holdfast.memory.kernels.autotune import LaunchPlan, TuningJob
from holdfast.torch_versions import matmul_precision

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = [LSTM, GRU]
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
UNSPLIT, SPLIT, STREAMED = (
    LaunchPlan(16, 128, 4),
    LaunchPlan(16, 32, 4, chunk=32),
    LaunchPlan(16, 16, 4, chunk=32, stages=2),
)
PLANS = {"unsplit": UNSPLIT, "split": SPLIT, "streamed": STREAMED}

every_kind = pytest.mark.parametrize("kind", KINDS)
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)

# NumPy, which interprets the kernels, warns of what a GPU does silently.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")

triton_interpreter.repair()


@pytest.fixture(autouse=True)
def full_float32():
    """No tf32."""
    with matmul_precision(tf32=False):
        yield


@pytest.fixture
def use_plan(monkeypatch):
    """Replace the choice of the launch plan."""

    def use(plan):
        monkeypatch.setattr(ops, "choose_plan", lambda job, device, run: plan)

    return use


def case(kind, B, T, hidden, layers=1, inputs=8, starts=0.2, invalid=0.2, dtype=torch.float32, seed=0):
    """Random weights, inputs, state, clears and invalid steps."""
    torch.manual_seed(seed)
    cell = kind(inputs, hidden, layers).to(dtype)
    for weight in cell.parameters():
        nn.init.normal_(weight, std=hidden**-0.5)
    use_kernel(cell, "triton")
    state = cell.initial(B).apply(torch.randn_like)
    clear, valid = torch.rand(B, T) < starts, torch.rand(B, T) >= invalid
    x = torch.randn(B, T, inputs, dtype=dtype)
    return cell.to(DEVICE), x.to(DEVICE), state.to(DEVICE), clear.to(DEVICE), valid.to(DEVICE)


def run_and_differentiate(run, cell, x, state, grad):
    """Outputs, final state and gradients of inputs and weights."""
    x = x.clone().requires_grad_()
    y, after = run(x, state)
    grads = torch.autograd.grad((y * grad).sum(), [x, *cell.parameters()])
    return [y.detach(), *after.values(), *grads]


def largest_error(cell, x, state, clear, valid):
    """Largest error against the float64 reference, relative to the largest entry of each tensor."""
    grad = torch.randn(*clear.shape, cell.hidden_size, dtype=x.dtype, device=DEVICE)
    truth = copy.deepcopy(cell).double()
    actual = run_and_differentiate(lambda x, state: cell(x, state, clear, valid), cell, x, state, grad)
    expected = run_and_differentiate(
        lambda x, state: truth.reference_forward(x, state, clear, valid),
        truth,
        x.double(),
        state.double(),
        grad.double(),
    )
    errors = [
        float((a.double() - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(actual, expected, strict=True)
    ]
    assert all(tensor.isfinite().all() for tensor in actual)
    return max(errors)


@settings(max_examples=12)
@given(
    kind=st.sampled_from(KINDS),
    plan=st.sampled_from(list(PLANS.values())),
    B=st.integers(1, 35),
    T=st.integers(1, 6),
    hidden=st.sampled_from([16, 32, 48, 80, 112]),
    layers=st.integers(1, 2),
    starts=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    invalid=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_kernels_equal_the_reference_for_any_clears_and_invalid_steps(
    kind, plan, B, T, hidden, layers, starts, invalid, seed
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "choose_plan", lambda job, device, run: plan)
        assert largest_error(*case(kind, B, T, hidden, layers, starts=starts, invalid=invalid, seed=seed)) <= 1e-5


@every_kind
@every_plan
def test_kernels_in_float16_are_within_bounds(kind, plan, use_plan):
    use_plan(plan)
    assert largest_error(*case(kind, 18, 3, 48, 2, dtype=torch.float16)) <= BOUNDS[torch.float16]


ON_GPU = [
    (144, 700, torch.bfloat16),
    (512, 300, torch.bfloat16),
    (256, 5000, torch.float16),
    (208, 100, torch.float32),
]
SIZES = ON_GPU if DEVICE.type == "cuda" else [(48, 18, torch.float32)]


@every_kind
@pytest.mark.parametrize(("hidden", "B", "dtype"), SIZES)
def test_every_candidate_plan_equals_the_reference(kind, hidden, B, dtype, use_plan):
    name = kind.__name__.lower()
    jobs = [
        TuningJob(f"{name}_{direction}", hidden, B, False, dtype, "tf32x3") for direction in ("forward", "backward")
    ]
    plans = {plan for job in jobs for plan in autotune.candidates(job, 132)}
    for plan in sorted(plans, key=astuple):
        use_plan(plan)
        assert largest_error(*case(kind, B, 3, hidden, dtype=dtype)) <= BOUNDS[dtype], plan


@pytest.mark.gpu
@every_kind
@every_plan
def test_cuda_graph_replay_reads_current_inputs(kind, plan, use_plan):
    use_plan(plan)
    cell, x, state, clear, valid = case(kind, 40, 6, 112, dtype=torch.bfloat16)
    x.requires_grad_()

    def forward_backward():
        y, after = cell(x, state, clear, valid)
        return [y, *after.values(), *torch.autograd.grad(y.sum(), [x, *cell.parameters()])]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward_backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # On one stream: autograd warns of gradients that come from another one than the weights were first used on.
    with torch.cuda.graph(graph, stream=stream):
        captured = forward_backward()
    with torch.cuda.stream(stream):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            clear.copy_(clear.roll(1, dims=1))
        graph.replay()
        assert all(a.equal(b) for a, b in zip(captured, forward_backward(), strict=True))


@every_kind
@every_plan
def test_no_gradient_or_value_crosses_a_clear(kind, plan, use_plan):
    use_plan(plan)
    cell, x, state, _, _ = case(kind, 5, 5, 48)
    clear = torch.zeros(5, 5, dtype=torch.bool, device=DEVICE)
    clear[:, 3] = True
    entry = state.apply(lambda leaf: leaf.requires_grad_())
    y, _ = cell(x.requires_grad_(), entry, clear)
    grads = torch.autograd.grad(y[:, 3:].sum(), [x, *entry.values()])
    assert (grads[0][:, :3] == 0).all()
    assert (grads[0][:, 3:] != 0).any()
    assert all((leaf_grad == 0).all() for leaf_grad in grads[1:])
    for before in (1e4 * torch.randn_like(x[:, :3]), torch.full_like(x[:, :3], float("nan"))):
        with torch.no_grad():
            other, _ = cell(torch.cat([before, x[:, 3:]], 1), state, clear)
        assert other[:, 3:].equal(y[:, 3:])


@every_kind
@every_plan
def test_invalid_steps_leave_the_state_unchanged(kind, plan, use_plan):
    use_plan(plan)
    cell, x, state, clear, valid = case(kind, 3, 6, 32, 2)
    clear[:], valid[:] = False, False
    y, after = cell(x * float("nan"), state, clear, valid)
    assert (y == 0).all()
    assert all(leaf.equal(state[key]) for key, leaf in after.items())


@every_kind
@every_plan
def test_gradients_of_entry_and_final_state(kind, plan, use_plan):
    use_plan(plan)
    cell, x, state, clear, valid = case(kind, 4, 5, 32, starts=0.1)
    weights = tuple(weight.clone().requires_grad_() for weight in cell.layer(0))
    before = [leaf[:, 0].clone().requires_grad_() for leaf in state.values()]
    code = clear.byte() | ((~valid).byte() << 1)
    run = ops.lstm if kind is LSTM else ops.gru
    outputs = run(x, weights, *before, code, torch.float32)
    output_grads = [torch.randn_like(output) for output in outputs]
    actual = torch.autograd.grad(
        sum((a * b).sum() for a, b in zip(outputs, output_grads, strict=True)), [*before, *weights]
    )
    before64 = [leaf.double().requires_grad_() for leaf in before]
    weights64 = tuple(weight.detach().double().requires_grad_() for weight in weights)
    step = partial(cell.reference_step, weights64)
    y, *after = reference.run_layer(step, x.double().transpose(0, 1), before64, clear.T, valid.T)
    truth = [y.transpose(0, 1), *after]
    expected = torch.autograd.grad(
        sum((a * b).sum() for a, b in zip(truth, output_grads, strict=True)), [*before64, *weights64]
    )
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max().clamp(min=1)


@every_kind
@every_plan
def test_segment_equals_single_steps(kind, plan, use_plan):
    use_plan(plan)
    cell, x, state, clear, valid = case(kind, 6, 4, 48, 2)
    with torch.no_grad():
        segment_y, end = cell(x, state, clear, valid)
        steps = []
        for t in range(4):
            y, state = cell(x[:, t], state, clear[:, t], valid[:, t])
            steps.append(y)
    torch.testing.assert_close(torch.stack(steps, 1), segment_y, atol=1e-6, rtol=0)
    for key, leaf in end.items():
        torch.testing.assert_close(state[key], leaf, atol=1e-6, rtol=0)


@every_kind
@every_plan
def test_huge_inputs_give_no_nan(kind, plan, use_plan):
    use_plan(plan)
    cell, x, state, clear, valid = case(kind, 9, 4, 32, dtype=torch.float16)
    y, after = cell((1e4 * x).requires_grad_(), state, clear, valid)
    grads = torch.autograd.grad(y.sum(), list(cell.parameters()))
    assert not any(tensor.isnan().any() for tensor in (y, *after.values(), *grads))


@every_kind
def test_nan_with_all_bits_set_is_exchanged_as_a_standard_nan(kind, use_plan):
    use_plan(SPLIT)
    cell, x, state, clear, valid = case(kind, 4, 3, 48)
    clear[:], valid[:] = False, True
    state["h"][0] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    y, _ = cell(x, state, clear, valid)
    assert y[0].isnan().all()
    assert not y[1:].isnan().any()


@every_kind
def test_ops_compile_into_one_graph(kind, annotations_asleep):
    cell, x, state, clear, valid = case(kind, 4, 3, 32)
    # torch.compile treats modules with RNN weights specially.
    with torch._dynamo.config.patch(allow_rnn=True):
        run = torch.compile(lambda x: cell(x, state, clear, valid)[0], backend="aot_eager", fullgraph=True)
        compiled = run(x)
    assert compiled.equal(cell(x, state, clear, valid)[0])
    grads = [torch.autograd.grad(y.sum(), list(cell.parameters())) for y in (run(x), cell(x, state, clear, valid)[0])]
    assert all(a.equal(b) for a, b in zip(*grads, strict=True))


@every_kind
def test_ops_pass_opcheck(kind):
    cell, _, state, clear, _ = case(kind, 4, 3, 32)
    weight = cell.layer(0)[1].requires_grad_()
    gates = torch.randn(4, 3, weight.shape[0], device=DEVICE, requires_grad=True)
    states = [leaf[:, 0].contiguous() for leaf in state.values()]
    biases = [torch.randn(size, device=DEVICE, requires_grad=True) for size in (weight.shape[0], 32)]
    biases = biases[:1] if kind is LSTM else biases
    name = "lstm" if kind is LSTM else "gru"
    torch.library.opcheck(
        getattr(torch.ops.holdfast, name), (gates, weight, *biases, *states, clear.byte(), True, "tf32x3")
    )


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("keep", [True, False])
@every_kind
def test_a_launch_describes_its_job(kind, keep, T, monkeypatch):
    jobs = []
    monkeypatch.setattr(ops, "choose_plan", lambda job, device, run: jobs.append(job) or SPLIT)
    cell, x, state, clear, valid = case(kind, 4, T, 48)
    with torch.set_grad_enabled(keep):
        y, _ = cell(x, state, clear, valid)
    if keep:
        y.sum().backward()
    name = "lstm" if kind is LSTM else "gru"
    forward = TuningJob(f"{name}_forward", 48, 4, T == 1, torch.float32, "tf32x3", keep)
    assert jobs == [forward, forward._replace(kernel=f"{name}_backward")][: 1 + keep]


@pytest.mark.parametrize("keep", [True, False])
@every_kind
def test_compiled_shapes_are_those_of_the_kernels(kind, keep, use_plan):
    use_plan(SPLIT)
    cell, _, state, clear, _ = case(kind, 4, 3, 32)
    weight = cell.layer(0)[1]
    states = [leaf[:, 0].contiguous() for leaf in state.values()]
    biases = [torch.randn(size, device=DEVICE) for size in (weight.shape[0], 32)][: 1 if kind is LSTM else 2]
    inputs = (torch.randn(4, 3, weight.shape[0], device=DEVICE), weight.detach(), *biases, *states, clear.byte())
    call = torch.ops.holdfast.lstm if kind is LSTM else torch.ops.holdfast.gru
    with FakeTensorMode() as mode:
        fake = call(*map(mode.from_tensor, inputs), keep, "tf32x3")
    assert [tensor.shape for tensor in fake] == [tensor.shape for tensor in call(*inputs, keep, "tf32x3")]
    assert all(tensor.numel() == 0 for tensor in fake[len(states) + 1 :]) != keep


def test_biases_of_two_layers_are_summed_apart_while_a_graph_is_recorded(monkeypatch, use_plan):
    use_plan(UNSPLIT)
    cell, x, state, clear, valid = case(LSTM, 4, 3, 32, layers=2, inputs=32)
    with torch.no_grad():
        expected = cell(x, state, clear, valid)[0]
        monkeypatch.setattr(cuda_graphs, "_recording", True)
        try:
            actual = cell(x, state, clear, valid)[0]
        finally:
            cuda_graphs._constants.clear()
    assert actual.equal(expected)


LAYOUT_PLANS = [LaunchPlan(16, 32, 4, chunk=32), LaunchPlan(16, 16, 4, chunk=32, stages=2), LaunchPlan(16, 128, 4)]


@given(st.integers(1, 5000), st.integers(1, 600), st.sampled_from(LAYOUT_PLANS), st.integers(40, 150))
def test_waves_cover_every_row_once_and_fit_the_gpu(B, hidden, plan, processors):
    layout = ops.LaunchLayout(torch.empty(B, 2, 0), hidden, plan, "tf32")
    layout._cooperative = layout.splits > 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "processors_of", lambda device: processors)
        waves = list(layout.waves(0, 2))
    assert layout.splits == 1 or all(grid[0] <= processors for grid, _ in waves)
    rows = [range(rest[-1], rest[-1] + grid[0] // layout.splits * plan.rows) for grid, rest in waves]
    assert rows[0].start == 0
    assert all(a.stop == b.start for a, b in itertools.pairwise(rows))
    assert B <= rows[-1].stop < B + plan.rows
