"""The log of one environment's episode, and its replay."""

import numpy as np
import pytest
from gymnasium import spaces

from helpers.gym_envs import TERMINATED, Counting
from holdfast.errors import ContractError, error_text
from holdfast.worlds.gym import episode_log
from holdfast.worlds.gym.episode_log import (
    AgentEnv,
    EnvError,
    as_flag,
    count_reasons,
    require_episode_logs,
)


def make_env(length=10):
    return AgentEnv(Counting(2, ((length, TERMINATED),)), agent=2)


def step_env(env, actions, seed=5):
    env.reset(seed=seed)
    return [env.step(action)[0].copy() for action in actions]


def test_replay_continues_the_saved_episode():
    one, other = make_env(), make_env()
    step_env(one, [0, 2, 1])
    assert other.replay_episode(one.save(), fallback_seed=9) == ("", None)
    assert one.step(1)[0].tolist() == other.step(1)[0].tolist()


def test_replay_of_a_finished_episode_resets_at_the_next_step():
    one, other = make_env(3), make_env(3)
    step_env(one, [0, 2, 1])
    assert other.replay_episode(one.save(), fallback_seed=9) == ("", None)
    _, reward, terminated, _, _ = other.step(1)
    assert (reward, terminated) == (0.0, False)
    assert other.save()["actions"].tolist() == []


def test_changed_action_or_long_episode_starts_a_new_one(monkeypatch):
    one, other = make_env(), make_env()
    step_env(one, [0, 2, 1])
    state = one.save()
    reason, obs = other.replay_episode({**state, "actions": np.array([0, 2, 2], np.uint8)}, fallback_seed=9)
    assert reason == "the replayed episode differs: it depends on more than seed and actions"
    assert obs[1] == -1
    monkeypatch.setattr(episode_log, "MAX_LOGGED_ACTIONS", 2)
    long = make_env()
    step_env(long, [0, 2, 1])
    assert long.save()["actions"] is None
    assert "more than 2 actions" in other.replay_episode(long.save(), fallback_seed=9)[0]


def test_env_errors_name_the_agent():
    env = make_env(1)
    step_env(env, [0])
    with pytest.raises(EnvError, match=r"step\(\) failed with AssertionError: stepped after") as caught:
        env.step(0)
    assert caught.value.agent == 2


@pytest.mark.parametrize("flag", [None, "False", [True]])
def test_flags_that_are_no_booleans_are_refused(flag):
    with pytest.raises(TypeError, match=r"terminated is .*; it must be True or False"):
        as_flag("terminated", flag)
    assert as_flag("terminated", np.bool_(True))
    assert not as_flag("truncated", 0)


def test_require_episode_logs_rejects_other_actions():
    env = make_env()
    step_env(env, [0, 1])
    state = env.save()
    assert require_episode_logs([state], spaces.Discrete(3), 1) == [state]
    for states, message in (
        ([], "a list of 1 environments"),
        ([{**state, "seed": True}], "'seed' of an environment is bool"),
        ([{**state, "actions": np.zeros(2)}], "must be uint8, 1 each"),
    ):
        with pytest.raises(ContractError, match=message):
            require_episode_logs(states, spaces.Discrete(3), 1)


def test_reasons_are_counted_and_errors_are_one_line():
    assert count_reasons(["a", "", "b", "a"], "agents") == "a (2 of 4 agents); b (1 of 4 agents)"
    assert error_text(ValueError("x\n y")) == "ValueError: x y"
    assert error_text(KeyError()) == "KeyError"
