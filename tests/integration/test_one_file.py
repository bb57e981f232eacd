"""The library against `examples/one_file.py`, which replays its actions."""

import ast
import copy
import dataclasses
import functools
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import holdfast
from helpers.one_update import learner_for, replay_loss
from holdfast.config.trainer import PPOConfig
from holdfast.evaluation.evaluate import evaluate
from holdfast.learn import replay
from holdfast.learn.ppo import compute_targets, normalize_advantages
from holdfast.rollout import Collector
from holdfast.rollout.segments import minibatches

PATH = Path(__file__).parents[2] / "examples" / "one_file.py"
AGENTS, HORIZON, LENGTH = 8, 16, 32
GAMMA, LAM, ENT_COEF = 0.99, 0.95, 0.02

WORLDS = {
    "fixed": {"delay": 8},
    "mixed": {"delay": (1, 7)},
    "truncated": {"delay": (1, 7), "truncate": True},
}

NAMES = {
    "encoder.conv1": "conv1",
    "encoder.conv2": "conv2",
    "encoder.fc1": "fc1",
    "encoder.fc2": "fc2",
    "lstm.cell.rnn.weight_ih_l0": "w_x.0",
    "lstm.cell.rnn.weight_ih_l1": "w_x.1",
    "lstm.cell.rnn.weight_hh_l0": "w_h.0",
    "lstm.cell.rnn.weight_hh_l1": "w_h.1",
    "lstm.cell.rnn.bias_ih_l0": "b_x.0",
    "lstm.cell.rnn.bias_ih_l1": "b_x.1",
    "lstm.cell.rnn.bias_hh_l0": "b_h.0",
    "lstm.cell.rnn.bias_hh_l1": "b_h.1",
    "critic.fc1": "critic1",
    "critic.fc2": "critic2",
    "actor.fc1": "actor",
    "actor.scores.weight": "bilinear",
    "actor.scores.bias": "bias",
    "actor.embeddings.table.weight": "embeddings",
}
"""Whole names, or layers whose `weight` and `bias` are called so on both sides."""


