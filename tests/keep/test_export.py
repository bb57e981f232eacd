import json
import logging

import numpy as np
import pytest
import torch

import holdfast
from handwritten import NewLSTMPolicy
from holdfast.errors import ConfigError, ContractError
from holdfast.keep.export import OneStep, one_step, write_exported
from holdfast.keep.parity import (
    FACTS,
    difference_in_world,
    facts_in,
    largest_difference,
    open_exported,
    some_seen,
    some_tokens,
)
from holdfast.policies import make_policy
from holdfast.policies.graph import parse_graph
from small import SPEC, Small
from spaces_worlds import IMAGE_SPEC, TREE_SPEC, SayNumber

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
    return one_step(policy)


def apart(step, file, steps=200, sizes=(1, 3, 17)):
    theirs = open_exported(file)
    return max(largest_difference(step, theirs, step.draw, rows=rows, steps=steps) for rows in sizes)


def step_of(name, memory, spec):
    options = {} if memory is None else {"memory": memory}
    return one_step(make_policy(name, SPECS[spec], seed=0, **options))


def test_an_onnx_file_thinks_what_the_policy_thinks_over_200_steps_with_restarts(tmp_path):
    step = step_of("fast", None, "recall")
    assert apart(step, exported(step, tmp_path)) <= BOUND


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
def test_every_policy_memory_and_space_can_be_exported(tmp_path, name, memory, spec):
    step = step_of(name, memory, spec)
    assert apart(step, exported(step, tmp_path), sizes=(3, 17)) <= BOUND


def test_a_torch_file_thinks_the_same_too(tmp_path):
    step = small_step()
    file = exported(step, tmp_path, "torch")
    assert apart(step, file) <= BOUND
    assert json.loads(facts_in(file)["actions"]) == ["a", "b", "c"]
    program = torch.export.load(file, extra_files={FACTS: ""})
    said = program.module()(step.draw(2, torch.Generator()))
    assert list(said) == ["logits", "value", "h_out", "c_out"]


def test_names_and_shapes_are_those_of_the_cell_and_the_batch_is_free(tmp_path, capfd):
    before = logging.getLogger("torch").level
    file = exported(small_step(hidden_size=6), tmp_path)
    assert capfd.readouterr() == ("", ""), "exporters say nothing"
    assert logging.getLogger("torch").level == before
    session = onnxruntime.InferenceSession(file)
    assert {each.name: each.shape for each in session.get_inputs()} == {
        "obs": ["batch", 5],
        "h_in": ["batch", 2, 6],
        "c_in": ["batch", 2, 6],
        "first": ["batch"],
    }
    assert {each.name: each.shape for each in session.get_outputs()} == {
        "logits": ["batch", 3],
        "value": ["batch"],
        "h_out": ["batch", 2, 6],
        "c_out": ["batch", 2, 6],
    }
    told = session.get_modelmeta().custom_metadata_map
    assert told["world"] == "recall"
    assert told["holdfast"] == holdfast.__version__
    assert json.loads(told["actions"]) == ["a", "b", "c"]


def test_what_is_seen_in_parts_has_a_name_for_each():
    names = list(step_of("fast", "gru", "tree").draw(1, torch.Generator()))
    assert names == ["obs.more.0", "obs.more.1", "obs.more.2", "obs.picture", "obs.vector", "h_in", "first"]


@pytest.mark.slow
def test_the_words_of_the_world_are_translated_in_the_file(tmp_path):
    policy = make_policy("latent_attn_tiny", RECALL, seed=0)
    other = holdfast.WorldSpec(
        (80, 3),  # long enough that on the CPU padding would be left out
        tuple(reversed(RECALL.action_names)),
        tuple(
            holdfast.Feature(each.name, each.normalization, id=7 + 2 * place)
            for place, each in enumerate(RECALL.features)
        ),
        RECALL.window,
    )
    policy.bind(other, learn=False)
    assert policy.binding.translates
    step = one_step(policy)
    assert apart(step, exported(step, tmp_path), steps=30) <= BOUND
    given = step.draw(3, torch.Generator().manual_seed(0))
    thoughts, _ = policy.unroll(given["obs"], given["first"], policy.lstm.cell.initial(3))
    assert step(given)["logits"].equal(thoughts.logits)


class Forgetful(OneStep):
    """Exports a step that never clears."""

    def forward(self, given):
        return super().forward(given | {"first": torch.zeros_like(given["first"])})


class Fixed(OneStep):
    """Gives back the memory that came in."""

    def forward(self, given):
        said = super().forward(given)
        return said | {f"{leaf}_out": given[f"{leaf}_in"].clone() for leaf in self.leaves}


@pytest.mark.parametrize("kind", [Forgetful, Fixed])
def test_a_file_that_treats_memory_otherwise_is_found(tmp_path, kind):
    step = small_step()
    assert apart(step, exported(kind(step.policy).eval(), tmp_path, "torch"), steps=30) > 1e-3


