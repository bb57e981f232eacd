"""The nine laws of a world: on one recording, and on two recordings that must be equal."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from gymnasium import spaces

from holdfast.check.results import Measurement, not_measured
from holdfast.check.world_recording import Recording, WorldUnderTest, record_strict, same, script
from holdfast.errors import ConfigError
from holdfast.rng import generator_state, isolated_rng
from holdfast.types import Bool, Int, Shaped, Tensor
from holdfast.worlds import WorldSpec, closing_world, tokens
from holdfast.worlds.obs import space_bounds, subspaces

CHANCE = 1e-6
"""A coincidence less likely than this counts as a fault."""


def _too_short(what: str, steps: int) -> Measurement:
    longer = 10 * max(steps, 100)
    return not_measured(f"{what} in {steps} steps", f"record more by --steps {longer}, or steps={longer} in Python")


def _count_rows(what: str, bad: Bool[Tensor, "N A"], advice: str = "") -> Measurement:
    """Count bad rows; the finding names the first one."""
    count, place = int(bad.sum()), ""
    if count:
        step, agent = bad.nonzero()[0].tolist()
        place = f"agent {agent}, step {step}"
    return Measurement(what, float(count), finding=f"{place}{advice and f'; {advice}'}")


def _count_faults(what: str, faults: dict[int, str]) -> Measurement:
    step, fault = next(iter(faults.items()), (0, ""))
    return Measurement(what, float(len(faults)), finding=f"step {step}: {fault}")


def kind(target: WorldUnderTest) -> list[Measurement]:
    """Shapes, dtypes and observations are those of the spec, and rewards are finite."""
    recording, requested, agents = target.recording, target.requested_agents, target.world.agents
    count = f"requested {requested}, is {agents}"
    parts = [
        Measurement("agents more or fewer than requested", float(abs(requested - agents)), finding=count),
        _count_faults("steps of the wrong kind", recording.faults),
    ]
    if recording.raised:
        parts.append(Measurement("recording", float("inf"), finding=recording.raised, path="raised"))
    if not recording.steps:
        return parts
    for bad, detail in _outside_space(target.spec, recording.leaves("obs"), "obs"):
        parts.append(_count_rows("observations outside the space", bad & recording["valid"], detail))
    return [*parts, _count_rows("rewards that are not finite", ~recording["reward"].isfinite())]


def _outside_space(spec: WorldSpec, leaves: dict[str, Tensor], name: str) -> Iterator[tuple[Bool[Tensor, "N A"], str]]:
    """Find rows `[N,A]` outside of the observation space, with a description of the first."""
    if spec.features:
        yield from _wrong_tokens(spec, leaves[name])
        return
    for key, space in _leaf_spaces(spec.observation_space, name):
        leaf = leaves[key]
        low, high = (torch.as_tensor(bound).to(leaf.device) for bound in space_bounds(space))
        # Written so that NaN is outside.
        bad = ~((leaf >= low) & (leaf <= high) & leaf.isfinite())
        detail = ""
        if bool(bad.any()):
            at = tuple(bad.nonzero()[0].tolist())
            least, most = (float(edge.expand(leaf.shape[2:])[at[2:]]) for edge in (low, high))
            detail = f"{key} is {leaf[at].item():g}, must be finite, from {least:g} to {most:g}"
        yield bad.flatten(2).any(2) if bad.dim() > 2 else bad, detail


def _leaf_spaces(space: spaces.Space[Any], name: str) -> Iterator[tuple[str, spaces.Space[Any]]]:
    children = subspaces(space)
    if not children:
        yield name, space
    for key, child in children.items():
        yield from _leaf_spaces(child, f"{name}[{key!r}]")


def _wrong_tokens(spec: WorldSpec, obs: Shaped[Tensor, "N A M 3"]) -> Iterator[tuple[Bool[Tensor, "N A"], str]]:
    """Find tokens outside of the window, with an unknown feature, or after padding."""
    location, feature, _ = obs.long().unbind(-1)
    padding, (rows, columns) = location == tokens.PADDING, spec.window
    inside = (location == tokens.GLOBAL) | ((location >> 4 < rows) & (location & 15 < columns))
    registered = torch.isin(feature, torch.tensor(spec.feature_ids, device=obs.device))
    # Padding comes last.
    after_padding = (padding.cumsum(-1) > 0) & ~padding
    for bad, reason in (
        (padding & (obs != tokens.PADDING).any(-1), "padding is 255 in all three bytes"),
        (after_padding, "a token after padding; padding comes last"),
        (~padding & ~inside, f"a location outside of the window of {rows} x {columns}"),
        (~padding & ~registered, f"a feature that is none of {', '.join(map(str, spec.feature_ids))}"),
    ):
        detail = ""
        if bool(bad.any()):
            at = tuple(bad.nonzero()[0].tolist())
            detail = f"token {at[2]} is {obs[at].tolist()}: {reason}"
        yield bad.any(-1), detail


def first(target: WorldUnderTest) -> list[Measurement]:
    """Every reset starts an episode of every agent."""
    advice = "set first everywhere in reset()"
    again = f"{advice}, in the middle of an episode too"
    return [
        _count_rows("rows without first after reset()", ~target.recording["first"][:1], advice),
        _count_rows("rows without first after another reset()", ~target.after_reset["first"][:1], again),
    ]


def flags(target: WorldUnderTest) -> list[Measurement]:
    """Episode ends and firsts alternate, and rows between them are invalid."""
    recording = target.recording
    ended, first, valid = recording.ended, recording["first"], recording["valid"]
    later, always = torch.arange(len(first), device=first.device)[:, None] > 0, torch.ones_like(first[0])
    inside = _before_each_row(always, starts=first, ends=ended)
    # An agent that is invalid at its first row may join later, so it has acted only since a valid one.
    acted = _before_each_row(~always, starts=valid, ends=first)
    end = "set terminated or truncated in the row of the last reward, also if the next episode starts in it"
    start = "set first where the next episode starts, and valid=False until then"
    between = later & valid & ~first & (~inside | ended)
    trial = "a new episode is not a new trial of the old one"
    parts = [
        _count_rows("firsts without an end before", later & first & inside & acted & ~ended, end),
        _count_rows("valid rows after an end and before the next first", between, start),
        _count_rows("ends outside an episode", ended & ~inside & valid.roll(1, 0), "it had ended before"),
        _count_rows("ends in reset()", ended & ~later),
        _count_rows("trials where first is", recording["trial"] & first, trial),
    ]
    if target.spec.truncates == "never":
        advice = 'write truncates="always" in its spec'
        parts.append(_count_rows("truncations, though its spec says never", recording["truncated"], advice))
    if not bool(ended.any()):
        return [_too_short("no episode ended", len(first) - 1), *parts]
    return parts


def _before_each_row(
    now: Bool[Tensor, " A"], *, starts: Bool[Tensor, "N A"], ends: Bool[Tensor, "N A"]
) -> Bool[Tensor, "N A"]:
    """Return a condition before each row: it is `now` at first, and rows start or end it; a start wins."""
    rows = []
    for start, end in zip(starts, ends, strict=True):
        rows.append(now)
        now = start | (now & ~end)
    return torch.stack(rows)


def dead(target: WorldUnderTest) -> list[Measurement]:
    """An invalid row has no reward and no end after it, its action has no effect, and a first row is valid."""
    recording, valid = target.recording, target.recording["valid"]
    later = torch.arange(len(valid), device=valid.device)[:, None] > 0
    acted = valid.roll(1, 0) & later
    invalid_first = later & recording["first"] & ~valid
    before = "the row before is invalid"
    return [
        _invalid_actions(target),
        _count_rows("rewards after invalid rows", ~acted & (recording["reward"] != 0), before),
        _count_rows("ends after invalid rows", later & ~acted & recording.ended, before),
        _count_rows("invalid rows with first", invalid_first, "set valid where first is"),
    ]


def last(target: WorldUnderTest) -> list[Measurement]:
    """Every truncated episode has a last observation, which is not that of another step."""
    recording, truncated = target.recording, target.recording["truncated"]
    if not bool(truncated.any()):
        if target.spec.truncates == "never":
            return [not_measured("this world truncates no episodes")]
        return [_too_short("no episode was truncated", len(truncated) - 1)]
    missing = truncated & ~torch.tensor(recording.has_last_obs, device=truncated.device)[:, None]
    parts = [
        _count_rows("truncations without a last observation", missing, "give last_obs"),
        _count_faults("last_obs of the wrong kind", recording.last_faults),
    ]
    for bad, detail in _outside_space(target.spec, recording.leaves("last_obs"), "last_obs"):
        parts.append(_count_rows("last observations outside the space", bad & truncated & ~missing, detail))
    if bool(missing.any()) or recording.last_faults:
        return parts
    return [*parts, *_not_of_another_step(recording)]


def _not_of_another_step(recording: Recording) -> list[Measurement]:
    """Require that last observations are not always those of the step before or of the next episode.

    Both happen in some rows of a correct world. It is a fault only if all are equal and that is unlikely, given how
    often observations one step apart are equal elsewhere.
    """
    truncated, valid, first = recording["truncated"], recording["valid"], recording["first"]
    next_first = _next_first(first)
    step, agent = (truncated & (next_first >= 0)).nonzero().unbind(1)
    opening = next_first[step, agent]
    inner = (valid[1:] & valid[:-1] & ~first[1:] & ~recording.ended[1:]).nonzero()
    usual = _equal_obs(recording, (inner[:, 0] + 1, inner[:, 1]), "obs", inner[:, 0])
    before = _equal_obs(recording, (step, agent), "last_obs", step - 1)
    ahead = _equal_obs(recording, (step, agent), "last_obs", opening)
    chance = _equal_obs(recording, (step - 1, agent), "obs", opening)
    what = "last observations unlike"
    return [
        _unlikely_equal(f"{what} the next episode's first one", ahead, chance, "the first of the next"),
        _unlikely_equal(f"{what} the one before", before, usual, "the one before the last action"),
    ]


def _unlikely_equal(what: str, equal: Bool[Tensor, " K"], usual: Bool[Tensor, " n"], which: str) -> Measurement:
    # One more of each kind than was counted, so that a few are no proof.
    share = (float(usual.sum()) + 1) / (len(usual) + 2)
    if not len(equal) or share ** len(equal) > CHANCE:
        return not_measured(f"{what}: these are often equal, or truncations are few")
    finding = f"all {len(equal)} are {which}; last_obs is the observation after the last action"
    return Measurement(what, float((~equal).sum()), 0.0, "more than", finding)


def _equal_obs(
    recording: Recording, where: tuple[Tensor, Tensor], name: str, other: Int[Tensor, " K"]
) -> Bool[Tensor, " K"]:
    """Return whether observations equal those of another step of the same agent."""
    result = torch.ones_like(other, dtype=torch.bool)
    for key, leaf in recording.leaves("obs").items():
        obs = recording.steps[key if name == "obs" else f"last_{key}"][where]
        equal = same(obs, leaf[other, where[1]])
        result &= equal.flatten(1).all(1) if leaf.dim() > 2 else equal
    return result


def _next_first(first: Bool[Tensor, "N A"]) -> Int[Tensor, "N A"]:
    """Return the row, this one or a later one, where the next episode starts; -1 if none does."""
    N = len(first)
    at = torch.where(first, torch.arange(N, device=first.device)[:, None], N)
    nearest = at.flip(0).cummin(0).values.flip(0)
    return torch.where(nearest == N, -1, nearest)


def still(target: WorldUnderTest) -> list[Measurement]:
    """The world does not write into returned steps or passed actions."""
    overwritten = target.recording.overwritten
    finding = f"{overwritten[0]}; return new tensors in every step" if overwritten else ""
    return [Measurement("steps modified after they were returned", float(len(overwritten)), finding=finding)]


def _expect_equal(
    what: str, expected: Recording, actual: Recording, agents: Bool[Tensor, " A"] | None = None
) -> Measurement:
    """Require that two recordings are bit-equal, for some agents.

    Observations of invalid rows, and `last_obs` of rows without truncation, are not compared.
    """
    differ = _differences(expected, actual)
    if agents is not None:
        differ = {key: where & agents for key, where in differ.items()}
    anywhere = torch.stack(list(differ.values())).any(0)
    count, finding = int(anywhere.sum()), ""
    if count:
        step, agent = anywhere.nonzero()[0].tolist()
        names = [key for key, where in differ.items() if bool(where[step, agent])]
        finding = f"agent {agent}, step {step}, {', '.join(names)}"
    return Measurement(what, float(count), finding=finding)


def _differences(expected: Recording, actual: Recording) -> dict[str, Bool[Tensor, "N A"]]:
    """Return where two recordings differ, by name."""
    result = {}
    for key, leaf in expected.steps.items():
        differ = ~same(leaf, actual.steps[key])
        differ = differ.flatten(2).any(2) if differ.dim() > 2 else differ
        if key.startswith(("obs", "last_obs")):
            differ = differ & expected["truncated" if key.startswith("last_obs") else "valid"]
        result[key] = differ
    return result


def repeat(target: WorldUnderTest) -> list[Measurement]:
    """Seed and actions determine everything, and the seed matters."""
    recording, again = target.recording, target.after_reset
    # Law first checks the flag after a reset.
    first = torch.cat([recording["first"][:1], again["first"][1:]])
    again = replace(again, steps=again.steps | {"first": first})
    parts = [
        _expect_equal("rows that differ in a new world, same seed", recording, target.rerun(recording.actions)),
        _expect_equal("rows that differ after another reset()", recording, again),
    ]
    other_seed = target.rerun(recording.actions, seed=target.seed + 1)
    differ = torch.stack(list(_differences(recording, other_seed).values()))
    if not bool(differ.any()) and _is_deterministic(target):
        what = "the world is deterministic: no row differs with another seed or between agents"
        return [*parts, not_measured(f"{what} with the same actions")]
    finding = "no row differs, though agents differ from each other; draw from the seed that is passed"
    count = float(differ.any(0).sum())
    return [*parts, Measurement("rows that differ with another seed", count, 0.0, "more than", finding)]


def _is_deterministic(target: WorldUnderTest) -> bool:
    """Whether all environments give the same steps for the same actions."""
    size = target.spec.agents_per_env
    envs = target.world.agents // size
    recording = target.rerun(torch.cat([target.recording.actions[:, :size]] * envs, dim=1))
    first_env = {key: torch.cat([leaf[:, :size]] * envs, dim=1) for key, leaf in recording.steps.items()}
    differ = _differences(recording, replace(recording, steps=first_env))
    return not bool(torch.stack(list(differ.values())).any())


def isolate(target: WorldUnderTest) -> list[Measurement]:
    """Agents do not depend on agents in other environments, nor on their number."""
    size, agents, recording = target.spec.agents_per_env, target.world.agents, target.recording
    if agents <= size:
        advice = f"all {agents} agents share one environment; check with {2 * size} agents"
        return [_among_more(target), not_measured("there is one environment", advice)]
    env_ids = torch.arange(agents, device=recording["first"].device) // size
    groups, parts = "agents" if size == 1 else f"environments of {size} agents", []
    for parity, others in enumerate(("odd", "even")):
        mask = env_ids % 2 == parity
        what = f"rows that depend on actions of {others} {groups}"
        parts.append(_expect_equal(what, recording, _rerun_with_other_actions(target, ~mask[None]), mask))
    return [*parts, _among_more(target)]


def _among_more(target: WorldUnderTest) -> Measurement:
    """Record the same actions among twice as many agents, with other actions for the rest."""
    recording, many = target.recording, 2 * target.world.agents
    actions = script(target.spec, many, len(recording.actions), 1, recording.actions.device)
    try:
        with isolated_rng(0), closing_world(target.make_world(many, target.seed)) as world:
            if world.agents != many:
                return not_measured(f"requested {many} agents, it has {world.agents}")
            rows = _rows_in_larger(target.spec, world.spec, target.world.agents)
            actions[:, rows] = recording.actions
            larger = record_strict(world, many, actions)
    except ConfigError as error:
        return not_measured(f"it cannot be made for {many} agents", str(error))
    subset = {key: leaf[:, rows] for key, leaf in larger.steps.items()}
    return _expect_equal(f"rows that differ among {many} agents", recording, replace(larger, steps=subset))


def _rows_in_larger(small: WorldSpec, large: WorldSpec, agents: int) -> Int[Tensor, " A"]:
    """Return the rows of a larger world that hold a smaller one's agents: the first rows of each of its parts."""
    if not small.parts:
        return torch.arange(agents)
    begin, rows = 0, list[Tensor]()
    for (name, count), (_, more) in zip(small.parts, large.parts, strict=True):
        if more < count:
            raise ConfigError(f"In {name} there are {more} agents then, and {count} before.")
        rows.append(begin + torch.arange(count))
        begin += more
    return torch.cat(rows)


