import pytest

import holdfast
from holdfast.check.adapters import CleanRL, Functions, HoldfastPolicy, RawModule
from holdfast.cli.check import find_target
from holdfast.errors import ConfigError
from holdfast.policies.components.graph import BUILTIN

TEXT = """
import torch
from torch import nn
import holdfast
from helpers.foreign_policies import Agent, functions

class Core(nn.GRU):
    def __init__(self):
        super().__init__(5, 16)

class Needs(nn.GRU):
    def __init__(self, size):
        super().__init__(5, size)

class Eyes(nn.Module):
    def __init__(self):
        super().__init__()
        self.eyes, self.core = nn.Conv2d(3, 4, 3), nn.GRU(4 * 36, 8)
    def forward(self, x, state):
        T, B = x.shape[:2]
        return self.core(self.eyes(x.flatten(0, 1)).reshape(T, B, -1), state)

def make_agent():
    return Agent()

made = nn.LSTM(5, 4)
adapter = functions()
number = 7
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "strange_ones.py").write_text(TEXT)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("Core", RawModule), ("make_agent", CleanRL), ("made", RawModule), ("adapter", Functions)],
)
def test_target_names_class_function_module_or_adapter(name, kind):
    assert type(find_target(f"strange_ones:{name}")) is kind


def test_target_names_a_holdfast_policy():
    assert type(find_target("fast")) is HoldfastPolicy


def test_run_of_a_component_graph_uses_its_saved_graph(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    graph = (BUILTIN / "fast.yaml").read_text().replace("hidden_size: 128", "hidden_size: 9")
    (tmp_path / "mine.yaml").write_text(graph)
    keys = {
        "agent": "mine.yaml",
        "run": "x",
        "trainer.total_timesteps": 256,
        "report": "off",
        "trainer.eval_episodes": 2,
    }
    sizes = {"world.agents": 4, "trainer.batch_size": 256, "trainer.minibatch_size": 256}
    run = holdfast.train("recall", keys | sizes)
    (tmp_path / "mine.yaml").unlink()
    policy = find_target("runs/x").module
    assert isinstance(policy, holdfast.ComponentPolicy)
    assert policy.hidden_size == 9
    trained = dict(run.policy.named_parameters())
    assert all(weight.equal(trained[name]) for name, weight in policy.named_parameters())
    assert (run.checkpoint / "agent.yaml").read_text() == graph


@pytest.mark.parametrize(
    "keys",
    [
        {"world": "mixture", "world.parts": "recall + n_back + parity", "world.agents": 6},
        {"world": "arena", "world.size": 12, "world.length": 20, "world.agents": 24},
        {"world": "gym:CartPole-v1", "world.agents": 2},
    ],
    ids=lambda keys: keys["world"],
)
def test_run_in_any_world_can_be_checked(tmp_path, keys):
    sizes = {"trainer.bptt_horizon": 4, "trainer.batch_size": 96, "trainer.minibatch_size": 96}
    tiny = {"trainer.total_timesteps": 96, "report": "off", "trainer.eval_episodes": 2, "policy.hidden_size": 4}
    run = holdfast.train(None, {**keys, **sizes, **tiny, "runs_dir": str(tmp_path), "run": "x"})
    assert type(find_target(str(run.folder))) is HoldfastPolicy


def test_target_is_built_with_a_fixed_seed():
    one, other = (find_target("strange_ones:Core").module for _ in range(2))
    assert all(a.equal(b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_obs_option_gives_the_observation_shape():
    with pytest.raises(ConfigError, match="observation shape of Eyes is unknown"):
        find_target("strange_ones:Eyes")
    assert find_target("strange_ones:Eyes", "3,8,8").layout == "time first"


@pytest.mark.parametrize(
    ("target", "obs", "message"),
    [
        ("torch.nn:LSTM", None, "and 'hidden_size'; give its arguments, policy.NAME=VALUE, or write a function"),
        ("strange_ones:Needs", None, "cannot be made (missing a required argument: 'size'); give its arguments"),
        ("strange_ones:number", None, "not int"),
        ("strange_ones:Missing", None, "has no class Missing"),
        ("strange_ons:Core", None, "is it on the Python path"),
        ("strange_ones:Core", "wide", "for example 4 or 3,84,84"),
        ("strange_ones:Core", "0", "for example 4 or 3,84,84"),
        ("strange_ones:a b", None, "write package.module:Class"),
        ("runs/nothing", None, "does not exist"),
        ("fats", None, "did you mean fast"),
    ],
)
def test_unknown_target_error_is_one_line(target, obs, message):
    with pytest.raises(ConfigError) as caught:
        find_target(target, obs)
    assert message in str(caught.value).replace("Did", "did")
    assert "\n" not in str(caught.value)
