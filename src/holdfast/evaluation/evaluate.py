"""Episodes of one policy, or of two in a match; memory intact, cleared, frozen or shuffled."""

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args
from warnings import warn

import torch
from tensordict import TensorDict

from holdfast import rng
from holdfast.errors import ContractError
from holdfast.memory.cell import select_rows
from holdfast.policies import LSTMWrapper
from holdfast.rollout.collector import step_to_td
from holdfast.types import Bool, Float, Int, Shaped, Tensor
from holdfast.worlds import Step, World, WorldSpec
from holdfast.worlds.checked_world import checked, raise_violations
from holdfast.worlds.step import select


class EpisodeCounter:
    """Sums rewards and steps until every agent finished `episodes_per_agent` episodes.

    All agents count equally many episodes, so that short ones are not over-represented. Rewards and steps count where
    the agent acted. An episode without an end in `max_steps` steps is cut: it counts as it is, and its agent plays no
    further one. The returns of episodes that are not played are NaN.
    """

    def __init__(self, agents: int, episodes_per_agent: int, device: torch.device, max_steps: int) -> None:
        self.episodes_per_agent, self.max_steps = episodes_per_agent, max_steps
        self._total = torch.zeros(agents, dtype=torch.float64, device=device)
        self._steps, self._finished, self._since = torch.zeros(3, agents, dtype=torch.long, device=device)
        self.cut = torch.zeros(agents, dtype=torch.bool, device=device)
        """Agents whose last episode was cut."""
        # One column more than there are episodes, for agents that have finished them all.
        self._returns = self._total.new_full((agents, episodes_per_agent + 1), torch.nan)
        self._lengths = self._steps.new_zeros(agents, episodes_per_agent + 1)

    @property
    def done(self) -> bool:
        """Whether every agent finished its episodes."""
        return int(self._finished.min()) >= self.episodes_per_agent

    @property
    def returns(self) -> Float[Tensor, "A share"]:
        """Return of every agent's episodes."""
        return self._returns[:, :-1].float()

    @property
    def lengths(self) -> Int[Tensor, "A share"]:
        """Length of every agent's episodes."""
        return self._lengths[:, :-1]

    def on_step(self, acted: Bool[Tensor, " A"], step: Step) -> None:
        """Count a world step; `acted` is the mask of agents whose action it answers."""
        ended = step.terminated | step.truncated
        self._since = torch.where(ended, 0, self._since + 1)
        cut = (self._since >= self.max_steps) & (self._finished < self.episodes_per_agent)
        slot = self._finished.clamp(max=self.episodes_per_agent)[:, None]
        self._total += torch.where(acted, step.reward, 0.0)
        self._steps += acted
        for table, sums in ((self._returns, self._total), (self._lengths, self._steps)):
            table.scatter_(1, slot, torch.where(ended | cut, sums, table.gather(1, slot)[:, 0])[:, None])
            sums.masked_fill_(ended | cut, 0)
        self._finished = torch.where(cut, self.episodes_per_agent, self._finished + ended)
        self.cut |= cut

    def __str__(self) -> str:
        count, share = self._finished.clamp(max=self.episodes_per_agent), self.episodes_per_agent
        return f"{int(count.sum()):,} of {len(count) * share:,} episodes are played"


def _select_episodes(table: Int[Tensor, "A share"] | Float[Tensor, "A share"], episodes: int, together: int) -> Tensor:
    """Select episodes round by round, all agents first.

    Spread the last, partial round evenly over agents, because neighbouring rows share an environment;
    `together` rows are selected or dropped as a group.
    """
    agents, rounds = table.shape
    groups, left = agents // together, (episodes - (rounds - 1) * agents) // together
    selected = torch.arange(left, device=table.device) * groups // left
    rows = (selected[:, None] * together + torch.arange(together, device=table.device)).flatten()
    return torch.cat([table[:, :-1].T.flatten(), table[rows, -1]])


MemoryMode = Literal["intact", "cleared", "frozen", "shuffled"]
MEMORY_MODES: tuple[MemoryMode, ...] = get_args(MemoryMode)


