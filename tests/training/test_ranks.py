"""Training on several ranks: forked processes on the CPU, with gloo."""

import json
import os
import pickle
import shutil
import signal
import time
from itertools import product

import pytest
import torch

import holdfast
import holdfast.build
import holdfast.config.run
import holdfast.recipes
import holdfast.training.train
from helpers.rank_processes import environment, finish, free_port, on_ranks, start
from helpers.small_runs import TINY, differences, lines_of
from holdfast import ranks
from holdfast.check.results import Laws
from holdfast.checkpoint.serialization import unpack
from holdfast.errors import ConfigError, RankError
from holdfast.rollout import Collector
from holdfast.training.distributed import SlowRanks
from holdfast.training.trainer import Trainer

EVERY = {"trainer.checkpoint_interval": 1, "trainer.keep_checkpoints": 0}
CARTPOLE = {
    "world": "gym:CartPole-v1",
    "policy.normalize_obs": True,
    "policy.normalize_value": True,
    "trainer.normalize_reward": True,
    "trainer.sampling.method": "prioritized",
    "trainer.stale": "recompute",
    "trainer.accumulate": 2,
    "trainer.update_epochs": 2,
    "trainer.total_timesteps": 128,
}
VTRACE = {
    "trainer.ppo.advantage": "vtrace",
    "trainer.refresh": "epoch",
    "trainer.update_epochs": 3,
    "trainer.stale": "burn_in",
    "trainer.burn_in": 2,
    "trainer.ppo.target_kl": 1e-6,
    "trainer.total_timesteps": 128,
}
OF_A_PROCESS = ("machine/", "time/", "memory/buffer_bytes", "memory/state_bytes", "memory/graph_bytes")
"""Metrics of rank 0 alone."""


def train(folder, name, keys, **options):
    keys = {**TINY, "runs_dir": str(folder), "run": name, **keys}
    if "world" in keys:
        del keys["world.delay"]
    # Adam turns a gradient that is rounding alone into a whole step; with this eps it does not.
    keys |= {"trainer.optimizer.eps": 1e-3}
    run = holdfast.train(None if options.get("resume") else "recall", keys, quiet=True, **options)
    return {name: weight.double() for name, weight in run.policy.state_dict().items()}


def largest_difference(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize(
    "keys",
    [
        {"trainer.total_timesteps": 64},
        pytest.param(CARTPOLE, marks=pytest.mark.slow),
        pytest.param(VTRACE, marks=pytest.mark.slow),
    ],
    ids=["recall", "gym", "vtrace"],
)
def test_1_2_and_4_ranks_train_the_same(tmp_path, keys):
    weights = {n: on_ranks(n, train, tmp_path, f"on-{n}", {**EVERY, **keys}) for n in (1, 2, 4)}
    first = lines_of(tmp_path / "on-1")
    for count in (2, 4):
        for other in weights[count][1:]:
            assert largest_difference(weights[count][0], other) == 0, "all ranks have the same weights"
        assert largest_difference(weights[1][0], weights[count][0]) <= 1e-6
        for one, other in zip(first, lines_of(tmp_path / f"on-{count}"), strict=True):
            assert one.keys() == other.keys()
            names = [name for name in one if not name.startswith(OF_A_PROCESS)]
            assert {name: other[name] for name in names} == pytest.approx({name: one[name] for name in names}, abs=1e-6)
        assert rollout_of(tmp_path / f"on-{count}") == rollout_of(tmp_path / "on-1")


def rollout_of(folder):
    """What the first rollout left behind of every agent: bit for bit."""
    path = folder / "checkpoints" / "000001"
    config = (folder / "config.json").read_text()
    collector = unpack(path / "trainer_state.safetensors")["collector"]
    memories = unpack(path / "live_memories.safetensors")["policy"]["leaves"]
    return {
        **{name: leaf.tolist() for name, leaf in collector["pending"].items()},
        **{name: leaf.tolist() for name, leaf in collector["episodes"].items()},
        # What refreshes the memories after an update reads its weights.
        **({name: leaf.tolist() for name, leaf in memories.items()} if '"keep"' in config else {}),
    }


def first_rollout(agents, dtype):
    config = holdfast.config.run.override(
        holdfast.recipes.find_recipe("recall"),
        {**TINY, "world.agents": agents, "trainer.batch_size": 8 * agents, "trainer.minibatch_size": 4 * agents},
    )
    torch.set_default_dtype(dtype)
    with ranks.joined():
        world = holdfast.build.build_training_world(config, torch.device("cpu"), 0)
        policy = holdfast.make_policy("fast", world, hidden_size=32).to(dtype)
        segments = Collector(world, policy, length=8, horizon=4, seed=3).rollout(0)
        return {str(name): leaf.clone() for name, leaf in segments.steps.items()} | dict(segments.entry_state.items())


@pytest.mark.parametrize(
    ("agents", "dtype"),
    [
        (8, torch.float32),
        pytest.param(160, torch.float32, marks=pytest.mark.slow),
        pytest.param(64, torch.float64, marks=pytest.mark.slow),
    ],
)
def test_rollouts_are_bit_equal(agents, dtype):
    (alone,) = on_ranks(1, first_rollout, agents, dtype)
    for count in (2, 4):
        parts = on_ranks(count, first_rollout, agents, dtype)
        for name, leaf in alone.items():
            assert torch.equal(torch.cat([part[name] for part in parts]), leaf), name


def resumed_rollout(folder):
    """The rollout that follows a checkpoint, agent by agent."""
    rollouts = []
    collect = Trainer.collect

    def recording(self):
        segments = collect(self)
        rollouts.append(segments.steps.clone())
        return segments

    Trainer.collect = recording
    holdfast.train(resume=folder, config={"trainer.total_timesteps": 64 * (rounds(folder) + 1)}, quiet=True)
    return {str(name): leaf for name, leaf in rollouts[0].items()}


def rounds(folder):
    return int((folder / "checkpoints" / "latest").resolve().name)


WORKERS = {"world": "gym:CartPole-v1", "trainer.num_workers": 2, "trainer.async_factor": 1}


@pytest.mark.parametrize("keys", [{}, pytest.param(WORKERS, marks=pytest.mark.slow)], ids=["alone", "workers"])
def test_a_run_resumes_on_another_number_of_ranks(tmp_path, keys):
    keys = {**keys, "world.agents": 16, "trainer.batch_size": 64, "trainer.total_timesteps": 128}
    on_ranks(2, train_float32, tmp_path, "x", keys)
    for step, count in enumerate((1, 4)):
        copies = {}
        for other in (count, 2):
            copies[other] = tmp_path / f"{step}-{other}"
            os.system(f"cp -r {tmp_path / 'x'} {copies[other]}")
        parts, reference = (on_ranks(n, resumed_rollout, copies[n]) for n in (count, 2))
        for name in reference[0]:
            assert torch.equal(*(torch.cat([part[name] for part in each]) for each in (parts, reference))), name
        shutil.rmtree(tmp_path / "x")
        shutil.copytree(copies[count], tmp_path / "x", symlinks=True)
        assert rounds(tmp_path / "x") == step + 3


def train_float32(folder, name, keys, **options):
    keys = {**TINY, "runs_dir": str(folder), "run": name, **keys}
    if "world" in keys:
        del keys["world.delay"]
    return holdfast.train("recall", keys, quiet=True, **options).finished


def killed_after(folder, name, keys, number):
    """Rank 1 is killed in an iteration; the others return what their run raises."""

    def kill(iteration):
        if iteration.number == number and ranks.rank() == 1 and "TORCHELASTIC_RESTART_COUNT" not in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)

    start_s = time.monotonic()
    try:
        return str(train_float32(folder, name, keys, callbacks=[kill]))
    except RankError as error:
        return f"{error} {time.monotonic() - start_s < 60}"


