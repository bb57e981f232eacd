"""What stale states cost: log-probs from stored, recomputed and warmed-up states against whole episodes.

python benchmarks/stale.py

One training of `fast` on `repeat_first` (episodes of 65 to 95 steps, segments of 16), with weights that
move a lot. Its weights are then lived through once more in each mode: only what is remembered differs.
"""

import copy

import torch

from holdfast.build import build_policy, build_world
from holdfast.config import change
from holdfast.experience import Collector, Segments
from holdfast.learn import Learner, replay, stale
from holdfast.recipes import find_recipe

KEYS = {
    "trainer.batch_size": 4096,
    "trainer.minibatch_size": 1024,
    "trainer.bptt_horizon": 16,
    "trainer.update_epochs": 4,
    "trainer.optimizer.learning_rate": 3e-3,
}
ROLLOUTS, SEEDS, COUNTED = 12, 3, 9
# No episode is longer than two rollouts: what was lived in three holds it whole.
LOOK_BACK = 3


def live(mode, seed, weights=None):
    config = change(find_recipe("repeat_first"), {**KEYS, "seed": seed, "trainer.stale": mode})
    device, trainer = torch.device("cpu"), config.trainer
    world = build_world(config, device, agents=config.world.agents, seed=seed)
    policy = build_policy(config, world, device)
    lead = trainer.burn_in if mode == "burn_in" else 0
    length, horizon = config.rollout_length, trainer.bptt_horizon
    collector = Collector(world, policy, length=length, horizon=horizon, seed=seed, lead=lead)
    learner, moved, lives, told = Learner(policy, trainer, seed), [], [], []
    for version in range(ROLLOUTS):
        segments = collector.rollout(version)
        lives = [*lives[1 - LOOK_BACK :], copy.deepcopy(segments)]
        learner.update(segments)
        if weights is not None:
            policy.load_state_dict(weights[version])
        moved.append(copy.deepcopy(policy.state_dict()))
        if version >= ROLLOUTS - COUNTED:
            told.append(error_of(policy, mode, lives))
        drift = learner.refresh(segments, collector)
    return moved, torch.tensor(told).mean(), drift


@torch.no_grad()
def error_of(policy, mode, lives):
    """Mean |difference of log-probs| to the whole episode run with current weights."""
    segments = lives[-1]
    state = policy.lstm.cell.initial(segments.agents)
    for past in lives:
        steps, entries = past.steps.unflatten(0, past.by_agent), []
        for k in range(past.each):
            entries.append(state)
            state = stale.state_after(policy, steps[:, k], state)
    rows = segments.rows(torch.arange(len(segments)))
    truth = Segments(rows.steps, torch.stack(entries, 1).flatten(0, 1), rows.tail, rows.version)
    used = stale.warmed(policy, rows) if mode == "burn_in" else rows
    if mode == "recompute":
        fresh = stale.recompute(policy, segments, at_once=64).entry.flatten(0, 1)
        used = Segments(rows.steps, fresh, rows.tail, rows.version)
    apart = replay(policy, used)["act_log_prob"] - replay(policy, truth)["act_log_prob"]
    return float(apart[rows.steps["valid"]].abs().mean())


def main():
    torch.set_num_threads(1)
    print("| seed | keep | recompute | burn_in 16 | drift | stale_kl |\n|---|---|---|---|---|---|")
    for seed in range(SEEDS):
        weights, kept, drift = live("keep", seed)
        others = [live(mode, seed, weights)[1] for mode in ("recompute", "burn_in")]
        cells = [f"{float(error):.2e}" for error in (kept, *others)]
        cells += [f"{drift['memory/drift']:.2f}", f"{drift['memory/stale_kl']:.1e}"]
        print(f"| {seed} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
