"""Which world a name means: ours, Gymnasium's, yours, and what each is made with."""

import sys
import textwrap

import gymnasium
import pytest
import torch

from holdfast import make_world, which_world
from holdfast.build import build_world
from holdfast.cli import main
from holdfast.config import change, keys_of, read_config
from holdfast.errors import ConfigError
from holdfast.recipes import find_recipe
from holdfast.train import train
from holdfast.which_world import GymKnobs, knobs_of
from holdfast.worlds.gym import GymWorld

BASE = find_recipe("recall")
CPU = torch.device("cpu")
MINE = '''
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
        self.dice = torch.Generator().manual_seed(self.seed % 2**63)
        return self.tell(torch.zeros(self.agents), True, False)

    def step(self, actions):
        self.asks = not self.asks
        right = (actions == self.coin) * self.pays
        return self.tell(right if not self.asks else torch.zeros(self.agents), not self.asks, not self.asks)

    def tell(self, reward, begins, ends):
        self.asks = not begins
        if begins:
            self.coin = torch.randint(self.sides, (self.agents,), generator=self.dice)
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
        self.spec = dataclasses.replace(self.spec, crowd=3, best_return=1.0)


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
def mine(tmp_path, monkeypatch):
    (tmp_path / "coin_worlds.py").write_text(textwrap.dedent(MINE))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("coin_worlds", None)
    which_world._knobs_of_yours.cache_clear()


def test_a_class_of_ones_own_has_the_keys_it_is_made_with():
    config = change(BASE, {"world": "coin_worlds:Coin", "world.sides": "3", "world.pays": "0.5"})
    assert (config.world.sides, config.world.pays, config.world.agents) == (3, 0.5, 64)
    assert {"world.sides", "world.pays", "world.name"} <= keys_of("coin_worlds:Coin").keys()
    assert read_config(config.model_dump_json()) == config
    world = build_world(config, CPU, agents=5, seed=7)
    assert (world.agents, world.sides, world.pays, world.seed) == (5, 3, 0.5, 7)
    assert make_world("coin_worlds:Coin", agents=4, sides=6).sides == 6


def test_a_class_of_ones_own_is_trained_in(tmp_path):
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
        "trainer.eval_episodes": 64,
        "runs_dir": str(tmp_path / "runs"),
    }
    run = train("recall", keys)
    assert run.folder.name.startswith("coin_worlds-Coin-")
    assert run.metrics["eval/return_mean"] >= 0.95
    assert run.metrics["eval/return_mean_memory_cleared"] <= 0.6


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("coin_worlds:Coi", "has no class Coi. did you mean Coin?"),
        ("coin_worlds:NUMBER", "5 is neither a class nor a function"),
        ("coin_worlds:Homeless", r"Homeless\(agents, \*, seed, device, ...\); this one takes size"),
        ("coin_word:Coin", "No module named 'coin_word'; is it on the Python path"),
        ("coin_worlds/x.py:Coin", "write package.module:Class, as coin_worlds.x:Coin"),
    ],
)
def test_what_is_no_world_is_told(name, told):
    with pytest.raises(ConfigError, match=told):
        change(BASE, {"world": name})
    with pytest.raises(ConfigError, match=told):
        make_world(name)


def test_a_key_or_value_that_a_class_does_not_take_is_told():
    with pytest.raises(
        ConfigError, match=r"tmaze has name, agents, corridor, limit; delay belongs to recall, "
    ):
        change(BASE, {"world": "tmaze", "world.delay": 3})
    with pytest.raises(
        ConfigError, match=r"the environment is made with goes by world.options='\{size: ...\}'"
    ):
        change(BASE, {"world": "gym:CartPole-v1", "world.size": 3})
    with pytest.raises(ConfigError, match=r"no key 'world.side'; did you mean world.sides\?"):
        change(BASE, {"world": "coin_worlds:Coin", "world.side": 3})
    with pytest.raises(ConfigError, match=r"world.sides=many: give a whole number"):
        change(BASE, {"world": "coin_worlds:Coin", "world.sides": "many"})
    with pytest.raises(ConfigError, match=r"coin_worlds:Coin cannot be made: .*side"):
        make_world("coin_worlds:Coin", side=3)
    with pytest.raises(ConfigError, match=r"nothing makes 5; a world has agents, spec, reset\(\) and step"):
        make_world("coin_worlds:nothing")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("more", "has 65 agents; 64 were asked for"),
        ("Licensed", "cannot be made: RuntimeError: no licence"),
        ("Blind", "action_space|do not go together"),
    ],
)
def test_a_world_that_cannot_be_is_one_line(name, told):
    with pytest.raises(ConfigError, match=told):
        make_world(f"coin_worlds:{name}")


def test_a_function_that_takes_anything_is_told_seed_and_device():
    world = make_world("coin_worlds:coins", agents=3, seed=4, device="cpu", sides=5)
    assert (world.seed, world.sides) == (4, 5)


@pytest.mark.parametrize("name", ["coin_worlds:Stick", "gym:coin_worlds:Stick", "gym:coin_worlds:stick"])
def test_an_environment_of_gymnasium_is_one_too(name):
    assert knobs_of(name) is GymKnobs
    keys = {"world": name, "world.options": "{length: 5}", "world.keep": "1", "world.autoreset": "next_step"}
    config = change(BASE, keys)
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


def test_ids_go_by_the_door_they_come_through():
    world = make_world("gym:CartPole-v1", agents=2, options={"max_episode_steps": 7})
    assert world.spec.sight.shape == (4,)
    world = make_world("popgym:RepeatFirstEasy", agents=2)
    assert world.spec.sight == gymnasium.spaces.Discrete(4)
    with pytest.raises(ConfigError, match="did you mean CartPole-v"):
        make_world("gym:CartPol-v1", agents=1)
    assert make_world("popgym:popgym-RepeatFirstEasy-v0", agents=1).agents == 1
    told = r"world.name=popgym:RepeatFirstEazy: popgym has no such .* did you mean RepeatFirstEasy\?"
    with pytest.raises(ConfigError, match=told):
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
    "trainer.eval_episodes": 100,
}


def test_a_world_that_is_particular_about_seeds_and_agents_is_evaluated(tmp_path, capsys):
    words = [f"{key}={value}" for key, value in KEYS.items()]
    words += ["world=coin_worlds:Numpy", "world.agents=6", f"runs_dir={tmp_path}"]
    assert main(["train", *words]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-3] == "the best there is 1.000"
    for seed in range(6):
        parts = "coin_worlds:Numpy rate=1e-3 + coin_worlds:Numpy"
        assert make_world("mixture", agents=6, parts=parts, seed=seed).spec.crowd == 3


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
def test_a_word_is_read_by_its_type_or_its_default(key, word, value):
    config = change(BASE, {"world": "coin_worlds:Numpy", f"world.{key}": word})
    assert getattr(config.world, key) == value
    assert read_config(config.model_dump_json()) == config
    # What cannot be written down is no key.
    assert "world.act" not in keys_of("coin_worlds:Numpy")


def test_a_function_of_any_kind_makes_a_world():
    assert make_world("coin_worlds:half", agents=2).sides == 2
    assert change(BASE, {"world": "coin_worlds:half"}).world.name == "coin_worlds:half"


def test_a_world_that_cannot_be_evaluated_in_is_told_before_the_training(tmp_path):
    keys = {"trainer.eval_worlds": "gym:CartPole-v1", "runs_dir": str(tmp_path / "runs")}
    with pytest.raises(ConfigError, match=r"trainer.eval_worlds: gym:CartPole-v1 cannot be played: "):
        train("recall", keys)
    assert not (tmp_path / "runs").exists()


def test_worlds_that_hold_something_open_are_closed(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(GymWorld, "close", lambda self: closed.append(self.agents))
    run = train(None, {**KEYS, "world": "coin_worlds:Stick", "world.agents": 6, "runs_dir": str(tmp_path)})
    assert run.finished
    assert set(closed) == {6, 100}
    # Every dead row of this one is known: none.
    assert run.metrics["global_step"] == 96


def test_rows_nobody_acts_in_are_not_counted(tmp_path):
    keys = {**KEYS, "world": "coin_worlds:Stick", "world.agents": 6, "world.autoreset": "next_step"}
    run = train(None, {**keys, "runs_dir": str(tmp_path)})
    # Episodes have three steps and a row in which nobody acts.
    assert run.metrics["global_step"] == 96 * 3 // 4


def test_a_world_begins_as_it_is_where_no_recipe_is_named(tmp_path):
    keys = {**KEYS, "world": "gym:CartPole-v1", "world.agents": 6, "runs_dir": str(tmp_path)}
    run = train(None, {**keys, "trainer.eval_episodes": 4})
    assert run.spec.obs_shape == (4,)