def test_a_killed_rank_ends_the_run_and_is_named(tmp_path):
    (tmp_path / "out").mkdir()
    children = start(2, killed_after, tmp_path, "x", EVERY, 3, folder=tmp_path / "out")
    codes = finish(children, 60)
    assert codes == [0, -signal.SIGKILL]
    line = pickle.loads((tmp_path / "out" / "0.pickle").read_bytes())
    assert line.startswith(f"rank 1 (process {children[1]}) of 2 ended, so the run ends; resume it with --resume")
    assert rounds(tmp_path / "x") == 2

    # What torchrun does with --max-restarts: the same command again, by the same parent.
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    try:
        assert on_ranks(2, train_float32, tmp_path, "x", EVERY) == [True, True]
    finally:
        del os.environ["TORCHELASTIC_RESTART_COUNT"]
    on_ranks(2, train_float32, tmp_path, "whole", EVERY)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole", "x"]
    for file in ("trainer_state", "live_memories", "world_state"):
        trees = [unpack(tmp_path / name / "checkpoints" / "latest" / f"{file}.safetensors") for name in ("x", "whole")]
        assert differences(*trees) == []
    models = [
        (tmp_path / name / "checkpoints" / "latest" / "model.safetensors").read_bytes() for name in ("x", "whole")
    ]
    assert models[0] == models[1]


def stopped_by_signal(folder):
    def interrupt(iteration):
        if iteration.number == 2 and ranks.rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    return train_float32(folder, "x", {"trainer.checkpoint_interval": 0}, callbacks=[interrupt])


def test_a_signal_to_one_rank_stops_all_and_saves(tmp_path):
    assert on_ranks(2, stopped_by_signal, tmp_path) == [False, False]
    assert rounds(tmp_path / "x") == 2


def laws_of_rank(folder):
    run = holdfast.train(
        "recall", {**TINY, "runs_dir": str(folder), "run": "x", "trainer.total_timesteps": 64}, quiet=True
    )
    laws: Laws = holdfast.check(run.policy)
    return {name: [(part.what, part.finding) for part in law.broken] for name, law in laws.items()}


