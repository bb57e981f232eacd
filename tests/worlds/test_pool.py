"""Worlds in processes of their own: they live as in one, and whatever they do, the trainer is not hurt."""

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

from faulty import named_memory
from holdfast.errors import ConfigError, ContractError
from holdfast.experience import Collector
from holdfast.monitor.resets import Resets
from holdfast.policies import make_policy
from holdfast.worlds import closing_world, draws, make_world
from holdfast.worlds.pool import Blueprint, Pool, WorkerError
from holdfast.worlds.pool.nursery import nursery
from holdfast.worlds.pool.shared import Layout, form_of, open_memory, write_step
from holdfast.worlds.turns import TakesTurns

FLAGS = ("reward", "terminated", "truncated", "first", "valid", "trial")
FAULTY = "faulty:Faulty"


def pool(name, agents, *, workers=2, shares=1, seed=3, **words):
    options = words.pop("options", {})
    return closing_world(
        Pool(Blueprint(name, options), agents, workers=workers, shares=shares, seed=seed, **words)
    )


@pytest.fixture(scope="module", autouse=True)
def one_nursery():
    """Load everything once for all workers of these tests."""
    with nursery():
        yield


def acts(world, clock):
    return draws.below(
        len(world.spec.action_names), 5, draws.STREAM_ACTION, torch.arange(world.agents), clock
    )


def same(one, other):
    both = (one.last_obs is None) == (other.last_obs is None)
    flags = all(getattr(one, name).equal(getattr(other, name)) for name in FLAGS)
    seen = bool((one.obs == other.obs).all())
    return both and flags and seen and (one.last_obs is None or bool((one.last_obs == other.last_obs).all()))


def gone(pids):
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_workers_live_as_one_process_does_and_leave_nothing_behind():
    whole = make_world("recall", 8, seed=3, delay=(0, 5), truncate=True)
    with pool("recall", 8, shares=2, options={"delay": (0, 5), "truncate": True}) as shared:
        assert isinstance(shared, TakesTurns)
        told, expected = shared.reset(), whole.reset()
        for clock in range(30):
            assert same(told, expected), clock
            told, expected = shared.step(acts(shared, clock)), whole.step(acts(whole, clock))
        # Put back to where it was, it lives the same again; anew, its first episodes.
        where, ahead = shared.state(), [shared.step(acts(shared, clock)) for clock in range(30, 36)]
        assert shared.restore(where) is None
        assert all(same(shared.step(acts(shared, clock)), ahead[clock - 30]) for clock in range(30, 36))
        whole.restore(whole.state())
        assert same(shared.reset(), make_world("recall", 8, seed=3, delay=(0, 5), truncate=True).reset())
        with pytest.raises(ContractError, match="workers"):
            shared.restore({**where, "workers": 3})
        pids = shared.pids
        assert not gone(pids)
        assert named_memory(pids) == []
    assert gone(pids)


def test_what_is_told_stays_until_its_agents_were_answered_twice():
    with pool("gym:CartPole-v1", 4, options={"previous_action": True}) as shared:
        whole = make_world("gym:CartPole-v1", 4, seed=3, previous_action=True)
        shared.reset()
        expected = whole.reset()
        for clock in range(12):
            rows = shared.shares[0]
            shared.answer(rows, acts(shared, clock))
            told = shared.turn().step
            expected = whole.step(acts(whole, clock))
            shared.answer(rows, acts(shared, clock + 100))
            # The next step is being written elsewhere.
            assert same(told, expected)
            shared.turn()
            expected = whole.step(acts(whole, clock + 100))
        with pytest.raises(ContractError, match="share by share, once"):
            shared.answer(torch.tensor([1, 2]), torch.zeros(2, dtype=torch.long))
        with pytest.raises(ContractError, match="Nobody acts"):
            shared.turn()
        shared.answer(rows, acts(shared, 0))
        with pytest.raises(ContractError, match=r"turn\(\) comes before state\(\)"):
            shared.state()
        shared.turn()
        with pytest.raises(ContractError, match=r"agent 2 took action 7"):
            shared.answer(rows, torch.tensor([0, 0, 7, 0]))
        whole.close()


