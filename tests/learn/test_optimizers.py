import io
import math

import pytest
import torch
from gymnasium import spaces
from torch import nn

import holdfast
from helpers.small_policy import Small, make_small
from holdfast.config.trainer import OptimizerConfig
from holdfast.errors import ConfigError, ContractError
from holdfast.learn.optimizers import hidden_matrices, make_optimizers, restore_optimizers
from holdfast.worlds import WorldSpec

LSTM = {f"lstm.cell.rnn.weight_{way}_l{layer}" for way in ("ih", "hh") for layer in (0, 1)}
LAYERS = [f"encoder.cross_attention.layers.{n}.{part}" for n in (0, 1) for part in ("query", "out", "mlp.0", "mlp.2")]
HIDDEN = {
    "fast": {"encoder.fc1", "encoder.fc2", "critic.fc1", "actor.fc1"},
    "latent_attn_tiny": {
        "encoder.cross_attention.key_value",
        *LAYERS,
        "encoder.cross_attention.out",
        "critic.fc1",
        "actor.fc1",
    },
    "example": {"surroundings.5", "centre.0"},
    "component:fast": {f"components.{name}.layer" for name in ("fc1", "encoded_obs", "critic_1", "actor_1")},
}


def make(name, policy, learning_rate=0.01, **changed):
    if name == "muon" and torch.__version__ < "2.9":
        pytest.skip("Muon comes with torch 2.9")
    return make_optimizers(policy, OptimizerConfig(name=name, learning_rate=learning_rate, **changed))


def names_of(policy, optimizer):
    """Names of the parameters of an optimizer."""
    ids = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    return {name for name, weight in policy.named_parameters() if id(weight) in ids}


def bound(**options):
    policy = make_small(**options)
    policy.bind(WorldSpec(obs_shape=(5,), action_names=("a", "b", "c")))
    return policy


def regression(policy):
    """A loss of all outputs of a policy after three steps, which need its memory."""
    x = torch.randn(64, 3, 5, generator=torch.Generator().manual_seed(0))
    first = torch.tensor([True, False, False]).expand(64, 3)
    state = policy.lstm.cell.initial(64)

    def loss():
        thoughts, _ = policy.unroll(x, first, state)
        likely = policy.actions.parameters(thoughts.logits[:, -1])[:, 0]
        return (thoughts.values[:, -1] - x[:, 0, 0]).square().mean() - likely.mean()

    return loss


def learn(optimizers, loss, steps):
    for _ in range(steps):
        for optimizer in optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        loss().backward()
        for optimizer in optimizers.values():
            optimizer.step()


@pytest.mark.parametrize("name", HIDDEN)
def test_muon_moves_the_hidden_matrices_of_shipped_policies_and_adamw_the_rest(name):
    policy = holdfast.make_policy(name, holdfast.make_world("arena", agents=24), seed=0)
    optimizers = make("muon", policy)
    hidden = LSTM | {f"{layer}.weight" for layer in HIDDEN[name]}
    assert names_of(policy, optimizers["muon"]) == hidden
    everything = {name for name, _ in policy.named_parameters()}
    assert names_of(policy, optimizers["adamw"]) == everything - hidden


@pytest.mark.parametrize(
    ("action", "outputs"),
    [
        (spaces.MultiDiscrete([3, 2]), {"actor.fc2.weight"}),
        (spaces.Box(-1, 1, (6,)), {"actor.mean.fc2.weight"}),
    ],
)
def test_muon_excludes_the_output_layer_of_every_action_space(action, outputs):
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


def test_adamw_optimizes_all_but_hidden_matrices():
    policy = bound(kind=Odd)
    assert hidden_matrices(policy) == {"inwards.weight", "wide.weight", *LSTM}


