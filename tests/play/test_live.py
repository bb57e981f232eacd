import io
import threading

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from rich.console import Console

from helpers.small_replays import player_of
from holdfast.errors import ConfigError, ContractError
from holdfast.evaluation.evaluate import EvalPolicy
from holdfast.play import live
from holdfast.play.live import Command, LivePlay
from holdfast.play.play_loop import PlayLoop
from holdfast.play.terminal import play_in_terminal


@pytest.fixture
def play():
    with PlayLoop(player_of(), 4, follow=4) as loop:
        yield LivePlay(loop, loop.header("small", 0))


def run(play, **fields):
    play.run(Command(**fields))


def memory(play):
    return {name: leaf.clone() for name, leaf in play.loop.session.memory.items()}


def rows_equal(one, other, agents):
    return all(torch.equal(one[name][agents], other[name][agents]) for name in one)


@pytest.mark.parametrize("mode", ["intact", "frozen", "cleared"])
def test_modes_are_those_of_evaluations(play, mode):
    loop = play.loop
    policy = EvalPolicy(loop.player.policy, loop.spec, torch.arange(4), memory=mode)
    for agent in range(4):
        run(play, do="mode", agent=agent, mode=mode)
    for _ in range(25):
        actions = policy.act(loop.current)
        row = play.advance()
        np.testing.assert_array_equal(row["action"][:, 0], actions)
        assert rows_equal(memory(play), dict(policy._policy.store.view(0).items()), [0, 1, 2, 3]) or mode == "cleared"


def test_clear_changes_one_agent_at_once(play):
    run(play, do="step", count=5)
    before, probs = memory(play), play.now()["probs"].copy()
    run(play, do="clear", agent=2)
    after = memory(play)
    assert rows_equal(before, after, [0, 1, 3])
    assert all(not leaf[2].any() for leaf in after.values())
    assert play.now()["norm"][2] == 0 < play.now()["norm"][1]
    assert play.before == {2: probs[2].tolist()}
    assert play.state()["marks"] == [{"t": 5, "agents": [2], "what": "cleared"}]
    run(play, do="step")
    assert play.before == {}


def test_swap_exchanges_two_states(play):
    run(play, do="step", count=5)
    before = memory(play)
    run(play, do="swap", agent=0, other=3)
    after = memory(play)
    for name in before:
        assert torch.equal(after[name], before[name][[3, 1, 2, 0]])
    with pytest.raises(ConfigError, match="Agent 1 cannot be swapped with itself"):
        run(play, do="swap", agent=1, other=1)


def test_restore_returns_a_remembered_state(play):
    with pytest.raises(ConfigError, match="No state of agent 1 is remembered"):
        run(play, do="restore", agent=1)
    run(play, do="step", count=3)
    before = memory(play)
    run(play, do="remember", agent=1)
    assert play.state()["remembered"] == [1]
    run(play, do="step", count=2)
    run(play, do="restore", agent=1)
    assert rows_equal(memory(play), before, [1])
    assert not rows_equal(memory(play), before, [0])


def test_looking_changes_nothing(play):
    run(play, do="step", count=4)
    before = memory(play)
    for _ in range(3):
        play.state()
    assert rows_equal(memory(play), before, [0, 1, 2, 3])
    with PlayLoop(player_of(), 4, follow=4) as other:
        watched, alone = [play.loop.step()["action"] for _ in range(20)], [other.step()["action"] for _ in range(24)]
    np.testing.assert_array_equal(watched, alone[4:])


def test_episodes_with_a_changed_memory_are_counted_apart(play):
    # An episode of recall with a delay of 8 has 10 steps.
    run(play, do="step", count=5)
    run(play, do="clear", agent=2)
    run(play, do="step", count=15)
    tally = play.tally()
    assert (tally["alone"][0], tally["changed"][0]) == (7, 1)
    run(play, do="mode", agent=0, mode="cleared")
    run(play, do="step", count=20)
    tally = play.tally()
    assert (tally["alone"][0], tally["changed"][0]) == (13, 3)


