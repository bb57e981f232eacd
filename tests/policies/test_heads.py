"""Heads: values, logits from action embeddings, Gaussian parameters."""

import math

import pytest
import torch

from holdfast import Fast
from holdfast.errors import ContractError
from holdfast.policies.heads import (
    ActionEmbeddings,
    Bilinear,
    BilinearActor,
    Critic,
    GaussianActor,
    LinearActor,
)
from holdfast.worlds import Feature, WorldSpec

FEATURES = tuple(Feature(f"feature_{i}", float(i + 1)) for i in range(25))


def test_too_many_actions_raise():
    with pytest.raises(ContractError, match="101 actions"):
        Fast(WorldSpec((4, 3), tuple(map(str, range(101))), FEATURES))


def test_critic_returns_one_value_per_row():
    torch.manual_seed(0)
    critic, x = Critic(6), torch.randn(5, 6)
    expected = torch.tanh(x @ critic.fc1.weight.T + critic.fc1.bias) @ critic.fc2.weight[0] + critic.fc2.bias
    torch.testing.assert_close(critic(x), expected)


def test_bilinear_equals_the_formula():
    torch.manual_seed(0)
    scores, x, embeddings = Bilinear(6, 3), torch.randn(5, 6), torch.randn(4, 3)
    expected = torch.einsum("nd,ad->na", torch.tanh(x @ scores.weight[0]), embeddings) + scores.bias
    torch.testing.assert_close(scores(x, embeddings), expected)
    assert scores.weight.abs().max() <= 1 / math.sqrt(6)


def test_added_actions_use_existing_embeddings():
    embeddings = ActionEmbeddings(["a", "b"], room=3, size=4)
    before = embeddings().clone()
    assert before.shape == (2, 4)
    embeddings.set_names((), ["a", "b", "c"])
    assert embeddings()[:2].equal(before)
    assert embeddings()[2].abs().sum() > 0
    with pytest.raises(ContractError, match="needs embeddings for 4 actions; it has 3"):
        embeddings.require_room((), list("abcd"))


def test_bilinear_actor_has_a_logit_per_action():
    torch.manual_seed(0)
    actor, x = BilinearActor(6, ["a", "b", "c"]), torch.randn(5, 6)
    logits = actor(x)
    assert logits.shape == (5, 3)
    with torch.no_grad():
        actor.embeddings.table.weight[1] += 1
    assert (actor(x)[:, [0, 2]] == logits[:, [0, 2]]).all()
    assert (actor(x)[:, 1] != logits[:, 1]).all()


def test_linear_actor_starts_near_uniform():
    torch.manual_seed(0)
    probs = torch.softmax(LinearActor(6, 4)(torch.randn(100, 6)), dim=1)
    assert (probs - 0.25).abs().max() < 0.02


def test_gaussian_actor_starts_with_standard_deviation_one_everywhere():
    torch.manual_seed(0)
    actor = GaussianActor(6, 2)
    mean, log_std = actor(torch.randn(5, 6)).chunk(2, dim=1)
    assert mean.std() > 0
    assert (log_std == 0).all()
    with torch.no_grad():
        actor.log_std[:] = torch.tensor([1.0, -2.0])
    assert actor(torch.randn(5, 6))[:, 2:].tolist() == [[1.0, -2.0]] * 5
