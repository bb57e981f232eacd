import io

import pytest
import torch
from gymnasium import spaces
from torch import nn

import holdfast
from holdfast.errors import ConfigError, ContractError
from holdfast.learn.optimizers import Several, hidden_matrices, make_optimizer
from holdfast.worlds import WorldSpec
from small import Small, make_small

USUAL = {
    "learning_rate": 0.01,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "momentum": 0.95,
}
LSTM = {f"lstm.cell.rnn.weight_{way}_l{layer}" for way in ("ih", "hh") for layer in (0, 1)}
LAYERS = [
    f"encoder.cross_attention.layers.{n}.{part}"
    for n in (0, 1)
    for part in ("query", "out", "mlp.0", "mlp.2")
]
HIDDEN = {
    "fast": {"encoder.fc1", "encoder.fc2", "critic.fc1", "actor.fc1"},
    "latent_attn_tiny": {
        "encoder.cross_attention.key_value",
        *LAYERS,
        "encoder.cross_attention.out",
        "critic.fc1",
        "actor.fc1",
    },
    "example": {"around.5", "myself.0"},
    "component:fast": {f"components.{name}.layer" for name in ("fc1", "encoded_obs", "critic_1", "actor_1")},
}


def make(name, policy, **changed):
    return make_optimizer(policy, name=name, **(USUAL | changed))


def names_of(policy, optimizer):
    """The names of what an optimizer moves."""
    ids = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    return {name for name, weight in policy.named_parameters() if id(weight) in ids}


def bound(**options):
    policy = make_small(**options)
    policy.bind(WorldSpec(obs_shape=(5,), action_names=("a", "b", "c")))
    return policy


def regression(policy):
    """A loss of everything a policy says after three steps, which its memory is needed for."""
    x = torch.randn(64, 3, 5, generator=torch.Generator().manual_seed(0))
    first = torch.tensor([True, False, False]).expand(64, 3)
    state = policy.lstm.cell.initial(64)

    def loss():
        thoughts, _ = policy.unroll(x, first, state)
        likely = policy.actions.tell(thoughts.logits[:, -1])[:, 0]
        return (thoughts.values[:, -1] - x[:, 0, 0]).square().mean() - likely.mean()

    return loss


def learn(optimizer, loss, steps):
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        optimizer.step()


@pytest.mark.parametrize("name", HIDDEN)
def test_muon_moves_the_hidden_matrices_of_shipped_policies_and_adamw_the_rest(name):
    policy = holdfast.make_policy(name, holdfast.make_world("arena", agents=24), seed=0)
    optimizer = make("muon", policy)
    assert isinstance(optimizer, Several)
    hidden = LSTM | {f"{layer}.weight" for layer in HIDDEN[name]}
    assert names_of(policy, optimizer.parts["muon"]) == hidden
    everything = {name for name, _ in policy.named_parameters()}
    assert names_of(policy, optimizer.parts["adamw"]) == everything - hidden
    assert names_of(policy, optimizer) == everything


@pytest.mark.parametrize(
    ("action", "outputs"),
    [
        (spaces.MultiDiscrete([3, 2]), {"actor.fc2.weight"}),
        (spaces.Box(-1, 1, (6,)), {"actor.mean.fc2.weight"}),
    ],
)
def test_the_layer_that_scores_actions_is_left_to_adamw_whatever_they_are(action, outputs):
    policy = holdfast.make_policy("fast", WorldSpec((4,), (), action=action), seed=0)
    hidden = hidden_matrices(policy)
    assert {"critic.fc1.weight", *LSTM} <= hidden
    assert not hidden & {"critic.fc2.weight", *outputs}
    assert outputs <= {name for name, _ in policy.named_parameters()}


class Odd(Small):
    """Scores and a value by one layer, an actor for each part, and weights of other kinds."""

    def __init__(self):
        super().__init__()
        self.bare = nn.Parameter(torch.zeros(7, 7))
        self.words = nn.Embedding(9, 7)
        self.wide = nn.Linear(7, 9)


def test_what_is_no_hidden_matrix_is_left_to_adamw():
    policy = bound(kind=Odd)
    assert hidden_matrices(policy) == {"inwards.weight", "wide.weight", *LSTM}


def test_each_part_of_an_action_may_have_a_layer_of_its_own():
    policy = holdfast.make_policy("fast", WorldSpec((4,), (), action=spaces.MultiDiscrete([30, 20])), seed=0)
    policy.thirty, policy.twenty, policy.other = nn.Linear(8, 30), nn.Linear(8, 20), nn.Linear(8, 25)
    own = hidden_matrices(policy) & {"thirty.weight", "twenty.weight", "other.weight"}
    assert own == {"other.weight"}


