"""World laws: correct worlds pass, and each law is broken by a world that violates it."""

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch

import holdfast
from helpers.broken_worlds import SABOTAGES, Around, changed, other_spec, recall, telling
from helpers.space_worlds import NamePlace, SayNumber, SayNumberInATree
from holdfast.check.laws import run_world_laws
from holdfast.check.world_laws import WORLD_LAWS
from holdfast.check.world_recording import WorldUnderTest
from holdfast.config.worlds import WORLD_CONFIGS
from holdfast.errors import ConfigError, ContractError
from holdfast.report.check_report import as_text, summary
from holdfast.worlds import WorldSpec, make_world
from worlds.test_tensor_world import SHORT, TRUNCATING

pytestmark = pytest.mark.usefixtures("annotations_asleep")
LAWS = ["kind", "first", "flags", "last", "dead", "still", "repeat", "isolate", "pure"]


def broken(laws):
    return {name: law.finding for name, law in laws.items() if not law.ok}


def unmeasured(laws):
    return {name for name, law in laws.items() if law.worst.path == "n/a"}


@pytest.mark.parametrize("name", sorted(WORLD_CONFIGS))
def test_every_builtin_world_obeys_every_law(name):
    laws = holdfast.check_world(name, **SHORT[name])
    assert (broken(laws), list(laws), laws.ok) == ({}, LAWS, True)
    assert unmeasured(laws) == {"last"} | (set() if name == "ragged" else {"dead"})


@pytest.mark.parametrize("name", TRUNCATING)
def test_every_truncating_world_obeys_every_law(name):
    laws = holdfast.check_world(name, truncate=True, **SHORT[name])
    assert broken(laws) == {}
    assert unmeasured(laws) == (set() if name == "ragged" else {"dead"})
    paths = {part.what: part.path for part in laws["last"].parts}
    # In no builtin world the two are equal so often that the law cannot be measured.
    assert paths["last observations unlike the next episode's first one"] == ""


@pytest.mark.parametrize("world", [SayNumber, SayNumberInATree, NamePlace])
def test_worlds_of_other_spaces_obey_every_law(world):
    assert broken(holdfast.check_world(lambda agents, seed: world(agents, seed=seed))) == {}


MEASUREMENTS = {
    "kind": {
        "agents more or fewer than requested": "requested 24, is 24",
        "steps of the wrong kind": "step 0: ",
        "observations outside the space": "",
        "rewards that are not finite": "",
    },
    "first": {
        "rows without first after reset()": "; set first everywhere in reset()",
        "rows without first after another reset()": "; set first everywhere in reset(), in the middle of an episode "
        "too",
    },
    "flags": {
        "firsts without an end before": "; set terminated or truncated in the row of the last reward, also if the "
        "next episode starts in it",
        "valid rows after an end and before the next first": "; set first where the next episode starts, and "
        "valid=False until then",
        "ends outside an episode": "; it had ended before",
        "ends in reset()": "",
        "trials where first is": "; a new episode is not a new trial of the old one",
    },
    "last": {
        "truncations without a last observation": "; give last_obs",
        "last_obs of the wrong kind": "step 0: ",
        "last observations outside the space": "",
        "last observations unlike the next episode's first one": "all 672 are the first of the next; last_obs is the "
        "observation after the last action",
        "last observations unlike the one before": "all 672 are the one before the last action; last_obs is the "
        "observation after the last action",
    },
    "dead": {
        "there is no invalid row": "",
        "rewards after invalid rows": "; the row before is invalid",
        "ends after invalid rows": "; the row before is invalid",
        "invalid rows with first": "; set valid where first is",
    },
    "still": {"steps modified after they were returned": ""},
    "repeat": {
        "rows that differ in a new world, same seed": "",
        "rows that differ after another reset()": "",
        "rows that differ with another seed": "no row differs, though agents differ from each other; draw from the "
        "seed that is passed",
    },
    "isolate": {
        "rows that depend on actions of odd agents": "",
        "rows that depend on actions of even agents": "",
        "rows that differ among 48 agents": "",
    },
    "pure": {
        "global generators it draws from": "it draws from the global generator of ; draw from a generator with its "
        "seed",
        "rows that depend on the global generators": "",
    },
}