def _invalid_actions(target: WorldUnderTest) -> Measurement:
    """Actions of invalid rows have no effect."""
    invalid = ~target.recording["valid"][:-1]
    if not bool(invalid.any()):
        return not_measured("there is no invalid row")
    changed = _rerun_with_other_actions(target, invalid)
    return _expect_equal("rows that depend on actions of invalid rows", target.recording, changed)


def _rerun_with_other_actions(target: WorldUnderTest, where: Bool[Tensor, "#S A"]) -> Recording:
    actions = target.recording.actions
    others = script(target.spec, target.world.agents, len(actions), 1, actions.device)
    return target.rerun(torch.where(where.reshape(*where.shape, *[1] * (actions.dim() - 2)), others, actions))


def pure(target: WorldUnderTest) -> list[Measurement]:
    """The world neither reads nor advances the global random generators."""
    with isolated_rng(12345):
        before = generator_state()
        with closing_world(target.make_world(target.requested_agents, target.seed)) as world:
            rerun = record_strict(world, target.world.agents, target.recording.actions)
        after = generator_state()
    used = [name for name in before if before[name] != after[name]]
    finding = f"it draws from the global generator of {', '.join(used)}; draw from a generator with its seed"
    return [
        Measurement("global generators it draws from", float(len(used)), finding=finding),
        _expect_equal("rows that depend on the global generators", target.recording, rerun),
    ]


WORLD_LAWS: dict[str, Callable[[WorldUnderTest], list[Measurement]]] = {
    law.__name__: law for law in (kind, first, flags, last, dead, still, repeat, isolate, pure)
}
