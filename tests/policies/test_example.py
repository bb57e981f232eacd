import pytest
import torch
from tensordict import TensorDict

from holdfast import make_policy, make_world
from holdfast.check.adapters import adapt
from holdfast.check.context import prepare
from holdfast.check.laws import measure
from holdfast.policies import Example
from holdfast.worlds import Feature, WorldSpec
from holdfast.worlds.tokens import GLOBAL, PADDING

FEATURES = tuple(Feature(f"feature_{i}", float(i + 1)) for i in range(22))
ORIGINAL = WorldSpec(obs_shape=(200, 3), action_names=tuple(f"action_{i}" for i in range(19)), features=FEATURES)


def count(module):
    return sum(p.numel() for p in module.parameters())


def some_tokens(*batch):
    obs = torch.randint(0, 11, (*batch, 30, 3), dtype=torch.uint8)
    obs[..., 0] = obs[..., 0] * 16 + torch.randint(0, 11, (*batch, 30), dtype=torch.uint8)
    obs[..., 0, :] = torch.tensor([GLOBAL, 21, 9], dtype=torch.uint8)
    obs[..., 20:, :] = PADDING
    return obs


def test_example_parameter_counts():
    policy = Example(ORIGINAL)
    # conv 22*128*5*5+128, conv 128*128*3*3+128, linear 128*256+256
    assert count(policy.surroundings) == 70_528 + 147_584 + 33_024
    # linear 22*256+256
    assert count(policy.centre) == 5_888
    # 2 layers of 4*512*(512+512) weights and 2*4*512 biases
    assert count(policy.lstm) == 2 * (2_097_152 + 4_096) == 4_202_496
    # linear 512*19+19, linear 512+1
    assert count(policy.actor) + count(policy.critic) == 9_747 + 513
    assert count(policy) == 4_469_780


@pytest.mark.parametrize("window", [(3, 3), (11, 11), (15, 15), (9, 13)])
def test_example_encodes_every_window(window):
    spec = WorldSpec((30, 3), ("a", "b"), FEATURES, window=window)
    assert Example(spec, hidden_size=8).encode(some_tokens(2)).shape == (2, 512)


@pytest.mark.parametrize("options", [{"hidden_size": 24}, {"hidden_size": 24, "memory": "gru"}])
def test_example_passes_memory_options_on(options):
    world = make_world("recall", agents=5)
    policy = make_policy("example", world, seed=0, num_layers=1, clear_on="never", **options)
    assert type(policy) is Example
    assert (policy.hidden_size, policy.num_layers, policy.clear_on) == (24, 1, "never")
    output, _ = policy.unroll(world.reset().obs, torch.ones(5, dtype=torch.bool), policy.lstm.cell.initial(5))
    assert output.logits.shape == (5, 4)
    assert output.values.shape == (5,)


def test_example_starts_uniform_and_evaluates_actions():
    torch.manual_seed(0)
    policy = Example(ORIGINAL, hidden_size=32)
    td = TensorDict(
        {
            "env_obs": some_tokens(6),
            "first": torch.ones(6, dtype=torch.bool),
            "training_env_id_start": torch.zeros(6, dtype=torch.long),
        },
        batch_size=[6],
    )
    weight = policy.actor.weight
    torch.testing.assert_close(weight @ weight.T, 1e-4 * torch.eye(19), atol=1e-8, rtol=0)
    actions = torch.arange(6)
    td_out = policy(td.clone(), action=actions)
    assert td_out["full_log_probs"].exp().sub(1 / 19).abs().max() < 1e-3
    assert td_out["act_log_prob"].equal(td_out["full_log_probs"][torch.arange(6), actions])
    td["draws"] = torch.linspace(0.01, 0.99, 6)
    assert policy(td)["actions"].tolist() == [int(19 * draw) for draw in td["draws"].tolist()]


def test_example_does_not_modify_observations():
    obs = some_tokens(4)
    before = obs.clone()
    Example(ORIGINAL, hidden_size=8).encode(obs)
    assert obs.equal(before)


def test_example_reads_the_centre_cell():
    torch.manual_seed(0)
    policy = Example(ORIGINAL, hidden_size=8)
    obs = torch.tensor([[[GLOBAL, 3, 8]], [[0x55, 3, 8]], [[0x45, 3, 8]]], dtype=torch.uint8)
    centre = policy.encode(obs)[:, 256:]
    # The normalization of feature 3 is 4: a value of 8 becomes 2.
    expected = torch.relu(2 * policy.centre[0].weight[:, 3])
    torch.testing.assert_close(centre[0], expected)
    assert centre[1].equal(centre[0])
    assert centre[2].count_nonzero() == 0


def test_example_gradient_reaches_every_parameter():
    torch.manual_seed(0)
    policy = Example(ORIGINAL, hidden_size=16)
    output, _ = policy.unroll(some_tokens(8, 6), torch.zeros(8, 6, dtype=torch.bool), policy.lstm.cell.initial(8))
    (output.logits * torch.randn(19)).sum().add(output.values.sum()).backward()
    for name, weight in policy.named_parameters():
        # Features that do not occur have no gradient, and a ReLU may be off in all rows.
        assert (weight.grad != 0).double().mean() > 0.1, name


@pytest.mark.usefixtures("annotations_asleep")
def test_example_obeys_the_quick_laws():
    torch.manual_seed(0)
    world = make_world("recall", agents=8)
    context = prepare(adapt(Example(world.spec, hidden_size=16), world))
    laws = list(measure(context, ["cut", "replay", "isolate", "pure", "restore"]))
    assert {law.name: law.finding for law in laws if not law.ok} == {}
    assert len(laws) == 5


def test_example_and_its_graph_start_with_the_same_scales():
    """The largest singular value of every layer but the memory: that of its gain."""

    def scales(policy):
        layers = [weight for name, weight in policy.named_parameters() if "lstm" not in name and weight.dim() > 1]
        norms = [torch.linalg.matrix_norm(weight.flatten(1), 2).item() for weight in layers]
        return sorted(norms)

    world = make_world("arena", agents=24)
    expected = scales(make_policy("example", world, seed=0, hidden_size=32))
    assert scales(make_policy("component:example", world, seed=1, hidden_size=32)) == pytest.approx(expected, rel=1e-4)
