"""Features and actions are identified by name, whatever their ids."""

import copy

import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from helpers.component_graphs import SMALL
from helpers.manual_policy import NewLSTMPolicy
from helpers.one_update import learn_from
from helpers.small_policy import OnlySpec, make_small
from holdfast.errors import ContractError
from holdfast.evaluation.evaluate import evaluate
from holdfast.policies import POLICIES, ComponentPolicy, Example, Fast, make_policy
from holdfast.policies.components.graph import parse_graph
from holdfast.policies.heads import MAX_ACTIONS
from holdfast.rollout import Collector
from holdfast.worlds import Feature, WorldSpec, make_world
from holdfast.worlds.tokens import GLOBAL, PADDING

FEATURES = tuple(Feature(f"feature_{i}", float(i + 1)) for i in range(6))
ACTIONS = ("left", "right", "stay")
HOME = WorldSpec((12, 3), ACTIONS, FEATURES)
FORMS = [*POLICIES, *(f"component:{name}" for name in POLICIES)]
QUICK = ["fast", "latent_attn_tiny", "component:fast", "component:latent_attn_small"]


def make(name, spec=HOME):
    torch.manual_seed(0)
    policy = make_policy(name, OnlySpec(spec=spec), hidden_size=8, num_layers=1).double()
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return policy


def tokens(spec, names=None, rows=3):
    """Tokens of named features in a world's ids: the same observations in every world."""
    ids = dict(zip([feature.name for feature in spec.features], spec.feature_ids, strict=True))
    names = names or [feature.name for feature in FEATURES]
    obs = torch.full((rows, 12, 3), PADDING, dtype=torch.uint8)
    for row in range(rows):
        generator = torch.Generator().manual_seed(row)
        for place, name in enumerate(names):
            where = int(torch.randint(11, (), generator=generator)) * 17
            value = int(torch.randint(1, 250, (), generator=generator))
            obs[row, place] = torch.tensor([GLOBAL if place == 0 else where, ids[name], value])
    return obs


def run(policy, obs):
    rows = len(obs)
    with torch.no_grad():
        output, _ = policy.unroll(obs, torch.zeros(rows, dtype=torch.bool), policy.lstm.cell.initial(rows))
    return output


@pytest.mark.parametrize("name", FORMS)
def test_same_names_with_other_ids_give_the_same_outputs(name):
    policy = make(name)
    other = WorldSpec(
        (12, 3),
        ("stay", "left", "right"),
        tuple(Feature(f.name, f.normalization, id=40 - 7 * i) for i, f in enumerate(FEATURES[::-1])),
    )
    here = run(policy, tokens(HOME))
    policy.bind(other, learn=False)
    there = run(policy, tokens(other))
    torch.testing.assert_close(there.values, here.values, atol=1e-12, rtol=0)
    torch.testing.assert_close(there.logits, here.logits[:, [2, 0, 1]], atol=1e-12, rtol=0)
    policy.bind(HOME)
    assert run(policy, tokens(HOME)).logits.equal(here.logits)


