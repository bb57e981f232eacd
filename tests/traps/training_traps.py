"""Traps in the buffer, the update and saved files: ways to put the bug into our own code, and their measurements.

As in `of_memory`: a measure says how much is wrong in the library as it is, a trap is set by a `with`.
"""

import copy
import dataclasses
import io
import pickle
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import torch

from helpers.scripted_world import Reader, Scripted, make_reader
from holdfast.config.trainer import OptimizerConfig, PPOConfig, TrainerConfig
from holdfast.evaluation.evaluate import evaluate
from holdfast.learn import Learner, advantage, replay
from holdfast.memory import StateStore
from holdfast.policies.encoders import TokensToBox
from holdfast.policies.latent_attn import TokenEmbedding
from holdfast.rollout import Collector
from holdfast.worlds.step import Feature
from holdfast.worlds.tokens import ActionTable

T = 5

# 6: what is saved.


def remembered_numbers_in_saved_weights():
    """Count hidden-state values in a policy that is saved, pickled or copied."""
    policy, newborn, world = make_reader(), make_reader(), Scripted(6, T + 1)
    newborn.bind(world.spec)
    Collector(world, policy, length=T, horizon=T, seed=0).rollout(0)
    assert policy.store.snapshot().tree["h"].any()
    torch.save(policy, file := io.BytesIO())
    file.seek(0)
    copies = torch.load(file, weights_only=False), pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)
    trees = [each.store.snapshot().tree for each in copies]
    size_after, size_before = (sum(leaf.numel() for leaf in each.state_dict().values()) for each in (policy, newborn))
    return float(size_after - size_before + sum(leaf.numel() for tree in trees for leaf in tree.values()))


def state_pickled_with_weights():
    # Everything on the object goes along, as it does where nobody decides otherwise.
    return mock.patch.object(StateStore, "__reduce__", object.__reduce__)


# 10: rows of the buffer.


def share_of_steps_lost():
    """Share of collected steps in no row of consecutive steps of one agent when the update starts."""
    world = Scripted(6, 2 * T + 1)
    collector = Collector(world, make_reader(), length=2 * T, horizon=T, seed=0)
    numbers = collector.rollout(0).steps["env_obs"].squeeze(-1)
    complete = (numbers == numbers[:, :1] + torch.arange(T)).all(1)
    assert world.t == 2 * T
    return 1 - numbers[complete].unique().numel() / (world.agents * world.t)


def rows_overwritten():
    """Eight rows for six agents in two slices that take turns: the second round writes over the first."""
    rollout = Collector.rollout

    def wrapped(self, version):
        s = rollout(self, version)
        one, two = torch.arange(0, 12, 2), torch.arange(1, 12, 2)
        # Six rows are full. The next six begin in rows 6 and 7 and go on in row 0.
        buffer = s.rows(torch.cat([two[2:], one[4:], two[:2]]))
        # Eight rows are full, and learning begins, one step before the second slice's are.
        buffer.steps[1:4, -1] = s.steps[one[1:4], -1]
        return buffer

    return mock.patch.object(Collector, "rollout", wrapped)


# 11 and 12: what an update leaves in the buffer, and how it adds up.


def lived_for_learning(policy):
    """Eight rows of a scripted world, with small rewards."""
    collector = Collector(Scripted(4, 2 * T + 1), policy, length=2 * T, horizon=T, seed=0)
    segments = collector.rollout(0)
    for part in (segments.steps, segments.tail):
        part["rewards"] = torch.sin(part["rewards"])
    return segments


def learned(**knobs):
    """Update on all eight rows at once; return the policy and the segments."""
    policy = make_reader().double()
    segments = lived_for_learning(policy)
    sizes = {"batch_size": 8 * T, "minibatch_size": 8 * T, "bptt_horizon": T}
    steps = {"optimizer": OptimizerConfig(learning_rate=0.01), "ppo": PPOConfig(max_grad_norm=1e9)}
    Learner(policy, TrainerConfig(**sizes, **steps, **knobs), seed=0).update(segments)
    return policy, segments


def error_of_refreshed_values_and_ratios():
    """What the buffer holds after two epochs, against what weights after one say of it."""
    once, segments = learned(update_epochs=1)
    with torch.no_grad():
        outputs = replay(once, segments)
    ratio = (outputs["act_log_prob"] - segments.steps["act_log_prob"]).exp()
    _, after = learned(update_epochs=2)
    errors = after.steps["values_now"] - outputs["values"], after.steps["ratio"] - ratio
    return max(float(error.abs().max()) for error in errors)


def update_on_a_copy():
    learn_from = Learner._minibatch_step

    def on_a_copy(self, segments, *rest):
        # What an index picks is a copy, and what is written there is gone.
        return learn_from(self, dataclasses.replace(segments, steps=segments.steps.clone()), *rest)

    return mock.patch.object(Learner, "_minibatch_step", on_a_copy)


def error_of_accumulated_gradients():
    """How far a minibatch's gradient in four pieces is from that of the whole, relative to its length."""
    full_gradient, pieces = (
        torch.cat([weight.grad.flatten() for weight in learned(accumulate=count)[0].parameters()]) for count in (1, 4)
    )
    return float((pieces - full_gradient).norm() / full_gradient.norm())


