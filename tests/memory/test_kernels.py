"""Our kernels against the cells written out in float64: on a GPU as they are, elsewhere interpreted."""

import copy
import itertools
from dataclasses import astuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import interpreted
from holdfast.errors import ConfigError, ContractError
from holdfast.memory import GRU, LSTM, kernels, require_kernel, use_kernel
from holdfast.memory.kernels import choices, launch, operators, plans, tuning
from holdfast.memory.kernels.launch import Plan
from holdfast.memory.kernels.plans import Job
from holdfast.memory.products import products

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = [LSTM, GRU]
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
WHOLE, SPLIT, STREAMED = Plan(16, 128, 4), Plan(16, 32, 4, chunk=32), Plan(16, 16, 4, chunk=32, stages=2)
PLANS = {"whole": WHOLE, "split": SPLIT, "streamed": STREAMED}

every_kind = pytest.mark.parametrize("kind", KINDS)
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)

# What a chip does without a word, NumPy warns of.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")

interpreted.repair()


@pytest.fixture(autouse=True)
def full_float32():
    """float32 means float32."""
    with products(tf32=False):
        yield


@pytest.fixture
def planned(monkeypatch):
    """Let a test say which plan is used."""

    def use(plan):
        monkeypatch.setattr(operators, "choose", lambda job, device, run: plan)

    return use


def case(kind, B, T, hidden, layers=1, inputs=8, starts=0.2, absent=0.2, dtype=torch.float32, seed=0):
    """Random weights, inputs, state, clears and gaps."""
    torch.manual_seed(seed)
    cell = kind(inputs, hidden, layers).to(dtype)
    for weight in cell.parameters():
        nn.init.normal_(weight, std=hidden**-0.5)
    use_kernel(cell, "triton")
    state = cell.initial(B).apply(torch.randn_like)
    clear, valid = torch.rand(B, T) < starts, torch.rand(B, T) >= absent
    x = torch.randn(B, T, inputs, dtype=dtype)
    return cell.to(DEVICE), x.to(DEVICE), state.to(DEVICE), clear.to(DEVICE), valid.to(DEVICE)


def lived(run, cell, x, state, towards):
    """What comes out, the state after it, and the gradients of inputs and weights."""
    x = x.clone().requires_grad_()
    y, after = run(x, state)
    grads = torch.autograd.grad((y * towards).sum(), [x, *cell.parameters()])
    return [y.detach(), *after.values(), *grads]


def apart(cell, x, state, clear, valid):
    """How far a cell is from its reference in float64, by the size of each tensor."""
    towards = torch.randn(*clear.shape, cell.hidden_size, dtype=x.dtype, device=DEVICE)
    truth = copy.deepcopy(cell).double()
    mine = lived(lambda x, state: cell(x, state, clear, valid), cell, x, state, towards)
    true = lived(
        lambda x, state: truth.plain(x, state, clear, valid),
        truth,
        x.double(),
        state.double(),
        towards.double(),
    )
    sizes = [
        float((a.double() - b).abs().max() / b.abs().max().clamp(min=1))
        for a, b in zip(mine, true, strict=True)
    ]
    assert all(each.isfinite().all() for each in mine)
    return max(sizes)