@pytest.mark.parametrize("how", ["raise", "shape", "nan", "hang", "kill", "crash", "leave", "exit"])
def test_a_worker_that_goes_wrong_is_named_with_where_it_was_and_what_it_did(how):
    timeout = 3.0 if how == "hang" else 60.0
    options = {"how": how, "when": 3, "who": 5}
    with pool(FAULTY, 8, timeout=timeout, options=options) as shared:
        shared.reset()
        pids = shared.pids
        shared.step(acts(shared, 0))
        shared.step(acts(shared, 1))
        last = acts(shared, 2)
        with pytest.raises(WorkerError) as told:
            shared.step(last)
        words = str(told.value)
        assert words.startswith(f"Worker 1 of 2 ({FAULTY}, agents 4 to 7) ")
        assert f"step 3, last actions {last[4:].tolist()}." in words
        story = {
            "raise": "failed: World Faulty, step 3: it raised ValueError: the bottom fell out",
            "shape": "failed: World Faulty, step 3: reward is [3], must be a tensor [4]",
            "nan": "failed: World Faulty, step 3: agent 4 got a reward that is not finite",
            "hang": "did not answer within 3 seconds",
            "kill": "was ended by SIGKILL",
            "crash": "was ended by SIGABRT",
            "leave": "ended with exit code 3",
            "exit": "failed: SystemExit: 7",
        }
        assert story[how] in words
        if how in ("raise", "hang", "crash", "exit"):
            assert f"in _{how}" in words
        # Nothing more is asked of it: others may be in the middle of something.
        with pytest.raises(WorkerError, match="Worker 1 of 2"):
            shared.reset()
    assert gone(pids)


def test_a_world_may_take_longer_to_be_made_than_to_answer():
    with pool("faulty:Slow", 4, timeout=1.0) as shared:
        shared.reset()
        shared.step(acts(shared, 0))
        with pytest.raises(WorkerError, match="did not answer within 1 seconds"):
            shared.step(acts(shared, 1))


def test_worlds_that_cannot_be_made_or_shared_out_say_so_and_leave_no_process():
    mine = psutil.Process()
    with pytest.raises(ConfigError, match=r"world.agents=6 cannot be shared out evenly.*try world.agents=8"):
        Pool(Blueprint("recall", {}), 6, workers=2, shares=2)
    with pytest.raises(ConfigError, match="has no option 'dely'; did you mean delay"):
        Pool(Blueprint("recall", {"dely": 3}), 4, workers=1)
    with pytest.raises(ConfigError, match="cannot be shared out to several workers"):
        Pool(Blueprint("mixture", {"parts": "recall + n_back"}), 8, workers=2)
    with pytest.raises(ConfigError, match=r"4 pieces of whole crowds of 24; try world.agents=96"):
        Pool(Blueprint("arena", {}), 48, workers=2, shares=2)
    (born_by,) = [child for child in mine.children() if "pool.nursery" in " ".join(child.cmdline())]
    assert born_by.children() == []


def test_a_lost_worker_is_started_anew_and_its_agents_forget(tmp_path):
    lines = []
    options = {"how": "kill", "when": 9, "who": 5, "marker": str(tmp_path / "marker")}
    with pool(FAULTY, 8, shares=2, restart=True, say=lines.append, options=options) as shared:
        policy = make_policy("fast", shared, seed=0, hidden_size=16)
        resets = Resets(policy, 8)
        collector = Collector(shared, policy, length=32, horizon=16, seed=1, saw=resets.saw)
        with resets.listening():
            steps = collector.rollout(0).steps
        (line,) = lines
        assert line.startswith(f"Worker 0 of 2 ({FAULTY}, agents 4 to 5) was ended by SIGKILL; step 9")
        assert line.endswith("Started anew: its 4 agents begin new episodes.")
        truncated, first = steps["truncateds"].reshape(8, 32), steps["first"].reshape(8, 32)
        # Worker 0 has agents 0 and 1 of the first share, 4 and 5 of the second.
        assert truncated.nonzero()[:, 0].tolist() == [0, 1, 4, 5]
        assert bool((first | ~truncated).all())
        assert resets.take()["memory/resets"] > 0
        where = shared.state()
        assert where["lives"] == [1, 0]
        # What ended it is not lived again.
        seeds = [[piece["world"]["seed"] for piece in pieces] for pieces in where["pieces"]]
        assert seeds[1] == [3, 3]
        assert 3 not in seeds[0]
        again = [shared.step(acts(shared, clock)) for clock in range(8)]
        assert shared.restore(where) is None
        assert all(same(shared.step(acts(shared, clock)), again[clock]) for clock in range(8))


@pytest.mark.parametrize("truncate", [False, True])
def test_episodes_of_a_lost_worker_are_cut_off_where_they_were_last_seen(tmp_path, truncate):
    marker = str(tmp_path / "marker")
    options = {"how": "leave", "when": 4, "who": 0, "marker": marker, "truncate": truncate}
    with pool(FAULTY, 6, workers=3, restart=True, say=lambda line: None, options=options) as shared:
        assert shared.spec.truncates == "always"
        told = shared.reset()
        for clock in range(6):
            before, told = told, shared.step(acts(shared, clock))
            lost = torch.arange(6) < (2 if clock == 3 else 0)
            assert told.truncated[lost].all()
            assert (told.first & (told.reward == 0) & ~told.terminated & told.valid)[lost].all()
            assert bool((told.last_obs == before.obs)[lost].all())
            assert truncate or not told.truncated[~lost].any()


