"""`holdfast.nn` against `torch.nn` and against a loop over time that resets by hand."""

import copy
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast.nn
from holdfast.errors import ConfigError, ContractError

KINDS = {"LSTM": (holdfast.nn.LSTM, nn.LSTM), "GRU": (holdfast.nn.GRU, nn.GRU)}
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
lstm_and_gru = pytest.mark.parametrize("kind", KINDS)
shapes = st.fixed_dictionaries(
    {
        "sizes": st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 6)),
        "num_layers": st.integers(1, 3),
        "bias": st.booleans(),
        "batch_first": st.booleans(),
        "dtype": st.sampled_from([torch.float32, torch.float64]),
        "seed": st.integers(0, 2**31),
    }
)


def leaves_of(state):
    return list(state) if isinstance(state, tuple) else [state]


def state_like(kind, leaves):
    return tuple(leaves) if kind == "LSTM" else leaves[0]


def pair(kind, case):
    """Our module and torch's with the same weights, an input and a state."""
    T, B, D, H = case["sizes"]
    torch.manual_seed(case["seed"])
    options = {key: case[key] for key in ("num_layers", "bias", "batch_first", "dtype")}
    ours, reference = KINDS[kind][0](D, H, **options), KINDS[kind][1](D, H, **options)
    ours.load_state_dict(reference.state_dict())
    x = torch.randn((B, T, D) if case["batch_first"] else (T, B, D), dtype=case["dtype"])
    number = 2 if kind == "LSTM" else 1
    leaves = [torch.randn(case["num_layers"], B, H, dtype=case["dtype"]) for _ in range(number)]
    return ours, reference, x, leaves


def outputs_and_gradients(kind, module, call, x, leaves):
    """Outputs, last state, and gradients of all of them by input, state and weights."""
    x = x.clone().requires_grad_()
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    y, state = call(x, state_like(kind, leaves))
    results = [y, *leaves_of(state)]
    loss = sum((result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum() for result in results)
    gradients = torch.autograd.grad(loss, [x, *leaves, *module.parameters()])
    return [*results, *gradients]


def assert_close(actual, expected, dtype):
    for a, b in zip(actual, expected, strict=True):
        a, b = a.detach(), b.detach()
        # Of the largest entry: gradients add up over the batch.
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE[dtype] * max(1.0, float(b.abs().max())))


@lstm_and_gru
@settings(max_examples=40, deadline=None)
@given(case=shapes)
def test_equals_torch_without_first(kind, case):
    ours, reference, x, leaves = pair(kind, case)
    actual = outputs_and_gradients(kind, ours, ours, x, leaves)
    assert_close(actual, outputs_and_gradients(kind, reference, reference, x, leaves), case["dtype"])
    without_state = [ours(x), reference(x)]
    assert_close(*[[y, *leaves_of(state)] for y, state in without_state], case["dtype"])


def loop_with_resets(kind, module, x, state, first, valid, batch_first):
    """Torch's module step by step: zero the state where `first`, keep it where not `valid`."""
    axis, leaves, outputs = int(batch_first), leaves_of(state), []
    for t in range(x.shape[axis]):
        zero, use = (mask.select(axis, t)[None, :, None] for mask in (first, valid))
        leaves = [torch.where(zero, 0.0, leaf) for leaf in leaves]
        y, after = module(x.narrow(axis, t, 1), state_like(kind, [leaf.contiguous() for leaf in leaves]))
        outputs.append(torch.where(valid.narrow(axis, t, 1)[..., None], y, 0.0))
        leaves = [torch.where(use, new, old) for new, old in zip(leaves_of(after), leaves, strict=True)]
    return torch.cat(outputs, axis), state_like(kind, leaves)


@lstm_and_gru
@settings(max_examples=60, deadline=None)
@given(case=shapes, starts=st.sampled_from([0.1, 0.5, 1.0]), invalid=st.sampled_from([0.0, 0.3]))
def test_first_and_valid_equal_a_loop_that_resets_by_hand(kind, case, starts, invalid):
    ours, reference, x, leaves = pair(kind, case)
    first, valid = torch.rand(x.shape[:2]) < starts, torch.rand(x.shape[:2]) >= invalid
    actual = outputs_and_gradients(kind, ours, lambda x, state: ours(x, state, first, valid), x, leaves)
    expected = outputs_and_gradients(
        kind,
        reference,
        lambda x, state: loop_with_resets(kind, reference, x, state, first, valid, case["batch_first"]),
        x,
        leaves,
    )
    assert_close(actual, expected, case["dtype"])


