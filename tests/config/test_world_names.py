"""World names: built-in, prefixed, user classes, and their config keys."""

import sys
import textwrap

import gymnasium
import pytest
import torch

from holdfast import make_world
from holdfast.build import build_world
from holdfast.cli import main
from holdfast.config import world_names
from holdfast.config.run import all_keys, override, read_config
from holdfast.config.world_names import world_config_class
from holdfast.config.worlds import GymConfig
from holdfast.errors import ConfigError
from holdfast.recipes import find_recipe
from holdfast.training.train import train
from holdfast.worlds.gym import GymWorld

BASE = find_recipe("recall")
CPU = torch.device("cpu")
USER_WORLDS = '''
import dataclasses
import functools
import gymnasium
import numpy
import torch
from gymnasium import spaces
from holdfast import Step, WorldSpec


class Coin:
    """Shows a coin, and pays for naming it a step later."""

    def __init__(self, agents, *, sides: int = 2, pays: float = 1.0, name="coin", seed=0, device="cpu"):
        self.agents, self.sides, self.pays, self.seed, self.name = agents, sides, pays, seed, name
        observation = spaces.Discrete(sides + 1)
        self.spec = WorldSpec((), tuple(f"side_{n}" for n in range(sides)), observation=observation)

    def reset(self):
        self.generator = torch.Generator().manual_seed(self.seed % 2**63)
        return self.make_step(torch.zeros(self.agents), True, False)

    def step(self, actions):
        self.query = not self.query
        right = (actions == self.coin) * self.pays
        reward = right if not self.query else torch.zeros(self.agents)
        return self.make_step(reward, not self.query, not self.query)

    def make_step(self, reward, begins, ends):
        self.query = not begins
        if begins:
            self.coin = torch.randint(self.sides, (self.agents,), generator=self.generator)
        flag = lambda value: torch.full((self.agents,), value)
        obs = self.coin if begins else torch.full_like(self.coin, self.sides)
        return Step(obs, reward, flag(ends), flag(False), flag(begins), flag(True), flag(False))


class Stick(gymnasium.Env):
    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self, length=3):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.length
        return self.observation_space.sample(), {}

    def step(self, action):
        self.left -= 1
        return self.observation_space.sample(), 1.0, self.left == 0, False, {}


def stick(length=3):
    return Stick(length)


def coins(agents, **options):
    return Coin(agents, **options)


class Numpy(Coin):
    """Takes seeds as NumPy does, and comes in crowds of three."""

    def __init__(self, agents, *, rate=0.5, pair=(1, 2), word: str | None = None, act=torch.relu, seed=0,
                 many: int | None = None):
        if agents % 3:
            raise ValueError("crowds of three")
        numpy.random.default_rng(seed)
        super().__init__(agents, seed=seed)
        self.rate, self.pair, self.word, self.many = rate, pair, word, many
        self.spec = dataclasses.replace(self.spec, agents_per_env=3, best_return=1.0)


class Homeless:
    def __init__(self, size):
        pass


def nothing(agents):
    return 5


def more(agents, seed=0):
    return Coin(agents + 1)


class Licensed(Coin):
    def __init__(self, agents):
        raise RuntimeError("no licence")


class Blind(gymnasium.Env):
    pass


NUMBER = 5
half = functools.partial(Coin, sides=2)
'''


@pytest.fixture(autouse=True)
def user_worlds_module(tmp_path, monkeypatch):
    (tmp_path / "coin_worlds.py").write_text(textwrap.dedent(USER_WORLDS))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("coin_worlds", None)
    world_names._config_of_user_world.cache_clear()


def test_user_world_keys_follow_its_signature():
    config = override(BASE, {"world": "coin_worlds:Coin", "world.sides": "3", "world.pays": "0.5"})
    assert (config.world.sides, config.world.pays, config.world.agents) == (3, 0.5, 64)
    assert {"world.sides", "world.pays", "world.name"} <= all_keys("coin_worlds:Coin").keys()
    assert read_config(config.model_dump_json()) == config
    world = build_world(config, CPU, agents=5, seed=7)
    assert (world.agents, world.sides, world.pays, world.seed) == (5, 3, 0.5, 7)
    assert make_world("coin_worlds:Coin", agents=4, sides=6).sides == 6