def test_a_world_that_stays_broken_is_not_started_anew_for_ever(tmp_path):
    lines, options = [], {"how": "raise", "when": 3, "who": 0, "stays": True}
    with pool(FAULTY, 4, restart=True, say=lines.append, options=options) as shared:
        shared.reset()
        shared.step(acts(shared, 0))
        shared.step(acts(shared, 1))
        shared.step(acts(shared, 2))
        with pytest.raises(WorkerError, match="It did nothing since it was started: not again"):
            shared.step(acts(shared, 3))
    assert len(lines) == 1


def test_who_is_away_has_no_episode_that_could_be_cut_off():
    options = {"delay": (0, 2), "absent": (3, 6)}
    with pool("ragged", 6, workers=1, restart=True, say=lambda line: None, options=options) as shared:
        shared.reset()
        away = torch.zeros(6, dtype=torch.bool)
        clock = 0
        while not away.any():
            told = shared.step(acts(shared, clock))
            away, clock = ~told.valid & ~told.terminated, clock + 1
        where = shared.state()
        assert shared.restore(where) is None
        os.kill(shared.pids[0], 9)
        acting, told = told.valid.clone(), shared.step(acts(shared, clock))
        assert told.truncated.equal(acting)
        assert not acting.all()
        assert told.first.all()


def test_a_worker_that_is_lost_before_it_did_anything_is_an_error():
    options = {"how": "leave", "when": 1, "who": 0}
    with pool(FAULTY, 4, restart=True, say=lambda line: None, options=options) as shared:
        shared.reset()
        with pytest.raises(WorkerError, match="ended with exit code 3"):
            shared.step(acts(shared, 0))


def test_workers_end_when_their_trainer_is_killed():
    code = (
        "import sys, time; from holdfast.worlds.pool import Blueprint, Pool\n"
        f"pool = Pool(Blueprint({FAULTY!r}, {{'how': 'hold', 'when': 1}}), 4, workers=2)\n"
        "pool.reset(); pool.answer(pool.shares[0], __import__('torch').zeros(4, dtype=int))\n"
        "print(*pool.pids, flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    pids = [int(word) for word in child.stdout.readline().split()]
    assert len(pids) == 2
    child.kill()
    child.wait()
    child.stdout.close()
    # One is in the middle of a step that never ends and lets nobody else run, the other waits.
    for _ in range(600):
        if gone(pids):
            break
        time.sleep(0.1)
    assert gone(pids)


def test_what_is_written_to_shared_memory_is_read_from_it():
    step = make_world("gym:CartPole-v1", 3, seed=1, previous_action=True, previous_reward=True).reset()
    layout = Layout(form_of(step), rows=6, shares=2, numbers=1)
    memory = open_memory()
    one, other = layout.map(memory), layout.map(memory)
    write_step(step, one.step(1, 0), slice(3, 6))
    seen = other.step(1, 0)
    assert same(type(step)(**{name: part[3:6] for name, part in vars(seen).items()}), step)
    assert not other.step(0, 0).first.any()
    assert not other.step(1, 1).first.any()
    one.actions(1, torch.float32, ()).fill_(0.5)
    assert other.actions(1, torch.float32, ()).eq(0.5).all()
    assert not other.step(1, 1).reward.any()
    os.close(memory)


def test_workers_whose_nursery_is_gone_end_with_it_and_the_next_pool_has_another():
    with pool("recall", 4) as shared:
        shared.reset()
        pids = shared.pids
        psutil.Process(pids[0]).parent().kill()
        for _ in range(600):
            if gone(pids):
                break
            time.sleep(0.1)
        with pytest.raises(
            WorkerError, match=r"Worker 0 of 2 .* ended with the process that it was copied from"
        ):
            shared.step(acts(shared, 0))
    assert gone(pids)
    with pool("recall", 4) as shared:
        assert shared.reset().first.all()
        assert shared.pids != pids


def test_pools_in_several_threads_do_not_mix_up_their_workers():
    told = {}

    def live(seed):
        with pool("recall", 4, seed=seed) as shared:
            shared.reset()
            told[seed] = [shared.step(acts(shared, clock)) for clock in range(5)]

    threads = [threading.Thread(target=live, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        whole = make_world("recall", 4, seed=seed)
        whole.reset()
        assert all(same(step, whole.step(acts(whole, clock))) for clock, step in enumerate(told[seed]))
