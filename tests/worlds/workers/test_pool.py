"""WorkerPool: the same steps as in one process, and crashes that do not harm the trainer."""

import os
import threading

import psutil
import pytest
import torch

from helpers.faulty_worlds import named_memory
from holdfast import rng
from holdfast.errors import ConfigError, ContractError, WorkerError
from holdfast.monitor.state_audit import ResetAudit
from holdfast.policies import make_policy
from holdfast.rollout import Collector
from holdfast.worlds import closing_world, make_world
from holdfast.worlds.step import AsyncWorld
from holdfast.worlds.workers import WorkerPool
from holdfast.worlds.workers.spawn import fork_server

FLAGS = ("reward", "terminated", "truncated", "first", "valid", "trial")
FAULTY = "helpers.faulty_worlds:Faulty"


def pool(name, agents, *, workers=2, groups=1, seed=3, **args):
    options = args.pop("options", {})
    return closing_world(WorkerPool(name, agents, options=options, workers=workers, groups=groups, seed=seed, **args))


@pytest.fixture(scope="module", autouse=True)
def one_fork_server():
    """Import everything once for all workers of these tests."""
    with fork_server():
        yield


def acts(world, clock):
    return rng.randint(len(world.spec.action_names), 5, rng.STREAM_ACTION, torch.arange(world.agents), clock)


def same(one, other):
    both = (one.last_obs is None) == (other.last_obs is None)
    flags = all(getattr(one, name).equal(getattr(other, name)) for name in FLAGS)
    obs = bool((one.obs == other.obs).all())
    return both and flags and obs and (one.last_obs is None or bool((one.last_obs == other.last_obs).all()))


def gone(pids):
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_worker_steps_equal_those_of_one_process_and_nothing_leaks():
    local = make_world("recall", 8, seed=3, delay=(0, 5), truncate=True)
    with pool("recall", 8, groups=2, options={"delay": (0, 5), "truncate": True}) as shared:
        assert isinstance(shared, AsyncWorld)
        step, expected = shared.reset(), local.reset()
        for clock in range(30):
            assert same(step, expected), clock
            step, expected = shared.step(acts(shared, clock)), local.step(acts(local, clock))
        # Restored it repeats its steps; reset, its first episodes.
        state, ahead = shared.state(), [shared.step(acts(shared, clock)) for clock in range(30, 36)]
        assert shared.restore(state) is None
        assert all(same(shared.step(acts(shared, clock)), ahead[clock - 30]) for clock in range(30, 36))
        local.restore(local.state())
        assert same(shared.reset(), make_world("recall", 8, seed=3, delay=(0, 5), truncate=True).reset())
        with pytest.raises(ContractError, match="of every worker"):
            shared.restore({**state, "workers": 3})
        pids = shared.pids
        assert not gone(pids)
        assert named_memory(pids) == []
    assert gone(pids)


def test_step_stays_valid_until_its_group_acted_twice():
    with pool("gym:CartPole-v1", 4, options={"previous_action": True}) as shared:
        local = make_world("gym:CartPole-v1", 4, seed=3, previous_action=True)
        shared.reset()
        expected = local.reset()
        for clock in range(12):
            rows = shared.groups[0]
            shared.send(rows, acts(shared, clock))
            step = shared.recv().step
            expected = local.step(acts(local, clock))
            shared.send(rows, acts(shared, clock + 100))
            # The next step is written to the other slot.
            assert same(step, expected)
            shared.recv()
            expected = local.step(acts(local, clock + 100))
        with pytest.raises(ContractError, match="agents of one group, once"):
            shared.send(torch.tensor([1, 2]), torch.zeros(2, dtype=torch.long))
        with pytest.raises(ContractError, match="No agent is stepping"):
            shared.recv()
        shared.send(rows, acts(shared, 0))
        with pytest.raises(ContractError, match=r"call recv\(\) before state\(\)"):
            shared.state()
        shared.recv()
        with pytest.raises(ContractError, match=r"agent 2 took action 7"):
            shared.send(rows, torch.tensor([0, 0, 7, 0]))
        local.close()


@pytest.mark.parametrize("how", ["raise", "shape", "nan", "hang", "kill", "crash", "leave", "exit"])
def test_worker_error_names_worker_agents_step_and_actions(how):
    timeout = 3.0 if how == "hang" else 60.0
    options = {"how": how, "when": 3, "who": 5}
    with pool(FAULTY, 8, timeout=timeout, options=options) as shared:
        shared.reset()
        pids = shared.pids
        shared.step(acts(shared, 0))
        shared.step(acts(shared, 1))
        last = acts(shared, 2)
        with pytest.raises(WorkerError) as caught:
            shared.step(last)
        message = str(caught.value)
        assert message.startswith(f"Worker 1 of 2 ({FAULTY}, agents 4 to 7) ")
        assert f"step 3, last actions {last[4:].tolist()}." in message
        reasons = {
            "raise": "failed: World Faulty, step 3: it raised ValueError: the bottom fell out (faulty_worlds.py:",
            "shape": "failed: World Faulty, step 3: reward is [3], must be a tensor [4]",
            "nan": "failed: World Faulty, step 3: agent 4 got a reward that is not finite",
            "hang": "did not answer within 3 seconds",
            "kill": "was ended by SIGKILL",
            "crash": "was ended by SIGABRT",
            "leave": "ended with exit code 3",
            "exit": "failed: World Faulty, step 3: it raised SystemExit: 7",
        }
        assert reasons[how] in message
        if how in ("raise", "hang", "crash", "exit"):
            assert f"in _{how}" in "".join(caught.value.__notes__)
        assert "\n" not in message
        # No more requests: other workers may be in the middle of a step.
        with pytest.raises(WorkerError, match="Worker 1 of 2"):
            shared.reset()
    assert gone(pids)


