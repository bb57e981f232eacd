import pytest
import torch

from holdfast import make_policy, make_world
from holdfast.check.bench import set_up
from holdfast.check.laws import measure
from holdfast.check.subjects.find import subject_of
from holdfast.policies import POLICIES, LatentAttnMed, LatentAttnSmall, LatentAttnTiny
from holdfast.worlds import Feature, WorldSpec
from holdfast.worlds.tokens import PADDING

FEATURES = tuple(Feature(f"feature_{i}", float(i + 1)) for i in range(25))
ORIGINAL = WorldSpec(
    obs_shape=(200, 3), action_names=tuple(f"action_{i}" for i in range(19)), features=FEATURES
)
NAMES = {
    "latent_attn_tiny": LatentAttnTiny,
    "latent_attn_small": LatentAttnSmall,
    "latent_attn_med": LatentAttnMed,
}
STANDARD = {"hidden_size": 128, "num_layers": 2, "clear_on": "episode"}
KINDS = list(NAMES.values())


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("kind", "encoder", "total"),
    [(LatentAttnTiny, 29_782, 502_936), (LatentAttnSmall, 28_402, 501_556), (LatentAttnMed, 55_002, 528_156)],
)
def test_parameters_are_counted_as_in_the_original(kind, encoder, total):
    policy = kind(ORIGINAL)
    # The arithmetic of the encoders is in test_attention.py; the others are those of fast.
    assert count(policy.encoder) == encoder
    assert count(policy.lstm) == 264_192
    assert count(policy.critic) == 133_121
    assert count(policy.actor) == 75_841
    assert count(policy) == encoder + 264_192 + 133_121 + 75_841 == total


def test_initial_weights():
    torch.manual_seed(0)
    encoder = LatentAttnSmall(ORIGINAL).encoder
    table, queries = encoder.front.embedding.weight, encoder.cross_attention.queries
    assert table[PADDING].count_nonzero() == 0
    assert queries.std().item() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"hidden_size": 24, "num_layers": 1, "clear_on": "never"}])
def test_they_are_found_by_name_and_think(name, options):
    world = make_world("recall", agents=5)
    policy = make_policy(name, world, seed=0, **options)
    assert type(policy) is POLICIES[name] is NAMES[name]
    asked = ("hidden_size", "num_layers", "clear_on")
    assert [getattr(policy, key) for key in asked] == [{**STANDARD, **options}[key] for key in asked]
    obs = world.reset().obs
    state = policy.lstm.cell.initial(5)
    thoughts, after = policy.unroll(obs, torch.ones(5, dtype=torch.bool), state)
    assert thoughts.logits.shape == (5, 4)
    assert thoughts.values.shape == (5,)
    assert after.batch_size == state.batch_size


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_reaches_every_parameter(kind):
    torch.manual_seed(0)
    policy = kind(ORIGINAL)
    with torch.no_grad():
        for each in policy.parameters():
            # No weight is at rest: what happens to start at zero hides what it would do.
            each.add_(0.05 * torch.randn_like(each))
    features = torch.arange(25, dtype=torch.uint8).repeat(3, 8, 1)
    places = torch.randint(0, 11, features.shape, dtype=torch.uint8) * 17
    obs = torch.stack([places, features, features + 9], -1)
    thoughts, _ = policy.unroll(obs, torch.zeros(3, 8, dtype=torch.bool), policy.lstm.cell.initial(3))
    (thoughts.logits * torch.randn(19)).sum().add(thoughts.values.sum()).backward()
    rows = {"encoder.front.embedding.weight": 25, "actor.embeddings.table.weight": 19}
    for name, each in policy.named_parameters():
        used = each.grad[: rows.get(name, len(each))]
        # Units of the actor's ReLU may be off for all; nothing else is ever wholly at rest.
        assert (used != 0).double().mean() > (0.5 if name.startswith("actor") else 0.99), name


@pytest.mark.usefixtures("annotations_asleep")
@pytest.mark.parametrize("kind", KINDS)
def test_the_laws_that_are_quick_to_measure_hold(kind):
    torch.manual_seed(0)
    world = make_world("recall", agents=8)
    bench = set_up(subject_of(kind(world.spec, hidden_size=16), world))
    laws = list(measure(bench, ["cut", "replay", "isolate", "pure", "restore"]))
    assert {law.name: law.finding for law in laws if not law.ok} == {}
    assert len(laws) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_lives_the_same_whatever_fills_the_observations_of_others(kind, dtype):
    # The law `isolate` where padding can be left out, of which the script of the check has none.
    torch.manual_seed(0)
    policy = kind(ORIGINAL, hidden_size=16).to(dtype)
    short = torch.randint(0, 11, (8, 4, 200, 3), dtype=torch.uint8)
    full = short.clone()
    short[:, :, 20:] = PADDING
    full[0] = short[0]
    first = torch.zeros(8, 4, dtype=torch.bool)
    with torch.no_grad():
        alone, _ = policy.unroll(short, first, policy.lstm.cell.initial(8))
        crowd, _ = policy.unroll(full, first, policy.lstm.cell.initial(8))
    assert alone.logits[0].equal(crowd.logits[0])
    assert alone.values[0].equal(crowd.values[0])
    assert not alone.logits[1].equal(crowd.logits[1])
