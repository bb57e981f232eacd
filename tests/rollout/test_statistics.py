"""Episode returns and lengths, timers and throughput."""

import copy

import pytest
import torch

from helpers.scripted_world import Scripted, make_reader
from holdfast.errors import ContractError
from holdfast.policies import make_policy
from holdfast.rollout import Collector
from holdfast.rollout.statistics import EpisodeStatistics, Throughput, Timer
from holdfast.worlds import Step, make_world

A, T = 4, 5
CPU = torch.device("cpu")


def collect(policy, world, length=2 * T):
    """Collect one rollout; return the collector and a copy of the segments."""
    collector = Collector(world, policy, length=length, horizon=T, seed=0)
    return collector, copy.deepcopy(collector.rollout(0))


def test_episode_statistics_of_finished_episodes():
    # Agent 0 ends with steps 3 and 8, agent 1 is truncated with step 4, agents 2 and 3 do not end.
    ended, cut = torch.zeros(2, A, 40, dtype=torch.bool)
    ended[0, [3, 8]] = True
    cut[1, 4] = True
    collector, _ = collect(make_reader(), Scripted(A, 40, terminated=ended, truncated=cut))
    # Rewards that answer an action: 1+2+3 = 6 in 3 steps, 4+..+8 = 30 in 5, 1001+..+1004 = 4010 in 4.
    metrics = collector.episodes.pop()
    assert metrics["charts/episodes"] == 3
    assert metrics["charts/episodic_return"] == pytest.approx((6 + 30 + 4010) / 3)
    assert metrics["charts/episodic_length"] == pytest.approx((3 + 5 + 4) / 3)
    assert collector.episodes.pop() == {"charts/episodes": 0}


def test_episode_statistics_span_rollouts():
    ended = torch.zeros(A, 40, dtype=torch.bool)
    ended[0, 2 * T + 3] = True
    collector = Collector(Scripted(A, 40, terminated=ended), make_reader(), length=2 * T, horizon=T, seed=0)
    collector.rollout(0)
    assert collector.episodes.pop() == {"charts/episodes": 0}
    collector.rollout(1)
    metrics = collector.episodes.pop()
    assert metrics["charts/episodic_length"] == 2 * T + 3
    assert metrics["charts/episodic_return"] == sum(range(1, 2 * T + 4))


def test_an_end_with_the_very_last_step_is_counted_once():
    ended = torch.zeros(A, 40, dtype=torch.bool)
    ended[:, 2 * T] = True
    collector = Collector(Scripted(A, 40, terminated=ended), make_reader(), length=2 * T, horizon=T, seed=0)
    collector.rollout(0)
    assert collector.episodes.pop()["charts/episodes"] == A
    collector.rollout(1)
    assert collector.episodes.pop()["charts/episodes"] == 0


def test_invalid_steps_do_not_count_in_episode_length():
    ended, there = torch.zeros(A, 40, dtype=torch.bool), torch.ones(A, 40, dtype=torch.bool)
    ended[0, 6] = True
    there[0, 2:5] = False
    collector, _ = collect(make_reader(), Scripted(A, 40, terminated=ended, valid=there))
    assert collector.episodes.pop()["charts/episodic_length"] == 3


def test_episode_statistics_on_recall():
    world = make_world("recall", agents=6, delay=(0, 3))
    collector, segments = collect(make_policy("fast", world, seed=0, hidden_size=8, num_layers=1), world, length=8 * T)
    metrics = collector.episodes.pop()
    steps, tail = segments.steps, segments.tail.unflatten(0, (6, 8))[:, -1]
    assert metrics["charts/episodes"] == int(steps["dones"].sum() + tail["dones"].sum())
    paid = float(steps["rewards"].sum() + tail["rewards"].sum())
    assert metrics["charts/episodic_return"] == pytest.approx(paid / metrics["charts/episodes"])
    assert 2 <= metrics["charts/episodic_length"] <= 5


def step_of(rewards, ended):
    no = torch.zeros(len(rewards), dtype=torch.bool)
    return Step(torch.zeros(len(rewards), 1), torch.tensor(rewards), torch.tensor(ended), no, no, ~no, no)