@settings(max_examples=12)
@given(
    kind=st.sampled_from(KINDS),
    plan=st.sampled_from(list(PLANS.values())),
    B=st.integers(1, 35),
    T=st.integers(1, 6),
    hidden=st.sampled_from([16, 32, 48, 80, 112]),
    layers=st.integers(1, 2),
    starts=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    absent=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_kernels_equal_the_reference_whatever_starts_and_gaps(
    kind, plan, B, T, hidden, layers, starts, absent, seed
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "choose", lambda job, device, run: plan)
        assert apart(*case(kind, B, T, hidden, layers, starts=starts, absent=absent, seed=seed)) <= 1e-5


@every_kind
@every_plan
def test_kernels_in_float16_are_within_a_hundredth(kind, plan, planned):
    planned(plan)
    assert apart(*case(kind, 18, 3, 48, 2, dtype=torch.float16)) <= BOUNDS[torch.float16]


ON_GPU = [
    (144, 700, torch.bfloat16),
    (512, 300, torch.bfloat16),
    (256, 5000, torch.float16),
    (208, 100, torch.float32),
]
SIZES = ON_GPU if DEVICE.type == "cuda" else [(48, 18, torch.float32)]


@every_kind
@pytest.mark.parametrize(("hidden", "B", "dtype"), SIZES)
def test_every_plan_that_may_be_tried_is_right(kind, hidden, B, dtype, planned):
    name = kind.__name__.lower()
    jobs = [Job(f"{name}_{way}", hidden, B, False, dtype, "tf32x3") for way in ("forward", "backward")]
    tried = {plan for job in jobs for plan in plans.candidates(job, 132)}
    for plan in sorted(tried, key=astuple):
        planned(plan)
        assert apart(*case(kind, B, 3, hidden, dtype=dtype)) <= BOUNDS[dtype], plan


@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs need a GPU")
@every_kind
@every_plan
def test_a_recorded_call_reads_what_is_there_when_it_is_replayed(kind, plan, planned):
    planned(plan)
    cell, x, state, clear, valid = case(kind, 40, 6, 112, dtype=torch.bfloat16)
    x.requires_grad_()

    def both():
        y, after = cell(x, state, clear, valid)
        return [y, *after.values(), *torch.autograd.grad(y.sum(), [x, *cell.parameters()])]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = both()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        clear.copy_(clear.roll(1, dims=1))
    graph.replay()
    assert all(a.equal(b) for a, b in zip(recorded, both(), strict=True))


@every_kind
@every_plan
def test_nothing_at_all_crosses_a_clear(kind, plan, planned):
    planned(plan)
    cell, x, state, _, _ = case(kind, 5, 5, 48)
    clear = torch.zeros(5, 5, dtype=torch.bool, device=DEVICE)
    clear[:, 3] = True
    entry = state.apply(lambda leaf: leaf.requires_grad_())
    y, _ = cell(x.requires_grad_(), entry, clear)
    pulls = torch.autograd.grad(y[:, 3:].sum(), [x, *entry.values()])
    assert (pulls[0][:, :3] == 0).all()
    assert (pulls[0][:, 3:] != 0).any()
    assert all((pull == 0).all() for pull in pulls[1:])
    for before in (1e4 * torch.randn_like(x[:, :3]), torch.full_like(x[:, :3], float("nan"))):
        with torch.no_grad():
            other, _ = cell(torch.cat([before, x[:, 3:]], 1), state, clear)
        assert other[:, 3:].equal(y[:, 3:])


@every_kind
@every_plan
def test_memory_stands_still_where_nobody_acts(kind, plan, planned):
    planned(plan)
    cell, x, state, clear, valid = case(kind, 3, 6, 32, 2)
    clear[:], valid[:] = False, False
    y, after = cell(x * float("nan"), state, clear, valid)
    assert (y == 0).all()
    assert all(leaf.equal(state[key]) for key, leaf in after.items())


@every_kind
@every_plan
def test_gradients_reach_the_entry_state_and_come_from_the_last(kind, plan, planned):
    planned(plan)
    cell, x, state, clear, valid = case(kind, 4, 5, 32, starts=0.1)
    weights = tuple(weight.clone().requires_grad_() for weight in cell.layer(0))
    before = [leaf[:, 0].clone().requires_grad_() for leaf in state.values()]
    code = clear.byte() | ((~valid).byte() << 1)
    run = operators.lstm if kind is LSTM else operators.gru
    told = run(x, weights, *before, code, torch.float32)
    towards = [torch.randn_like(each) for each in told]
    mine = torch.autograd.grad(
        sum((a * b).sum() for a, b in zip(told, towards, strict=True)), [*before, *weights]
    )
    deep = [each.double().requires_grad_() for each in before]
    deep_weights = tuple(weight.detach().double().requires_grad_() for weight in weights)
    y, *after = cell.plain_layer(x.double().transpose(0, 1), *deep, clear.T, valid.T, deep_weights)
    truth = [y.transpose(0, 1), *after]
    true = torch.autograd.grad(
        sum((a * b).sum() for a, b in zip(truth, towards, strict=True)), [*deep, *deep_weights]
    )
    for a, b in zip(mine, true, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max().clamp(min=1)


@every_kind
@every_plan
def test_a_segment_equals_its_steps(kind, plan, planned):
    planned(plan)
    cell, x, state, clear, valid = case(kind, 6, 4, 48, 2)
    with torch.no_grad():
        whole, end = cell(x, state, clear, valid)
        steps = []
        for t in range(4):
            y, state = cell(x[:, t], state, clear[:, t], valid[:, t])
            steps.append(y)
    torch.testing.assert_close(torch.stack(steps, 1), whole, atol=1e-6, rtol=0)
    for key, leaf in end.items():
        torch.testing.assert_close(state[key], leaf, atol=1e-6, rtol=0)


@every_kind
@every_plan
def test_inputs_of_any_size_make_no_nan(kind, plan, planned):
    planned(plan)
    cell, x, state, clear, valid = case(kind, 9, 4, 32, dtype=torch.float16)
    y, after = cell((1e4 * x).requires_grad_(), state, clear, valid)
    grads = torch.autograd.grad(y.sum(), list(cell.parameters()))
    assert not any(each.isnan().any() for each in (y, *after.values(), *grads))


@every_kind
def test_a_nan_that_looks_like_nothing_written_is_handed_over_as_another(kind, planned):
    planned(SPLIT)
    cell, x, state, clear, valid = case(kind, 4, 3, 48)
    clear[:], valid[:] = False, True
    state["h"][0] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    y, _ = cell(x, state, clear, valid)
    assert y[0].isnan().all()
    assert not y[1:].isnan().any()


@every_kind
def test_kernels_are_operators_that_compile_into_one_graph(kind, annotations_asleep):
    cell, x, state, clear, valid = case(kind, 4, 3, 32)
    # The compiler has rules of its own for modules that hold a recurrent layer's weights.
    with torch._dynamo.config.patch(allow_rnn=True):
        run = torch.compile(lambda x: cell(x, state, clear, valid)[0], backend="aot_eager", fullgraph=True)
        compiled = run(x)
    assert compiled.equal(cell(x, state, clear, valid)[0])
    grads = [
        torch.autograd.grad(y.sum(), list(cell.parameters()))
        for y in (run(x), cell(x, state, clear, valid)[0])
    ]
    assert all(a.equal(b) for a, b in zip(*grads, strict=True))


@every_kind
def test_operators_keep_the_rules_of_torch(kind):
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


def test_a_kernel_that_is_asked_for_and_cannot_run_says_why(monkeypatch):
    odd = LSTM(4, 24)
    use_kernel(odd, "triton")
    with pytest.raises(ContractError, match=r"hidden sizes of 16 to 512 in steps of 16, not 24. Use auto"):
        odd(torch.randn(2, 4), odd.initial(2), torch.zeros(2, dtype=torch.bool))
    with pytest.raises(ConfigError, match=r"policy.kernel=triton: .* not 24. Use auto"):
        require_kernel(odd, DEVICE)
    deep = LSTM(4, 32).double().to(DEVICE)
    use_kernel(deep, "triton")
    with pytest.raises(ContractError, match=r"32 bits and fewer, not torch.float64"):
        deep(
            torch.randn(2, 4, device=DEVICE).double(),
            deep.initial(2),
            torch.zeros(2, dtype=torch.bool, device=DEVICE),
        )
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    kernels._refused_on.cache_clear()
    assert kernels.refusal(DEVICE, 32) == "Triton is not installed"
    kernels._refused_on.cache_clear()


def test_on_a_cpu_and_in_float64_auto_is_torch():
    cell = LSTM(4, 32)
    assert not cell._has_kernel(torch.device("cpu"), torch.float32)
    assert not cell._has_kernel(torch.device("cuda"), torch.float64)
    use_kernel(cell, "triton")
    assert cell._has_kernel(DEVICE, torch.float32)


@given(
    kernel=st.sampled_from(["lstm_forward", "lstm_backward", "gru_forward", "gru_backward"]),
    hidden=st.integers(1, 32).map(lambda k: 16 * k),
    rows=st.integers(1, 100_000),
    dtype=st.sampled_from(kernels.DTYPES),
    processors=st.integers(16, 200),
)
def test_every_job_has_few_plans_of_powers_of_two(kernel, hidden, rows, dtype, processors):
    job = Job(kernel, hidden, rows, False, dtype, "tf32")
    found = plans.candidates(job, processors)
    assert 2 <= len(found) <= 6
    for plan in found:
        assert all(size & (size - 1) == 0 for size in (plan.rows, plan.units, plan.warps, plan.chunk))
        assert plan.units >= hidden or -(-hidden // plan.units) <= plan.share * processors


@given(
    st.integers(1, 5000), st.integers(1, 600), st.sampled_from([SPLIT, STREAMED, WHOLE]), st.integers(40, 150)
)
def test_waves_take_every_row_once_and_fit_the_chip(B, hidden, plan, processors):
    layout = launch.Layout(torch.empty(B, 2, 0), hidden, plan, "tf32")
    layout._joined = layout.parts > 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "processors_of", lambda device: processors)
        waves = list(layout.waves(0, 2))
    assert layout.parts == 1 or all(grid[0] <= processors for grid, _ in waves)
    rows = [range(rest[-1], rest[-1] + grid[0] // layout.parts * plan.rows) for grid, rest in waves]
    assert rows[0].start == 0
    assert all(a.stop == b.start for a, b in itertools.pairwise(rows))
    assert B <= rows[-1].stop < B + plan.rows


class TestChoices:
    JOB = Job("lstm_forward", 128, 250, False, torch.bfloat16, "tf32")

    @pytest.fixture(autouse=True)
    def chip(self, monkeypatch, tmp_path):
        """Pretend to have a GPU on which the plan with the fewest rows is the slowest."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(tuning, "_signature", lambda device: "a chip")
        monkeypatch.setattr(tuning, "processors_of", lambda device: 132)
        monkeypatch.setattr(tuning, "do_bench", lambda run, **how: -float(run().rows))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        self.forget()
        yield
        self.forget()

    def forget(self):
        choices.forget()

    def choose(self, launched, job=JOB):
        def run(plan):
            launched.append(plan)
            return plan

        return tuning.choose(job, torch.device("cuda"), run)

    def test_the_fastest_plan_is_measured_once_and_known_to_later_runs(self, capsys):
        launched = []
        best = self.choose(launched)
        assert best == max(plans.candidates(self.JOB.rounded(), 132), key=lambda plan: plan.rows)
        assert len(launched) > 1
        assert (
            "lstm forward, segments of 256 rows, hidden size 128, bfloat16 (tf32)" in capsys.readouterr().err
        )
        before = len(launched)
        assert self.choose(launched, self.JOB._replace(rows=200)) == best
        self.forget()
        assert self.choose(launched) == best
        assert len(launched) == before

    def test_while_a_graph_is_recorded_nothing_is_timed_nor_kept(self, monkeypatch, tmp_path):
        launched = []
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert self.choose(launched) == plans.LEAST_ROOM
        assert launched == []
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("damage", ["", "{", "[]", '{"a chip": 3}', '{"a chip": {"a": [1, 2]}}'])
    def test_a_damaged_file_of_choices_is_measured_anew(self, damage, tmp_path):
        launched = []
        best = self.choose(launched)
        self.forget()
        file = tmp_path / "holdfast" / "kernels.json"
        file.write_text(damage)
        assert self.choose(launched) == best
        self.forget()
        count = len(launched)
        self.choose(launched)
        assert len(launched) == count

    def test_a_run_that_goes_on_chooses_as_before_whatever_the_file_says(self, tmp_path):
        best = self.choose([])
        carried = choices.all_chosen()
        self.forget()
        (tmp_path / "holdfast" / "kernels.json").unlink()
        other = {place: {key: list(astuple(WHOLE)) for key in jobs} for place, jobs in carried.items()}
        choices.adopt(other)
        launched = []
        assert self.choose(launched) == WHOLE != best
        assert launched == []

    @pytest.mark.parametrize(
        "nonsense", [None, 3, {"a chip": 3}, {"a chip": {"a": [1, 2]}}, {"a chip": {"a": ["x"] * 6}}]
    )
    def test_nonsense_is_not_adopted(self, nonsense):
        choices.adopt(nonsense)
        assert choices.all_chosen() == {}

    def test_of_two_processes_that_measure_the_first_is_right(self):
        best = self.choose([])
        place, key = "a chip", tuning._key(self.JOB.rounded())
        assert tuning._keep(place, key, WHOLE) == list(astuple(best))
        assert tuning._keep(place, "another", WHOLE) == list(astuple(WHOLE))
        assert set(tuning._read(tuning._file())[place]) == {key, "another"}

    def test_faults_that_are_no_lack_of_room_are_told(self, monkeypatch):
        def bench(run, **how):
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr(tuning, "do_bench", bench)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            self.choose([])

    def test_a_plan_the_chip_has_no_room_for_is_passed_over(self, monkeypatch):
        def bench(run, **how):
            plan = run()
            if plan != plans.LEAST_ROOM:
                raise RuntimeError("too many blocks in cooperative launch")
            return 1.0

        monkeypatch.setattr(tuning, "do_bench", bench)
        assert self.choose([]) == plans.LEAST_ROOM

    def test_a_chip_that_runs_none_is_told_what_to_use(self, monkeypatch):
        def bench(run, **how):
            raise RuntimeError("too many blocks in cooperative launch")

        monkeypatch.setattr(tuning, "do_bench", bench)
        with pytest.raises(ContractError, match=r"policy.kernel=torch"):
            self.choose([])

    def test_choices_that_cannot_be_kept_are_told(self, tmp_path):
        (tmp_path / "holdfast").write_text("")
        with pytest.warns(UserWarning, match="measures its kernels again"):
            self.choose([])
