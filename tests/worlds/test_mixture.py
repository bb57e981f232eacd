"""Mixture: several worlds at once, with one spec."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from helpers.oracles import ORACLES
from helpers.play_world import ALL, anything, live
from holdfast import rng
from holdfast.build import build_world
from holdfast.config.run import override
from holdfast.config.world_names import Parts
from holdfast.errors import ConfigError, ContractError
from holdfast.learn import replay
from holdfast.policies import make_policy
from holdfast.recipes import find_recipe
from holdfast.rollout import Collector
from holdfast.training.train import train
from holdfast.worlds import Feature, Step, WorldSpec, make_world
from holdfast.worlds.checked_world import CheckedWorld
from holdfast.worlds.mixture import Mixture, split_agents
from holdfast.worlds.tokens import PADDING

CPU = torch.device("cpu")


@given(st.integers(1, 300), st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.sampled_from([1, 3, 24]))
def test_split_agents_by_weight(crowds, weights, unit):
    if crowds < len(weights):
        with pytest.raises(ConfigError, match=f"{len(weights)} worlds need {len(weights) * unit} or more"):
            split_agents(crowds * unit, weights, unit)
        return
    shares = split_agents(crowds * unit, weights, unit)
    assert sum(shares) == crowds * unit
    assert all(share > 0 and share % unit == 0 for share in shares)
    wanted = [crowds * unit * weight / sum(weights) for weight in weights]
    if min(wanted) >= unit:
        assert all(abs(share - want) < unit * len(weights) for share, want in zip(shares, wanted, strict=True))
    # Who weighs more never gets less.
    order = sorted(range(len(weights)), key=weights.__getitem__)
    assert all(shares[a] <= shares[b] + unit for a, b in pairwise(order))


def test_split_agents_examples():
    assert split_agents(64, [3.0, 1.0]) == [48, 16]
    assert split_agents(96, [1.0, 1.0, 2.0], 24) == [24, 24, 48]
    with pytest.raises(ConfigError, match=r"world.agents=100 is not a multiple of 24; try 96\."):
        split_agents(100, [1.0, 1.0], 24)


def test_mixture_of_one_world_twice():
    mixed = make_world("mixture", agents=12, parts="recall delay=1 weight=2 + recall delay=4", seed=5)
    assert mixed.spec.parts == (("recall(delay=1)", 8), ("recall(delay=4)", 4))
    seeds = [rng.derive_seed(5, rng.STREAM_PART, number) for number in range(2)]
    alone = [make_world("recall", 8, delay=1, seed=seeds[0]), make_world("recall", 4, delay=4, seed=seeds[1])]
    act = anything(mixed)
    step, others = mixed.reset(), [world.reset() for world in alone]
    for _ in range(30):
        for name in ALL:
            assert torch.equal(getattr(step, name), torch.cat([getattr(each, name) for each in others]))
        actions = act(step.obs, step.first)
        step = mixed.step(actions)
        others = [world.step(part_actions) for world, part_actions in zip(alone, actions.split([8, 4]), strict=True)]


def test_mixture_merges_features_and_actions_by_name():
    mixed = make_world("mixture", agents=72, parts="recall cues=3 + tmaze + arena size=12")
    alone = [
        make_world(name, 24, **options)
        for name, options in (("recall", {"cues": 3}), ("tmaze", {}), ("arena", {"size": 12}))
    ]
    names = [feature.name for feature in mixed.spec.features]
    assert names == list(dict.fromkeys(f.name for world in alone for f in world.spec.features))
    assert mixed.spec.obs_shape == (200, 3)
    assert mixed.spec.action_names[:5] == (
        "name_cue_0",
        "name_cue_1",
        "name_cue_2",
        "move_north",
        "move_south",
    )
    assert mixed.spec.action_names[-1] == "noop"
    step = mixed.reset()
    for world, view, rows in zip(mixed.worlds, alone, step.obs.split(24), strict=True):
        own = world.reset()
        there = own.obs[..., 0] != PADDING
        short = rows[:, : own.obs.shape[1]]
        assert torch.equal(short[..., 0], own.obs[..., 0])
        assert torch.equal(short[..., 2], own.obs[..., 2])
        assert (rows[:, own.obs.shape[1] :] == PADDING).all()
        called = [[names[i] for i in row[mask].tolist()] for row, mask in zip(short[..., 1], there, strict=True)]
        meant = [
            [view.spec.features[i].name for i in row[mask].tolist()]
            for row, mask in zip(own.obs[..., 1], there, strict=True)
        ]
        assert called == meant


def test_unknown_action_is_noop_or_first():
    mixed = make_world("mixture", agents=48, parts="recall delay=0 + arena size=12")
    received = []
    for world in mixed.worlds:
        inner = world.step
        world.step = lambda actions, inner=inner: (received.append(actions), inner(actions))[1]
    mixed.reset()
    names = mixed.spec.action_names
    for name, recall, arena in (("name_cue_2", 2, 0), ("move_east", 0, 4), ("noop", 0, 0)):
        mixed.step(torch.full((48,), names.index(name)))
        assert received[-2].tolist() == [recall] * 24
        assert received[-1].tolist() == [arena] * 24


def test_oracles_reach_best_return_in_mixture():
    parts = {"recall": "recall delay=2", "n_back": "n_back length=8", "repeat_first": "repeat_first length=9"}
    mixed = make_world("mixture", agents=30, parts=" + ".join(parts.values()))
    worlds = dict(zip(parts, mixed.worlds, strict=True))
    oracles = [ORACLES[name](world) for name, world in worlds.items()]
    ids = [[mixed.spec.action_names.index(name) for name in world.spec.action_names] for world in mixed.worlds]
    step, total = mixed.reset(), torch.zeros(30)
    ends = torch.zeros(30)
    for _ in range(60):
        firsts = step.first.split(10)
        obs = [world._observe(first) for world, first in zip(mixed.worlds, firsts, strict=True)]
        acts = [
            torch.tensor(actions)[oracle(part, first)]
            for actions, oracle, part, first in zip(ids, oracles, obs, firsts, strict=True)
        ]
        step = mixed.step(torch.cat(acts))
        total += step.reward
        ends += step.terminated
    assert (total >= ends - 1e-5).all()
    assert (total <= ends + 1 + 1e-5).all()


def test_mixture_contract_and_replay():
    mixed = make_world("mixture", agents=24, parts="ragged truncate=true + recall + forage weight=2")
    assert mixed.spec.truncates == "always"
    live(CheckedWorld(mixed), 60, anything(mixed))
    policy = make_policy("auto", mixed, hidden_size=8, num_layers=1)
    collector = Collector(mixed, policy, length=32, horizon=16, seed=0)
    segments = collector.rollout(0)
    again = replay(policy, segments)
    valid = segments.steps["valid"]
    off = (again["act_log_prob"].detach() - segments.steps["act_log_prob"]).abs()
    assert float(torch.where(valid, off, 0.0).max()) <= 1e-5
    metrics = collector.episodes.pop()
    labels = [label for label, _ in mixed.spec.parts]
    assert labels == ["ragged(truncate=True)", "recall", "forage"]
    assert metrics["charts/episodes"] == sum(metrics[f"charts/episodes@{label}"] for label in labels)
    assert metrics["charts/episodic_length@recall"] == 10.0
    assert metrics["charts/episodic_length@forage"] == 24.0


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ("recall + gym:CartPole-v1", "gym:CartPole-v1 and recall cannot be mixed"),
        ("recall + ", "name something on both sides"),
        ("recall delay", "'delay' is not key=value"),
        ("recall agents=8", "weights divide the agents"),
        ("recall + n_bak", "did you mean n_back"),
        ("recall + n_back + recall", "recall is there twice; name it once, with weight=2"),
        ("recall options='x", "cannot be read: no closing quotation"),
        ("recall dely=3", "recall has no such key; did you mean delay"),
        ("recall weight=0", "weight=0: input should be greater than 0"),
        ("recall delay=-1", "world.delay=-1: give a number from 0"),
        ("mixture parts=recall", "no mixture inside"),
    ],
)
def test_mixture_errors(parts, message):
    with pytest.raises(ConfigError, match=message):
        make_world("mixture", agents=8, parts=parts)
    if "CartPole" not in parts and "recall + n_back +" not in parts:
        with pytest.raises(ConfigError, match=message):
            override(find_recipe("recall"), {"world": "mixture", "world.parts": parts})


def not_remade(number, clock):
    raise AssertionError("only a restored mixture makes a part again")


def test_mixture_rejects_conflicting_normalization():
    one, other = make_world("recall", 2), make_world("recall", 2)
    features = tuple(replace(feature, normalization=7.0) for feature in other.spec.features)
    other.spec = replace(other.spec, features=features)
    with pytest.raises(ContractError, match=r"a divides query by 1.0 and b by 7.0"):
        Mixture([one, other], ["a", "b"], not_remade)


def test_mixture_training_evaluates_every_part(tmp_path):
    keys = {
        "world": "mixture",
        "world.parts": "recall delay=1 weight=3 + recall delay=3",
        "trainer.eval_worlds": "recall delay=9 + ragged",
        "trainer.total_timesteps": 4096,
        "report": "off",
        "trainer.eval_episodes": 8,
        "policy.hidden_size": 8,
        "runs_dir": str(tmp_path),
        "run": "mixed",
    }
    run = train("recall", keys)
    labels = ["recall(delay=1)", "recall(delay=3)", "recall(delay=9)", "ragged"]
    for label in labels:
        for name in ("eval/return_mean", "eval/return_mean_memory_cleared"):
            assert 0 <= run.summary[f"{name}@{label}"] <= 1
    assert run.summary["charts/episodes@recall(delay=1)"] > run.summary["charts/episodes@recall(delay=3)"]
    config = override(find_recipe("recall"), {key: keys[key] for key in ("world", "world.parts")})
    assert build_world(config, CPU, agents=64, seed=0).spec.parts == (
        ("recall(delay=1)", 48),
        ("recall(delay=3)", 16),
    )


class Chatty:
    """Shows a token of feature 7 and records its actions."""

    def __init__(self, agents, feature, noop, **options):
        names = ("left", "noop") if noop else ("left", "jump")
        self.agents, self.actions = agents, []
        self.spec = WorldSpec((3, 3), names, features=(Feature("light", 1.0, 7), Feature(feature, 1.0, 200)), **options)

    def reset(self):
        return self.make_step()

    def step(self, actions):
        self.actions.append(actions.tolist())
        return self.make_step()

    def make_step(self):
        obs = torch.tensor([[5, 7, 1], [5, 200, 2], [PADDING] * 3], dtype=torch.uint8)
        flag = torch.zeros(self.agents, dtype=torch.bool)
        first = ~flag if not self.actions else flag
        return Step(obs.expand(self.agents, 3, 3), torch.zeros(self.agents), flag, flag, first, ~flag, flag)


def test_mixture_translates_feature_ids_and_noop():
    one, other = Chatty(2, "bell", True), Chatty(2, "lamp", False)
    mixed = Mixture([one, other], ["one", "other"], not_remade)
    assert [feature.name for feature in mixed.spec.features] == ["light", "bell", "lamp"]
    obs = mixed.reset().obs
    assert obs[0, :, 1].tolist() == [0, 1, PADDING]
    assert obs[2, :, 1].tolist() == [0, 2, PADDING]
    assert mixed.spec.action_names == ("left", "noop", "jump")
    mixed.step(torch.tensor([2, 0, 1, 2]))
    assert one.actions == [[1, 0]]
    assert other.actions == [[0, 1]]


def test_mixture_checks_each_part_by_its_spec():
    class Lies(Chatty):
        def make_step(self):
            step = super().make_step()
            cut = torch.tensor([False, True]) if len(self.actions) == 3 else step.truncated
            return replace(step, truncated=cut, first=step.first | cut)

    honest = make_world("recall", 4, truncate=True)
    mixed = CheckedWorld(Mixture([honest, Lies(2, "bell", True)], ["honest", "lies"], not_remade))
    with pytest.raises(ContractError, match="World lies, step 3: agent 5 was truncated, but the world decl"):
        live(mixed, 5, lambda obs, first: torch.zeros(6, dtype=torch.long))


def test_mixture_agents_per_env_is_the_lcm():
    specs = [replace(Chatty(2, "bell", True).spec, agents_per_env=crowd) for crowd in (4, 6)]
    worlds = [Chatty(12, "bell", True), Chatty(12, "bell", True)]
    for world, spec in zip(worlds, specs, strict=True):
        world.spec = spec
    assert Mixture(worlds, ["a", "b"], not_remade).spec.agents_per_env == 12


def test_mixture_part_labels():
    parts = TypeAdapter(Parts).validate_python("gym:CartPole-v1 keep=0,2 + recall delay=4..8 + n_back back=3")
    assert [part.label for part in parts] == [
        "gym:CartPole-v1(keep=0,2)",
        "recall(delay=4..8)",
        "n_back(back=3)",
    ]


def test_mixture_part_with_quoted_options():
    (part,) = TypeAdapter(Parts).validate_python("gym:CartPole-v1 options='{max_episode_steps: 1e2}'")
    assert part.world.options == {"max_episode_steps": 100}
