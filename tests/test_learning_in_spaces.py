"""Slow: numbers and several choices are learnt by remembering, in worlds of other spaces than tokens."""

import pytest

from holdfast.config import change
from holdfast.experience import evaluate
from holdfast.life import iterations
from holdfast.policies import make_policy
from holdfast.recipes import find_recipe
from spaces_worlds import NamePlace, SayNumber, SayNumberInATree

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("annotations_asleep")]
KEYS = {
    "world.agents": 64,
    "trainer.bptt_horizon": 16,
    "trainer.batch_size": 1024,
    "trainer.minibatch_size": 256,
    "trainer.update_epochs": 4,
    "trainer.ppo.ent_coef": 0.0,
    "schedule.trainer.ppo.ent_coef": "constant",
}


def learn(kind, seed, **more):
    config = change(find_recipe("recall"), {**KEYS, **more, "seed": seed})
    world = kind(64, seed=seed)
    policy = make_policy("auto", world, seed=seed, hidden_size=32, num_layers=1)
    lines = list(iterations(config, world, policy))
    assert max(line["memory/replay_error"] for line in lines) <= 1e-5
    unseen = kind(64, seed=-1 - seed)
    return [
        evaluate(policy, unseen, episodes=512, memory=memory).return_mean for memory in ("intact", "cleared")
    ]


@pytest.mark.parametrize(("kind", "seed"), [(SayNumber, 0), (SayNumberInATree, 1)])
def test_a_number_is_remembered_and_said(kind, seed):
    keys = {"trainer.total_timesteps": 40_960, "trainer.optimizer.learning_rate": 3e-3}
    intact, cleared = learn(kind, seed, **keys)
    # Who forgets can get 0.5 at best.
    assert intact >= 0.8
    assert cleared <= 0.55


def test_a_place_in_an_image_is_remembered_and_named():
    intact, cleared = learn(NamePlace, 0, **{"trainer.total_timesteps": 12_288})
    # Who forgets names one part of three right, and one of two: 5/12.
    assert intact >= 0.9
    assert cleared <= 0.5