@pytest.mark.slow
@pytest.mark.usefixtures("annotations_asleep")
def test_the_laws_hold_on_every_rank(tmp_path):
    for laws in on_ranks(2, laws_of_rank, tmp_path):
        assert [broken for broken in laws.values() if broken] == []
        assert {"cut", "carry", "clear", "replay", "isolate", "pure", "bounded", "restore", "agree"} <= laws.keys()


def slow_rank_lines():
    with ranks.joined():
        slow = SlowRanks()
        return [slow.check(2.0 if ranks.rank() == 1 else 1.0) for _ in range(4)]


def test_a_slow_rank_is_named_once():
    lines, others = on_ranks(2, slow_rank_lines)
    assert lines == [
        "",
        "",
        "rank 1 is slow: a rollout takes it 2.00 s, and the others 1.00 s (median), which wait for it.",
        "",
    ]
    assert others == [""] * 4


@pytest.mark.parametrize(
    ("keys", "count", "message"),
    [
        (
            {"world.agents": 8},
            3,
            "world.agents=8 cannot be split evenly over 3 ranks; try world.agents=9 trainer.batch_size=72 "
            "trainer.minibatch_size=36, or 2 ranks.",
        ),
        (
            {"trainer.minibatch_size": 8, "trainer.bptt_horizon": 8},
            2,
            "trainer.minibatch_size=8 is 1 segment of 8 steps for 2 ranks; try trainer.minibatch_size=16, or 1 rank.",
        ),
        (
            {"trainer.num_workers": 2, "world.agents": 6, "trainer.batch_size": 48, "trainer.minibatch_size": 24},
            2,
            "world.agents=6 cannot be split evenly over 2 ranks with 4 shards each (trainer.num_workers x "
            "trainer.async_factor); try world.agents=8 trainer.batch_size=64 "
            "trainer.minibatch_size=16, or 1 rank.",
        ),
    ],
)
def test_an_impossible_split_is_one_line_with_sizes_that_work(keys, count, message):
    config = holdfast.config.run.override(holdfast.recipes.find_recipe("recall"), {**TINY, **keys})
    with pytest.raises(ConfigError) as error:
        holdfast.config.run.require_ranks(config, count)
    assert str(error.value) == message


def test_the_sizes_that_an_error_proposes_can_be_split():
    for agents, minibatches, horizon, count in product((6, 8, 100), (1, 2), (4, 8), (7, 64)):
        sizes = {"world.agents": agents, "trainer.batch_size": agents * 16, "trainer.bptt_horizon": horizon}
        keys = {**TINY, **sizes, "trainer.minibatch_size": agents * 16 // minibatches}
        config = holdfast.config.run.override(holdfast.recipes.find_recipe("recall"), keys)
        with pytest.raises(ConfigError) as error:
            holdfast.config.run.require_ranks(config, count)
        proposed, _, fewer = str(error.value).partition("try ")[2].removesuffix(".").rpartition("or ")
        sizes = dict(word.rstrip(",").split("=") for word in proposed.split())
        holdfast.config.run.require_ranks(holdfast.config.run.override(config, sizes), count)
        holdfast.config.run.require_ranks(config, int(fewer.split()[0]))


def test_a_mixture_is_refused():
    keys = {**TINY, "world": "mixture", "world.parts": "recall delay=2 + n_back back=2"}
    del keys["world.delay"]
    config = holdfast.config.run.override(holdfast.recipes.find_recipe("recall"), keys)
    with pytest.raises(ConfigError, match="mixture cannot be split over 2 ranks; train it in one process"):
        holdfast.config.run.require_ranks(config, 2)


def test_one_process_is_rank_0_of_1():
    assert (ranks.rank(), ranks.count(), ranks.is_main(), ranks.share(8), ranks.first(8)) == (0, 1, True, 8, 0)
    tensor = torch.ones(2)
    assert ranks.reduce(tensor) is tensor
    assert ranks.concat(tensor) is tensor
    assert (ranks.gather(1), ranks.gather_to_main(1), ranks.broadcast(2), ranks.any_of(True)) == ([1], [1], 2, True)


def test_ranks_that_cannot_meet_are_one_line(monkeypatch):
    for name, number in environment(0, 2, free_port()).items():
        monkeypatch.setenv(name, number)
    monkeypatch.setenv("MASTER_PORT", "no")
    with pytest.raises(ConfigError, match="is to be rank 0 of 2, but the ranks cannot meet"), ranks.joined():
        pass


def meet(port, seconds):
    os.environ.update({"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"})
    time.sleep(seconds[int(os.environ["RANK"])])
    with ranks.joined():
        return ranks.gather(ranks.rank())


def test_ranks_that_are_started_again_meet_in_the_store_of_the_first_start():
    """The store of torchrun outlives its ranks: addresses in it may be of ranks that have ended."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for seconds in ([0, 0], [0.5, 0], [0, 0.5]):
        assert on_ranks(2, meet, store.port, seconds) == [[0, 1], [0, 1]]


def test_rank_0_alone_writes(tmp_path):
    on_ranks(2, train_float32, tmp_path, "x", {"trainer.total_timesteps": 128})
    lines = [json.loads(line) for line in (tmp_path / "x" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