def load_oracle():
    spec = importlib.util.spec_from_file_location("one_file", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


oracle = load_oracle()


def oracle_name(name):
    if name in NAMES:
        return NAMES[name]
    layer, _, leaf = name.rpartition(".")
    return f"{NAMES[layer]}.{leaf}"


def as_oracle(name, tensor):
    """The library keeps the bilinear form's weight as `[1,512,16]`, the oracle as a matrix."""
    return tensor[0] if name == "actor.scores.weight" else tensor


def carry_over(policy, cues):
    """Build the oracle's net with the policy's weights; every name of both must be used once."""
    net = oracle.Net(cues).to(policy.actor.scores.bias.dtype)
    weights = {name: leaf for name, leaf in policy.state_dict().items() if not name.startswith("binding.")}
    tensors = {oracle_name(name): as_oracle(name, leaf) for name, leaf in weights.items()}
    assert len(tensors) == len(weights)
    net.load_state_dict(tensors, strict=True)
    return net


def pairs(policy, net):
    """Pair the library's parameters with the oracle's, in the oracle's shape."""
    expected = dict(net.named_parameters())
    for name, ours in policy.named_parameters():
        yield name, ours, expected[oracle_name(name)]


def merge(rollouts):
    """Lay rollouts of one segment an agent side by side, in the library's order of rows."""
    columns = (torch.stack(parts, dim=1).flatten(0, 1) for parts in zip(*rollouts, strict=True))
    return oracle.Rollout(*columns)


def script(patch, actions):
    """Let the oracle take the recorded actions `[A,...]`, one column a step."""
    left = iter(actions.unbind(1))
    patch.setattr(oracle, "draw", lambda logits: next(left))


def by_agent(rows):
    """Turn the library's rows `[A * segments, T]` back into `[A, steps]`."""
    return rows.unflatten(0, (AGENTS, -1)).flatten(1, 2)


def make_talkative_policy(world, dtype):
    """Stir the weights: a newborn `fast` remembers and values in the fourth decimal, and hides mistakes."""
    policy = holdfast.make_policy("fast", world, seed=0).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    return policy


@functools.cache
def recording(kind, dtype):
    """Collect two rollouts with the library; replay the same actions with the oracle, from the start."""
    options = {"agents": AGENTS, "cues": 4, "seed": 5, **WORLDS[kind]}
    world = holdfast.make_world("recall", **options)
    policy = make_talkative_policy(world, dtype)
    net = carry_over(policy, cues=4)
    collector = Collector(world, policy, length=LENGTH, horizon=HORIZON, seed=7)
    actions = [by_agent(collector.rollout(version=0).steps["actions"]).clone()]
    segments = collector.rollout(version=0)
    actions.append(by_agent(segments.steps["actions"]))
    twin = holdfast.make_world("recall", **options)
    step, state, rollouts = twin.reset(), net.initial_state(AGENTS), []
    with pytest.MonkeyPatch.context() as patch:
        script(patch, torch.cat(actions, dim=1))
        for _ in range(2 * LENGTH // HORIZON):
            rollout, step, state = oracle.rollout(net, twin, step, state, HORIZON)
            rollouts.append(rollout)
    second = merge(rollouts[LENGTH // HORIZON :])
    return SimpleNamespace(policy=policy, net=net, segments=segments, rollout=second)


def live_twice(kind, dtype=torch.float64):
    """Return a copy of a recording, to be looked at or damaged."""
    return copy.deepcopy(recording(kind, dtype))


def apart(a, b):
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


def relative_gradients_apart(policy, net):
    """How far gradients are apart, each as a share of its largest entry."""
    largest = max(float(expected.grad.abs().max()) for _, _, expected in pairs(policy, net))
    shares = {}
    for name, ours, expected in pairs(policy, net):
        scale = float(expected.grad.abs().max())
        if name == "actor.scores.bias":
            # It moves all scores alike, which softmax does not see: its true gradient is 0.
            assert scale <= 1e-6 * largest
            scale = largest
        assert scale > 0, name
        shares[name] = apart(as_oracle(name, ours.grad), expected.grad) / scale
    return shares


def targets_apart(both):
    """How far advantages and returns are apart."""
    ours = compute_targets(both.segments, PPOConfig(gamma=GAMMA, gae_lambda=LAM))
    advantages, returns = oracle.advantages(both.rollout, GAMMA, LAM)
    return max(apart(ours.advantages, advantages), apart(ours.returns, returns))


def backward_both(both, rows, **knobs):
    """Take the gradient of the full loss of some rows on both sides, each from its own targets."""
    fixed = {"gamma": GAMMA, "gae_lambda": LAM, "vf_coef": 0.5, "ent_coef": ENT_COEF}
    ppo = PPOConfig(clip_coef=oracle.Config().clip, **fixed, **knobs)
    some = both.segments.rows(rows)
    goal = normalize_advantages(compute_targets(both.segments, ppo).rows(rows), some, ppo, None)
    loss, _, _ = replay_loss(both.policy, some, goal, ppo)
    loss.backward()
    cfg = dataclasses.replace(oracle.Config(), vf_clip=ppo.vf_clip_coef if ppo.clip_vloss else None)
    part = oracle.Rollout(*(field[rows] for field in both.rollout))
    advantages, returns = oracle.advantages(both.rollout, GAMMA, LAM)
    expected = oracle.ppo_loss(both.net, part, advantages[rows], returns[rows], cfg, ENT_COEF)
    expected.backward()
    return apart(loss, expected)


def replays_apart(both, h, c):
    """How far the library's replay is from the oracle's unroll from a given entry state."""
    ours = replay(both.policy, both.segments)
    logits, values, _ = both.net.unroll(both.rollout.obs, both.rollout.first, (h, c))
    return max(apart(ours["full_log_probs"], logits.log_softmax(-1)), apart(ours["values"], values))


ROWS = torch.tensor([1, 14, 6, 3, 9, 12])


def test_the_oracle_is_one_short_file_that_imports_nothing_of_ours():
    text = PATH.read_text()
    assert len(text.splitlines()) < 300
    nodes = list(ast.walk(ast.parse(text)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    roots = {name.partition(".")[0] for name in names}
    assert "torch" in roots
    assert roots - {"torch"} <= sys.stdlib_module_names
    assert not {"importlib", "__import__"} & {*roots, *(n.id for n in nodes if isinstance(n, ast.Name))}


def test_initial_weights_agree_with_the_oracle():
    world = holdfast.make_world("recall", agents=2, cues=4)
    policy = holdfast.make_policy("fast", world, seed=0)
    torch.manual_seed(1)
    net = oracle.Net(4)
    for name, ours, expected in pairs(policy, net):
        actual = as_oracle(name, ours.detach())
        assert actual.shape == expected.shape, name
        if name in ("actor.scores.weight", "actor.scores.bias"):
            bound = 512**-0.5
            assert actual.abs().max() <= bound
            assert expected.abs().max() <= bound
        elif name == "actor.embeddings.table.weight":
            assert actual.abs().max().item() == pytest.approx(0.1)
            assert expected.abs().max().item() == pytest.approx(0.1)
            spread = torch.linalg.svdvals(expected.detach())
            assert torch.allclose(spread, spread[0].expand_as(spread), rtol=1e-4)
        elif actual.dim() == 1:
            assert torch.equal(actual, expected), name
        else:
            spectra = [torch.linalg.svdvals(weight.detach().flatten(1)) for weight in (actual, expected)]
            assert torch.allclose(*spectra, atol=1e-4), name


@pytest.mark.parametrize("truncate", [False, True])
def test_worlds_agree_with_the_oracle(truncate):
    """The two draw differently, so the oracle's world is handed the cues and delays of ours."""
    ours = holdfast.make_world("recall", agents=AGENTS, delay=(0, 5), cues=4, truncate=truncate, seed=3)
    cfg = dataclasses.replace(oracle.Config(), delay=(0, 5), truncate=truncate)
    oracle_world = oracle.Recall(cfg, AGENTS, seed=0)
    step, expected = ours.reset(), oracle_world.reset()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.zeros(AGENTS)
    for _ in range(40):
        opened = step.first
        oracle_world.cue = torch.where(opened, ours._cue, oracle_world.cue)
        oracle_world.wait = torch.where(opened, ours._to_query, oracle_world.wait)
        expected = oracle_world._make_step(expected.first, expected.terminated | expected.truncated, expected.reward)
        for name in ("obs", "reward", "terminated", "truncated", "first"):
            assert torch.equal(getattr(step, name), getattr(expected, name)), name
        if truncate:
            assert torch.equal(step.last_obs, expected.last_obs)
        assert expected.obs.dtype == torch.uint8
        lengths = torch.where(opened, 1, lengths + 1)
        guess = torch.randint(4, (AGENTS,), generator=generator)
        actions = torch.where(torch.rand(AGENTS, generator=generator) < 0.5, ours._cue, guess)
        step, expected = ours.step(actions), oracle_world.step(actions)
        assert bool(((lengths >= 2) & (lengths <= 7))[step.first].all())


@pytest.mark.parametrize("kind", WORLDS)
def test_rollout_and_replay_agree_with_the_oracle(kind):
    both = live_twice(kind)
    steps, rollout = both.segments.steps, both.rollout
    assert bool(rollout.first[:, 1:].any()), "episodes open inside segments"
    assert float(rollout.h.abs().amax(dim=(1, 2)).min()) > 0.01, "no entry state is empty"
    assert torch.equal(steps["env_obs"], rollout.obs)
    assert torch.equal(steps["first"], rollout.first)
    assert torch.equal(steps["actions"], rollout.action)
    assert apart(both.segments.entry_state["h"], rollout.h) <= 1e-10
    assert apart(both.segments.entry_state["c"], rollout.c) <= 1e-10
    assert apart(steps["act_log_prob"], rollout.log_prob) <= 1e-10
    assert apart(steps["values"], rollout.value) <= 1e-10
    assert apart(both.segments.tail["values"], rollout.next_value) <= 1e-10
    assert replays_apart(both, rollout.h, rollout.c) <= 1e-10


@pytest.mark.parametrize("kind", WORLDS)
def test_advantages_and_returns_agree_with_the_oracle(kind):
    both = live_twice(kind)
    ended = both.rollout.truncated if kind == "truncated" else both.rollout.terminated
    assert bool(ended[:, :-1].any())
    assert bool(both.rollout.reward.any())
    if kind != "fixed":
        assert bool(ended[:, -1].any()), "some episode ends on a segment's edge"
    assert targets_apart(both) <= 1e-10


@pytest.mark.parametrize("kind", WORLDS)
def test_the_first_gradients_agree_with_the_oracle(kind):
    both = live_twice(kind)
    assert backward_both(both, ROWS, clip_vloss=False) <= 1e-10
    shares = relative_gradients_apart(both.policy, both.net)
    assert max(shares.values()) <= 1e-9, shares


def test_gradients_agree_where_ratio_and_value_are_clipped():
    """Weights have not changed yet, so the stored outputs are changed instead."""
    both = live_twice("mixed")
    generator = torch.Generator().manual_seed(0)
    size = both.rollout.value.shape
    for key, field in (("act_log_prob", "log_prob"), ("values", "value")):
        push = 0.3 * torch.randn(size, generator=generator, dtype=torch.float64)
        both.segments.steps[key] = both.segments.steps[key] + push
        both.rollout = both.rollout._replace(**{field: getattr(both.rollout, field) + push})
    assert backward_both(both, ROWS, clip_vloss=True, vf_clip_coef=0.1) <= 1e-10
    shares = relative_gradients_apart(both.policy, both.net)
    assert max(shares.values()) <= 1e-9, shares


@pytest.mark.parametrize("kind", WORLDS)
def test_single_precision_agrees_with_the_oracle(kind):
    both = live_twice(kind, torch.float32)
    steps, rollout = both.segments.steps, both.rollout
    assert apart(steps["act_log_prob"], rollout.log_prob) <= 1e-5
    assert apart(steps["values"], rollout.value) <= 1e-5
    assert replays_apart(both, rollout.h, rollout.c) <= 1e-5
    backward_both(both, ROWS, clip_vloss=False)
    shares = relative_gradients_apart(both.policy, both.net)
    assert max(shares.values()) <= 2e-5, shares


def test_two_iterations_of_training_end_in_the_same_weights(monkeypatch):
    """Rollout, update, rollout, update, with Adam, gradient clipping, two epochs and shuffled minibatches."""
    options = {"agents": AGENTS, "delay": (1, 7), "cues": 4, "truncate": True, "seed": 5}
    world, twin = (holdfast.make_world("recall", **options) for _ in range(2))
    policy = make_talkative_policy(world, torch.float64)
    net, before = carry_over(policy, cues=4), carry_over(policy, cues=4)
    collector = Collector(world, policy, length=HORIZON, horizon=HORIZON, seed=7)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    cfg = dataclasses.replace(oracle.Config(), gamma=GAMMA, lam=LAM)
    losses = {"clip_coef": cfg.clip, "vf_coef": cfg.vf_coef, "clip_vloss": False, "ent_coef": ENT_COEF}
    learner, ppo = None, PPOConfig(gamma=GAMMA, gae_lambda=LAM, **losses)
    step, state = twin.reset(), net.initial_state(AGENTS)
    for version in range(2):
        segments = collector.rollout(version=version)
        script(monkeypatch, segments.steps["actions"])
        rollout, step, state = oracle.rollout(net, twin, step, state, HORIZON)
        orders = [minibatches(segments, 4, seed=7, epoch=2 * version + epoch) for epoch in range(2)]
        oracle.update(net, optimizer, rollout, [rows for order in orders for rows in order], cfg, ENT_COEF)
        learner = learner or learner_for(policy, segments, ppo, epochs=2, seed=7)
        learned = learner.update(segments)
    assert learned["losses/clipfrac"] > 0, "some ratios were clipped"
    for name, ours, other in pairs(policy, net):
        assert apart(as_oracle(name, ours), other) <= 1e-9, name
        assert apart(other, dict(before.named_parameters())[oracle_name(name)]) > 0, name


@pytest.mark.parametrize("memory", ["intact", "cleared"])
def test_evaluation_agrees_with_the_oracle(memory):
    world = holdfast.make_world("recall", agents=50, delay=(1, 4), cues=4, seed=2)
    policy = make_talkative_policy(world, torch.float64)
    score = evaluate(policy, world, episodes=200, memory=memory).return_mean
    assert 0 < score < 1
    expected = oracle.evaluate(carry_over(policy, cues=4), world, 4, memory == "cleared")
    assert score == pytest.approx(expected, abs=1e-6)


# What the comparisons must notice.


def test_empty_entry_states_are_detected():
    both = live_twice("mixed")
    empty = torch.zeros_like(both.rollout.h)
    assert replays_apart(both, empty, empty) > 1e-6
    both.rollout = both.rollout._replace(h=empty, c=empty)
    backward_both(both, ROWS, clip_vloss=False)
    assert max(relative_gradients_apart(both.policy, both.net).values()) > 1e-6


def test_missing_resets_are_detected():
    both = live_twice("mixed")
    both.rollout = both.rollout._replace(first=torch.zeros_like(both.rollout.first))
    assert replays_apart(both, both.rollout.h, both.rollout.c) > 1e-6


@pytest.mark.parametrize(
    "damage",
    [
        lambda rollout: {"truncated": torch.zeros_like(rollout.truncated), "terminated": rollout.truncated},
        lambda rollout: {"truncated": torch.zeros_like(rollout.truncated)},
        lambda rollout: {"last_value": torch.zeros_like(rollout.last_value)},
        lambda rollout: {"last_value": torch.cat([rollout.value[:, 1:], rollout.next_value[:, None]], dim=1)},
        lambda rollout: {"next_value": torch.zeros_like(rollout.next_value)},
        lambda rollout: {"reward": rollout.reward.roll(1, dims=1)},
    ],
    ids=["as termination", "ignored", "worth nothing", "next episode's value", "no bootstrap", "late reward"],
)
def test_damaged_advantages_are_detected(damage):
    both = live_twice("truncated")
    both.rollout = both.rollout._replace(**damage(both.rollout))
    assert targets_apart(both) > 1e-6


def test_last_values_of_cleared_states_are_detected():
    """The last observation is empty, so only the memory before clearing tells agents apart there."""
    both = live_twice("truncated")
    nothing = torch.full((AGENTS, 4, 3), oracle.PADDING, dtype=torch.uint8)
    all_agents = torch.ones(AGENTS, dtype=torch.bool)
    with torch.no_grad():
        _, forgetful, _ = both.net(nothing, all_agents, both.net.initial_state(AGENTS))
    both.rollout = both.rollout._replace(last_value=torch.full_like(both.rollout.value, float(forgetful[0])))
    assert targets_apart(both) > 1e-6