@pytest.mark.parametrize("name", QUICK)
@settings(max_examples=15, deadline=None)
@given(
    order=st.permutations(range(6)),
    ids=st.lists(st.integers(0, 254), min_size=6, max_size=6, unique=True),
    actions=st.permutations(range(3)),
)
def test_ids_and_order_are_translated(name, order, ids, actions):
    policy = make(name)
    here = run(policy, tokens(HOME))
    features = tuple(Feature(FEATURES[i].name, FEATURES[i].normalization, ids[i]) for i in order)
    other = WorldSpec((12, 3), tuple(ACTIONS[i] for i in actions), features)
    policy.bind(other, learn=False)
    there = run(policy, tokens(other))
    torch.testing.assert_close(there.values, here.values, atol=1e-12, rtol=0)
    torch.testing.assert_close(there.logits, here.logits[:, list(actions)], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", QUICK)
def test_first_world_may_have_any_ids(name):
    odd = WorldSpec((12, 3), ACTIONS, tuple(Feature(f.name, f.normalization, 200 + i) for i, f in enumerate(FEATURES)))
    torch.testing.assert_close(
        run(make(name, odd), tokens(odd)).values, run(make(name), tokens(HOME)).values, atol=0, rtol=0
    )


WIDER = WorldSpec(
    (12, 3),
    ("jump", *ACTIONS[::-1]),
    (Feature("novel", 9.0), *FEATURES[::-1]),
)
OLD = [feature.name for feature in FEATURES]


@pytest.mark.parametrize("name", FORMS)
def test_unknown_features_and_actions_are_masked_without_learn(name):
    policy = make(name)
    here = run(policy, tokens(HOME))
    policy.bind(WIDER, learn=False)
    plain, novel = run(policy, tokens(WIDER, OLD)), run(policy, tokens(WIDER, [*OLD, "novel"]))
    torch.testing.assert_close(novel.values, plain.values, atol=1e-12, rtol=0)
    torch.testing.assert_close(plain.logits[:, [3, 2, 1]], here.logits, atol=1e-12, rtol=0)
    log_probs = torch.log_softmax(plain.logits, -1)
    assert (log_probs[:, 0].exp() == 0).all()
    assert (log_probs.exp() * log_probs).sum(-1).isfinite().all()
    assert log_probs.float().isfinite().all()


@pytest.mark.parametrize("name", [name for name in FORMS if "example" not in name])
def test_unknown_features_and_actions_are_added_with_learn(name):
    policy = make(name)
    here = run(policy, tokens(HOME))
    policy.bind(WIDER)
    assert [feature.name for feature in policy.binding.features] == [*OLD, "novel"]
    assert policy.binding.actions == (*ACTIONS, "jump")
    same = run(policy, tokens(WIDER, OLD))
    torch.testing.assert_close(same.values, here.values, atol=1e-12, rtol=0)
    torch.testing.assert_close(same.logits[:, [3, 2, 1]], here.logits, atol=1e-12, rtol=0)
    assert same.logits[:, 0].abs().max() < 1e3
    obs = tokens(WIDER, ["novel", *OLD])
    before = run(policy, obs).values
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    output, _ = policy.unroll(obs, torch.zeros(3, dtype=torch.bool), policy.lstm.cell.initial(3))
    (output.values.sum() + output.logits[:, 0].sum()).backward()
    optimizer.step()
    assert (run(policy, obs).values - before).abs().max() > 1e-6
    # The update changes outputs for observations with the new feature.
    with_novel, without_novel = run(policy, tokens(WIDER, ["novel", *OLD])), run(policy, tokens(WIDER, OLD))
    assert (with_novel.values - without_novel.values).abs().max() > 1e-9


def test_bind_rejects_what_has_no_room():
    for policy in (make("example"), make("component:example")):
        wider = WorldSpec((12, 3), ACTIONS, WIDER.features)
        policy.bind(wider)
        assert run(policy, tokens(wider, ["novel", *OLD])).values.isfinite().all()
        with pytest.raises(ContractError, match=r"cannot learn new actions \(jump\)"):
            policy.bind(WIDER)
    with pytest.raises(ContractError, match="has none of the world's actions"):
        make("fast").bind(WorldSpec((12, 3), ("x", "y"), FEATURES), learn=False)
    many = WorldSpec((12, 3), tuple(f"a{i}" for i in range(MAX_ACTIONS - 2)), FEATURES)
    with pytest.raises(ContractError, match=f"needs embeddings for {MAX_ACTIONS + 1} actions; it has {MAX_ACTIONS}"):
        make("fast").bind(many)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (WorldSpec((5,), ACTIONS), "reads tokens"),
        (WorldSpec((12, 3), ACTIONS, FEATURES, window=(13, 13)), "window of 11x11.*has 13x13"),
    ],
)
def test_bind_rejects_another_kind_of_observation(spec, message):
    with pytest.raises(ContractError, match=message):
        make("fast").bind(spec, learn=False)


def test_bind_rejects_another_obs_shape():
    policy = make_small()
    policy.bind(WorldSpec((5,), ("a", "b", "c")))
    with pytest.raises(ContractError, match=r"reads Box.*\(5,\).*; .* has Box.*\(6,\)"):
        policy.bind(WorldSpec((6,), ("a", "b", "c")))


def test_normalizations_are_those_of_the_world():
    policy = make("fast")
    louder = tuple(Feature(f.name, 2 * f.normalization) for f in FEATURES)
    here = run(policy, tokens(HOME))
    policy.bind(WorldSpec((12, 3), ACTIONS, louder), learn=False)
    assert not run(policy, tokens(HOME)).values.equal(here.values)
    policy.bind(HOME, learn=False)
    assert run(policy, tokens(HOME)).values.equal(here.values)


