import json
import logging

import numpy as np
import pytest
import torch

import holdfast
from helpers.manual_policy import NewLSTMPolicy
from helpers.small_policy import SPEC, Small
from helpers.space_worlds import IMAGE_SPEC, TREE_SPEC, SayNumber
from holdfast.errors import ConfigError, ContractError
from holdfast.play.export import (
    METADATA,
    ExportModule,
    difference_in_world,
    export_module,
    max_difference,
    open_exported,
    random_obs,
    random_tokens,
    write_exported,
)
from holdfast.policies import make_policy
from holdfast.policies.components.graph import parse_graph

onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.usefixtures("annotations_asleep")
RECALL = holdfast.make_world("recall", agents=2).spec
SPECS = {"recall": RECALL, "tree": TREE_SPEC, "image": IMAGE_SPEC, "vector": SayNumber.spec}
BOUND = 1e-5


def exported(step, folder, to="onnx"):
    file = folder / f"policy{'.onnx' if to == 'onnx' else '.pt2'}"
    write_exported(step, file, to, "recall")
    return file


def small_step(spec=SPEC, **options):
    torch.manual_seed(0)
    policy = Small(spec, **options)
    policy.bind(spec)
    return export_module(policy)


def largest_difference(step, file, steps=200, sizes=(1, 3, 17)):
    loaded = open_exported(file)
    return max(max_difference(step, loaded, rows=rows, steps=steps) for rows in sizes)


def step_of(name, memory, spec):
    options = {} if memory is None else {"memory": memory}
    return export_module(make_policy(name, SPECS[spec], seed=0, **options))


def test_onnx_equals_the_policy(tmp_path):
    step = step_of("fast", None, "recall")
    assert largest_difference(step, exported(step, tmp_path)) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "memory", "spec"),
    [
        ("component:latent_attn_tiny", "minlstm", "recall"),
        ("latent_attn_small", None, "recall"),
        ("latent_attn_med", "gru", "recall"),
        ("example", None, "recall"),
        ("fast", None, "image"),
        ("fast", "gru", "tree"),
        ("fast", "none", "vector"),
    ],
)
def test_export_of_every_policy_cell_and_space(tmp_path, name, memory, spec):
    step = step_of(name, memory, spec)
    assert largest_difference(step, exported(step, tmp_path), sizes=(3, 17)) <= BOUND


def test_torch_export_equals_the_policy(tmp_path):
    step = small_step()
    file = exported(step, tmp_path, "torch")
    assert largest_difference(step, file) <= BOUND
    metadata = {METADATA: ""}
    program = torch.export.load(file, extra_files=metadata)
    assert json.loads(json.loads(metadata[METADATA])["actions"]) == ["a", "b", "c"]
    outputs = program.module()(step.random_inputs(2, torch.Generator()))
    assert list(outputs) == ["action", "logits", "value", "h_out", "c_out"]


def test_onnx_names_shapes_and_metadata(tmp_path, capfd):
    before = logging.getLogger("torch").level
    file = exported(small_step(hidden_size=6), tmp_path)
    assert capfd.readouterr() == ("", ""), "exporters print nothing"
    assert logging.getLogger("torch").level == before
    session = onnxruntime.InferenceSession(file)
    assert {node.name: node.shape for node in session.get_inputs()} == {
        "obs": ["batch", 5],
        "h_in": ["batch", 2, 6],
        "c_in": ["batch", 2, 6],
        "first": ["batch"],
    }
    assert {node.name: node.shape for node in session.get_outputs()} == {
        "action": ["batch"],
        "logits": ["batch", 3],
        "value": ["batch"],
        "h_out": ["batch", 2, 6],
        "c_out": ["batch", 2, 6],
    }
    metadata = session.get_modelmeta().custom_metadata_map
    assert metadata["world"] == "recall"
    assert metadata["holdfast"] == holdfast.__version__
    assert json.loads(metadata["actions"]) == ["a", "b", "c"]


def test_dict_observation_has_one_input_per_leaf():
    names = list(step_of("fast", "gru", "tree").random_inputs(1, torch.Generator()))
    assert names == ["obs.more.0", "obs.more.1", "obs.more.2", "obs.picture", "obs.vector", "h_in", "first"]


@pytest.mark.slow
def test_exported_file_translates_names(tmp_path):
    policy = make_policy("latent_attn_tiny", RECALL, seed=0)
    other = holdfast.WorldSpec(
        (80, 3),  # long enough that on the CPU padding would be left out
        tuple(reversed(RECALL.action_names)),
        tuple(
            holdfast.Feature(feature.name, feature.normalization, id=7 + 2 * index)
            for index, feature in enumerate(RECALL.features)
        ),
        RECALL.window,
    )
    policy.bind(other, learn=False)
    assert policy.binding._feature_index is not None
    step = export_module(policy)
    assert largest_difference(step, exported(step, tmp_path), steps=30) <= BOUND
    inputs = step.random_inputs(3, torch.Generator().manual_seed(0))
    output, _ = policy.unroll(inputs["obs"], inputs["first"], policy.lstm.cell.initial(3))
    assert step(inputs)["logits"].equal(output.logits)


class NeverClears(ExportModule):
    """Exports a step that never clears."""

    def forward(self, inputs):
        return super().forward(inputs | {"first": torch.zeros_like(inputs["first"])})


class Fixed(ExportModule):
    """Returns the state that came in."""

    def forward(self, inputs):
        outputs = super().forward(inputs)
        return outputs | {f"{leaf}_out": inputs[f"{leaf}_in"].clone() for leaf in self.state_keys}