class EvalPolicy:
    """An evaluation copy of a policy, for some rows of a world, with optional memory ablation.

    `cleared`: the state is reset before every step. `frozen`: the state after the first step of an episode
    stays until the episode ends. `shuffled`: before every step each agent gets the state of another one, at
    a random offset that all rows share. Resets at episode starts apply as always.
    """

    def __init__(
        self,
        policy: LSTMWrapper,
        spec: WorldSpec,
        rows: Int[Tensor, " A"],
        *,
        memory: MemoryMode = "intact",
        greedy: bool = True,
        seed: int = 0,
    ) -> None:
        if memory not in MEMORY_MODES:
            raise ContractError(f"memory={memory!r} is not one of {', '.join(MEMORY_MODES)}.")
        if memory == "shuffled" and len(rows) < 2:
            raise ContractError("memory='shuffled' swaps states between agents; it needs 2 agents or more.")
        self._memory, self._greedy, self._seed = memory, greedy, seed
        self._rows, self._clock = rows, 0
        # Moving a copy makes its LSTM weights contiguous again, as cuDNN needs them.
        self._policy = copy.deepcopy(policy).eval().to(rows.device)
        if self._policy.binding.spec is None or self._policy.binding.spec.interface != spec.interface:
            self._policy.bind(spec, learn=False)
        self._policy.store.allocate({0: len(rows)})
        # Agents that have acted in their episode: from then on their state can be frozen.
        self._has_acted = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)

    def act(self, step: Step) -> Shaped[Tensor, "A ..."]:
        """Return the actions of these rows."""
        actions = self._policy.actions
        frozen_state = self._ablate_memory()
        if self._greedy:
            draws = actions.no_draws(len(self._rows), self._rows.device)
        else:
            draws = actions.draws_for(self._seed, self._rows, self._clock)
        td = self._policy(step_to_td(step, 0, draws))
        if frozen_state is not None:
            self._freeze(step, frozen_state)
        self._clock += 1
        return self._policy.env_actions(actions.greedy(td[actions.key]) if self._greedy else td["actions"])

    def _ablate_memory(self) -> TensorDict | None:
        """Ablate the states before a step; return a copy of those to freeze."""
        store, agents = self._policy.store, len(self._rows)
        if self._memory == "cleared":
            store.reset()
        elif self._memory == "shuffled":
            agent = torch.zeros((), dtype=torch.long)
            offset = 1 + int(rng.randint(agents - 1, self._seed, rng.STREAM_SHUFFLE, agent, self._clock))
            order = torch.arange(agents, device=self._rows.device).roll(offset)
            store.write(0, store.read(0, agents)[order])
        return store.read(0, agents).clone() if self._memory == "frozen" else None

    def _freeze(self, step: Step, state: TensorDict) -> None:
        store = self._policy.store
        frozen = self._has_acted & ~step.first
        store.write(0, select_rows(frozen, state, store.read(0, len(state))))
        self._has_acted = frozen | step.valid


MAX_STEPS = 100_000
"""Steps after which an episode is cut."""
PROGRESS_S = 10.0
"""Seconds between two lines of progress."""
Log = Callable[[str], object]


@dataclass(frozen=True)
class Evaluation:
    """Returns and lengths of finished episodes."""

    returns: Float[Tensor, " episodes"]
    lengths: Int[Tensor, " episodes"]
    memory: MemoryMode
    together: int = 1
    """Number of consecutive episodes that shared an environment, and so may be correlated."""
    cut: int = 0
    """Number of episodes that did not end."""

    @property
    def return_mean(self) -> float:
        """The mean return."""
        return float(self.returns.mean())

    @property
    def length_mean(self) -> float:
        """The mean length."""
        return float(self.lengths.double().mean())

    @property
    def per_agent(self) -> Float[Tensor, "groups together"]:
        """Returns, grouped by shared environment."""
        return self.returns.unflatten(0, (-1, self.together))


@torch.no_grad()
def evaluate(
    policy: LSTMWrapper,
    world: World,
    *,
    episodes: int,
    memory: MemoryMode = "intact",
    greedy: bool = True,
    seed: int = 0,
    max_steps: int = MAX_STEPS,
    log: Log | None = None,
) -> Evaluation:
    """Play episodes with a copy of the policy, equally many per agent (to within one).

    `memory` is the ablation: see `EvalPolicy`. Without `greedy`, actions are sampled; `seed` decides all
    draws but the world's. An episode without an end in `max_steps` steps is cut: it counts with its return until then,
    and its agent plays no further one. `log` gets a line of progress every ten seconds, and one if episodes were cut.
    """
    if episodes < 1:
        raise ContractError(f"episodes={episodes}: an evaluation needs at least one.")
    with _seeded_rng(seed):
        world = checked(world)
        step = world.reset()
        rows = torch.arange(world.agents, device=step.reward.device)
        player = EvalPolicy(policy, world.spec, rows, memory=memory, greedy=greedy, seed=seed)
        rounds = math.ceil(episodes / world.agents)
        counter = EpisodeCounter(world.agents, rounds, rows.device, max_steps)
        _play_episodes(world, step, player.act, counter, log)
    together = 1 if episodes % world.spec.agents_per_env else world.spec.agents_per_env
    tables = (counter.returns, counter.lengths)
    returns, lengths = (_select_episodes(table, episodes, together).unflatten(0, (-1, together)) for table in tables)
    played = ~returns.isnan().any(1)
    returns, lengths, cut = returns[played].flatten(), lengths[played].flatten(), int(counter.cut.sum())
    if cut:
        noun = "episode" if cut == 1 else "episodes"
        (log or warn)(
            f"{cut:,} {noun} did not end within {max_steps:,} steps: each counts with its return until then, and its "
            f"agent plays no further one, so that {len(returns):,} of {episodes:,} are counted; "
            "trainer.eval_max_steps=N (holdfast eval --max-steps N) sets the limit."
        )
    return Evaluation(returns, lengths, memory, together, cut)


