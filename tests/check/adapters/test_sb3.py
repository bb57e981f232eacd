"""The sb3-contrib adapter without the library; test_libraries.py runs it with it."""

import importlib.util
import sys
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from holdfast.check.adapters import SB3, sb3
from holdfast.check.script import write_script
from holdfast.errors import ConfigError

BOX, CHOICE = gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.Discrete(4)


class StubPolicy(nn.Module):
    """The attributes of a `RecurrentActorCriticPolicy` that the adapter reads first."""

    def __init__(self, action_space=CHOICE, observation_space=BOX):
        super().__init__()
        self.action_space, self.observation_space = action_space, observation_space


@pytest.fixture
def library(monkeypatch):
    """A stub of the module that defines the policy class."""
    module = SimpleNamespace(RecurrentActorCriticPolicy=StubPolicy)
    monkeypatch.setitem(sys.modules, sb3.POLICIES, module)
    monkeypatch.setattr(sb3, "import_sb3", lambda name: module)


def make_script(agents=2, steps=6, share_of_starts=0.4):
    return write_script(
        lambda size, generator: torch.randn(*size, 3, generator=generator),
        agents,
        steps,
        share_of_starts=share_of_starts,
        absences=False,
        act=lambda size, generator: torch.randint(4, size, generator=generator),
    )


@pytest.mark.skipif(importlib.util.find_spec("sb3_contrib") is not None, reason="sb3-contrib is installed")
def test_sb3_policy_without_sb3_names_the_extra():
    with pytest.raises(ConfigError, match=r"pip install .*\[sb3\]"):
        SB3(nn.Linear(4, 3)).initial(2)


def test_fits_does_not_import_the_library(monkeypatch):
    monkeypatch.delitem(sys.modules, sb3.POLICIES, raising=False)
    assert not SB3.fits(StubPolicy())
    assert sb3.POLICIES not in sys.modules


def test_fits_recurrent_policies_only(library):
    assert SB3.fits(StubPolicy())
    assert not SB3.fits(nn.LSTM(3, 4))


def test_unsupported_policies_are_an_error(library):
    with pytest.raises(ConfigError, match=r"checks a RecurrentPPO or its RecurrentActorCriticPolicy, not Linear"):
        SB3(nn.Linear(4, 3))
    with pytest.raises(ConfigError, match="Discrete or Box action space, not MultiBinary"):
        SB3(StubPolicy(gymnasium.spaces.MultiBinary(2)))


def test_scripted_actions_lie_in_the_action_space(library):
    batch = make_script().step_batches(0, 6)
    assert SB3(StubPolicy())._actions(batch).equal(batch.action)
    continuous = SB3(StubPolicy(gymnasium.spaces.Box(-1, 1, (2,))))._actions(batch)
    assert continuous.shape == (2, 6, 2)
    assert ((continuous >= 0) & (continuous < 1)).all()


def test_image_observations_are_bytes(library):
    images = gymnasium.spaces.Box(0, 255, (2, 2), np.uint8)
    generator = torch.Generator().manual_seed(0)
    assert SB3(StubPolicy(observation_space=images)).random_obs((3,), generator).dtype == torch.uint8
    assert SB3(StubPolicy()).random_obs((3,), generator).dtype == torch.float32


def test_scripted_env_plays_the_steps_of_one_agent():
    script = make_script()
    env = sb3.ScriptedEnv(script, 1, (BOX, CHOICE))
    assert env.reset()[0].tolist() == script.obs[1, 0].tolist()
    for t in range(1, 7):
        obs, _, terminated, truncated, _ = env.step(0)
        ended = bool(script.first[1, t])
        assert (terminated or truncated) is ended
        assert truncated is bool(script.truncated[1, t])
        assert obs.tolist() == (script.other_obs if ended else script.obs)[1, t].tolist()
        if ended:
            assert env.reset()[0].tolist() == script.obs[1, t].tolist()
    assert script.first[1, 1:].any()


def test_update_outputs_are_sorted_by_agent_and_step():
    missing = torch.full((2, 3, 2), torch.nan)
    log = sb3._OutputLog(missing, missing.clone())
    steps = (np.arange(3)[:, None] + 10 * np.arange(2)).astype(np.float32)
    buffer = SimpleNamespace(values=steps, log_probs=-steps, advantages=np.zeros((3, 2), np.float32))
    log.close_rollout(buffer)
    assert log.rollout[1, 2].tolist() == [12.0, -12.0]
    shuffled = torch.tensor(buffer.advantages.flatten()[[5, 0, 3, 1, 4, 2]])
    advantages = torch.cat([shuffled, torch.zeros(1)])
    mask = torch.tensor([True] * 6 + [False]).float()
    log.minibatch = SimpleNamespace(mask=mask, advantages=advantages)
    values = advantages // sb3.AGENT_STRIDE * 10 + advantages % sb3.AGENT_STRIDE
    values[-1] = 99.0
    log.wrap_evaluate_actions(lambda: (values[:, None], -values, None))()
    assert log.replay.equal(log.rollout)