@settings(max_examples=30, deadline=None)
@given(case=shapes, starts=st.sampled_from([0.1, 0.5]))
def test_min_lstm_over_a_sequence_equals_single_steps(case, starts):
    T, B, D, H = case["sizes"]
    torch.manual_seed(case["seed"])
    module = holdfast.nn.MinLSTM(D, H, case["num_layers"]).double()
    x, state, first = torch.randn(T, B, D).double(), torch.randn(case["num_layers"], B, H).double(), torch.rand(T, B)
    first = first < starts
    y, last = module(x, state, first)
    steps = []
    for t in range(T):
        step, state = module(x[t : t + 1], state, first[t : t + 1])
        steps.append(step)
    assert_close([y, last], [torch.cat(steps), state], torch.float64)
    assert last.requires_grad


@lstm_and_gru
def test_weights_have_the_names_and_first_values_of_torch(kind):
    kinds = KINDS[kind]
    modules = []
    for each in kinds:
        torch.manual_seed(3)
        modules.append(each(3, 4, 2))
    ours, reference = modules
    assert list(ours.state_dict()) == list(reference.state_dict()) == [name for name, _ in ours.named_parameters()]
    assert all(a.equal(b) for a, b in zip(ours.parameters(), reference.parameters(), strict=True))
    reference.load_state_dict(ours.state_dict())
    assert ours.weight_hh_l1.shape == reference.weight_hh_l1.shape
    assert str(ours) == str(reference)


@lstm_and_gru
def test_input_without_a_batch(kind):
    ours, reference = KINDS[kind][0](3, 4), KINDS[kind][1](3, 4)
    ours.load_state_dict(reference.state_dict())
    x = torch.randn(5, 3)
    (y, state), (expected, expected_state) = ours(x), reference(x)
    assert_close([y, *leaves_of(state)], [expected, *leaves_of(expected_state)], torch.float32)
    first = torch.tensor([False, False, True, False, False])
    y, state = ours(x, state, first)
    expected, _ = reference(x[2:])
    assert_close([y[2:]], [expected], torch.float32)


@lstm_and_gru
@pytest.mark.parametrize("detach", [False, True])
def test_detach_cuts_gradients_of_the_state(kind, detach):
    module = KINDS[kind][0](3, 4, 2, detach=detach)
    leaves = [torch.randn(2, 2, 4, requires_grad=True) for _ in range(2 if kind == "LSTM" else 1)]
    y, state = module(torch.randn(5, 2, 3), state_like(kind, leaves), torch.zeros(5, 2, dtype=torch.bool))
    assert all(leaf.requires_grad is not detach for leaf in leaves_of(state))
    gradients = torch.autograd.grad(y.sum(), leaves, allow_unused=True)
    assert all((gradient is None) is detach for gradient in gradients)


@lstm_and_gru
def test_copies_casts_and_pickles_compute_with_their_own_weights(kind):
    module, first = KINDS[kind][0](3, 4), torch.rand(6, 2) < 0.4
    x = torch.randn(6, 2, 3)
    expected, _ = module(x, None, first)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module.__class__(3, 4)):
        other.load_state_dict(module.state_dict())
        assert other(x, None, first)[0].equal(expected)
        with torch.no_grad():
            other.weight_ih_l0.zero_()
        assert not other(x, None, first)[0].equal(expected)
        assert module(x, None, first)[0].equal(expected)
        double = other.double()
        assert double(x.double(), None, first)[0].dtype == torch.float64
        assert double.eval().training is False
    meta = KINDS[kind][0](3, 4, device="meta").to_empty(device="cpu")
    meta.load_state_dict(module.state_dict())
    assert meta(x, None, first)[0].equal(expected)


@lstm_and_gru
def test_autocast_returns_the_output_as_torch_does_and_the_state_in_float32(kind):
    module, x, first = KINDS[kind][0](8, 8), torch.randn(6, 3, 8), torch.rand(6, 3) < 0.4
    expected, _ = module(x, None, first)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = module(x, None, first)
        reference, _ = KINDS[kind][1](8, 8)(x)
    assert y.dtype == reference.dtype
    assert all(leaf.dtype == torch.float32 for leaf in leaves_of(state))
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=0.02)


@lstm_and_gru
def test_torch_func_takes_gradients_of_the_weights(kind):
    module, x, first = KINDS[kind][0](3, 4).double(), torch.randn(6, 2, 3).double(), torch.rand(6, 2) < 0.4

    def loss(weights, x):
        return torch.func.functional_call(module, weights, (x, None, first))[0].square().sum()

    weights = dict(module.named_parameters())
    gradients = torch.func.grad(loss)(weights, x)
    expected = torch.autograd.grad(loss(weights, x), list(weights.values()))
    assert_close(list(gradients.values()), expected, torch.float64)


