"""make_policy and the registry of policies."""

from importlib.metadata import EntryPoint

import pytest
import torch

from helpers.small_policy import OnlySpec, Small
from holdfast import Fast, make_policy, make_world, registry
from holdfast.errors import ConfigError
from holdfast.policies import POLICIES, register_policy


def test_initial_weights_depend_on_the_seed_alone():
    world = make_world("recall", agents=2)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    a = make_policy("fast", world, seed=3)
    assert torch.random.get_rng_state().equal(before)
    torch.manual_seed(9)
    b = make_policy("auto", world, seed=3)
    c = make_policy("fast", world, seed=4)
    assert all(x.equal(y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not all(x.equal(y) for x, y in zip(a.parameters(), c.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fats", "did you mean fast"),
        ("transformer", "choose from example, fast"),
        ("no_such_package:Policy", "no_such_package"),
        ("helpers.small_policy:NoSuchClass", "has no class"),
        ("helpers.small_policy:OnlySpec", "not a subclass"),
        ("holdfast:LSTMWrapper", "LSTMWrapper is a base class"),
        ("holdfast:RecurrentPolicy", "RecurrentPolicy is a base class"),
        (":Class", "write package.module:Class"),
        (".small:Small", "write package.module:Class"),
        ("small:", "write package.module:Class"),
        ("helpers.small_policy:Small:", "write package.module:Class"),
    ],
)
def test_unknown_policy_raises(name, message):
    with pytest.raises(ConfigError, match=message):
        make_policy(name, make_world("recall", agents=1))


def test_make_policy_by_class_path():
    assert type(make_policy("helpers.small_policy:Small", OnlySpec())).__name__ == "Small"


class NoMemoryOptions(Fast):
    def __init__(self, spec, hidden_size=8):
        super().__init__(spec, hidden_size)


def test_missing_init_option_raises():
    with pytest.raises(ConfigError, match=r"'clear_on'\); write def __init__\(self, spec, hidden_size=64"):
        make_policy(f"{__name__}:NoMemoryOptions", make_world("recall", agents=1), clear_on="never")


def test_register_policy(monkeypatch):
    monkeypatch.setattr(POLICIES, "_entries", dict(POLICIES))
    register_policy("small", Small)
    assert type(make_policy("small", OnlySpec())) is Small
    with pytest.raises(ConfigError, match="a policy called small already"):
        register_policy("small", Fast)
    with pytest.raises(ConfigError, match=r"is not a subclass of .*LSTMWrapper"):
        register_policy("linear", torch.nn.Linear)


def test_policy_from_an_entry_point(monkeypatch):
    points = [EntryPoint("theirs", "helpers.small_policy:Small", POLICIES.group)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == POLICIES.group else [])
    assert type(make_policy("theirs", OnlySpec())) is Small
