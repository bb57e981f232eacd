"""The contract of a world: right worlds pass, and each law is broken by a world that breaks it."""

import random
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from check.broken_worlds import SABOTAGES, Around, changed, other_spec, recall, telling
from holdfast.check.world import WORLD_LAWS
from holdfast.errors import ConfigError, ContractError
from holdfast.report.verdict import as_text, summary
from holdfast.worlds import WORLDS, Step, WorldSpec, draws
from spaces_worlds import NamePlace, SayNumber, SayNumberInATree
from worlds.test_embedded import SHORT, TRUNCATING

pytestmark = pytest.mark.usefixtures("annotations_asleep")
LAWS = ["kind", "first", "flags", "last", "dead", "still", "repeat", "isolate", "pure"]


def broken(laws):
    return {name: law.finding for name, law in laws.items() if not law.ok}


def unmeasured(laws):
    return {name for name, law in laws.items() if law.worst.about == "n/a"}


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_every_world_of_ours_keeps_its_contract(name):
    laws = holdfast.check_world(name, **SHORT[name])
    assert (broken(laws), list(laws), laws.ok) == ({}, LAWS, True)
    assert unmeasured(laws) == {"last"} | (set() if name == "ragged" else {"dead"})


@pytest.mark.parametrize("name", TRUNCATING)
def test_and_so_it_does_when_episodes_are_truncated(name):
    laws = holdfast.check_world(name, truncate=True, **SHORT[name])
    assert broken(laws) == {}
    assert unmeasured(laws) == (set() if name == "ragged" else {"dead"})
    told = {part.what: part.about for part in laws["last"].parts}
    # In no world of ours the two look alike so often that nothing can be said.
    assert told["last observations unlike the next episode's first one"] == ""


@pytest.mark.parametrize("world", [SayNumber, SayNumberInATree, NamePlace])
def test_worlds_of_other_spaces_pass(world):
    assert broken(holdfast.check_world(lambda agents, seed: world(agents, seed=seed))) == {}


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_world_that_breaks_a_law_breaks_it_and_says_where(name):
    make, expected, told = SABOTAGES[name]
    laws = holdfast.check_world(make, steps=100)
    found = broken(laws)
    assert set(found) == expected, found
    assert told in " ".join(found.values()), found
    assert "\n" not in " ".join(found.values())
    assert not laws.ok


def test_every_law_is_broken_by_a_world_that_breaks_nothing_else():
    assert list(WORLD_LAWS) == LAWS
    alone = {law for _, expected, _ in SABOTAGES.values() if len(expected) == 1 for law in expected}
    assert alone == set(LAWS)


def parts_of(law, about=""):
    return [part.what for part in law.parts if part.about == about]


def test_what_did_not_happen_is_not_measured_and_told_what_to_do():
    laws = holdfast.check_world("recall", steps=20, delay=60, truncate=True)
    assert laws.ok
    assert unmeasured(laws) == {"flags", "last", "dead"}
    assert laws["flags"].finding == "live longer by --steps 1000, or steps=1000 in Python"
    assert laws.notes[0] == "24 agents lived 20 steps; 0 episodes ended, 0 by truncation"
    assert laws.notes[2].startswith("last: no episode was truncated in 20 steps; live longer by --steps 1000")
    told = laws.as_json()["laws"]
    assert (told["flags"]["measured"], told["kind"]["measured"]) == (None, 0.0)


def test_a_life_is_as_long_as_its_episodes_need():
    assert holdfast.check_world("constant", length=90).notes[0].startswith("24 agents lived 191 steps")
    assert holdfast.check_world("recall", delay=2000).notes[0].startswith("24 agents lived 1024 steps")


def test_a_world_that_draws_nothing_need_not_heed_its_seed():
    laws = holdfast.check_world("constant")
    (what,) = parts_of(laws["repeat"], "n/a")
    assert what.startswith("it draws nothing")
    assert "rows that differ with another seed" in parts_of(holdfast.check_world("recall")["repeat"])


