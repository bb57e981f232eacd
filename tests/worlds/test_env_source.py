"""make_world takes names, environments, vector environments, worlds, and functions that make them."""

import gc

import gymnasium
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

import holdfast
from helpers.gym_envs import Counting
from holdfast.config.run import all_keys, override
from holdfast.config.worlds import PythonConfig
from holdfast.errors import ConfigError
from holdfast.recipes import find_recipe
from holdfast.worlds.builtin.symbols import Recall
from holdfast.worlds.env_source import EnvSource, find_source
from holdfast.worlds.gym import GymWorld


class Outer:
    class Nested(Counting):
        """Not importable by `module:Class`."""


def make_recall(agents, seed=0):
    return Recall(agents, seed=seed)


KINDS = {
    "id": (lambda: "CartPole-v1", "gym:CartPole-v1", 64),
    "name": (lambda: "recall", "recall", 64),
    "module:ID": (lambda: "gymnasium.envs:CartPole-v1", "gym:gymnasium.envs:CartPole-v1", 64),
    "prefix": (lambda: "gym:CartPole-v1", "gym:CartPole-v1", 64),
    "class": (lambda: Counting, "helpers.gym_envs:Counting", 64),
    "nested class": (lambda: Outer.Nested, "python:Nested", 64),
    "function": (lambda: lambda: gymnasium.make("CartPole-v1"), "python:CartPole-v1", 64),
    "env": (lambda: gymnasium.make("CartPole-v1"), "python:CartPole-v1", 1),
    "unregistered env": (Counting, "python:Counting", 1),
    "vector": (lambda: SyncVectorEnv([Counting] * 3), "python:SyncVectorEnv", 3),
    "vector function": (lambda: lambda: SyncVectorEnv([Counting] * 3), "python:SyncVectorEnv", 3),
    "registered vector": (lambda: gymnasium.make_vec("CartPole-v1", num_envs=2), "python:CartPole-v1", 2),
    "world": (lambda: Recall(5), "python:Recall", 5),
    "world function": (lambda: make_recall, "python:make_recall", 64),
    "world class": (lambda: Recall, "holdfast.worlds.builtin.symbols:Recall", 64),
}


@pytest.mark.parametrize(("make", "name", "agents"), KINDS.values(), ids=KINDS)
def test_every_kind_has_its_name_and_number_of_agents(make, name, agents):
    source = find_source(make())
    assert (source.name if isinstance(source, EnvSource) else source) == name
    world = holdfast.make_world(make())
    assert world.agents == agents
    step = world.step(torch.zeros(agents, dtype=torch.long) if world.reset() else None)
    assert step.reward.shape == (agents,)


def test_a_function_is_called_once_for_each_agent_and_its_first_env_is_used():
    calls = []

    def make():
        calls.append(Counting())
        return calls[-1]

    world = holdfast.make_world(make, agents=3)
    assert len(calls) == 3
    world.reset()
    assert all(env.age == 0 for env in calls)


def test_id_function_and_class_make_the_same_episodes():
    actions = torch.randint(0, 2, (40, 4), generator=torch.Generator().manual_seed(0))
    rewards = []
    for env in ("CartPole-v1", lambda: gymnasium.make("CartPole-v1")):
        world = holdfast.make_world(env, agents=4, seed=7)
        steps = [world.reset(), *(world.step(action) for action in actions)]
        rewards.append(torch.stack([step.obs for step in steps]))
    assert torch.equal(*rewards)


def test_an_env_object_is_not_closed_by_a_world_around_it():
    env = Counting()
    world = holdfast.make_world(env)
    world.reset()
    world.close()
    del world
    gc.collect()
    assert not env.closed


@pytest.mark.usefixtures("annotations_asleep")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"env": 5}, "env=5 is int; give the id of a Gymnasium environment"),
        ({"env": lambda: 5}, "env=<lambda> makes 5; it must make a Gymnasium environment or a world"),
        ({"env": lambda: 1 / 0}, r"cannot be called: ZeroDivisionError: division by zero \(test_env_source.py:\d+\)"),
        (
            {"env": Counting(), "agents": 2},
            "python:Counting is one environment, with one agent, not 2; pass a function that makes them",
        ),
        ({"env": Recall(3), "keep": (0,)}, "world.keep is for Gymnasium environments; python:Recall is a world"),
        ({"env": Counting, "kep": (0,)}, "no option 'kep'; did you mean keep"),
        ({"env": Counting(), "kep": (0,)}, "no option 'kep'; did you mean keep"),
        ({"env": Counting(), "options": {"agent": 1}}, "pass the arguments of python:Counting where it is made"),
        ({"env": lambda agents: Counting(), "agents": 2}, "makes a Gymnasium environment; leave out its parameter"),
    ],
)
def test_errors_say_what_to_type(call, message):
    with pytest.raises(ConfigError, match=message):
        holdfast.make_world(**call)


def test_keys_of_gymnasium_environments_apply_to_objects():
    world = holdfast.make_world(gymnasium.make("CartPole-v1"), keep=(0, 2), frame_stack=3, previous_action=True)
    assert world.spec.observation_space["obs"].shape == (6,)
    assert isinstance(world, GymWorld)


def test_config_files_hold_the_name_of_an_object_and_not_the_object():
    config = override(find_recipe("general"), {"world": "python:Counting", "world.keep": "0"})
    with_source = config.world.model_copy(update={"source": find_source(Counting())})
    assert PythonConfig.model_validate_json(with_source.model_dump_json()) == config.world
    assert "source" not in with_source.model_dump()
    assert "world.source" not in all_keys("python:Counting")
    with pytest.raises(ConfigError, match=r"no file holds; pass it again: holdfast.train\(env=..., resume=RUN\)"):
        holdfast.make_world("python:Counting", source="a string from a file")


@pytest.mark.usefixtures("annotations_asleep")
def test_an_environment_in_the_place_of_a_world_says_what_to_type():
    env = gymnasium.make("CartPole-v1")
    policy = holdfast.make_policy("fast", holdfast.make_world(env))
    with pytest.raises(holdfast.ContractError, match=r"is no world; write holdfast.make_world\(env\)"):
        holdfast.evaluate(policy, env, episodes=1)
    for not_a_world in (env, "CartPole-v1"):
        with pytest.raises(ConfigError, match=r"is no world; write holdfast\.make_policy"):
            holdfast.make_policy("fast", not_a_world)
        with pytest.raises(ConfigError, match=r"is no world; write holdfast\.check"):
            holdfast.check(policy, not_a_world)
