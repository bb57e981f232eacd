"""Non-finite numbers are named with their agents, before the world acts on them."""

import pytest
import torch

from helpers.scripted_world import Reader, Scripted, make_reader
from holdfast.policies import PolicyOutput
from holdfast.rollout import Collector
from holdfast.rollout.nan_checks import (
    NonFiniteError,
    agent_list,
    first_few,
    non_finite_in,
    raise_non_finite_outputs,
    require_finite_weights,
)


def test_first_few_names_and_the_number_of_the_rest():
    assert first_few(["a"]) == "a"
    assert first_few(list("abcd")) == "a, b, c, d"
    assert first_few(list("abcde")) == "a, b, c, d and 1 more"


def test_agents_are_listed_by_number():
    assert agent_list([3]) == "agent 3"
    assert agent_list([3, 5]) == "agents 3, 5"


def test_non_finite_entries_are_counted():
    tensor = torch.tensor([[1.0, torch.nan], [torch.inf, -torch.inf]])
    assert non_finite_in({"a": torch.ones(2), "b": tensor}) == ["b (3 of 4)"]


def test_non_finite_weights_are_named():
    policy = make_reader()
    require_finite_weights(policy, "here")
    with torch.no_grad():
        policy.outwards.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError) as caught:
        require_finite_weights(policy, "here")
    assert str(caught.value) == (
        "here: weights are not finite: outwards.weight (1 of 24). No such weights are saved; lower "
        "trainer.optimizer.learning_rate or trainer.ppo.max_grad_norm."
    )


def test_outputs_of_valid_agents_are_named():
    valid = torch.tensor([True, False, True, True])
    finite = {"logits": torch.tensor([True, False, True, True]), "values": torch.tensor([True, False, True, False])}
    with pytest.raises(NonFiniteError, match=r"^here: the policy's values are not finite for agent 3\.$"):
        raise_non_finite_outputs(make_reader(), finite, valid, torch.arange(len(valid)), "here")


class Infinite(Reader):
    """Gives an infinite value at step 3 of agent 1."""

    def encode(self, obs):
        self.mask = obs[:, 0] == 1003
        return super().encode(obs)

    def decode(self, features):
        logits, values = super().decode(features)[:2]
        return PolicyOutput(logits, torch.where(self.mask, torch.inf, values))


def test_rollout_stops_before_the_world_acts_on_non_finite_outputs():
    world = Scripted(2, 20)
    collector = Collector(world, Infinite(), length=10, horizon=5, seed=0)
    with pytest.raises(NonFiniteError, match=r"^step 3: the policy's values are not finite for agent 1\.$"):
        collector.rollout(0)
    assert len(world.actions) == 3