def zero_grad_before_every_backward():
    module = sys.modules[Learner.__module__]
    compute_loss = module.compute_loss

    def zero_grad_first(policy, *args, **kwargs):
        policy.zero_grad()
        return compute_loss(policy, *args, **kwargs)

    return mock.patch.object(module, "compute_loss", zero_grad_first)


# 13: what tokens are worth.


@torch.no_grad()
def error_of_normalized_values():
    """How far what encoders read is from value / size, over all bytes, where the size is 10."""
    features, values = (Feature("a", 1.0), Feature("b", 10.0)), torch.arange(256)
    obs = torch.stack([torch.full((256,), 0x55), torch.ones(256), values], -1).to(torch.uint8)[:, None]
    tokens, _ = TokenEmbedding(features, (11, 11), 4, 1)(obs)
    box = TokensToBox(features, (11, 11))(obs)
    read = tokens[:, 0, -1], box[:, 1, 5, 5]
    return max(float((each - values / 10.0).abs().max()) for each in read)


@contextmanager
def normalized_in_bytes():
    """Divides, and writes the quotient to where the value stood: into a byte."""
    with ExitStack() as stack:
        for kind in (TokenEmbedding, TokensToBox):
            stack.enter_context(mock.patch.object(kind, "forward", _into_bytes(kind.forward)))
        yield


def _into_bytes(forward):
    def truncating(self, obs):
        obs = obs.clone()
        obs[..., 2] = obs[..., 2] / self.normalization.flatten()[obs[..., 1].long()]
        with mock.patch.object(self, "normalization", torch.ones_like(self.normalization)):
            return forward(self, obs)

    return truncating


# 14: the number of an action.

ARENA = ActionTable(("noop", "move", "rotate", "put_items", "get_items", "attack", "swap"), (0, 1, 3, 0, 0, 8, 0))


def share_of_actions_with_the_wrong_number():
    flat = torch.arange(len(ARENA.names))
    return float((ARENA.join(ARENA.split(flat)) != flat).double().mean())


def index_formula():
    def joined(self, pairs):
        most = torch.tensor(self.max_args)
        # A type has one action more than its largest argument, and that one is forgotten.
        before = torch.cumsum(most, 0) - most
        return before[pairs[..., 0]] + pairs[..., 1]

    return mock.patch.object(ActionTable, "join", joined)


# 15: time and batch in the advantage.


def effect_of_other_rewards_on_advantages():
    """As many rows as steps, so that nothing fails to fit when they are mistaken for each other."""
    none, numbers = torch.zeros(T, T, dtype=torch.bool), torch.linspace(-1, 1, T * T).unflatten(0, (T, T))
    flags = {"valid": ~none, "next_terminated": none, "next_truncated": none}
    rows = {"values": numbers.sin(), "next_last_values": numbers.cos(), "end_values": numbers[0]} | flags
    trace = {"ratio": numbers.exp(), "rho_clip": 1.0, "c_clip": 1.0}
    pay = numbers.clone()
    pay[-1] += 1.0
    worst = 0.0
    for name, more in (("gae", {}), ("vtrace", trace)):
        estimate = partial(getattr(advantage, name), **rows, **more, gamma=0.9, lam=0.8)
        moved = estimate(next_rewards=pay) - estimate(next_rewards=numbers)
        assert moved[-1].any()
        worst = max(worst, float(moved[:-1].abs().max()))
    return worst


def swapped_axes_of_the_advantage():
    gae = advantage.gae

    def swapped(*, gamma, lam, **rows):
        turned = {name: x.T if x.dim() == 2 else x for name, x in rows.items()}
        return gae(**turned, gamma=gamma, lam=lam).T

    return mock.patch.object(advantage, "gae", swapped)


# 16: graphs in evaluation.


class KeepsWhatItSaid(Reader):
    """Keeps its values, as statistics do."""

    recorded_values = []  # noqa: RUF012  # of all copies: an evaluation plays with one

    def decode(self, features):
        thoughts = super().decode(features)
        self.recorded_values.append(thoughts.values)
        return thoughts


class Ending(Scripted):
    """Episodes of three steps."""

    def __init__(self, agents, steps):
        ends = (torch.arange(steps) % 3 == 0) & (torch.arange(steps) > 0)
        super().__init__(agents, steps, terminated=ends.expand(agents, -1))


def graph_nodes_held_by_an_evaluation():
    KeepsWhatItSaid.recorded_values.clear()
    sys.modules[evaluate.__module__].evaluate(KeepsWhatItSaid(), Ending(2, 31), episodes=20)
    assert len(KeepsWhatItSaid.recorded_values) == 30
    ahead = [values.grad_fn for values in KeepsWhatItSaid.recorded_values if values.grad_fn is not None]
    nodes = set()
    while ahead:
        node = ahead.pop()
        if node not in nodes:
            nodes.add(node)
            ahead += [each for each, _ in node.next_functions if each is not None]
    return float(len(nodes))


def evaluation_with_gradients():
    return mock.patch.object(sys.modules[evaluate.__module__], "evaluate", evaluate.__wrapped__)