@pytest.mark.parametrize("name", QUICK)
def test_names_are_saved_and_loaded_with_the_weights(name):
    taught = make(name)
    taught.bind(WIDER)
    with torch.no_grad():
        for weight in taught.parameters():
            weight.add_(0.1)
    weights = taught.state_dict()
    taught.bind(HOME, learn=False)
    fresh = make(name)
    fresh.load_state_dict(weights)
    assert fresh.binding.actions == taught.binding.actions
    assert run(fresh, tokens(HOME)).logits.equal(run(taught, tokens(HOME)).logits)
    # A policy made for the same names in another order takes over the order of the weights.
    mixed = WorldSpec((12, 3), WIDER.action_names[::-1], WIDER.features[::-1])
    other = make(name, mixed)
    other.load_state_dict(weights)
    taught.bind(mixed, learn=False)
    assert run(other, tokens(mixed)).logits.equal(run(taught, tokens(mixed)).logits)


@pytest.mark.parametrize("name", [name for name in FORMS if "example" not in name])
def test_rollout_and_update_after_rebinding(name):
    policy = make_policy(name, make_world("recall", agents=2, cues=3), seed=0, hidden_size=8, num_layers=1)
    for cues, learn in ((2, False), (5, True), (4, False)):
        world = make_world("recall", agents=2, cues=cues)
        policy.bind(world.spec, learn=learn)
        segments = Collector(world, policy, length=8, horizon=4, seed=0).rollout(0)
        assert segments.steps["actions"].max() < cues
        learn_from(policy, segments, rows=2)
    assert len(policy.binding.actions) == 5
    assert all(weight.isfinite().all() for weight in policy.parameters())


def test_evaluation_takes_no_unknown_action():
    class Watching(type(make_world("recall", agents=1))):
        def step(self, actions):
            actions_taken.append(actions.clone())
            return super().step(actions)

    actions_taken = []
    policy = make_policy("fast", make_world("recall", agents=2, cues=2), seed=0, hidden_size=8)
    with torch.no_grad():
        # Without the mask, the unknown actions would be the most likely.
        policy.actor.embeddings.table.weight[2:] *= 1e3
    evaluate(policy, Watching(4, cues=5), episodes=8)
    assert torch.stack(actions_taken).max() < 2


@pytest.mark.parametrize("name", ["fast", "component:fast"])
def test_rejected_bind_changes_nothing(name):
    policy = make(name)
    before = {key: weight.clone() for key, weight in policy.state_dict().items()}
    many = WorldSpec((12, 3), tuple(f"a{i}" for i in range(MAX_ACTIONS)), WIDER.features)
    with pytest.raises(ContractError, match="needs embeddings for"):
        policy.bind(many)
    other = WorldSpec((12, 3), (), FEATURES, action=spaces.MultiDiscrete([2, 3]))
    with pytest.raises(ContractError, match="This policy takes None; the world it is bound to now has Multi"):
        policy.bind(other)
    after = policy.state_dict()
    assert policy.binding.spec is HOME
    assert before.keys() == after.keys()
    assert all(after[key].equal(leaf) for key, leaf in before.items())


def test_rejected_bind_of_a_hand_written_policy_changes_nothing():
    spec = WorldSpec((5,), ACTIONS)
    policy = NewLSTMPolicy(spec)
    policy.bind(spec)
    with pytest.raises(ContractError, match="NewLSTMPolicy is written by hand"):
        policy.bind(WorldSpec((5,), ACTIONS[::-1]), learn=False)
    assert policy.binding.spec is spec


@pytest.mark.parametrize("name", QUICK)
def test_normalizations_are_not_loaded(name):
    louder = tuple(Feature(f.name, 2 * f.normalization) for f in FEATURES)
    there = make(name, WorldSpec((12, 3), ACTIONS, louder))
    there.load_state_dict(make(name).state_dict())
    again = make(name)
    again.bind(there.binding.spec, learn=False)
    assert run(there, tokens(HOME)).values.equal(run(again, tokens(HOME)).values)


def test_loading_weights_with_fewer_features_raises():
    few, many = make("fast"), make("fast", WorldSpec((12, 3), ACTIONS, WIDER.features))
    with pytest.raises(ContractError, match="channels for 7 features; 6 are too few"):
        many.load_state_dict(few.state_dict())
    assert len(many.binding.features) == 7
    broken = few.state_dict() | {"binding._extra_state": torch.zeros(3, dtype=torch.uint8)}
    with pytest.raises(ContractError, match="cannot be read"):
        few.load_state_dict(broken)


def test_readers_of_the_box_are_widened_or_rejected():
    torch.manual_seed(0)
    policy = ComponentPolicy(HOME, parse_graph(SMALL)).double()
    policy.bind(HOME)
    here = run(policy, tokens(HOME))
    wider = WorldSpec((12, 3), ACTIONS, WIDER.features)
    policy.bind(wider)
    torch.testing.assert_close(run(policy, tokens(wider, OLD)).values, here.values, atol=1e-12, rtol=0)
    closed = SMALL.replace("Linear, sources: [flat], out: 6", "Concat, sources: [flat, flat]")
    policy = ComponentPolicy(HOME, parse_graph(closed))
    policy.bind(HOME)
    with pytest.raises(ContractError, match=r"seen \(Concat\) reads the box and cannot be widened"):
        policy.bind(wider)
    assert run(policy, tokens(HOME)).values.isfinite().all()


