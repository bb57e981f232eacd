import copy
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.small_runs import iterate
from holdfast.build import build_policy, build_world
from holdfast.config.run import override
from holdfast.evaluation.periodic_and_final import final_evaluation, periodic_evaluation, sampled_episodes
from holdfast.recipes import find_recipe
from holdfast.rng import generator_state
from holdfast.rollout import Collector
from holdfast.training.trainer import Trainer
from holdfast.worlds import make_world

TINY = {
    "world.agents": 8,
    "world.delay": "1..3",
    "trainer.bptt_horizon": 8,
    "trainer.batch_size": 128,
    "trainer.minibatch_size": 64,
    "trainer.total_timesteps": 384,
    "report": "off",
    "trainer.eval_episodes": 12,
    "policy.hidden_size": 8,
    "policy.num_layers": 1,
}
CPU = torch.device("cpu")


def config_of(**keys):
    return override(find_recipe("recall"), {**TINY, **{k.replace("__", "."): v for k, v in keys.items()}})


def everything(policy, world):
    """Copies of all that belongs to a training, bit by bit."""
    live, inside = policy.store.snapshot(), getattr(world, "inside", world)
    return {
        "weights": copy.deepcopy(policy.state_dict()),
        "gradients": {name: copy.deepcopy(each.grad) for name, each in policy.named_parameters()},
        "memories": (live.slices, dict(live.tree.items())),
        "mode": [module.training for module in policy.modules()],
        "binding": (policy.binding.spec, policy.binding.features, policy.binding.actions),
        "hooks": [len(module._forward_hooks) for module in policy.modules()],
        "world": copy.deepcopy({name: each for name, each in vars(inside).items() if name != "spec"}),
        "generators": generator_state(),
    }


def same(one, other):
    """Whether two trees of such copies are equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


class Draws:
    """A world that draws from the generators a program shares, whenever it is asked."""

    def __init__(self, agents, delay=1, seed=0):
        self.inside = make_world("recall", agents=agents, delay=delay, seed=seed)
        self.agents, self.spec = agents, self.inside.spec

    def reset(self):
        torch.rand(1), np.random.rand(), random.random()
        return self.inside.reset()

    def step(self, actions):
        torch.rand(1), np.random.rand(), random.random()
        return self.inside.step(actions)


@pytest.mark.parametrize("world_name", ["recall", "test_periodic_and_final:Draws"])
def test_periodic_evaluation_does_not_affect_training(world_name, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    delay = {"world__delay": 1} if world_name != "recall" else {}
    config = config_of(world=world_name, **{**delay, "world__agents": 8})
    world = build_world(config, CPU, agents=8, seed=0)
    policy = build_policy(config, world, CPU)
    collector = Collector(world, policy, length=16, horizon=8, seed=0)
    segments = collector.rollout(0)
    with policy.replay(segments.entry_state):
        policy(segments.steps.clone(), action=segments.steps["actions"])["values"].sum().backward()
    policy.train()
    before = everything(policy, world)
    assert bool(before["memories"][1]["h"].any())
    assert any(gradient is not None for gradient in before["gradients"].values())
    scores = periodic_evaluation(config, policy, CPU)
    assert scores.keys() == {"eval/return_mean", "eval/return_mean_memory_cleared"}
    after = everything(policy, world)
    assert [name for name in before if not same(before[name], after[name])] == []


def test_training_is_the_same_with_periodic_evaluation():
    config = config_of(trainer__monitor="every:1", trainer__check="every:1")
    runs = []
    for evaluates in (False, True):
        world = build_world(config, CPU, agents=8, seed=config.seed)
        policy = build_policy(config, world, CPU)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            history = []
            for metrics in iterate(Trainer(config, world, policy), config.iterations):
                history.append({name: number for name, number in metrics.items() if name.startswith("losses/")})
                if evaluates:
                    periodic_evaluation(config, policy, CPU)
        runs.append((history, everything(policy, world)))
    (losses, one), (losses_too, other) = runs
    assert len(losses) == 3
    assert losses == losses_too
    assert [name for name in one if name != "generators" and not same(one[name], other[name])] == []


def test_periodic_and_final_evaluation_use_different_seeds():
    config = config_of(trainer__eval_episodes=200)
    policy = build_policy(config, build_world(config, CPU, agents=8, seed=0), CPU)
    on_the_way = periodic_evaluation(config, policy, CPU)
    assert on_the_way == periodic_evaluation(config, policy, CPU)
    assert on_the_way != final_evaluation(config, policy, CPU)


def test_eval_max_steps_and_log_reach_both_evaluations():
    config, log = config_of(world__delay=9, trainer__eval_max_steps=3), []
    policy = build_policy(config, build_world(config, CPU, agents=8, seed=0), CPU)
    final_evaluation(config, policy, CPU, log=log.append)
    periodic_evaluation(config, policy, CPU, log=log.append)
    # Greedy with memory intact and cleared, twice; sampled at the end alone.
    assert [line.partition(":")[0] for line in log] == ["12 episodes did not end within 3 steps"] * 5


def test_final_evaluation_samples_too_and_a_periodic_one_does_not():
    config = config_of()
    world = build_world(config, CPU, agents=8, seed=0)
    policy = build_policy(config, world, CPU)
    greedy = {"eval/return_mean", "eval/return_mean_memory_cleared"}
    assert final_evaluation(config, policy, CPU).keys() == {*greedy, "eval/sampled_return_mean"}
    assert periodic_evaluation(config, policy, CPU).keys() == greedy
    assert [sampled_episodes(count) for count in (2, 100, 2000, 250)] == [2, 100, 500, 250]
