"""The worker's side: shards, steps in shared memory, and error replies."""

import os
import pickle
import re
import sys
import threading
from multiprocessing.connection import Pipe

import pytest
import torch

from holdfast.errors import AgentCountError, ConfigError, ContractError
from holdfast.trust import TYPED
from holdfast.worlds import make_world
from holdfast.worlds.workers.shared_memory import Layout, open_memory
from holdfast.worlds.workers.worker import ProcessContext, Shard, Worker, serve


@pytest.fixture
def memory():
    file = open_memory()
    yield file
    os.close(file)


def shard(name="recall", first_agent=0, agents=2, is_whole_world=False, **options):
    return Shard(name, options, first_agent, agents, seed=3, is_whole_world=is_whole_world, name_source=TYPED)


def start(memory, index=0, restarted=False, agents=4):
    """Make a worker with two of four agents of one group; return it and its buffers."""
    worker = Worker(memory)
    worker.make([shard(first_agent=2 * index)], ProcessContext.current())
    layout = Layout(worker.reset(), rows=agents, groups=1, numbers=1)
    worker.attach(layout, index, restarted=restarted)
    return worker, layout.map(memory)


def test_worker_steps_its_shard_in_its_rows(memory):
    world = make_world("recall", agents=4, seed=3)
    step = world.reset()
    worker, buffers = start(memory, index=1)
    actions = buffers.actions(0, torch.int64, ())
    for clock in range(20):
        slot = clock % 2
        assert buffers.step(0, slot).obs[2:].equal(step.obs[2:])
        assert not buffers.step(0, slot).first[:2].any()
        actions.copy_(torch.arange(4) % 2)
        assert worker.step(0, 1 - slot, torch.int64, ()) is False
        step = world.step(actions.clone())
    worker.close()


def test_restarted_worker_returns_its_reset_from_the_next_step(memory):
    worker, buffers = start(memory, restarted=True)
    assert not buffers.step(0, 0).first.any()
    assert worker.state() == [None]
    assert worker.step(0, 1, torch.int64, ()) is True
    assert buffers.step(0, 1).first.tolist() == [True, True, False, False]
    assert worker.step(0, 0, torch.int64, ()) is False
    assert worker.state() != [None]


def test_worker_restores_the_state_of_its_worlds(memory):
    worker, buffers = start(memory)
    state = worker.state()
    for _ in range(5):
        worker.step(0, 1, torch.int64, ())
    ahead = buffers.step(0, 1).obs.clone()
    assert worker.restore(state) == [None]
    for _ in range(5):
        worker.step(0, 0, torch.int64, ())
    assert buffers.step(0, 0).obs[:2].equal(ahead[:2])


def test_world_that_cannot_be_split_must_be_whole(memory):
    worker, context = Worker(memory), ProcessContext.current()
    parts = {"parts": "recall + n_back"}
    with pytest.raises(ConfigError, match=r"mixture cannot be split over several workers"):
        worker.make([shard("mixture", agents=4, **parts)], context)
    worker.make([shard("mixture", agents=4, is_whole_world=True, **parts)], context)


def test_process_context_round_trip(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_TEST", "1")
    context = pickle.loads(pickle.dumps(ProcessContext.current()))
    monkeypatch.chdir("/")
    monkeypatch.delenv("HOLDFAST_TEST")
    sys.path.append("elsewhere")
    context.apply()
    assert os.getcwd() == str(tmp_path)
    assert os.environ["HOLDFAST_TEST"] == "1"
    assert "elsewhere" not in sys.path


class FailingWorker(Worker):
    """Raises in every step."""

    error = None

    def step(self):
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind", "content"),
    [
        (AgentCountError("agents", 24), "agent_count", ("agents", 24)),
        (ConfigError("no such option"), "config", "no such option"),
        (ContractError("a\nb"), "error", "a b"),
        (ValueError("bad"), "error", "ValueError: bad"),
        (SystemExit(7), "error", "SystemExit: 7"),
    ],
)
def test_serve_replies_with_errors_and_continues(memory, error, kind, content):
    trainer, connection = Pipe()
    worker = FailingWorker(memory)
    worker.error = error
    thread = threading.Thread(target=serve, args=(connection, worker), daemon=True)
    thread.start()
    for _ in range(2):
        trainer.send(("step", {}))
        assert trainer.poll(10)
        reply = trainer.recv()
        assert reply[0] == kind
        if kind == "error":
            message, traceback = reply[1]
            place = "" if isinstance(error, ContractError) else r" \(test_worker.py:\d+\)"
            assert re.fullmatch(re.escape(content) + place, message)
            assert ("in step" in traceback) != isinstance(error, ContractError)
        else:
            assert reply[1] == content
    trainer.send(("end", {}))
    thread.join(10)
    assert not thread.is_alive()


def test_serve_ends_when_the_trainer_closes_the_connection(memory):
    trainer, connection = Pipe()
    trainer.close()
    serve(connection, Worker(memory))