def test_those_who_share_a_place_may_feel_each_other():
    make = telling(lambda self, step, actions: {} if actions is None else {"reward": feel(actions)}, "recall")

    def feel(actions):
        return actions.float().unflatten(0, (-1, 4)).sum(1).repeat_interleave(4)

    assert set(broken(holdfast.check_world(make, steps=60))) == {"isolate"}
    assert broken(holdfast.check_world(other_spec(make, crowd=4), steps=60)) == {}
    alone = holdfast.check_world(other_spec(make, crowd=24), steps=60, agents=24)
    assert parts_of(alone["isolate"], "n/a") == ["nobody lives in another place"]
    assert alone.notes[-1].endswith("all 24 agents share one place; check with 48 agents")


@dataclass(frozen=True)
class Several(WorldSpec):
    """The spec of a world of parts, which lie one after the other."""

    parts: tuple[tuple[str, int], ...] = ()


class Beside(Around):
    """Two parts that differ: the later half of the agents lives with another seed."""

    def __init__(self, agents, seed):
        self.worlds = [recall(agents // 2, seed), recall(agents // 2, seed + 50)]
        super().__init__(self.worlds[0])
        self.agents = agents

    def reset(self):
        return self.joined([world.reset() for world in self.worlds])

    def step(self, actions):
        halves = zip(self.worlds, actions.chunk(2), strict=True)
        return self.joined([world.step(half) for world, half in halves])

    def joined(self, steps):
        names = ("obs", "reward", "terminated", "truncated", "first", "valid", "trial")
        return changed(
            steps[0], **{name: torch.cat([getattr(each, name) for each in steps]) for name in names}
        )


def test_the_agents_of_a_part_live_in_the_first_rows_of_it_among_more():
    def make(agents, seed):
        world = Beside(agents, seed)
        own = {field.name: getattr(world.spec, field.name) for field in fields(WorldSpec)}
        world.spec = Several(**{**own, "parts": (("one", agents // 2), ("other", agents // 2))})
        return world

    assert set(broken(holdfast.check_world(Beside, steps=40))) == {"isolate"}
    assert broken(holdfast.check_world(make, steps=40)) == {}


def test_as_many_agents_live_as_crowds_need_or_somebody_says():
    assert holdfast.check_world("arena", steps=5).notes[0].startswith("48 agents")
    assert holdfast.check_world("arena", steps=5, agents=72).notes[0].startswith("72 agents")
    assert holdfast.check_world("recall", steps=5, agents=3).notes[0].startswith("3 agents")


def test_a_world_of_so_many_agents_only_is_told_to_be_one():
    def make(agents, seed):
        if agents != 24:
            raise ConfigError("There are 24 seats.")
        return recall(agents, seed)

    laws = holdfast.check_world(make, steps=40)
    assert laws.ok
    assert parts_of(laws["isolate"], "n/a") == ["it cannot be made for 48 agents"]
    assert laws.notes[-1] == "isolate: it cannot be made for 48 agents; There are 24 seats."


@pytest.mark.parametrize("name", ["recall", "ragged"])
def test_nothing_is_said_of_last_observations_where_all_look_alike(name):
    def blind(self, step, actions):
        last = step.last_obs if step.last_obs is None else torch.full_like(step.last_obs, 255)
        return {"obs": torch.full_like(step.obs, 255), "last_obs": last}

    laws = holdfast.check_world(telling(blind, name))
    assert broken(laws) == {}
    assert len(parts_of(laws["last"], "n/a")) == 2


def test_few_truncations_are_no_proof():
    make, _, _ = SABOTAGES["last is the next first"]
    few = holdfast.check_world(make, agents=2, steps=11)
    assert few["last"].ok
    assert len(parts_of(few["last"], "n/a")) == 2


def test_what_is_seen_where_nobody_acts_may_be_anything():
    class Anything(Around):
        def tell(self, step, actions):
            self.drawn = np.random.default_rng()  # of no seed
            noise = torch.from_numpy(self.drawn.integers(0, 256, tuple(step.obs.shape), np.uint8))
            rows = step.valid[:, None, None]
            cut = step.truncated[:, None, None]
            last = torch.where(cut, step.last_obs, noise)
            return changed(step, obs=torch.where(rows, step.obs, noise), last_obs=last)

    def make(agents, seed):
        return Anything(WORLDS["ragged"](agents, seed=seed, truncate=True))

    assert broken(holdfast.check_world(make)) == {}


def test_the_randomness_of_the_program_is_left_as_it_was():
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = float(torch.rand(())), np.random.rand(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    make, _, _ = SABOTAGES["torch's own generator"]
    holdfast.check_world(make, steps=20)
    assert (float(torch.rand(())), np.random.rand(), random.random()) == expected


def raises(agents, seed):
    raise ZeroDivisionError("no\nseats")


@pytest.mark.parametrize(
    ("world", "options", "kind", "told"),
    [
        ("recal", {}, ConfigError, "world.name=recal: there is no such world"),
        ("recall", {"dealy": 4}, ConfigError, "no option 'dealy'"),
        ("recall", {"steps": 0}, ConfigError, "steps=0: give at least 1"),
        ("recall", {"agents": 0}, ConfigError, "agents=0: give at least 1"),
        (recall, {"delay": 4}, ConfigError, "delay: options go with a world's name"),
        (raises, {}, ConfigError, "The world cannot be made for 24 agents: ZeroDivisionError: no seats"),
        (lambda agents, seed: {}, {}, ContractError, "dict is no world; it needs agents, spec"),
    ],
)
def test_what_cannot_be_checked_is_one_line(world, options, kind, told):
    with pytest.raises(kind, match=re.escape(told)) as caught:
        holdfast.check_world(world, **options)
    assert "\n" not in str(caught.value)


def test_a_world_that_raises_at_once_or_with_another_seed():
    class Refuses(Around):
        def reset(self):
            raise RuntimeError

    laws = holdfast.check_world(lambda agents, seed: Refuses(recall(agents, seed)))
    assert broken(laws) == {"kind": "living: reset() raised RuntimeError."}
    assert laws.notes == ()
    even = holdfast.check_world(lambda a, s: Refuses(recall(a, s)) if s % 2 else recall(a, s), steps=20)
    assert broken(even) == {"repeat": "measuring repeat: reset() raised RuntimeError."}


def test_the_verdict_speaks_of_a_world_and_of_no_pattern():
    make, _, _ = SABOTAGES["dead rows pay"]
    laws = holdfast.check_world(make, steps=60)
    assert summary(laws) == "1 of 9 laws of a world is broken: dead."
    text = as_text(laws)
    assert "pattern" not in text
    assert re.search(
        r"\ndead: rewards for no action: agent \d+, step \d+; nobody acted .*: \d+, must be 0\n", text
    )
    assert replace(laws["dead"], sought=True).finding.endswith("No known pattern explains these numbers.")


def test_the_guide_lists_every_law():
    guide = (Path(__file__).parents[2] / "docs" / "check.md").read_text()
    table = guide.partition("## The contract of a world")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == LAWS


class Latecomers:
    """Odd agents are away for three rows at first; then everybody lives five steps, again and again."""

    spec = WorldSpec(obs_shape=(1,), action_names=("stay", "go"))

    def __init__(self, agents, seed):
        self.agents, self.seed, self.agent = agents, seed, torch.arange(agents)
        self.late = 3 * (self.agent % 2)

    def reset(self):
        self.t = 0
        return self.tell()

    def step(self, actions):
        self.t += 1
        return self.tell()

    def tell(self):
        age = self.t - self.late
        first, nobody = (age >= 0) & (age % 5 == 0), torch.zeros(self.agents, dtype=torch.bool)
        seen = draws.uniform(self.seed, draws.STREAM_WORLD, self.agent, self.t)[:, None]
        over = first & (age > 0)
        return Step(seen, (age > 0).float(), over, nobody, first | (self.t == 0), age >= 0, nobody)


def test_who_is_away_at_first_may_begin_later():
    laws = holdfast.check_world(Latecomers)
    assert laws.ok, broken(laws)


def test_a_class_is_made_by_its_keywords_and_a_world_that_is_made_is_refused():
    assert holdfast.check_world(type(recall(2, 0)), delay=2).ok
    with pytest.raises(ConfigError, match="is made already; give its class, or a function"):
        holdfast.check_world(recall(2, 0))