def test_measurements_and_advice_of_every_law():
    """A measurement that holds ends in its advice: the place before it is empty."""
    messages = []
    target = WorldUnderTest(
        lambda agents, seed: make_world("recall", agents, seed=seed, delay=3, truncate=True), None, None, 0
    )
    laws = run_world_laws(target, messages.append)
    assert {name: {part.what: part.finding for part in law.parts} for name, law in laws.items()} == MEASUREMENTS
    assert messages[:3] == ["making the world", "recording", "measuring kind (1 of 9), 143 steps a recording"]
    assert messages[-1].startswith("measuring pure (9 of 9)")


@pytest.mark.parametrize("name", SABOTAGES)
def test_broken_world_breaks_its_laws_with_a_finding(name):
    make, expected, message = SABOTAGES[name]
    laws = holdfast.check_world(make, steps=100)
    findings = broken(laws)
    assert set(findings) == expected, findings
    assert message in " ".join(findings.values()), findings
    assert "\n" not in " ".join(findings.values())
    assert not laws.ok


def test_every_law_is_broken_alone_by_some_world():
    assert list(WORLD_LAWS) == LAWS
    alone = {law for _, expected, _ in SABOTAGES.values() if len(expected) == 1 for law in expected}
    assert alone == set(LAWS)


def parts_of(law, path=""):
    return [part.what for part in law.parts if part.path == path]


def test_unmeasured_laws_give_advice():
    laws = holdfast.check_world("recall", steps=20, delay=60, truncate=True)
    assert laws.ok
    assert unmeasured(laws) == {"flags", "last", "dead"}
    assert laws["flags"].finding == "record more by --steps 1000, or steps=1000 in Python"
    assert laws.notes[0] == "24 agents, 20 steps; 0 episodes ended, 0 by truncation"
    assert laws.notes[2].startswith("last: no episode was truncated in 20 steps; record more by --steps 1000")
    results = laws.as_json()["laws"]
    assert (results["flags"]["measured"], results["kind"]["measured"]) == (None, 0.0)


def test_last_observations_are_not_compared_with_firsts_where_all_observations_are_equal():
    def equal(self, step, actions):
        return {"obs": torch.zeros_like(step.obs), "last_obs": torch.ones_like(step.obs)}

    last = holdfast.check_world(telling(equal), steps=60)["last"]
    what = "last observations unlike the next episode's first one: these are often equal, or truncations are few"
    assert what in parts_of(last, "n/a")


def test_deterministic_world_may_ignore_its_seed():
    laws = holdfast.check_world("constant")
    (what,) = parts_of(laws["repeat"], "n/a")
    assert what.startswith("the world is deterministic")
    assert "rows that differ with another seed" in parts_of(holdfast.check_world("recall")["repeat"])


def test_agents_of_one_environment_may_affect_each_other():
    make = telling(lambda self, step, actions: {} if actions is None else {"reward": total(actions)}, "recall")

    def total(actions):
        return actions.float().unflatten(0, (-1, 4)).sum(1).repeat_interleave(4)

    assert set(broken(holdfast.check_world(make, steps=60))) == {"isolate"}
    assert broken(holdfast.check_world(other_spec(make, agents_per_env=4), steps=60)) == {}
    alone = holdfast.check_world(other_spec(make, agents_per_env=24), steps=60, agents=24)
    assert parts_of(alone["isolate"], "n/a") == ["there is one environment"]
    assert alone.notes[-1].endswith("all 24 agents share one environment; check with 48 agents")


@dataclass(frozen=True)
class Several(WorldSpec):
    """The spec of a world of parts, in consecutive rows."""

    parts: tuple[tuple[str, int], ...] = ()


class Beside(Around):
    """Two parts that differ: the second half of the agents has another seed."""

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
        return changed(steps[0], **{name: torch.cat([getattr(step, name) for step in steps]) for name in names})