def test_a_policy_that_knows_no_actions_yet_is_refused():
    with pytest.raises(ContractError, match=r"call policy.bind"):
        make("muon", make_small())


def test_a_policy_without_a_hidden_matrix_is_told_to_take_another():
    policy = bound(hidden_size=1, memory="none")
    policy.inwards = nn.Linear(5, 3)
    with pytest.raises(ConfigError, match=r"has none; use trainer.optimizer.name=adamw"):
        make("muon", policy)


@pytest.mark.parametrize("name", ["adam", "adamw", "muon"])
def test_every_weight_moves_at_the_first_step(name):
    policy = bound()
    before = {key: weight.clone() for key, weight in policy.state_dict().items()}
    learn(make(name, policy), regression(policy), 1)
    still = [key for key, weight in policy.named_parameters() if torch.equal(weight, before[key])]
    assert still == []


@pytest.mark.parametrize("name", ["adam", "adamw", "muon"])
def test_every_optimizer_learns(name):
    policy = bound()
    loss = regression(policy)
    start = loss().item()
    learn(make(name, policy), loss, 60)
    assert loss().item() < 0.3 * start


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_is_that_of_torch_bit_for_bit(kind):
    ours, theirs = bound(), bound()
    learn(make(kind.__name__.lower(), ours, eps=1e-12), regression(ours), 5)
    plain = kind(theirs.parameters(), lr=0.01, betas=(0.9, 0.999), eps=1e-12, weight_decay=0.0)
    learn(plain, regression(theirs), 5)
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)


def test_the_steps_of_muon_are_as_large_as_those_of_adamw():
    # match_rms_adamw: an update of 0.2 x the learning rate, root mean square, whatever the shape.
    policy = bound()
    before = {key: weight.clone() for key, weight in policy.state_dict().items()}
    learn(make("muon", policy), regression(policy), 1)
    for key in hidden_matrices(policy):
        size = (policy.get_parameter(key) - before[key]).square().mean().sqrt().item()
        assert 0.1 * 0.01 < size < 0.3 * 0.01, key


@pytest.mark.parametrize(
    ("changed", "part"),
    [({"weight_decay": 0.3}, "muon"), ({"weight_decay": 0.3}, "adamw"), ({"momentum": 0.5}, "muon")],
)
def test_what_was_asked_for_reaches_the_parts(changed, part):
    groups = make("muon", bound(), **changed).parts[part].param_groups
    assert [{key: group[key] for key in changed} for group in groups] == [changed]
    plain = make("muon", bound()).parts["adamw"].param_groups[0]
    assert (plain["betas"], plain["eps"], plain["lr"]) == ((0.9, 0.999), 1e-8, 0.01)


def test_a_learning_rate_that_is_set_is_set_in_every_part():
    policy = bound()
    optimizer = make("muon", policy)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = {key: weight.clone() for key, weight in policy.state_dict().items()}
    learn(optimizer, regression(policy), 1)
    assert all(torch.equal(weight, before[key]) for key, weight in policy.state_dict().items())


def test_gradients_are_forgotten_in_every_part():
    policy = bound()
    optimizer = make("muon", policy)
    regression(policy)().backward()
    optimizer.zero_grad(set_to_none=True)
    assert [weight.grad for weight in policy.parameters()] == [None] * len(list(policy.parameters()))


@pytest.mark.parametrize("name", ["adam", "adamw", "muon"])
def test_an_optimizer_that_was_saved_goes_on_bit_for_bit(name):
    policy, other = bound(), bound(seed=1)
    optimizer = make(name, policy)
    learn(optimizer, regression(policy), 3)
    file = io.BytesIO()
    torch.save((policy.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file)
    other.load_state_dict(weights)
    again = make(name, other, learning_rate=0.5)
    again.load_state_dict(state)
    for each, mine in ((optimizer, policy), (again, other)):
        for group in each.param_groups:
            group["lr"] = 0.02
        learn(each, regression(mine), 3)
    pairs = zip(policy.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)


def test_the_state_of_another_optimizer_is_refused():
    saved = make("adam", bound()).state_dict()
    with pytest.raises(ContractError, match="of state, param_groups; this optimizer is made of muon, adamw"):
        make("muon", bound()).load_state_dict(saved)


def test_a_step_may_ask_for_its_loss():
    policy = bound()
    optimizer, loss = make("muon", policy), regression(policy)

    def closure():
        optimizer.zero_grad()
        found = loss()
        found.backward()
        return found

    start = loss().item()
    with torch.no_grad():
        assert optimizer.step(closure).item() == start
    assert loss().item() != start