@pytest.mark.parametrize("kind", holdfast.nn.__all__)
def test_torch_func_vectorizes_over_sequences_and_weights(kind):
    module = getattr(holdfast.nn, kind)(3, 4, 2).double()
    x, first, weights = torch.randn(3, 6, 2, 3).double(), torch.rand(3, 6, 2) < 0.4, dict(module.named_parameters())

    def run(weights, x, first=None):
        return torch.func.functional_call(module, weights, (x, None, first))[0]

    each = [module(*case) for case in zip(x, [None] * 3, first, strict=True)]
    assert_close([torch.func.vmap(run, (None, 0, 0))(weights, x, first)], [torch.stack([y for y, _ in each])], x.dtype)
    ensemble = {name: torch.stack([weight, -weight]) for name, weight in weights.items()}
    members = [run({name: weight[i] for name, weight in ensemble.items()}, x[0]) for i in (0, 1)]
    assert_close([torch.func.vmap(run, (0, None))(ensemble, x[0])], [torch.stack(members)], x.dtype)
    # By forward mode, by reverse mode, and by differences.
    tangent, step = torch.randn_like(x[0]), 1e-6
    _, forward = torch.func.jvp(lambda x: run(weights, x, first[0]), (x[0],), (tangent,))
    jacobian = torch.func.jacrev(lambda x: run(weights, x, first[0]))(x[0])
    assert_close([forward], [(jacobian * tangent).sum((3, 4, 5))], x.dtype)
    difference = (run(weights, x[0] + step * tangent, first[0]) - run(weights, x[0] - step * tangent, first[0])) / step
    torch.testing.assert_close(forward, difference / 2, rtol=0, atol=1e-8)


COMPILED = """
import torch, holdfast.nn
from torch import nn
for kind in (holdfast.nn.LSTM, holdfast.nn.GRU):
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(3, 8), kind(8, 8), nn.Linear(8, 2)])
    x, first = torch.randn(6, 2, 3), torch.rand(6, 2) < 0.4
    def forward(x, first):
        return layers[2](layers[1](layers[0](x), None, first)[0])
    print(float((torch.compile(forward)(x, first) - forward(x, first)).abs().max()) <= 1e-6)
"""


@pytest.mark.slow
def test_compiled_equals_eager():
    # In a process of its own: the compiler cannot trace the checks of annotations that the tests switch on.
    process = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=300)
    assert process.stdout.split() == ["True", "True"], process.stderr


LOADED = """
import sys, torch
before = {*sys.modules}
import holdfast.nn
loaded = {*sys.modules} - before
print(*sorted(name for name in loaded if name.startswith("holdfast")))
others = {name for name in loaded if name.partition(".")[0] not in {*sys.stdlib_module_names, "holdfast", "jaxtyping"}}
print(*sorted(name for name in others if not name.startswith(("_sysconfigdata", "numpy"))))
"""


def loaded_by(module):
    """The modules of Holdfast and of other packages that an import loads after torch."""
    code = LOADED.replace("holdfast.nn", module)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return [line.split() for line in process.stdout.split("\n")[:2]]


def test_import_loads_the_layers_and_no_package_but_jaxtyping():
    memory = "memory memory.kernels memory.kernels.autotune memory.layers memory.packing memory.reference memory.scan"
    names = f"cuda_graphs errors kernel_support {memory} nn torch_versions types version"
    assert loaded_by("holdfast.nn") == [["holdfast", *(f"holdfast.{name}" for name in names.split())], []]


TIMED = """
import time, torch
start = time.process_time()
import holdfast, {module}
print(time.process_time() - start)
"""


@pytest.mark.parametrize("module", ["holdfast", "holdfast.nn", "holdfast.check"])
def test_import_takes_less_than_a_third_of_a_second_beyond_torch(module):
    code = TIMED.format(module=module)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert float(process.stdout) < 0.3, process.stderr


def test_import_of_check_loads_no_trainer_and_no_environments():
    assert loaded_by("holdfast.check") == [["holdfast", "holdfast.check", "holdfast.version"], []]