def test_history_is_bounded_and_sent_from_a_step_on(play, monkeypatch):
    monkeypatch.setattr(live, "HISTORY", 40)
    play = live.LivePlay(play.loop, play.header)
    run(play, do="step", count=30)
    state = play.state(since=28)
    assert (state["total"], state["first"], state["rows"]["reward"]["shape"]) == (30, 28, [2, 4])
    assert play.state(since=30)["rows"] is None
    assert play.state(since=10**12)["rows"] is None
    run(play, do="step", count=40)
    state = play.state()
    assert (state["first"], state["rows"]["reward"]["shape"]) == (30, [40, 4])


def test_an_error_pauses_and_is_shown(play, monkeypatch):
    monkeypatch.setattr(play.loop, "step", lambda: (_ for _ in ()).throw(ContractError("World x, step 3: it broke.")))
    run(play, do="speed", speed=64.0)
    run(play, do="play")
    stop = threading.Event()
    thread = threading.Thread(target=play.play_until, args=(stop,))
    thread.start()
    for _ in range(400):
        if play.error or stop.wait(0.02):
            break
    stop.set()
    thread.join(timeout=10)
    assert (play.error, play.playing) == ("World x, step 3: it broke.", False)
    run(play, do="play")
    assert not play.playing


@pytest.mark.parametrize(
    "fields",
    [
        {"do": "exec"},
        {"do": "step", "count": 10**9},
        {"do": "clear", "agent": -1},
        {"do": "speed", "speed": 1e9},
        {"do": "mode", "mode": "<script>"},
        {"do": "clear", "code": "x"},
        {"do": "speed", "speed": float("nan")},
    ],
)
def test_commands_are_validated(fields):
    with pytest.raises(ValidationError):
        Command(**fields)


def test_unknown_agents_are_refused(play):
    with pytest.raises(ConfigError, match="There is no agent 9; there are agents 0 to 3"):
        run(play, do="clear", agent=9)
    with pytest.raises(ConfigError, match="There is no agent 10"):
        run(play, do="swap", other=10)


def test_a_policy_without_memory_has_none_to_change():
    player = player_of(memory="none")
    with PlayLoop(player, 2, follow=2) as loop:
        play = LivePlay(loop, loop.header("small", 0))
        run(play, do="step")
        assert play.now()["units"].shape == (2, 0)
        with pytest.raises(ConfigError, match="has no memory that could be changed"):
            run(play, do="clear")


def in_terminal(play, text):
    out = io.StringIO()
    console = Console(file=out, highlight=False, markup=False, emoji=False, width=120)
    assert play_in_terminal(play, io.StringIO(text).readline, console) == 0
    return out.getvalue()


def test_terminal_steps_and_changes_memory(play):
    output = in_terminal(play, "\n4\nremember\nclear\nrestore\nswap 1\nfrozen\nsampled\nagent 2\nstep 10\nquit\n")
    assert play.total == 15
    assert play.modes == ["frozen", "intact", "intact", "intact"]
    assert not play.loop.greedy
    assert [mark.what for mark in play.marks] == ["cleared", "restored", "swapped with agent 1", "frozen"]
    assert "step 15" in output
    assert " → " in output
    assert "memory changed" in output
    assert "[" not in output.split("\n\n", 1)[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cleer", "'cleer': did you mean clear?"),
        ("agent 99", "agent 99: there are agents 0 to 3."),
        ("swap", "swap N: there are agents 0 to 3."),
        ("swap 0", "Agent 0 cannot be swapped with itself"),
        ("restore", "No state of agent 0 is remembered"),
        ("step x", "'step x': type help."),
        ("step 99999999", "count=99999999"),
        ("clear 1 2", "'clear 1 2': type help."),
        ("\x1b[31m", "type help."),
    ],
)
def test_terminal_explains_mistakes_in_one_line(play, line, message):
    assert message in in_terminal(play, f"{line}\n")
    assert play.total == 0