def test_user_world_training(tmp_path):
    keys = {
        "world": "coin_worlds:Coin",
        "world.sides": 3,
        "policy": "auto",
        "policy.hidden_size": 16,
        "policy.num_layers": 1,
        "trainer.total_timesteps": 16_384,
        "trainer.bptt_horizon": 16,
        "trainer.batch_size": 1024,
        "trainer.minibatch_size": 256,
        "report": "off",
        "trainer.eval_episodes": 64,
        "runs_dir": str(tmp_path / "runs"),
    }
    run = train("recall", keys)
    assert run.folder.name.startswith("coin_worlds-Coin-")
    assert run.summary["eval/return_mean"] >= 0.95
    assert run.summary["eval/return_mean_memory_cleared"] <= 0.6


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("coin_worlds:Coi", "has no class Coi; did you mean coin_worlds:Coin?"),
        ("coin_worlds:NUMBER", "5 is neither a class nor a function"),
        ("coin_worlds:Homeless", r"Homeless\(agents, \*, seed, device, ...\); this one takes size"),
        ("coin_word:Coin", "No module named 'coin_word'; is it on the Python path"),
        ("coin_worlds/x.py:Coin", "write package.module:Class, as coin_worlds.x:Coin"),
    ],
)
def test_user_world_import_errors(name, message):
    with pytest.raises(ConfigError, match=message):
        override(BASE, {"world": name})
    with pytest.raises(ConfigError, match=message):
        make_world(name)


def test_world_key_errors():
    with pytest.raises(ConfigError, match=r"agents, clip_reward, corridor, limit; delay belongs to recall, "):
        override(BASE, {"world": "tmaze", "world.delay": 3})
    with pytest.raises(ConfigError, match=r"set arguments of the environment with world.options='\{size: ...\}'"):
        override(BASE, {"world": "gym:CartPole-v1", "world.size": 3})
    with pytest.raises(ConfigError, match=r"no key 'world.side'; did you mean world.sides\?"):
        override(BASE, {"world": "coin_worlds:Coin", "world.side": 3})
    with pytest.raises(ConfigError, match=r"world.sides=many: give an integer"):
        override(BASE, {"world": "coin_worlds:Coin", "world.sides": "many"})
    with pytest.raises(ConfigError, match=r"coin_worlds:Coin cannot be made: .*side"):
        make_world("coin_worlds:Coin", side=3)
    with pytest.raises(ConfigError, match=r"nothing makes 5; a world has agents, spec, reset\(\) and step"):
        make_world("coin_worlds:nothing")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("more", "has 65 agents; 64 were requested"),
        ("Licensed", "cannot be made: RuntimeError: no licence"),
        ("Blind", "action_space|do not go together"),
    ],
)
def test_user_world_constructor_errors(name, message):
    with pytest.raises(ConfigError, match=message):
        make_world(f"coin_worlds:{name}")


def test_variadic_user_function_gets_seed_and_device():
    world = make_world("coin_worlds:coins", agents=3, seed=4, device="cpu", sides=5)
    assert (world.seed, world.sides) == (4, 5)


@pytest.mark.parametrize("name", ["coin_worlds:Stick", "gym:coin_worlds:Stick", "gym:coin_worlds:stick"])
def test_gymnasium_class_by_its_path(name):
    assert world_config_class(name) is GymConfig
    keys = {"world": name, "world.options": "{length: 5}", "world.keep": "1", "world.autoreset": "next_step"}
    config = override(BASE, keys)
    assert config.world.options == {"length": 5}
    assert read_config(config.model_dump_json()) == config
    world = build_world(config, CPU, agents=3, seed=0)
    world.reset()
    for t in range(1, 13):
        step = world.step(torch.zeros(3, dtype=torch.long))
        assert step.obs.shape == (3, 1)
        assert step.terminated.tolist() == [t % 6 == 5] * 3
        assert step.valid.tolist() == [t % 6 != 5] * 3
    world.close()


def test_prefixed_ids():
    world = make_world("gym:CartPole-v1", agents=2, options={"max_episode_steps": 7})
    assert world.spec.observation_space.shape == (4,)
    world = make_world("popgym:RepeatFirstEasy", agents=2)
    assert world.spec.observation_space == gymnasium.spaces.Discrete(4)
    with pytest.raises(ConfigError, match="did you mean gym:CartPole-v"):
        make_world("gym:CartPol-v1", agents=1)
    assert make_world("popgym:popgym-RepeatFirstEasy-v0", agents=1).agents == 1
    message = r"world.name=popgym:RepeatFirstEazy: popgym has no such .* did you mean RepeatFirstEasy\?"
    with pytest.raises(ConfigError, match=message):
        make_world("popgym:RepeatFirstEazy", agents=1)
    with pytest.raises(ConfigError, match="has no option 'keeps'; did you mean keep"):
        make_world("gym:CartPole-v1", agents=1, keeps=(1,))