@dataclass(frozen=True)
class Match:
    """Evaluations of two policies in the same environments: first leg, and second leg with sides swapped."""

    ours: tuple[Evaluation, Evaluation]
    opponent: tuple[Evaluation, Evaluation]

    @property
    def margins(self) -> tuple[Float[Tensor, "_ 1"], ...]:
        """Difference of mean returns in each environment and round."""
        pairs = zip(self.ours, self.opponent, strict=True)
        return tuple(_mean_per_env(one) - _mean_per_env(other) for one, other in pairs)


@torch.no_grad()
def compete(
    policy: LSTMWrapper,
    other: LSTMWrapper,
    world: World,
    *,
    episodes: int,
    memory: MemoryMode = "intact",
    greedy: bool = True,
    seed: int = 0,
    max_steps: int = MAX_STEPS,
    log: Log | None = None,
) -> Match:
    """Play against another policy, which controls every second agent of each environment.

    The world is played twice, with sides swapped, in complete rounds: at least `episodes` in total, and both
    policies play each row equally often. `memory` ablates `policy`; the memory of `other` stays intact. An episode
    without an end in `max_steps` steps is an error.
    """
    if world.spec.agents_per_env < 2:
        raise ContractError(
            f"{world.spec.name or type(world).__name__} has one agent per environment; a match needs several "
            "(spec.agents_per_env), as in arena."
        )
    world = checked(world)
    rounds, sides = math.ceil(episodes / 2 / world.agents), list[tuple[Evaluation, Evaluation]]()
    for swapped in (False, True):
        with _seeded_rng(seed):
            step = world.reset()
            rows = torch.arange(world.agents, device=step.reward.device)
            second = (rows % world.spec.agents_per_env) % 2 == 1
            ours, opponents = rows[second == swapped], rows[second != swapped]
            one = EvalPolicy(policy, world.spec, ours, memory=memory, greedy=greedy, seed=seed)
            two = EvalPolicy(other, world.spec, opponents, greedy=greedy, seed=seed)
            act = _act_jointly((one, ours), (two, opponents))
            counter = EpisodeCounter(world.agents, rounds, rows.device, max_steps)
            _play_episodes(world, step, act, counter, log)
        if bool(counter.cut.any()):
            agent = int(counter.cut.long().argmax())
            raise ContractError(
                f"Agent {agent} finished no episode within {max_steps:,} steps; a match needs episodes that end. "
                "trainer.eval_max_steps=N (holdfast eval --max-steps N) sets the limit."
            )
        envs = world.agents // world.spec.agents_per_env
        sides.append((_side(counter, ours, envs, memory), _side(counter, opponents, envs, "intact")))
    (one, two), (three, four) = sides
    return Match((one, three), (two, four))


def _play_episodes(
    world: World, step: Step, act: Callable[[Step], Tensor], counter: EpisodeCounter, log: Log | None
) -> None:
    """Step the world until the counter has all its episodes."""
    steps, next_line = 0, time.monotonic() + PROGRESS_S
    while not counter.done:
        acted, step = step.valid, world.step(act(step))
        counter.on_step(acted, step)
        steps += 1
        if log is not None and time.monotonic() >= next_line:
            next_line = time.monotonic() + PROGRESS_S
            log(f"evaluating: {counter} after {steps:,} steps; one that does not end is cut at {counter.max_steps:,}")
    raise_violations(world)


@contextmanager
def _seeded_rng(seed: int) -> Iterator[None]:
    """Seed torch's global generators, for policies and worlds that use them, and restore them after."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def _act_jointly(*players: tuple[EvalPolicy, Int[Tensor, " _"]]) -> Callable[[Step], Tensor]:
    """Let two policies act as one, each for its own rows."""
    order = torch.cat([rows for _, rows in players]).argsort()
    # Indices on the CPU, as `select` takes them.
    parts = [(player, rows.cpu()) for player, rows in players]
    return lambda step: torch.cat([player.act(select(step, rows)) for player, rows in parts])[order]


def _mean_per_env(side: Evaluation) -> Float[Tensor, "envs 1"]:
    return side.per_agent.double().mean(1, keepdim=True)


def _side(counter: EpisodeCounter, rows: Int[Tensor, " _"], envs: int, memory: MemoryMode) -> Evaluation:
    """Evaluation of one side's rows, round by round."""
    returns, lengths = (table[rows].T.flatten() for table in (counter.returns, counter.lengths))
    return Evaluation(returns, lengths, memory, len(rows) // envs)
