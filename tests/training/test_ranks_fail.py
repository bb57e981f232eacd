"""Errors and signals on one of several ranks: all ranks end, and the last complete iteration is saved."""

import os
import signal

import pytest
import torch

import holdfast
import holdfast.training.train
from helpers.rank_processes import on_ranks
from helpers.small_runs import TINY
from holdfast import ranks
from holdfast.cli import main
from holdfast.errors import HoldfastError
from holdfast.training import train as training
from holdfast.training.trainer import Trainer

NUMBER = 2
"""The iteration in which it happens."""
RARE = {"trainer.checkpoint_interval": 0}


def outcome(folder, callbacks=(), **keys):
    """Train on this rank; return the error, and whether it is printed."""
    keys = {**TINY, **RARE, "runs_dir": str(folder), "run": "x", **keys}
    try:
        return holdfast.train("recall", keys, quiet=True, callbacks=callbacks).finished, True
    except (HoldfastError, OSError) as error:
        return f"{type(error).__name__}: {error}", getattr(error, "prints", True)


def last_saved(folder):
    return int((folder / "x" / "checkpoints" / "latest").resolve().name)


def callback_error(folder):
    def fail(iteration):
        assert iteration.number < NUMBER or ranks.rank() == 0, "no luck"

    return outcome(folder, [fail])


def world_error(folder):
    collect = Trainer.collect

    def failing(self):
        if self.iteration == NUMBER - 1 and ranks.rank() == 1:
            raise OSError("no luck")
        return collect(self)

    Trainer.collect = failing
    return outcome(folder)


def evaluation_error(folder):
    def fail(*args, **options):
        raise OSError("no luck")

    training.periodic_evaluation = fail
    return outcome(folder, **{"trainer.eval_interval": NUMBER})


def nan_reward(folder):
    collect = Trainer.collect

    def poisoned(self):
        segments = collect(self)
        if self.iteration == NUMBER - 1 and ranks.rank() == 1:
            segments.steps["rewards"][:] = float("nan")
        return segments

    Trainer.collect = poisoned
    return outcome(folder)


@pytest.mark.parametrize(
    ("failure", "rank", "text"),
    [
        (callback_error, 1, "callback fail, iteration 2: AssertionError: no luck"),
        (world_error, 1, "OSError: no luck"),
        pytest.param(evaluation_error, 0, "OSError: no luck", marks=pytest.mark.slow),
        (nan_reward, 1, "iteration 2, epoch 1, minibatch 1: rewards is not finite: agents 4"),
    ],
)
def test_an_error_on_one_rank_ends_all_saved(failure, rank, text, tmp_path):
    outcomes = on_ranks(2, failure, tmp_path)
    error, is_printed = outcomes[rank]
    assert text in error
    assert is_printed
    other, is_printed = outcomes[1 - rank]
    assert other.startswith(f"OtherRankError: rank {rank}")
    assert not is_printed
    assert last_saved(tmp_path) == NUMBER - 1


def signalled(folder, signals):
    def interrupt(iteration):
        if iteration.number == NUMBER:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGINT)

    return outcome(folder, [interrupt])


def test_two_signals_to_all_ranks_lose_nothing(tmp_path):
    assert on_ranks(2, signalled, tmp_path, 2) == [(False, True)] * 2
    assert last_saved(tmp_path) == NUMBER


def numbers_of_rank_0(folder):
    def change(iteration):
        iteration.set("trainer.optimizer.learning_rate", 1e-3 * (1 + ranks.rank()))

    keys = {**TINY, "runs_dir": str(folder), "run": "x", "trainer.total_timesteps": 128}
    run = holdfast.train("recall", keys, quiet=True, callbacks=[change])
    return torch.cat([weight.flatten() for weight in run.policy.parameters()])


@pytest.mark.slow
def test_numbers_that_callbacks_set_are_those_of_rank_0(tmp_path):
    one, other = on_ranks(2, numbers_of_rank_0, tmp_path)
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["--ranks=2", "seeds=0..1"], {}, "Each of several seeds trains in one process; leave out --ranks 2,"),
        (["seeds=0..1"], {"RANK": "0", "WORLD_SIZE": "2"}, "trains in one process; leave out torchrun, or train one"),
        (["--ranks=2"], {"RANK": "0", "WORLD_SIZE": "2"}, "has started 2 ranks already; leave out --ranks 2."),
        (["--max-restarts=2"], {}, "--max-restarts needs --ranks N or --gpus N; torchrun has its own."),
        (["--ranks=2", "--gpus=2"], {}, "--gpus 2 and --ranks 2 are two numbers of ranks; keep one."),
        ([], {"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE=two is no number of ranks; start the ranks with torchrun"),
        ([], {"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0 is no number of ranks; start the ranks with torchrun"),
        (["world.agents=9"], {"RANK": "0", "WORLD_SIZE": "2"}, "world.agents=9 cannot be split evenly over 2 ranks;"),
        (["world.agents=9"], {"RANK": "1", "WORLD_SIZE": "2"}, ""),
    ],
)
def test_a_launch_that_cannot_be_is_one_line_of_rank_0(words, environment, message, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    batch = ["trainer.batch_size=72", "trainer.minibatch_size=72", "world.delay=2", "trainer.bptt_horizon=4"]
    assert main(["train", "recall", *batch, *words]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == bool(message)
