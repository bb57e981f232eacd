"""Measure the laws on the trainers of other libraries, each in its own environment: part of `make check-peers`.

Called with the folder of the environments, `python tools/check_trainers.py FOLDER`, it runs
`holdfast check trainer:NAME` with FOLDER/NAME/bin/python, and writes docs/museum/conformance.md.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from holdfast.check.trainers import TRAINERS, PeerTrainer

PAGE = Path(__file__).parent.parent / "docs" / "museum" / "conformance.md"
LIMIT = 600
"""Seconds for one library."""
LAWS = ("weights", "clear", "carry", "pure", "entry", "replay", "advantage", "bootstrap", "once")
ABOUT = """\
Whole trainers of other libraries, run by their own code on the scripted environments of
[`holdfast check trainer:`](../guides/check_your_trainer.md) with learning rate 0: 8 environments, 3 rollouts of 16
steps, 2 epochs, an LSTM of 16 units, gamma 0.99, lambda 0.95. One release and one configuration each: another
configuration may behave otherwise. Written by `make check-peers`."""
POLICIES = "The laws on policies of TorchRL are in [other libraries](peers.md)."
TIANSHOU = """\
tianshou 2.0.1 stores no states for updates: with `stack_num=8` a recurrent network reads, for each step, the last 8
observations from a state of zeros, and an episode's first observation is repeated until there are 8. Rollouts carry
the state of the whole episode. So updates compute other outputs than rollouts, at an episode's start by far, later by
what lies more than 8 steps back, and the first ratio of PPO is not 1. Bootstrap values at a rollout's end are those
of a full window, and the next rollout's buffer, emptied, begins a new one.

**Confirmed by hand, windows.** A network alone, no check:

```python
import torch
from tianshou.utils.net.common import Recurrent

torch.manual_seed(0)
net = Recurrent(layer_num=1, state_shape=8, action_shape=3, hidden_layer_size=16)
obs, state, acted = torch.randn(20, 1, 8), None, []
with torch.no_grad():
    for x in obs:
        y, state = net(x, state)
        acted.append(y)
    for t in (0, 7, 15):
        window = obs[max(0, t - 7) : t + 1, 0]
        window = torch.cat([window[:1].expand(8 - len(window), -1), window])
        print(t, float((net(window[None])[0] - acted[t]).abs().max()))
# 0 0.0847, 7 3e-08, 15 0.0006
```

A fix: store the state that each step read, and start windows there.

**Confirmed by hand, states that are plain tensors.** `tianshou/data/collector.py`, line 1108, clears the states of
ended episodes by `last_hidden_state_RH[env_ind_local_D].zero_()`. Indexing with an array makes a copy, so the state
stays: with `state = torch.ones(3, 2)`, `Collector._reset_hidden_state_based_on_type(np.array([1]), state)` leaves it
as it was. `Recurrent` returns a `Batch`, which another branch clears rightly, so the run above does not show it. A fix:
`last_hidden_state_RH[env_ind_local_D] = 0`."""
SKRL = """\
**Confirmed by hand, stored states.** `skrl/agents/torch/ppo/ppo_rnn.py`, line 371, makes `_rnn_initial_states` and
`_rnn_final_states` the same dictionary. From the second step on, `act` (line 263) therefore overwrites the policy's
initial state before `record_transition` (line 336) stores it: the memory holds the state *after* each step. Updates
start one step late, and `clear` breaks with it, where a sequence begins with an episode. The value's state is stored
before it is overwritten and is right. A fix: `self._rnn_initial_states = dict(self._rnn_final_states)`, with which
`clear`, `entry` and `replay` hold. The same line is in the recurrent A2C, RPO, TRPO, DDPG, TD3 and SAC agents, which
were not run.

Without the check, in four steps of the agent alone, for `agent`, `memory` and models as in
`src/holdfast/check/trainers/skrl_trainer.py`:

```python
read = []  # the hidden state that the policy's LSTM reads at each step
agent.policy.lstm.register_forward_pre_hook(lambda module, args: read.append(args[1][0][0].clone()))
never = torch.zeros(2, 1, dtype=torch.bool)
with torch.no_grad():
    for t in range(4):
        obs, times = torch.randn(2, 8), {"timestep": t, "timesteps": 9}
        actions, _ = agent.act(obs, None, **times)
        agent.record_transition(
            observations=obs,
            states=None,
            actions=actions,
            rewards=torch.zeros(2, 1),
            next_observations=obs,
            next_states=None,
            terminated=never,
            truncated=never,
            infos={},
            **times,
        )
stored = memory.get_tensor_by_name("rnn_policy_0")
print([float((stored[t].flatten(1) - read[t]).abs().max()) for t in range(4)])
# [0.0, 0.262, 0.290, 0.226]: and stored[1] is read[2]
```

**Confirmed by hand, truncations.** `compute_gae` (line 17 of the same file) gets `terminated` alone, so an advantage
runs on from an episode that was truncated into the next one of its environment. With rewards 0 and values 0, 0, 10,
and a truncation after the second step, `compute_gae` returns 0.4655, 0.495, 0 for three steps, where the first two
must be 0 if the final observation's value is 0. `time_limit_bootstrap=True` adds `gamma V(s)` to the reward and cuts
nothing. A fix: cut the sum at `terminated | truncated`, and use the final observation's value at a truncation."""
SAMPLE_FACTORY = """\
At a truncation `gamma V(s_t)` is added to the reward, the value of the step before the end. `value_bootstrap` is off by
default: a truncation then counts as a termination. An environment of one agent hands over its final observation, which
Sample Factory overwrites as it resets it (`sample_factory/algo/utils/make_env.py`, lines 93 and 117); one of many
agents, as here, resets itself. Its sampler and learner run in one process here (`serial_mode`, `async_rl` off), with
its batched sampler. GRUs, two layers and `recurrence=8` give the same results.

**Confirmed by hand, both flags.** Where an episode is terminated and truncated in the same step, `gamma V(s_t)` is
added too, and must not be: `sample_factory/algo/sampling/batched_sampling.py`, line 320, stores `time_outs=truncated`,
and `sample_factory/algo/learning/learner.py`, line 984, adds the value at all `time_outs`. Gymnasium's `TimeLimit` sets
both flags where an episode terminates in the last step that it allows. All 10 such steps of the run are wrong.

Without the check, with episodes of one step and no reward, where all returns must be 0:

```python
import tempfile

import gymnasium
import numpy as np
from sample_factory.algo.learning.learner import Learner
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import run_rl


class OneStep(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(2)

    def reset(self, **options):
        return np.ones(2, np.float32), {}

    def step(self, action):
        return np.ones(2, np.float32), 0.0, True, False, {}


def limited(*args):
    return gymnasium.wrappers.TimeLimit(OneStep(), 1)


def shown(self, batch, prepare=Learner._prepare_batch):
    result = prepare(self, batch)
    print(*(float(result[0][name][0]) for name in ("returns", "values")))
    return result


if __name__ == "__main__":
    Learner._prepare_batch = shown
    register_env("one_step", limited)
    options = "--env=one_step --seed=0 --device=cpu --serial_mode=True --async_rl=False --batched_sampling=True"
    options += " --num_workers=1 --num_envs_per_worker=1 --worker_num_splits=1 --rollout=16 --batch_size=16"
    options += " --train_for_env_steps=1 --normalize_returns=False --value_bootstrap=True --train_dir="
    arguments = (options + tempfile.mkdtemp()).split()
    run_rl(parse_full_cfg(parse_sf_args(arguments)[0], arguments))
# -0.0497 -0.0502: the return is gamma V(s); with OneStep(), 2 it is 0
```

A fix: `time_outs=truncated & ~terminated`, and in `non_batched_sampling.py`, line 193, likewise: `truncated and not
terminated`."""
REMARKS = {
    "sb3": "A truncation is bootstrapped from the final observation, with the state before clearing.",
    "cleanrl": """\
As in CleanRL's published scripts, `done = terminated | truncated` ends the sum and nothing is bootstrapped: a
documented simplification of the algorithm, which biases values in environments with time limits. A fix: add
`gamma * value(final observation, state before clearing)` to the reward of a truncated step.""",
    "rsl_rl": """\
At a truncation `gamma V(s_t)` is added to the reward, the value of the step before the end: its environments hand
over no final observations. The critic's state is restored after the bootstrap value.""",
    "rl_games": """\
At a truncation `gamma V(s_t)` is added to the reward (`value_bootstrap`), the value of the step before the end: its
environments hand over no final observations.""",
    "skrl": SKRL,
    "torchrl": """\
The collector resets the state by the primer, stores it with each step, and the recurrent mode starts from it. Values of
final observations are computed after the rollout, with the state before clearing.""",
    "tianshou": TIANSHOU,
    "sample_factory": SAMPLE_FACTORY,
}


