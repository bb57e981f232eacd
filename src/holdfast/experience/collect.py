"""Collecting: the world speaks, the policy answers, and what was lived becomes segments."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDict

from holdfast.errors import ContractError
from holdfast.experience.segments import Segments
from holdfast.experience.worth import shift_in, worth_before
from holdfast.policies import LSTMWrapper
from holdfast.policies.actions import actions_of, require_fit
from holdfast.shapes import Bool, Float, Tensor
from holdfast.worlds import Step, World, tokens
from holdfast.worlds.seen import Seen
from holdfast.worlds.watched import settle, watched

TAIL_KEYS = ("rewards", "dones", "truncateds", "values", "last_values")


def as_batch(step: Step, start: int, uniform: Tensor) -> TensorDict:
    """Put a step into the words that policies read."""
    agents = len(step.reward)
    return TensorDict(
        {
            "env_obs": step.obs,
            "rewards": step.reward,
            "dones": step.terminated,
            "truncateds": step.truncated,
            "first": step.first,
            "valid": step.valid,
            "trial": step.trial,
            "training_env_id_start": torch.full((agents,), start, device=step.reward.device),
            "draws": uniform,
        },
        batch_size=[agents],
    )


def value_of(
    policy: LSTMWrapper,
    state: TensorDict,
    obs: Seen,
    first: Bool[Tensor, " A"],
    trial: Bool[Tensor, " A"],
    valid: Bool[Tensor, " A"] | None = None,
) -> Float[Tensor, " A"]:
    """Ask what observations are worth, given a state. Nothing advances: it is a replay."""
    batch: dict[str, Any] = {"env_obs": obs, "first": first, "trial": trial}
    if valid is not None:
        batch["valid"] = valid
    batch["draws"] = policy.actions.idle(len(first), first.device)
    with torch.no_grad(), policy.replay(state):
        return policy(TensorDict(batch, batch_size=first.shape))["values"]


@dataclass
class EpisodeStatistics:
    """Returns and lengths of the episodes that ended, added up where the data lies, world by world."""

    agent: Tensor
    parts: tuple[tuple[str, int], ...] = ()
    totals: Tensor = field(init=False)
    _running: Tensor = field(init=False)
    _acted: Tensor = field(init=False)
    _part: Tensor = field(init=False)

    def __post_init__(self) -> None:
        device, agents = self.agent.device, len(self.agent)
        counts = [count for _, count in self.parts] or [agents]
        # Whether an episode ended, its return, its length.
        self._running = torch.zeros(agents, 3, dtype=torch.float64, device=device)
        self._acted = torch.zeros(agents, dtype=torch.bool, device=device)
        self._part = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(device)
        self.totals = torch.zeros(len(counts), 3, dtype=torch.float64, device=device)

    def saw(self, step: Step) -> None:
        """Count a step that answers an action; a reward for no action is none."""
        self._running[:, 1] += torch.where(self._acted, step.reward, 0.0)
        ended = step.terminated | step.truncated
        self._running[:, 0] = ended
        over = torch.where(ended[:, None], self._running, 0.0)
        self.totals.index_add_(0, self._part, over)
        self._running = torch.where(ended[:, None], 0.0, self._running)

    def acted(self, valid: Tensor) -> None:
        """Count an action."""
        self._acted = valid
        self._running[:, 2] += valid

    def take(self) -> dict[str, float]:
        """Return the means since the last call, of all and of each world of several, and begin anew."""
        named = {"": self.totals.sum(0).tolist()}
        if self.parts:
            labels = [f"@{label}" for label, _ in self.parts]
            named |= dict(zip(labels, self.totals.tolist(), strict=True))
        self.totals.zero_()
        found: dict[str, float] = {}
        for label, (episodes, returns, lengths) in named.items():
            found[f"charts/episodes{label}"] = episodes
            if episodes:
                found[f"charts/episodic_return{label}"] = returns / episodes
                found[f"charts/episodic_length{label}"] = lengths / episodes
        return found


class Collector:
    """Lives `length` steps with every agent of a world and cuts them into segments of `horizon`.

    States live on from segment to segment and from rollout to rollout; the tensors of the returned
    segments are overwritten by the next rollout.
    """

    def __init__(self, world: World, policy: LSTMWrapper, *, length: int, horizon: int, seed: int) -> None:
        self.world, self.policy = watched(world), policy
        self.length, self.horizon, self.seed = length, horizon, seed
        self._actions = actions_of(world.spec)
        policy.require_bound(world.spec)
        policy.store.open({0: world.agents})
        self._pending = self.world.reset()
        self._clock = 0
        self._agent = torch.arange(world.agents, device=self._pending.reward.device)
        told = policy.get_agent_experience_spec()
        self._keys = [*told.keys(), "last_values"]
        self._steps: TensorDict | None = None
        self.episodes = EpisodeStatistics(self._agent, world.spec.parts)

    @torch.no_grad()
    def rollout(self, version: int) -> Segments:
        """Live one rollout with fixed weights."""
        entries = []
        for t in range(self.length):
            if t % self.horizon == 0:
                entries.append(self._state().clone())
            lived = self._live_one_step()
            self._steps = self._room_for(lived) if self._steps is None else self._steps
            self._steps[:, t] = lived
        assert self._steps is not None, "a rollout has at least one step"
        settle(self.world)
        entry = cast("TensorDict", torch.stack(entries, dim=1))
        return self._cut(self._steps, entry, version)

    def _room_for(self, lived: TensorDict) -> TensorDict:
        """Make room for a rollout, in the precision that things are said in."""
        size = (self.world.agents, self.length)
        return cast("TensorDict", lived.apply(partial(_room_of, size), batch_size=size))

    def _state(self) -> TensorDict:
        return self.policy.store.read(0, self.world.agents)

    def _live_one_step(self) -> TensorDict:
        step = self._pending
        last_values = self._last_values(step)
        mine = self.policy.actions
        td = self.policy(as_batch(step, 0, mine.uniform(self.seed, self._agent, self._clock)))
        for key in (mine.key, "actions", "act_log_prob", "values"):
            if key not in td:
                raise ContractError(
                    f"The policy left {key} out of its answer; a rollout needs it: td[{key!r}]."
                )
        require_fit(mine, td[mine.key].shape[-1], self._actions)
        self.episodes.acted(step.valid)
        self._pending = self.world.step(td["actions"])
        self._clock += 1
        self.episodes.saw(self._pending)
        td["last_values"] = last_values
        return td.select(*self._keys)

    def _last_values(self, step: Step) -> Tensor:
        """Value the last observations of truncated episodes, with the state before clearing."""
        if self.world.spec.truncates == "never":
            return torch.zeros_like(step.reward)
        assert step.last_obs is not None, "a guarded world that truncates gives the last observation"
        if step.truncated.device.type == "cpu" and not bool(step.truncated.any()):
            # Where looking costs nothing, nobody is asked what nobody needs.
            return torch.zeros_like(step.reward, dtype=next(self.policy.parameters()).dtype)
        nobody = torch.zeros_like(step.first)
        values = value_of(self.policy, self._state(), step.last_obs, nobody, nobody)
        return torch.where(step.truncated, values, 0.0)

    def _value_of(self, step: Step) -> Tensor:
        batch = (step.obs, step.first, step.trial)
        return value_of(self.policy, self._state(), *batch, valid=step.valid)

    def _worth(self, steps: TensorDict, after: TensorDict) -> Tensor:
        """Say what each step of the rollout is worth to the one before it."""
        ended = {key: shift_in(steps[key], after[key]) for key in ("dones", "truncateds")}
        last_values = shift_in(steps["last_values"], after["last_values"])
        return worth_before(
            steps["values"],
            steps["valid"],
            ended["dones"] | ended["truncateds"],
            torch.where(ended["dones"], 0.0, last_values),
            after["values"],
        )

    def _cut(self, steps: TensorDict, entry: TensorDict, version: int) -> Segments:
        """Cut `[A, length]` steps into rows `[A * length / horizon, horizon]` with their tails."""
        coming = self._pending
        after = TensorDict(
            {
                "rewards": coming.reward,
                "dones": coming.terminated,
                "truncateds": coming.truncated,
                "values": torch.where(coming.valid, self._value_of(coming), _last_valid_value(steps)),
                "last_values": self._last_values(coming),
            },
            batch_size=[self.world.agents],
        )
        shape = (self.length // self.horizon, self.horizon)
        rows = steps.unflatten(1, shape)
        if self.policy.any_length and self.world.spec.features:
            # Once a rollout, so that no update computes what is padding in all of it.
            rows["env_obs"] = tokens.shorten(rows["env_obs"])
        later = rows[:, 1:, 0].select(*TAIL_KEYS)
        later["values"] = self._worth(steps, after).unflatten(1, shape)[:, 1:, 0]
        tail = torch.cat([later, after[:, None]], dim=1)
        return Segments(rows.flatten(0, 1), entry.flatten(0, 1), tail.flatten(0, 1), version)


def _room_of(size: tuple[int, int], leaf: Tensor) -> Tensor:
    return torch.zeros(*size, *leaf.shape[1:], dtype=leaf.dtype, device=leaf.device)


def _last_valid_value(steps: TensorDict) -> Float[Tensor, " A"]:
    """Say what each agent thought its last step was worth: the best guess while it is away."""
    valid = steps["valid"]
    when = torch.where(valid, torch.arange(valid.shape[1], device=valid.device), -1).amax(1)
    values = steps["values"].gather(1, when.clamp(min=0)[:, None])[:, 0]
    return torch.where(when >= 0, values, 0.0)