def test_optimizer_made_before_widening_still_works():
    policy = make("fast")
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    policy.bind(WIDER)
    before = policy.encoder.conv1.weight.clone()
    output, _ = policy.unroll(tokens(WIDER), torch.zeros(3, dtype=torch.bool), policy.lstm.cell.initial(3))
    output.values.sum().backward()
    optimizer.step()
    assert not policy.encoder.conv1.weight.equal(before)


def test_deepcopy_has_its_own_binding():
    policy = make("fast")
    policy.bind(WIDER)
    copied = copy.deepcopy(policy)
    copied.bind(WorldSpec((12, 3), ACTIONS, (*WIDER.features, Feature("newest", 1.0))))
    assert len(copied.binding.features) == 8
    assert len(policy.binding.features) == 7
    assert policy.encoder.conv1.in_channels == 7
    assert copied.encoder.conv1.in_channels == copied.encoder.conv1.weight.shape[1] == 8


def test_collector_and_check_reject_another_interface():
    policy = make_policy("fast", make_world("recall", agents=2, cues=3), seed=0, hidden_size=8)
    with pytest.raises(ContractError, match="bound to a world with other observations or actions"):
        Collector(make_world("recall", agents=2, cues=4), policy, length=4, horizon=4, seed=0)
    with pytest.raises(ContractError, match="bound to a world"):
        holdfast.check(policy, make_world("recall", agents=2, cues=4))


@pytest.mark.parametrize("cues", [3, 5])
def test_evaluation_binds_a_copy(cues):
    policy = make_policy("fast", make_world("recall", agents=2), seed=0, hidden_size=8)
    evaluation = evaluate(policy, make_world("recall", agents=4, cues=cues), episodes=8)
    assert len(evaluation.returns) == 8
    assert len(policy.binding.actions) == 4
    assert policy.binding._feature_index is policy.binding._action_index is None


@pytest.mark.parametrize("policy", [Fast(HOME), ComponentPolicy(HOME, "fast"), make_small()])
def test_experience_spec_keys(policy):
    with pytest.raises(ContractError, match="bound to no world yet"):
        policy.get_agent_experience_spec()
    spec = HOME if policy.hidden_size == 128 else WorldSpec((5,), ACTIONS)
    policy.bind(spec)
    step = policy.get_agent_experience_spec()
    assert step["env_obs"].shape == (0, *spec.obs_shape)
    assert step["env_obs"].dtype == (torch.uint8 if spec.features else torch.float32)
    needed = {"env_obs", "rewards", "dones", "truncateds", "first", "valid", "trial"}
    assert set(step.keys()) == needed | {"actions", "act_log_prob", "values"}


def test_experience_spec_matches_the_collector():
    world = make_world("recall", agents=3)
    policy = make_policy("fast", world, seed=0, hidden_size=8)
    steps = Collector(world, policy, length=4, horizon=4, seed=0).rollout(0).steps
    spec = policy.get_agent_experience_spec()
    assert set(steps.keys()) == {*spec.keys(), "last_values", "values_now", "ratio"}
    assert {key: leaf.dtype for key, leaf in spec.items()} == {key: steps[key].dtype for key in spec.keys()}  # noqa: SIM118


def test_duplicate_names_and_ids_raise():
    with pytest.raises(ContractError, match="the action a more than once"):
        WorldSpec((5,), ("a", "a"))
    for size in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ContractError, match="feature x has normalization"):
            WorldSpec((5, 3), ("a",), (Feature("x", size),))
    with pytest.raises(ContractError, match="the feature x more than once"):
        WorldSpec((5, 3), ("a",), (Feature("x", 1.0), Feature("x", 2.0)))
    with pytest.raises(ContractError, match="the feature id 1 more than once"):
        WorldSpec((5, 3), ("a",), (Feature("x", 1.0, 1), Feature("y", 2.0)))
    with pytest.raises(ContractError, match="ids go from 0 to 254"):
        WorldSpec((5, 3), ("a",), (Feature("x", 1.0, 255),))


def test_example_has_one_logit_per_action():
    assert isinstance(make("example"), Example)
    assert make("example").actor.out_features == len(ACTIONS)
