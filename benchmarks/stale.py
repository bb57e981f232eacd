"""Measure stale states: log-probs from stored, recomputed and burned-in states against full episodes.

python benchmarks/stale.py

One training run of `fast` on `repeat_first` (episodes of 65 to 95 steps, segments of 16) at a high learning
rate. The other modes load its weights after each update, so that only the entry states differ.
"""

import copy

import torch

from holdfast.build import build_policy, build_world
from holdfast.config.run import override
from holdfast.learn import Learner, replay
from holdfast.learn.replay import burn_in_rows, recompute, state_after
from holdfast.recipes import find_recipe
from holdfast.rollout import Collector, Segments

KEYS = {
    "trainer.batch_size": 4096,
    "trainer.minibatch_size": 1024,
    "trainer.bptt_horizon": 16,
    "trainer.update_epochs": 4,
    "trainer.optimizer.learning_rate": 3e-3,
}
ROLLOUTS, SEEDS, COUNTED = 12, 3, 9
# No episode is longer than two rollouts, so three rollouts contain all of the current one.
LOOK_BACK = 3


def run(mode, seed, weights=None):
    config = override(find_recipe("repeat_first"), {**KEYS, "seed": seed, "trainer.stale": mode})
    device, trainer = torch.device("cpu"), config.trainer
    world = build_world(config, device, agents=config.world.agents, seed=seed)
    policy = build_policy(config, world, device)
    burn_in = trainer.burn_in if mode == "burn_in" else 0
    length, horizon = config.rollout_length, trainer.bptt_horizon
    collector = Collector(world, policy, length=length, horizon=horizon, seed=seed, burn_in=burn_in)
    learner, weights_by_version, rollouts, errors = Learner(policy, trainer, seed), [], [], []
    for version in range(ROLLOUTS):
        segments = collector.rollout(version)
        rollouts = [*rollouts[1 - LOOK_BACK :], copy.deepcopy(segments)]
        learner.update(segments)
        if weights is not None:
            policy.load_state_dict(weights[version])
        weights_by_version.append(copy.deepcopy(policy.state_dict()))
        if version >= ROLLOUTS - COUNTED:
            errors.append(error_of(policy, mode, rollouts))
        drift = learner.refresh(segments, collector)
    return weights_by_version, torch.tensor(errors).mean(), drift


@torch.no_grad()
def error_of(policy, mode, rollouts):
    """Return the mean |difference of log-probs| to a replay of the full episode with current weights."""
    segments = rollouts[-1]
    state = policy.lstm.cell.initial(segments.agents)
    for past in rollouts:
        steps, entries = past.steps.unflatten(0, past.agent_shape), []
        for k in range(past.segments_per_agent):
            entries.append(state)
            state = state_after(policy, steps[:, k], state)
    rows = segments.rows(torch.arange(len(segments)))
    truth = Segments(rows.steps, torch.stack(entries, 1).flatten(0, 1), rows.tail, rows.version)
    inputs = burn_in_rows(policy, rows) if mode == "burn_in" else rows
    if mode == "recompute":
        fresh = recompute(policy, segments, at_once=64)[0].flatten(0, 1)
        inputs = Segments(rows.steps, fresh, rows.tail, rows.version)
    difference = replay(policy, inputs)["act_log_prob"] - replay(policy, truth)["act_log_prob"]
    return float(difference[rows.steps["valid"]].abs().mean())


def main():
    torch.set_num_threads(1)
    print("| seed | keep | recompute | burn_in 16 | drift | stale_kl |\n|---|---|---|---|---|---|")
    for seed in range(SEEDS):
        weights, keep, drift = run("keep", seed)
        errors = [run(mode, seed, weights)[1] for mode in ("recompute", "burn_in")]
        cells = [f"{float(error):.2e}" for error in (keep, *errors)]
        cells += [f"{drift['memory/drift']:.2f}", f"{drift['memory/stale_kl']:.1e}"]
        print(f"| {seed} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