@pytest.mark.parametrize("kind", [NeverClears, Fixed])
def test_wrong_memory_handling_is_detected(tmp_path, kind):
    step = small_step()
    assert largest_difference(step, exported(kind(step.policy).eval(), tmp_path, "torch"), steps=30) > 1e-3


def test_nan_is_an_infinite_difference():
    step = small_step()

    def with_nan(inputs):
        outputs = step(inputs)
        return outputs | {"value": outputs["value"] * torch.nan}

    assert max_difference(step, with_nan, rows=2, steps=2) == torch.inf


@pytest.mark.parametrize(("clear_on", "flags"), [("trial", ["first", "trial"]), ("never", ["first"])])
def test_exported_file_clears_as_the_policy(tmp_path, clear_on, flags):
    step = small_step(clear_on=clear_on)
    inputs = step.random_inputs(4, torch.Generator().manual_seed(0))
    assert [name for name in inputs if inputs[name].dtype == torch.bool] == flags
    inputs |= {name: torch.ones_like(inputs[name]) for name in ("h_in", "c_in")}
    inputs |= {"first": torch.tensor([True, False, True, False])}
    outputs = open_exported(exported(step, tmp_path, "torch"))(inputs)
    entry = step.policy.lstm.cell.initial(4)
    clear = torch.zeros(4, dtype=torch.bool) if clear_on == "never" else inputs["first"] | inputs["trial"]
    for name in ("h", "c"):
        entry[name][~clear] = 1.0
    output, after = step.policy.unroll(inputs["obs"], torch.zeros(4, dtype=torch.bool), entry)
    assert torch.allclose(outputs["value"], output.values, atol=1e-6)
    assert torch.allclose(outputs["h_out"], after["h"], atol=1e-6)


def test_several_memories_have_named_states():
    graph = parse_graph(
        """
components:
  _obs_: {component: Encoder, size: 8}
  other: {component: Memory, cell: gru, hidden_size: 4, num_layers: 1, sources: [_obs_]}
  _core_: {component: LSTM, hidden_size: 4, num_layers: 1, sources: [other]}
  _action_: {component: Actor, sources: [_core_]}
  _value_: {component: Linear, out: 1, nonlinearity: none, sources: [_core_]}
"""
    )
    policy = holdfast.ComponentPolicy(SPEC, graph)
    policy.bind(SPEC)
    step = export_module(policy)
    assert sorted(step.random_inputs(1, torch.Generator())) == [
        "_core_.c_in",
        "_core_.h_in",
        "first",
        "obs",
        "other.h_in",
    ]


def test_hand_written_policy_cannot_be_exported():
    with pytest.raises(ConfigError, match=r"NewLSTMPolicy is written by hand .* Inherit RecurrentPolicy"):
        export_module(NewLSTMPolicy(SPEC))
    with pytest.raises(ContractError, match="bound to no world yet"):
        export_module(Small())


def test_data_dependent_policy_cannot_be_exported(tmp_path):
    class Branches(Small):
        def encode(self, obs):
            return super().encode(obs if obs.sum() > 0 else -obs)

    policy = Branches()
    policy.bind(SPEC)
    with pytest.raises(ContractError, match="Branches cannot be exported: ") as caught:
        exported(export_module(policy), tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_onnx_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.play.export.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"onnx, onnxscript, onnxruntime: .*pip install .*\[export\]'"):
        exported(small_step(), tmp_path)


@pytest.mark.parametrize("name", ["tree", "image", "vector"])
def test_random_obs_is_inside_the_space(name):
    space = SPECS[name].observation_space
    obs = random_obs(space, 50, torch.Generator().manual_seed(0))
    for row in range(50):
        assert space.contains(_as_sample(obs[row]))


def _as_sample(obs):
    if isinstance(obs, torch.Tensor):
        return obs.numpy() if obs.dim() else np.int64(obs)
    fields = {key: _as_sample(field) for key, field in obs.items()}
    return tuple(fields.values()) if "0" in fields else fields


def test_random_tokens_are_mostly_of_the_worlds_features():
    obs = random_tokens(RECALL, 200, torch.Generator().manual_seed(0))
    assert obs.dtype == torch.uint8
    registered = torch.isin(obs[..., 1].int(), torch.tensor(RECALL.feature_ids))
    assert 0.8 < float(registered.float().mean()) < 1.0


def test_random_token_values_are_within_normalizations():
    obs = random_tokens(RECALL, 200, torch.Generator().manual_seed(0))
    queries = obs[obs[..., 1] == 0][:, 2]
    assert set(queries.tolist()) >= {0, 1}
    # Except for random bytes: one token in ten, few of them with this feature id.
    assert (queries <= 1).float().mean() > 0.95
    assert obs[obs[..., 1] == 1][:, 2].max() > 200


def forgets(step):
    def run(inputs):
        return step({name: 0 * x if name == "h_in" else x for name, x in inputs.items()})

    return run


def test_difference_in_world():
    step = step_of("fast", None, "vector")
    differences = []
    for run in (step, forgets(step)):
        world = SayNumber(4)
        differences.append(difference_in_world(step, run, world, steps=30))
    assert differences[0] == 0
    assert differences[1] > 1e-3


def test_max_difference_without_carry_does_not_accumulate():
    step = small_step()

    def drifting(inputs):
        return {name: x + 1e-4 * name.endswith("_out") for name, x in step(inputs).items()}

    differences = [max_difference(step, drifting, rows=3, steps=100, carry=carry) for carry in (True, False)]
    assert differences[0] > 1.5e-4
    assert differences[1] == pytest.approx(1e-4, rel=0.01)
