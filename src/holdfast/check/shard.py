"""The law shard: an iteration of training on two ranks against one, in forked processes with gloo between them."""

import os
import pickle
import select
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import distributed

from holdfast import ranks
from holdfast.check.compare import expect_close, expect_zero
from holdfast.check.policy_copy import AGENTS, HORIZON, STEPS, PolicyCopy
from holdfast.check.results import Measurement, not_measured
from holdfast.config.trainer import OptimizerConfig, TrainerConfig
from holdfast.errors import ContractError, error_text
from holdfast.policies import FunctionalPolicy, LSTMWrapper
from holdfast.types import Tensor

if TYPE_CHECKING:
    from holdfast.check.context import CheckContext

RANKS = 2
SECONDS = 120.0
"""Processes that take longer hang."""
UPDATE_BOUND = 1e-6
ROLLOUT = ("actions", "act_log_prob", "values")
Numbers = dict[str, Tensor]


def shard(context: "CheckContext") -> list[Measurement]:
    """Several ranks train as one does: rollouts bit for bit, updates up to the order of a sum."""
    policy = context.exact
    if not isinstance(policy.adapter.module, LSTMWrapper):
        return [not_measured("training on several ranks", "only Holdfast policies are trained by Holdfast")]
    if ranks.count() > 1 or policy.device.type != "cpu" or not has_gloo():
        return [not_measured("training on several ranks", "check in one process, on the CPU of a system with fork")]
    alone = _train(policy, context, AGENTS, 0)
    parts = on_ranks(RANKS, lambda rank: _train(policy, context, AGENTS // RANKS, rank))
    weights = [part["weights"] for part in parts]
    same_weights = expect_zero("weights of the ranks after an update", weights[1] - weights[0], "weight", path="shard")
    if bool(alone["has_drawn"]):
        reason = 'it draws actions from torch\'s generator, which differs on every rank, and not from td["draws"]'
        return [same_weights, not_measured(f"a rollout on {RANKS} ranks", reason)]
    measurements = []
    for name in ROLLOUT:
        joined, what = torch.cat([part[name] for part in parts]), f"{name} of a rollout on {RANKS} ranks"
        if isinstance(policy.adapter.module, FunctionalPolicy) or name == "actions":
            difference = (joined.double() - alone[name].double()).reshape(AGENTS, STEPS, -1).abs().amax(-1)
            measurements.append(expect_zero(what, difference, "agent", "step", path="shard"))
        else:
            # Its products of matrices have other sizes.
            measurements.append(expect_close(what, joined, alone[name], 1e-9, path="shard"))
    return [
        *measurements,
        same_weights,
        expect_close(
            f"weights after an update on {RANKS} ranks", weights[0], alone["weights"], UPDATE_BOUND, path="shard"
        ),
    ]


def has_gloo() -> bool:
    """Whether this system has fork, and gloo."""
    return "fork" in vars(os) and distributed.is_available() and distributed.is_gloo_available()


def _train(policy: PolicyCopy, context: "CheckContext", agents: int, rank: int) -> Numbers:
    """Train one iteration on some agents of the script; return the rollout, the weights, and who drew the actions."""
    adapter: Any = policy.unused_copy().adapter
    module: LSTMWrapper = adapter.module
    config = TrainerConfig(
        batch_size=AGENTS * STEPS,
        minibatch_size=AGENTS * STEPS // 2,
        bptt_horizon=HORIZON,
        optimizer=OptimizerConfig(eps=1e-5),
    )
    with policy.default_dtype(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        script = policy.to_policy(context.script)[rank * agents : (rank + 1) * agents]
        world = adapter.scripted_world(script, first_agent=rank * agents)
        collector = adapter.collector(world, module, length=STEPS, horizon=HORIZON, seed=0)
        generator = torch.get_rng_state()
        segments = collector.rollout(0)
        has_drawn = not torch.equal(generator, torch.get_rng_state())
        rollout = {name: segments.steps[name].unflatten(0, segments.agent_shape).flatten(1, 2) for name in ROLLOUT}
        rollout = {name: leaf.clone() for name, leaf in rollout.items()}
        adapter.learner(module, config, seed=0).update(segments)
        with torch.no_grad():
            weights = torch.cat([weight.flatten().double() for weight in module.parameters()])
            return rollout | {"weights": weights, "has_drawn": torch.tensor(has_drawn)}


def on_ranks(count: int, function: Callable[[int], Numbers]) -> list[Numbers]:
    """Call a function on every rank of a group of forked processes, which need no imports."""
    with tempfile.TemporaryDirectory() as name:
        folder, deadline = Path(name), time.monotonic() + SECONDS
        children = [_fork(rank, count, function, folder) for rank in range(count)]
        for child in children:
            handle = os.pidfd_open(child)
            if not select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]:
                os.kill(child, signal.SIGKILL)
            os.close(handle)
            os.waitpid(child, 0)
        replies = [folder / f"{rank}.reply" for rank in range(count)]
        results = [
            pickle.loads(file.read_bytes()) if file.exists() else "it ended without a result" for file in replies
        ]
    errors = [f"rank {rank}: {result}" for rank, result in enumerate(results) if isinstance(result, str)]
    if errors:
        raise ContractError(errors[0])
    return cast("list[Numbers]", results)


def _fork(rank: int, count: int, function: Callable[[int], Numbers], folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        store = f"file://{folder / 'store'}"
        distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
        reply = pickle.dumps(function(rank))
    except BaseException as error:
        reply = pickle.dumps(error_text(error, 300))
    try:
        (folder / f".{rank}").write_bytes(reply)
        (folder / f".{rank}").rename(folder / f"{rank}.reply")
    finally:
        os._exit(0)
