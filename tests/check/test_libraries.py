"""The adapters of other libraries name what is missing; `make check-peers` runs them where it is there."""

import importlib.util

import pytest
from tensordict.nn import TensorDictModule
from torch import nn

from holdfast.check.subjects.find import subject_of
from holdfast.errors import ConfigError


def missing(name):
    return importlib.util.find_spec(name) is None


@pytest.mark.skipif(not missing("torchrl"), reason="torchrl is installed, so it is not missing")
def test_a_torchrl_policy_without_torchrl_says_what_to_install():
    policy = TensorDictModule(nn.Linear(4, 3), ["observation"], ["logits"])
    with pytest.raises(ConfigError, match=r"pip install .holdfast\[torchrl\]"):
        subject_of(policy)


@pytest.mark.skipif(not missing("sb3_contrib"), reason="sb3-contrib is installed, so it is not missing")
def test_an_sb3_policy_without_sb3_says_what_to_install():
    from holdfast.check.subjects import SB3

    with pytest.raises(ConfigError, match=r"pip install .holdfast\[sb3\]"):
        SB3(nn.Linear(4, 3)).initial(2)