def test_isolate_compares_the_first_rows_of_each_part():
    def make(agents, seed):
        world = Beside(agents, seed)
        spec = {field.name: getattr(world.spec, field.name) for field in fields(WorldSpec)}
        world.spec = Several(**{**spec, "parts": (("one", agents // 2), ("other", agents // 2))})
        return world

    assert set(broken(holdfast.check_world(Beside, steps=40))) == {"isolate"}
    assert broken(holdfast.check_world(make, steps=40)) == {}


def test_number_of_agents_fills_two_environments_by_default():
    assert holdfast.check_world("arena", steps=5).notes[0].startswith("48 agents")
    assert holdfast.check_world("arena", steps=5, agents=72).notes[0].startswith("72 agents")
    assert holdfast.check_world("recall", steps=5, agents=3).notes[0].startswith("3 agents")


def test_world_of_a_fixed_number_of_agents_is_noted():
    def make(agents, seed):
        if agents != 24:
            raise ConfigError("There are 24 seats.")
        return recall(agents, seed)

    laws = holdfast.check_world(make, steps=40)
    assert laws.ok
    assert parts_of(laws["isolate"], "n/a") == ["it cannot be made for 48 agents"]
    assert laws.notes[-1] == "isolate: it cannot be made for 48 agents; There are 24 seats."


def raises(agents, seed):
    raise ZeroDivisionError("no\nseats")


@pytest.mark.parametrize(
    ("world", "options", "kind", "message"),
    [
        ("recal", {}, ConfigError, "world.name=recal: there is no such world"),
        ("recall", {"dealy": 4}, ConfigError, "no option 'dealy'"),
        ("recall", {"steps": 0}, ConfigError, "steps=0: give at least 1"),
        ("recall", {"agents": 0}, ConfigError, "agents=0: give at least 1"),
        (recall, {"delay": 4}, ConfigError, "delay: options go with a world's name"),
        (raises, {}, ConfigError, "The world cannot be made for 24 agents: ZeroDivisionError: no seats"),
        (lambda agents, seed: {}, {}, ContractError, "dict is not a world; it needs agents, spec"),
    ],
)
def test_check_world_error_is_one_line(world, options, kind, message):
    with pytest.raises(kind, match=re.escape(message)) as caught:
        holdfast.check_world(world, **options)
    assert "\n" not in str(caught.value)


def test_world_that_raises_breaks_kind_or_repeat():
    class Refuses(Around):
        def reset(self):
            raise RuntimeError

    laws = holdfast.check_world(lambda agents, seed: Refuses(recall(agents, seed)))
    assert broken(laws) == {"kind": "recording: reset() raised RuntimeError."}
    assert laws.notes == ()
    (part,) = laws["flags"].parts
    assert (part.what, part.finding, part.path) == ("nothing, since kind is broken", "fix kind first", "n/a")
    even = holdfast.check_world(lambda a, s: Refuses(recall(a, s)) if s % 2 else recall(a, s), steps=20)
    assert broken(even) == {"repeat": "measuring repeat: reset() raised RuntimeError."}


def test_world_report_has_no_patterns():
    make, _, _ = SABOTAGES["dead rows pay"]
    laws = holdfast.check_world(make, steps=60)
    assert summary(laws) == "1 of 9 laws of a world is broken: dead."
    text = as_text(laws)
    assert "pattern" not in text
    assert re.search(
        r"\ndead: rewards after invalid rows: agent \d+, step \d+; the row before is .*: \d+, must be 0\n",
        text,
    )
    assert replace(laws["dead"], diagnosed=True).finding.endswith("No known pattern explains these numbers.")


def test_docs_list_every_world_law():
    guide = (Path(__file__).parents[2] / "docs" / "concepts" / "laws.md").read_text()
    table = guide.partition("## Laws of a world")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == LAWS


def test_check_world_takes_a_class_and_refuses_an_instance():
    assert holdfast.check_world(type(recall(2, 0)), delay=2).ok
    with pytest.raises(ConfigError, match="is an instance; give its class, or a function"):
        holdfast.check_world(recall(2, 0))