def test_config_errors_of_workers_leave_no_process():
    trainer = psutil.Process()
    with pytest.raises(ConfigError, match=r"world.agents=6 cannot be split evenly.*try world.agents=8"):
        WorkerPool("recall", 6, options={}, workers=2, groups=2)
    with pytest.raises(ConfigError, match="has no option 'dely'; did you mean delay"):
        WorkerPool("recall", 4, options={"dely": 3}, workers=1)
    with pytest.raises(ConfigError, match="cannot be split over several workers"):
        WorkerPool("mixture", 8, options={"parts": "recall + n_back"}, workers=2)
    with pytest.raises(ConfigError, match=r"4 shards of whole environments of 24 agents; try world.agents=96"):
        WorkerPool("arena", 48, options={}, workers=2, groups=2)
    (server,) = [child for child in trainer.children() if "workers.spawn" in " ".join(child.cmdline())]
    assert server.children() == []


def test_restarted_worker_truncates_episodes_and_clears_memory(tmp_path):
    lines = []
    options = {"how": "kill", "when": 9, "who": 5, "marker": str(tmp_path / "marker")}
    with pool(FAULTY, 8, groups=2, restart=True, log=lines.append, options=options) as shared:
        policy = make_policy("fast", shared, seed=0, hidden_size=16)
        resets = ResetAudit(policy, 8)
        collector = Collector(shared, policy, length=32, horizon=16, seed=1, audit=resets)
        with resets.track():
            steps = collector.rollout(0).steps
        (line,) = lines
        assert line.startswith(f"Worker 0 of 2 ({FAULTY}, agents 4 to 5) was ended by SIGKILL; step 9")
        assert line.endswith("Restarted: its 4 agents start new episodes.")
        truncated, first = steps["truncateds"].reshape(8, 32), steps["first"].reshape(8, 32)
        # Worker 0 has agents 0 and 1 of the first group, 4 and 5 of the second.
        assert truncated.nonzero()[:, 0].tolist() == [0, 1, 4, 5]
        assert bool((first | ~truncated).all())
        assert resets.pop_metrics()["memory/resets"] > 0
        state = shared.state()
        assert state["restart_counts"] == [1, 0]
        # A restarted worker has another seed, so it does not repeat its crash.
        seeds = [[shard["world"]["seed"] for shard in worker] for worker in state["shards"]]
        assert seeds[1] == [3, 3]
        assert 3 not in seeds[0]
        again = [shared.step(acts(shared, clock)) for clock in range(8)]
        assert shared.restore(state) is None
        assert all(same(shared.step(acts(shared, clock)), again[clock]) for clock in range(8))


@pytest.mark.parametrize("truncate", [False, True])
def test_restart_truncates_with_the_last_obs(tmp_path, truncate):
    marker = str(tmp_path / "marker")
    options = {"how": "leave", "when": 4, "who": 0, "marker": marker, "truncate": truncate}
    with pool(FAULTY, 6, workers=3, restart=True, log=lambda line: None, options=options) as shared:
        assert shared.spec.truncates == "always"
        step = shared.reset()
        for clock in range(6):
            before, step = step, shared.step(acts(shared, clock))
            crashed = torch.arange(6) < (2 if clock == 3 else 0)
            assert step.truncated[crashed].all()
            assert (step.first & (step.reward == 0) & ~step.terminated & step.valid)[crashed].all()
            assert bool((step.last_obs == before.obs)[crashed].all())
            assert truncate or not step.truncated[~crashed].any()


def test_restart_does_not_truncate_absent_agents():
    options = {"delay": (0, 2), "absent": (3, 6)}
    with pool("ragged", 6, workers=1, restart=True, log=lambda line: None, options=options) as shared:
        shared.reset()
        away = torch.zeros(6, dtype=torch.bool)
        clock = 0
        while not away.any():
            step = shared.step(acts(shared, clock))
            away, clock = ~step.valid & ~step.terminated, clock + 1
        state = shared.state()
        assert shared.restore(state) is None
        os.kill(shared.pids[0], 9)
        acting, step = step.valid.clone(), shared.step(acts(shared, clock))
        assert step.truncated.equal(acting)
        assert not acting.all()
        assert step.first.all()


def test_pools_in_several_threads():
    steps = {}

    def play(seed):
        with pool("recall", 4, seed=seed) as shared:
            shared.reset()
            steps[seed] = [shared.step(acts(shared, clock)) for clock in range(5)]

    threads = [threading.Thread(target=play, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for seed in range(4):
        local = make_world("recall", 4, seed=seed)
        local.reset()
        assert all(same(step, local.step(acts(local, clock))) for clock, step in enumerate(steps[seed]))