def test_sums_do_not_depend_on_which_agents_arrive_first():
    returns, both = [0.1, 1e15, 0.7], []
    for order in ([0, 1, 2], [2, 1, 0]):
        episodes = EpisodeStatistics(3, (), CPU)
        for _ in range(3):
            episodes.on_action(torch.ones(3, dtype=torch.bool))
            for agent in order:
                episodes.on_step(step_of([returns[agent]], [True]), slice(agent, agent + 1))
        both.append(episodes.pop())
    assert both[0] == both[1]


def test_episode_statistics_per_world_of_a_mixture():
    episodes = EpisodeStatistics(3, (("a", 1), ("b", 2)), CPU)
    episodes.on_action(torch.ones(3, dtype=torch.bool))
    episodes.on_step(step_of([1.0, 2.0, 4.0], [True, True, False]))
    assert episodes.pop() == {
        "charts/episodes": 2,
        "charts/episodic_return": 1.5,
        "charts/episodic_length": 1,
        "charts/episodes@a": 1,
        "charts/episodic_return@a": 1,
        "charts/episodic_length@a": 1,
        "charts/episodes@b": 1,
        "charts/episodic_return@b": 2,
        "charts/episodic_length@b": 1,
    }


def test_reward_without_an_action_does_not_count():
    episodes = EpisodeStatistics(2, (), CPU)
    episodes.on_step(step_of([100.0, 100.0], [False, False]))
    episodes.on_action(torch.tensor([True, False]))
    episodes.on_step(step_of([1.0, 7.0], [True, True]))
    assert episodes.pop()["charts/episodic_return"] == 0.5


def test_running_episodes_survive_save_and_restore():
    one, other = EpisodeStatistics(2, (), CPU), EpisodeStatistics(2, (), CPU)
    one.on_action(torch.tensor([True, True]))
    one.on_step(step_of([3.0, 5.0], [False, True]))
    assert set(one.state()) == {"running", "acted", "totals"}
    other.restore(copy.deepcopy(one.state()))
    for episodes in (one, other):
        episodes.on_action(torch.tensor([True, True]))
        episodes.on_step(step_of([4.0, 0.0], [True, False]))
    assert one.pop() == other.pop()
    assert one.pop() == {"charts/episodes": 0}
    with pytest.raises(ContractError, match=r"'running' is \[3, 3\]"):
        one.restore(EpisodeStatistics(3, (), CPU).state())


def test_restarted_agents_drop_their_running_episode():
    episodes = EpisodeStatistics(2, (), CPU)
    episodes.on_action(torch.ones(2, dtype=torch.bool))
    episodes.on_step(step_of([3.0, 5.0], [False, False]))
    episodes.on_action(torch.ones(2, dtype=torch.bool))
    episodes.reset_agents(torch.tensor([True, False]))
    episodes.on_step(step_of([1.0, 1.0], [True, True]))
    metrics = episodes.pop()
    assert metrics["charts/episodic_return"] == (0 + 6) / 2
    assert metrics["charts/episodic_length"] == (0 + 2) / 2


def test_timer_sums_phases_and_throughput_has_the_rest(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 4.0, 5.0, 10.0, 10.0, 12.0, 20.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    throughput, timer = Throughput(), Timer(torch.device("cpu"))
    for _ in range(2):
        with timer.timing("world"):
            pass
    metrics = throughput.pop(timer, num_steps=50)
    assert metrics["time/world"] == 3.0
    assert metrics["time/other"] == 7.0
    assert metrics["charts/SPS"] == 5.0
    assert throughput.seconds == metrics["seconds"] == 10.0
    assert timer.pop() == {}
    throughput.restore(100.0)
    metrics = throughput.pop(timer, num_steps=50)
    assert (metrics["seconds"], metrics["charts/SPS"], metrics["time/other"]) == (102.0, 25.0, 2.0)


class Event:
    """An event of a GPU, at a number of milliseconds."""

    def __init__(self, when):
        self.when, self.is_complete = when, False

    def synchronize(self):
        self.is_complete = True

    def elapsed_time(self, other):
        return other.when - self.when


def test_timer_sums_events_of_a_gpu():
    timer, events = Timer(CPU), [Event(when) for when in (0, 500, 600, 700)]
    timer._events = [("world", *events[:2]), ("world", *events[2:])]
    assert timer.pop() == {"world": pytest.approx(0.6)}
    assert events[-1].is_complete
    assert timer.pop() == {}