def test_the_cleanrl_example_equals_the_one_with_a_loop(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    agents = []
    for name, kind in (("cleanrl_style", "Agent"), ("cleanrl_parts", "FastAgent")):
        torch.manual_seed(0)
        agents.append(getattr(importlib.import_module(name), kind)())
    x, done, action = torch.randn(30, 4), (torch.rand(30) < 0.3).float(), torch.randint(3, (30,))
    state = (torch.randn(1, 5, 64), torch.randn(1, 5, 64))
    (_, *actual, actual_state), (_, *expected, expected_state) = (
        agent.get_action_and_value(x, state, done, action) for agent in agents
    )
    assert_close([*actual, *actual_state], [*expected, *expected_state], torch.float32)
    assert holdfast.check(agents[1]).ok


def test_flags_may_be_floats_as_in_cleanrl():
    module, x, first = holdfast.nn.LSTM(3, 4), torch.randn(6, 2, 3), torch.rand(6, 2) < 0.4
    assert module(x, None, first.float())[0].equal(module(x, None, first)[0])


@pytest.mark.usefixtures("annotations_asleep")
def test_gru_refuses_the_state_of_an_lstm():
    with pytest.raises(ContractError, match=r"state is \[\[1, 2, 4\], \[1, 2, 4\]\], must be \[\[1, 2, 4\]\]"):
        holdfast.nn.GRU(3, 4)(torch.randn(5, 2, 3), (torch.zeros(1, 2, 4),) * 2)


@lstm_and_gru
def test_shapes_without_numbers(kind):
    y, _ = KINDS[kind][0](3, 4, 2, device="meta")(torch.empty(5, 2, 3, device="meta"))
    assert (y.shape, y.device.type) == ((5, 2, 4), "meta")


def test_min_lstm_takes_the_constructor_of_torch():
    module = holdfast.nn.MinLSTM(3, 4, 2, False, True, 0.0, False, 0, "cpu", torch.float64)
    assert [name for name, _ in module.named_parameters()] == ["gates.0.weight", "gates.1.weight"]
    assert module(torch.randn(2, 5, 3).double())[0].shape == (2, 5, 4)
    with pytest.raises(ConfigError, match=r"holdfast.nn.MinLSTM\(dropout=0.1\)"):
        holdfast.nn.MinLSTM(3, 4, dropout=0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dropout": 0.1}, r"dropout=0.1\): replay needs the same masks; use 0 and nn.Dropout"),
        ({"bidirectional": True}, "an agent cannot read later steps; use False"),
        ({"proj_size": 2}, "proj_size=2.* is not supported; use 0 and nn.Linear"),
    ],
)
def test_options_that_are_not_supported_are_refused(options, words):
    with pytest.raises(ConfigError, match=rf"^holdfast.nn.LSTM.*{words}"):
        holdfast.nn.LSTM(3, 4, **options)


@pytest.mark.usefixtures("annotations_asleep")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda lstm, x: lstm(x[..., :2]), r"x is \[5, 2, 2\], must be \[T,B,3\]"),
        (lambda lstm, x: lstm(x[:0]), "at least one step"),
        (lambda lstm, x: lstm(x, (torch.zeros(1, 3, 4),) * 2), r"must be \[\[1, 2, 4\], \[1, 2, 4\]\]: layers, batch"),
        (lambda lstm, x: lstm(x, None, torch.zeros(2, 5)), r"first is \[2, 5\], must be \[5, 2\]"),
        (lambda lstm, x: lstm(x, None, None, torch.zeros(5)), r"valid is \[5\], must be \[5, 2\]"),
        (lambda lstm, x: lstm(nn.utils.rnn.pack_sequence([x[:, 0]])), "is a PackedSequence, must be a tensor"),
        (
            lambda lstm, x: lstm(x, torch.zeros(1, 2, 4)),
            r"state is \[\[1, 2, 4\]\], must be \[\[1, 2, 4\], \[1, 2, 4\]\]",
        ),
        (lambda lstm, x: lstm(x, None, [[0, 0]] * 5), "first is a list, must be a tensor"),
        (
            lambda lstm, x: lstm(x.double()),
            r"x is torch.float64, the weights are torch.float32; .*\.to\(torch.float32\)",
        ),
        (lambda lstm, x: lstm(x[:1].long()), "x is torch.int64, the weights are torch.float32"),
        (lambda lstm, x: lstm(x, (torch.zeros(1, 2, 4).double(),) * 2), "The state is torch.float64, the weights are"),
    ],
)
def test_wrong_shapes_and_types_are_refused(call, words):
    with pytest.raises(ContractError, match=words):
        call(holdfast.nn.LSTM(3, 4), torch.randn(5, 2, 3))