KEYS = {
    "policy": "auto",
    "policy.hidden_size": 4,
    "policy.num_layers": 1,
    "trainer.total_timesteps": 96,
    "trainer.bptt_horizon": 16,
    "trainer.batch_size": 96,
    "trainer.minibatch_size": 96,
    "report": "off",
    "trainer.eval_episodes": 100,
}


def test_user_world_with_agents_per_env_is_evaluated(tmp_path, capsys):
    words = [f"{key}={value}" for key, value in KEYS.items()]
    words += ["world=coin_worlds:Numpy", "world.agents=6", f"runs_dir={tmp_path}"]
    assert main(["train", *words]) == 0
    message = capsys.readouterr().out.splitlines()
    assert message[-3] == "best possible return 1.000"
    for seed in range(6):
        parts = "coin_worlds:Numpy rate=1e-3 + coin_worlds:Numpy"
        assert make_world("mixture", agents=6, parts=parts, seed=seed).spec.agents_per_env == 3


@pytest.mark.parametrize(
    ("key", "word", "value"),
    [
        ("rate", "1e-3", 0.001),
        ("rate", "2", 2.0),
        ("word", "8", "8"),
        ("word", "no", "no"),
        ("word", "none", None),
        ("many", "none", None),
        ("many", "3", 3),
        ("pair", "[3, 4]", (3, 4)),
    ],
)
def test_user_world_values_are_parsed_by_type(key, word, value):
    config = override(BASE, {"world": "coin_worlds:Numpy", f"world.{key}": word})
    assert getattr(config.world, key) == value
    assert read_config(config.model_dump_json()) == config
    # What cannot be written down is no key.
    assert "world.act" not in all_keys("coin_worlds:Numpy")


def test_partial_as_user_world():
    assert make_world("coin_worlds:half", agents=2).sides == 2
    assert override(BASE, {"world": "coin_worlds:half"}).world.name == "coin_worlds:half"


def test_eval_world_error_before_training(tmp_path):
    keys = {"trainer.eval_worlds": "gym:CartPole-v1", "runs_dir": str(tmp_path / "runs")}
    with pytest.raises(ConfigError, match=r"trainer.eval_worlds: gym:CartPole-v1 cannot be played: "):
        train("recall", keys)
    assert not (tmp_path / "runs").exists()


def test_worlds_are_closed_after_training(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(GymWorld, "close", lambda self: closed.append(self.agents))
    run = train(None, {**KEYS, "world": "coin_worlds:Stick", "world.agents": 6, "runs_dir": str(tmp_path)})
    assert run.finished
    assert set(closed) == {6, 100}
    # Every dead row of this one is known: none.
    assert run.summary["global_step"] == 96


def test_invalid_rows_are_not_counted_as_steps(tmp_path):
    keys = {**KEYS, "world": "coin_worlds:Stick", "world.agents": 6, "world.autoreset": "next_step"}
    run = train(None, {**keys, "runs_dir": str(tmp_path)})
    # Episodes have three steps and a row in which nobody acts.
    assert run.summary["global_step"] == 96 * 3 // 4


def test_general_recipe_for_external_worlds(tmp_path):
    keys = {**KEYS, "world": "gym:CartPole-v1", "world.agents": 6, "runs_dir": str(tmp_path)}
    run = train(None, {**keys, "trainer.eval_episodes": 4})
    assert run.spec.obs_shape == (4,)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("metagrid:tmaze", "mettagrid:tmaze"), ("petingzoo:mpe2.x", "pettingzoo:mpe2.x"), ("gyms:A", "gym:A")],
)
def test_did_you_mean_for_misspelt_prefix(typed, meant):
    with pytest.raises(ConfigError, match=f"did you mean {meant}"):
        world_config_class(typed)


def test_no_did_you_mean_for_other_modules():
    with pytest.raises(ConfigError, match="is it on the Python path") as message:
        world_config_class("nowhere.at_all:World")
    assert "did you mean" not in str(message.value)