def test_each_part_of_an_action_may_have_a_layer_of_its_own():
    policy = holdfast.make_policy("fast", WorldSpec((4,), (), action=spaces.MultiDiscrete([30, 20])), seed=0)
    policy.thirty, policy.twenty, policy.other = nn.Linear(8, 30), nn.Linear(8, 20), nn.Linear(8, 25)
    own = hidden_matrices(policy) & {"thirty.weight", "twenty.weight", "other.weight"}
    assert own == {"other.weight"}


def test_unbound_policy_is_refused():
    with pytest.raises(
        ContractError, match=r"^This policy is not bound to a world yet; call policy\.bind\(world\.spec\)\.$"
    ):
        make("muon", make_small())


def test_muon_without_hidden_matrix_is_an_error():
    policy = bound(hidden_size=1, memory="none")
    policy.inwards = nn.Linear(5, 3)
    with pytest.raises(ConfigError, match=r"has none; use trainer.optimizer.name=adamw"):
        make("muon", policy)


def test_torch_without_muon_is_an_error(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ConfigError, match=r"Muon comes with torch 2\.9, .*; use trainer.optimizer.name=adamw"):
        make_optimizers(bound(), OptimizerConfig(name="muon"))


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
    ours, expected = bound(), bound()
    learn(make(kind.__name__.lower(), ours, eps=1e-12), regression(ours), 5)
    plain = kind(expected.parameters(), lr=0.01, betas=(0.9, 0.999), eps=1e-12, weight_decay=0.0)
    learn({"plain": plain}, regression(expected), 5)
    pairs = zip(ours.parameters(), expected.parameters(), strict=True)
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
def test_options_reach_every_optimizer(changed, part):
    groups = make("muon", bound(), **changed)[part].param_groups
    assert [{key: group[key] for key in changed} for group in groups] == [changed]
    plain = make("muon", bound())["adamw"].param_groups[0]
    assert (plain["betas"], plain["eps"], plain["lr"]) == ((0.9, 0.999), 1e-8, 0.01)


@pytest.mark.parametrize("name", ["adam", "adamw", "muon"])
def test_restored_optimizer_continues_bit_for_bit(name):
    policy, other = bound(), bound(seed=1)
    optimizers = make(name, policy)
    learn(optimizers, regression(policy), 3)
    file = io.BytesIO()
    moments = {part: optimizer.state_dict()["state"] for part, optimizer in optimizers.items()}
    torch.save((policy.state_dict(), moments), file)
    file.seek(0)
    weights, state = torch.load(file)
    other.load_state_dict(weights)
    again = make(name, other)
    restore_optimizers(again, state)
    learn(optimizers, regression(policy), 3)
    learn(again, regression(other), 3)
    pairs = zip(policy.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)


def test_moments_of_another_optimizer_are_an_error():
    with pytest.raises(ContractError, match="there is no 'muon'"):
        restore_optimizers(make("muon", bound()), {"Adam": {}})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({9999: {}}, "The saved state of Adam is of more than its 12 weights."),
        ({0: {"step": torch.ones(()), 3: 0}}, "The saved state of Adam for weight 0 has step, 3."),
        (
            {0: {"step": torch.ones(()), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}},
            "The saved 'exp_avg' of Adam for weight 0 is [2]; the weight is [64, 12].",
        ),
    ],
)
def test_moments_that_do_not_fit_are_an_error(state, message):
    with pytest.raises(ContractError) as caught:
        restore_optimizers(make("adam", bound()), {"Adam": state})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("key", "value"), [("step", -1e38), ("step", math.nan), ("exp_avg", math.inf), ("exp_avg_sq", -1.0), ("step", 3)]
)
def test_moments_with_impossible_numbers_are_an_error(key, value):
    state = {"step": torch.ones(()), "exp_avg": torch.ones(64, 12), "exp_avg_sq": torch.ones(64, 12)}
    restore_optimizers(make("adam", bound()), {"Adam": {0: state}})
    state[key] = torch.full(state[key].shape, value)
    with pytest.raises(ContractError, match=f"The saved '{key}' of Adam for weight 0 has impossible numbers"):
        restore_optimizers(make("adam", bound()), {"Adam": {0: state}})