def test_a_nan_in_a_file_is_no_small_difference():
    step = small_step()

    def theirs(given):
        said = step(given)
        return said | {"value": said["value"] * torch.nan}

    assert largest_difference(step, theirs, step.draw, rows=2, steps=2) == torch.inf


@pytest.mark.parametrize(("clear_on", "flags"), [("trial", ["first", "trial"]), ("never", ["first"])])
def test_what_clears_is_what_clears_the_policy(tmp_path, clear_on, flags):
    step = small_step(clear_on=clear_on)
    given = step.draw(4, torch.Generator().manual_seed(0))
    assert [name for name in given if given[name].dtype == torch.bool] == flags
    given |= {name: torch.ones_like(given[name]) for name in ("h_in", "c_in")}
    given |= {"first": torch.tensor([True, False, True, False])}
    said = open_exported(exported(step, tmp_path, "torch"))(given)
    entry = step.policy.lstm.cell.initial(4)
    clear = torch.zeros(4, dtype=torch.bool) if clear_on == "never" else given["first"] | given["trial"]
    for name in ("h", "c"):
        entry[name][~clear] = 1.0
    thoughts, after = step.policy.unroll(given["obs"], torch.zeros(4, dtype=torch.bool), entry)
    assert torch.allclose(said["value"], thoughts.values, atol=1e-6)
    assert torch.allclose(said["h_out"], after["h"], atol=1e-6)


def test_several_memories_have_the_names_of_their_components():
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
    step = one_step(policy)
    assert sorted(step.draw(1, torch.Generator())) == [
        "_core_.c_in",
        "_core_.h_in",
        "first",
        "obs",
        "other.h_in",
    ]


def test_a_policy_written_by_hand_is_refused():
    with pytest.raises(ConfigError, match=r"NewLSTMPolicy is written by hand .* Inherit RecurrentPolicy"):
        one_step(NewLSTMPolicy(SPEC))
    with pytest.raises(ContractError, match="bound to no world yet"):
        one_step(Small())


def test_a_policy_that_looks_at_numbers_to_decide_is_told(tmp_path):
    class Looks(Small):
        def encode(self, obs):
            return super().encode(obs if obs.sum() > 0 else -obs)

    policy = Looks()
    policy.bind(SPEC)
    with pytest.raises(ContractError, match="Looks cannot be exported: ") as caught:
        exported(one_step(policy), tmp_path)
    assert "\n" not in str(caught.value)


def test_without_its_packages_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.keep.parity.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"onnx, onnxscript, onnxruntime: pip install 'holdfast\[export\]'"):
        exported(small_step(), tmp_path)


@pytest.mark.parametrize("name", ["tree", "image", "vector"])
def test_random_observations_are_of_their_space(name):
    space = SPECS[name].sight
    seen = some_seen(space, 50, torch.Generator().manual_seed(0))
    for row in range(50):
        assert space.contains(_as_sample(seen[row]))


def _as_sample(seen):
    if isinstance(seen, torch.Tensor):
        return seen.numpy() if seen.dim() else np.int64(seen)
    parts = {key: _as_sample(part) for key, part in seen.items()}
    return tuple(parts.values()) if "0" in parts else parts


def test_random_tokens_are_mostly_of_features_that_there_are():
    seen = some_tokens(RECALL, 200, torch.Generator().manual_seed(0))
    assert seen.dtype == torch.uint8
    known = torch.isin(seen[..., 1].int(), torch.tensor(RECALL.feature_ids))
    assert 0.8 < float(known.float().mean()) < 1.0


def test_values_of_random_tokens_are_of_the_sizes_that_features_have():
    obs = some_tokens(RECALL, 200, torch.Generator().manual_seed(0))
    queries = obs[obs[..., 1] == 0][:, 2]
    assert set(queries.tolist()) >= {0, 1}
    # But for bytes that mean nothing: one in ten, of which few say this feature.
    assert (queries <= 1).float().mean() > 0.95
    assert obs[obs[..., 1] == 1][:, 2].max() > 200


def forgets(step):
    def run(given):
        return step({name: 0 * each if name == "h_in" else each for name, each in given.items()})

    return run


def test_a_file_that_forgets_is_found_in_its_world_and_one_that_does_not_is_the_same():
    step = step_of("fast", None, "vector")
    found = []
    for theirs in (step, forgets(step)):
        world = SayNumber(4)
        act = step.policy.actions.greedy
        found.append(difference_in_world(step, theirs, step.ask, act, world, steps=30))
    assert found[0] == 0
    assert found[1] > 1e-3


def test_without_carrying_what_is_off_in_a_memory_does_not_add_up():
    step = small_step()

    def drifting(given):
        return {name: each + 1e-4 * name.endswith("_out") for name, each in step(given).items()}

    apart = [
        largest_difference(step, drifting, step.draw, rows=3, steps=100, carry=carry)
        for carry in (True, False)
    ]
    assert apart[0] > 1.5e-4
    assert apart[1] == pytest.approx(1e-4, rel=0.01)