@dataclass(frozen=True)
class Outcome:
    """What one library's trainer gave."""

    name: str
    peer: PeerTrainer
    versions: dict[str, str]
    results: dict | None
    error: str


def run(name: str, folder: Path) -> Outcome:
    """Check one trainer in its environment."""
    peer, python = TRAINERS[name], folder / name / "bin" / "python"
    if not python.exists():
        return Outcome(name, peer, {}, None, "not installed")
    command = [str(python), "-m", "holdfast", "check", f"trainer:{name}", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return Outcome(name, peer, {}, None, f"no result after {LIMIT} s")
    if done.returncode == 2 or not done.stdout.strip():
        return Outcome(name, peer, {}, None, done.stderr.strip().splitlines()[-1])
    return Outcome(name, peer, versions(python, peer.package), json.loads(done.stdout), "")


def versions(python: Path, package: str) -> dict[str, str]:
    """Return the versions of torch, Gymnasium and the library."""
    names = [name for name in (package, "torch", "gymnasium") if name]
    code = f"import importlib.metadata as m; print(*[m.version(name) for name in {names}])"
    output = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    return {name: version.partition("+")[0] for name, version in zip(names, output.split(), strict=True)}


def cell(results: dict, name: str) -> str:
    """Return one cell of the table: holds, holds in part, broken, or not measured."""
    law = results["laws"][name]
    if not law["ok"]:
        return "**broken**"
    in_part = any(note.startswith(f"{name}: ") for note in results["notes"])
    return "-" if law["measured"] is None else "holds, in part" if in_part else "holds"


def page(outcomes: list[Outcome]) -> str:
    """Return the page."""
    lines = ["# Trainers of other libraries", "", *ABOUT.splitlines(), ""]
    lines += [f"Measured on {datetime.now(UTC).date().isoformat()}, on a CPU.", ""]
    lines += [f"| trainer | version | {' | '.join(LAWS)} |", f"|---|---|{'---|' * len(LAWS)}"]
    for each in outcomes:
        version = each.versions.get(each.peer.package, "ours")
        cells = [cell(each.results, law) for law in LAWS] if each.results else [each.error] * len(LAWS)
        lines.append(f"| {each.name} | {version} | {' | '.join(cells)} |")
    lines += ["", "`-`: not measured; in part: see the notes below.", "", POLICIES, ""]
    for each in outcomes:
        lines += section(each)
    return "\n".join(lines).rstrip() + "\n"


def section(outcome: Outcome) -> list[str]:
    """Return what was run, and the findings in words."""
    packages = ", ".join(f"{name} {version}" for name, version in outcome.versions.items())
    lines = [f"## {outcome.name}", "", f"Run: {outcome.peer.description}. {packages}.", ""]
    if outcome.results is None:
        return [*lines, f"Not measured: {outcome.error}.", ""]
    for name, law in outcome.results["laws"].items():
        if not law["ok"]:
            lines.append(f"- **{name}**: {law['finding']}")
    if outcome.results["ok"]:
        lines.append("All laws that were measured hold.")
    lines += ["", *[f"- Note: {note}." for note in outcome.results["notes"]], ""]
    return [*lines, *REMARKS[outcome.name].splitlines(), ""]


def main() -> int:
    """Check all trainers and write the page; 1 if a right one was not measured or not passed."""
    folder = Path(sys.argv[1])
    outcomes = []
    for name in TRAINERS:
        outcomes.append(run(name, folder))
        results = outcomes[-1].results
        broken = [law for law, result in results["laws"].items() if not result["ok"]] if results else []
        print(f"trainer:{name}: {outcomes[-1].error or ', '.join(broken) or 'all laws hold'}", flush=True)
    PAGE.write_text(page(outcomes), encoding="utf-8")
    right = [each for each in outcomes if each.name in ("sb3", "rsl_rl")]
    return 0 if all(each.results and each.results["ok"] for each in right) else 1


if __name__ == "__main__":
    sys.exit(main())
