"""Observations far outside of their Box are reported once, with count and agents."""

import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from helpers.gym_envs import Counting
from helpers.small_runs import TINY
from holdfast.build import build_policy
from holdfast.config.run import override
from holdfast.policies import make_policy
from holdfast.recipes import find_recipe
from holdfast.report.console import RunNotices
from holdfast.rollout import Collector
from holdfast.rollout.nan_checks import report_outside_box
from holdfast.training.trainer import Trainer
from holdfast.worlds.gym import GymWorld
from holdfast.worlds.obs import far_outside, has_bounds


class Bounded(Counting):
    """Shows values up to 5 in a Box of 0 to 2; its last action may be 10 % outside."""

    observation_space = spaces.Box(0, 2, (2,))

    def show(self, action):
        return super().show(max(action, -0.1))


def bounded_world(agents):
    # Every environment is that of agent 0, which shows the number of its step: 0, 1, 2, then 3 in the fourth.
    return GymWorld(agents, env=lambda: Bounded(script=((9, (True, False)),)))


def test_observations_far_outside_of_a_box_are_counted_by_agent():
    world = bounded_world(2)
    policy = make_policy("auto", world, hidden_size=4)
    collector = Collector(world, policy, length=4, horizon=2, seed=0)
    segments = collector.rollout(0)
    assert report_outside_box(segments, world.spec.observation_space) == (
        f"2 of 8 observations are far outside of their space {world.spec.observation_space}: agents 0, 1. "
        "Training continues; correct the space or the observations."
    )
    segments.steps["valid"][:, -1] = False
    assert report_outside_box(segments, world.spec.observation_space) == ""


def test_a_trainer_reports_them_once():
    class Recorder(RunNotices):
        def __init__(self):
            super().__init__()
            self.texts = []

        def alarm(self, text):
            self.texts += filter(None, [text])

    config = override(find_recipe("recall"), TINY)
    world, notices = bounded_world(8), Recorder()
    policy = build_policy(config, world, torch.device("cpu"))
    trainer = Trainer(config, world, policy, notices=notices)
    for _ in range(2):
        trainer.collect()
    (text,) = notices.texts
    assert text.startswith(
        "40 of 64 observations are far outside of their space Box(0.0, 2.0, (2,), float32): agents 0"
    )


@pytest.mark.parametrize(
    ("space", "value", "far"),
    [
        (spaces.Box(-1, 1, (2,)), 1.1, False),
        (spaces.Box(-1, 1, (2,)), -1.3, True),
        (spaces.Box(-torch.inf, torch.inf, (2,)), 1e30, False),
        (spaces.Box(0, torch.inf, (2,)), -1e6, True),
        (spaces.Box(0, torch.inf, (2,)), 1e30, False),
        (spaces.Discrete(2), 7.0, False),
        (spaces.Dict({"x": spaces.Box(-1, 1, (2,))}), 9.0, True),
    ],
)
def test_far_outside_has_a_margin_and_reads_nested_spaces(space, value, far):
    obs = torch.tensor([[0.0, value], [0.0, 0.0]])
    obs = TensorDict({"x": obs}, [2]) if isinstance(space, spaces.Dict) else obs
    assert far_outside(obs, space, rows=2).tolist() == [far, False]


def test_bytes_are_never_outside_of_a_box_of_all_bytes():
    obs = torch.tensor([[0], [255]], dtype=torch.uint8)
    assert far_outside(obs, spaces.Box(0, 255, (1,), "uint8"), rows=2).tolist() == [False, False]


@pytest.mark.parametrize(
    ("space", "bounded"),
    [
        (spaces.Box(-1, 1, (2,)), True),
        (spaces.Box(0, torch.inf, (2,)), True),
        (spaces.Box(-torch.inf, torch.inf, (2,)), False),
        (spaces.Box(0, 255, (1,), "uint8"), False),
        (spaces.Discrete(2), False),
        (spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1, 1, (2,))}), True),
    ],
)
def test_only_spaces_with_bounds_are_checked(space, bounded):
    assert has_bounds(space) == bounded
