"""Collecting: the world speaks, the policy answers, and what was lived becomes segments."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDict

from holdfast.errors import ContractError
from holdfast.experience.asked import as_batch, value_of
from holdfast.experience.finite import require_finite_answer
from holdfast.experience.segments import READ, Lead, Segments
from holdfast.experience.statistics import EpisodeStatistics
from holdfast.experience.stopwatch import Stopwatch
from holdfast.experience.turns import Edges, live_in_turns, moment_of
from holdfast.experience.waiting import rows_from, seen_from, step_from, tree_of_seen, tree_of_step
from holdfast.experience.worth import worth_at_edges
from holdfast.policies import LSTMWrapper
from holdfast.policies.actions import actions_of, require_fit
from holdfast.saved import taken
from holdfast.shapes import Bool, Float, Int, Tensor
from holdfast.worlds import Step, World, tokens
from holdfast.worlds.going_on import Anew, go_on
from holdfast.worlds.turns import EVERYBODY, TakesTurns, Turn, place_of
from holdfast.worlds.watched import settle, watched

TAIL_KEYS = ("rewards", "dones", "truncateds", "values", "last_values")


class Collector:
    """Lives `length` steps with every agent of a world and cuts them into segments of `horizon`.

    States live on from segment to segment and from rollout to rollout; the tensors of the returned
    segments are overwritten by the next rollout. With `lead`, the last so many steps before each segment
    come with it; `saw` is told every step before the policy is, and whose it is. Tokens are stored without
    the padding that all rows end in, if `shorten` allows it.
    """

    def __init__(
        self,
        world: World,
        policy: LSTMWrapper,
        *,
        length: int,
        horizon: int,
        seed: int,
        lead: int = 0,
        shorten: bool = True,
        saw: Callable[[Step, slice | Tensor], None] | None = None,
    ) -> None:
        self.world, self.policy = watched(world), policy
        self.length, self.horizon, self.seed, self.lead = length, horizon, seed, lead
        self._saw = saw
        self._shorten = shorten and policy.any_length and bool(world.spec.features)
        self._actions = actions_of(world.spec)
        policy.require_bound(world.spec)
        policy.store.open({0: world.agents})
        self.pending = self.world.reset()
        """The step that nobody has answered yet."""
        self._clock = 0
        self._agent = torch.arange(world.agents, device=self.pending.reward.device)
        told = policy.get_agent_experience_spec()
        self._keys = [*told.keys(), "last_values"]
        self._steps: TensorDict | None = None
        self._before: Lead | None = None
        self.episodes = EpisodeStatistics(self._agent, world.spec.parts)
        self.stopwatch = Stopwatch(self._agent.device)

    @torch.no_grad()
    def rollout(self, version: int) -> Segments:
        """Live one rollout with fixed weights."""
        live = self._live_in_turns if isinstance(self.world, TakesTurns) else self._live_together
        entry, warm = live()
        assert self._steps is not None, "a rollout has at least one step"
        settle(self.world)
        self._require_finite(self._steps)
        return self._cut(self._steps, entry, version, warm)

    def _live_together(self) -> tuple[TensorDict, TensorDict | None]:
        """Let everybody act at once, step by step; return the states at the edges."""
        entries, warm = [], []
        for t in range(self.length):
            if t % self.horizon == 0:
                entries.append(self._state().clone())
            if self.lead and t % self.horizon == self.horizon - self.lead:
                warm.append(self._state().clone())
            self._note(EVERYBODY, t, self._live_one_step())
        return _stacked(entries), _stacked(warm) if warm else None

    def _live_in_turns(self) -> tuple[TensorDict, TensorDict | None]:
        """Answer some while others act; return the states at the edges."""
        assert isinstance(self.world, TakesTurns)
        world, store, device = self.world, self.policy.store, self._agent.device
        entries, warm = (
            Edges(self._state(), self.length, self.horizon, at)
            for at in (0, (self.horizon - self.lead) % self.horizon)
        )

        def answer(turn: Turn, when: Int[Tensor, " N"]) -> None:
            rows = place_of(turn.rows, device)
            with store.among(rows):
                for edges in (entries, warm) if self.lead else (entries,):
                    edges.pass_by(rows, when, store.read(0, len(when)))
                clock = moment_of(when + self._clock)
                lived = self._answer(turn.step, rows, clock if isinstance(clock, int) else clock.to(device))
            # Before the world goes on: it may write its next step into the same tensors.
            self._note(rows, moment_of(when), lived)
            with self.stopwatch.timing("world"):
                world.answer(turn.rows, lived["actions"])

        def hear() -> Turn:
            with self.stopwatch.timing("world"):
                turn = world.turn()
            self.episodes.saw(turn.step, place_of(turn.rows, device))
            return turn

        self.pending = live_in_turns(world.shares, self.pending, self.length, answer, hear)
        self._clock += self.length
        return entries.states, warm.states if self.lead else None

    def _note(self, rows: slice | Tensor, when: int | Tensor, lived: TensorDict) -> None:
        """Write down what some lived, each in its row."""
        if self._steps is None:
            # In the precision that things are said in.
            size = (self.world.agents, self.length)
            self._steps = cast("TensorDict", lived.apply(partial(_room_of, size), batch_size=size))
        with self.stopwatch.timing("copy"):
            if isinstance(rows, slice) and not isinstance(when, int):
                rows = self._agent[rows]
            self._steps[rows, when] = lived

    def _state(self, agents: int | None = None) -> TensorDict:
        return self.policy.store.read(0, self.world.agents if agents is None else agents)

    def _live_one_step(self) -> TensorDict:
        lived = self._answer(self.pending, EVERYBODY, self._clock)
        with self.stopwatch.timing("world"):
            self.pending = self.world.step(lived["actions"])
        self._clock += 1
        self.episodes.saw(self.pending)
        return lived

    def _answer(self, step: Step, rows: slice | Tensor, clock: int | Tensor) -> TensorDict:
        """Let the policy answer what some were told, in whose place the memories are."""
        if self._saw is not None:
            self._saw(step, rows)
        last_values = self._last_values(step)
        mine = self.policy.actions
        with self.stopwatch.timing("forward"):
            td = self.policy(as_batch(step, 0, mine.uniform(self.seed, self._agent[rows], clock)))
        for key in (mine.key, "actions", "act_log_prob", "values"):
            if key not in td:
                raise ContractError(
                    f"The policy left {key} out of its answer; a rollout needs it: td[{key!r}]."
                )
        require_fit(mine, td[mine.key].shape[-1], self._actions)
        self.episodes.acted(step.valid, rows)
        if step.reward.device.type == "cpu":
            # Before the world is told to do it; elsewhere looking would make the host wait.
            said = {key: td[key] for key in (mine.key, "values")}
            when = clock if isinstance(clock, int) else int(clock.max())
            require_finite_answer(self.policy, said, step.valid, f"step {when}")
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
        values = value_of(self.policy, self._state(len(nobody)), step.last_obs, nobody, nobody)
        return torch.where(step.truncated, values, 0.0)

    def _value_of(self, step: Step) -> Tensor:
        batch = (step.obs, step.first, step.trial)
        return value_of(self.policy, self._state(), *batch, valid=step.valid)

    def _require_finite(self, steps: TensorDict) -> None:
        """Look at a whole rollout; on the CPU every step was looked at when it was lived."""
        if self._agent.device.type != "cpu":
            there = steps["valid"]
            said = {key: torch.where(there, steps[key], 0.0) for key in ("act_log_prob", "values")}
            when = f"the rollout up to step {self._clock}"
            require_finite_answer(self.policy, said, there.any(1), when)

    def _cut(self, steps: TensorDict, entry: TensorDict, version: int, warm: TensorDict | None) -> Segments:
        """Cut `[A, length]` steps into rows `[A * length / horizon, horizon]` with their tails."""
        coming = self.pending
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
        rows = steps.unflatten(1, (self.length // self.horizon, self.horizon))
        if self._shorten:
            # Once a rollout, so that no update computes what is padding in all of it.
            rows["env_obs"] = tokens.shorten(rows["env_obs"])
        rows["values_now"], rows["ratio"] = rows["values"].clone(), torch.ones_like(rows["values"])
        tail = cast("TensorDict", torch.cat([rows[:, 1:, 0].select(*TAIL_KEYS), after[:, None]], dim=1))
        tail["values"] = worth_at_edges(steps["values"], steps, after, self.horizon)
        lead = None if warm is None else self._lead_of(steps, warm)
        return Segments(
            rows.flatten(0, 1),
            entry.flatten(0, 1),
            tail.flatten(0, 1),
            torch.full((len(rows) * rows.shape[1],), version, device=self._agent.device),
            self.world.agents,
            lead,
        )

    def _lead_of(self, steps: TensorDict, warm: TensorDict) -> Lead:
        """Gather what came before each row; before the first rollout there was nothing."""
        rows = steps.select(*READ, "actions").unflatten(1, (self.length // self.horizon, self.horizon))
        ends = rows[:, :, self.horizon - self.lead :]
        before = self._before or Lead(_nobody(ends[:, 0]), self.policy.lstm.cell.initial(len(ends)))
        self._before = Lead(ends[:, -1].clone(), warm[:, -1].clone())
        entry = torch.cat([before.entry[:, None], warm[:, :-1]], dim=1)
        lead = torch.cat([before.steps[:, None], ends[:, :-1]], dim=1)
        return Lead(lead.flatten(0, 1), entry.flatten(0, 1))

    def state(self) -> dict[str, Any]:
        """Say what waits to be answered, and what of the episodes that go on was counted."""
        lead = self._before
        return {
            "clock": self._clock,
            "pending": tree_of_step(self.pending),
            "episodes": self.episodes.state(),
            "lead": None
            if lead is None
            else {"steps": tree_of_seen(lead.steps), "entry": tree_of_seen(lead.entry)},
        }

    def restore(self, saved: Any, world: Mapping[str, Any] | None, *, rollouts: int) -> Anew | None:
        """Go on from there, in a world that goes on; who has to begin anew forgets everything."""
        pending = step_from(taken(saved, "pending", dict), self.pending)
        clock, agents = taken(saved, "clock", int), self.world.agents
        if clock != rollouts * self.length:
            raise ContractError(
                f"Its clock is at {clock}; {rollouts} rollouts end at {rollouts * self.length}."
            )
        self.episodes.restore(taken(saved, "episodes", dict))
        if self.lead and saved["lead"] is not None:
            kinds = self.policy.get_agent_experience_spec().select(*READ, "actions")
            steps = rows_from(saved["lead"], "steps", kinds, (agents, self.lead))
            entry = self.policy.lstm.cell.initial(agents)
            self._before = Lead(steps, seen_from(taken(saved["lead"], "entry", dict), entry))
        self.pending, anew = go_on(self.world, world, pending)
        self._clock = clock
        if anew is not None:
            self._forget(anew.who)
        return anew

    def _forget(self, who: Bool[Tensor, " A"]) -> None:
        """Let some begin without anything from before, whatever clears a memory otherwise."""
        self.policy.store.reset_slice(0, who)
        self.episodes.forget(who)
        if self._before is not None:
            self._before.steps["valid"][who] = False
            self._before.entry[who] = self.policy.lstm.cell.initial(int(who.sum()))

    @property
    def coming_lead(self) -> Lead:
        """What will lead into the next rollout."""
        assert self._before is not None, "a collector that keeps leads has lived a rollout"
        return self._before


def _stacked(states: list[TensorDict]) -> TensorDict:
    return cast("TensorDict", torch.stack(list[Any](states), dim=1))


def _nobody(steps: TensorDict) -> TensorDict:
    """Make steps in which nobody acts."""
    none = steps.clone()
    none["valid"] = torch.zeros_like(none["valid"])
    none["first"] = torch.zeros_like(none["first"])
    none["trial"] = torch.zeros_like(none["trial"])
    return none


def _room_of(size: tuple[int, int], leaf: Tensor) -> Tensor:
    return torch.zeros(*size, *leaf.shape[1:], dtype=leaf.dtype, device=leaf.device)


def _last_valid_value(steps: TensorDict) -> Float[Tensor, " A"]:
    """Say what each agent thought its last step was worth: the best guess while it is away."""
    valid = steps["valid"]
    when = torch.where(valid, torch.arange(valid.shape[1], device=valid.device), -1).amax(1)
    values = steps["values"].gather(1, when.clamp(min=0)[:, None])[:, 0]
    return torch.where(when >= 0, values, 0.0)
