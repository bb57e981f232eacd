"""Recording of a world under scripted actions, and the world under test."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from gymnasium import spaces

from holdfast import rng
from holdfast.errors import AgentCountError, ConfigError, ContractError, HoldfastError, error_text
from holdfast.rng import isolated_rng
from holdfast.types import Bool, Shaped, Tensor
from holdfast.worlds import Step, World, WorldSpec, closing_world
from holdfast.worlds.obs import FLAGS, StepSchema, flat_leaves

STREAM_SCRIPT = 1001
"""Far from the streams that worlds and policies draw from."""
UNCOPIED_STEPS = 64
"""Steps kept as the world returned them, to detect later writes into them."""

StepTensors = dict[str, Tensor]
"""A step as named tensors; observations by their leaves."""


def script(
    spec: WorldSpec, agents: int, steps: int, version: int = 0, device: torch.device | None = None
) -> Shaped[Tensor, "N A *action"]:
    """Draw actions as a function of (version, agent, step), whatever the number of agents."""
    space = spec.action
    width = 1 if space is None else space.shape[0]
    count = torch.arange(steps * width, device=device).view(steps, 1, width)
    agent = torch.arange(agents, device=device).view(1, agents, 1)
    if isinstance(space, spaces.Box):
        low, high = (torch.as_tensor(edge).to(count.device).nan_to_num() for edge in (space.low, space.high))
        low, high = low.clamp(min=-2.0), high.clamp(max=2.0)
        share = rng.uniform(version, STREAM_SCRIPT, agent, count)
        return torch.minimum(low + share * (high - low), high)
    sizes = [len(spec.action_names)] if space is None else space.nvec.tolist()
    columns = [
        rng.randint(int(size), version, STREAM_SCRIPT, agent[..., 0], count[..., at]) for at, size in enumerate(sizes)
    ]
    return columns[0] if space is None else torch.stack(columns, dim=-1)


@dataclass
class Recording:
    """All steps of a world, `[N,A,...]` by name, and the actions."""

    actions: Shaped[Tensor, "S A *action"]
    steps: StepTensors = field(default_factory=dict)
    has_last_obs: list[bool] = field(default_factory=list)
    """Which steps had a `last_obs`."""
    faults: dict[int, str] = field(default_factory=dict)
    """Wrong shapes and dtypes, by step."""
    last_faults: dict[int, str] = field(default_factory=dict)
    """Wrong shapes and dtypes of `last_obs`, by step."""
    raised: str = ""
    unreadable: str = ""
    """The fault that ended the recording: tensors of wrong shapes cannot be stacked."""
    overwritten: list[str] = field(default_factory=list)
    """Returned steps and passed actions that the world wrote into later."""

    def __getitem__(self, name: str) -> Tensor:
        return self.steps[name]

    @property
    def ended(self) -> Bool[Tensor, "N A"]:
        """Where an episode ended."""
        return self["terminated"] | self["truncated"]

    def leaves(self, name: str) -> StepTensors:
        """Return the leaves of `obs` or `last_obs`."""
        return {key: leaf for key, leaf in self.steps.items() if key == name or key.startswith(f"{name}[")}


class Recorder:
    """Records a world step by step."""

    def __init__(self, world: World, agents: int, actions: Tensor) -> None:
        self.rows: list[StepTensors] = []
        self.recording = Recording(actions)
        self._world, self._schema = world, StepSchema(world.spec, agents)
        self._uncopied: list[Step] = []

    def call(self, method: Callable[[], Step]) -> bool:
        """Call reset or step, record the result, and return whether the recording can continue."""
        number, recording = len(self.rows), self.recording
        try:
            step = method()
        except Exception as error:
            call = f"step {number}" if number else "reset()"
            recording.raised = f"{call} raised {error_text(error, 300)}"
            return False
        fault, readable = self._schema.find_error(step)
        if fault:
            recording.faults[number] = fault
        if not readable:
            recording.unreadable = f"step {number}: {fault}"
            return False
        if step.last_obs is not None:
            last_fault, _ = self._schema.find_obs_error(step.last_obs, "last_obs")
            recording.last_faults |= {number: last_fault} if last_fault else {}
        recording.has_last_obs.append(step.last_obs is not None)
        self.rows.append(step_tensors(step))
        if number < UNCOPIED_STEPS:
            self._uncopied.append(step)
        return True

    def act(self, actions: Tensor) -> bool:
        """Step the world, and check that it did not write into the actions."""
        passed = actions.to(self.rows[-1]["reward"].device, copy=True)
        readable = self.call(lambda: self._world.step(passed))
        if readable and not torch.equal(passed.to(actions.device), actions):
            self.recording.overwritten.append(f"the actions of step {len(self.rows) - 1}")
        return readable

    def close(self) -> Recording:
        """Return the recording, with its steps stacked."""
        recording, rows = self.recording, self.rows
        for number, (step, copy) in enumerate(zip(self._uncopied, rows, strict=False)):
            now = step_tensors(step)
            changed = [key for key, was in copy.items() if not bool(same(now[key], was).all())]
            if changed:
                recording.overwritten.append(f"step {number}, {', '.join(changed)}")
        recording.actions = recording.actions[: max(len(rows) - 1, 0)]
        if rows:
            recording.steps = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
            recording.actions = recording.actions.to(recording["reward"].device)
        return recording


def record(world: World, agents: int, actions: Tensor, enough: Callable[[Recorder], bool] | None = None) -> Recording:
    """Reset and act until the actions end, a step is unreadable, or `enough` returns true."""
    recorder = Recorder(world, agents, actions)
    readable = recorder.call(world.reset)
    for step_actions in actions:
        if not readable or (enough is not None and enough(recorder)):
            break
        readable = recorder.act(step_actions)
    return recorder.close()


def record_strict(world: World, agents: int, actions: Tensor) -> Recording:
    """Record all actions; raise if the world cannot."""
    recording = record(world, agents, actions)
    if recording.raised or recording.unreadable:
        raise ContractError(recording.raised or recording.unreadable)
    return recording


def step_tensors(step: Step) -> StepTensors:
    """Copy a step; a missing or misshapen `last_obs` becomes zeros."""
    tensors = {key: leaf.clone() for key, leaf in flat_leaves(step.obs, "obs").items()}
    last_obs = {} if step.last_obs is None else flat_leaves(step.last_obs, "last_obs")
    for key, leaf in list(tensors.items()):
        last = last_obs.get(f"last_{key}")
        if last is None or last.shape != leaf.shape:
            last = torch.zeros_like(leaf)
        tensors[f"last_{key}"] = last.clone()
    tensors["reward"] = step.reward.clone()
    # Flags of another dtype are a fault of law kind; the other laws read them as bool.
    return tensors | {flag: getattr(step, flag).bool().clone() for flag in FLAGS}


def same(a: Tensor, b: Tensor) -> Bool[Tensor, "..."]:
    """Return where two tensors are bit-equal; NaN equals NaN."""
    if a.shape != b.shape:
        raise ContractError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} of what should be the same.")
    return (a == b) | ((a != a) & (b != b))


Make = Callable[[int, int], World]
"""Makes a world: `make(agents, seed)`."""

AGENTS = 24
MIN_STEPS, MAX_STEPS = 128, 1024
"""Steps to record, unless the caller gives a number."""
EPISODES = 2
"""Episodes that each agent should end."""
SECONDS = 1.5
"""CPU time of the first recording: a check makes about a dozen."""
BYTES = 2**27
"""Size limit of a recording."""


@dataclass
class WorldUnderTest:
    """How to make a world; recordings of it are made on demand, and the first one is cached."""

    make: Make
    agents: int | None = None
    """None: as many as fill two environments, at least 24."""
    steps: int | None = None
    """None: until every agent ended some episodes, within a limit."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, number in (("agents", self.agents), ("steps", self.steps)):
            if number is not None and number < 1:
                raise ConfigError(f"{name}={number}: give at least 1, or leave it out.")

    @cached_property
    def requested_agents(self) -> int:
        """The number of agents; at least two environments by default, so that isolation can be measured."""
        if self.agents is not None:
            return self.agents
        try:
            with isolated_rng(0), closing_world(self.make_world(AGENTS, self.seed)) as world:
                agents_per_env = world.spec.agents_per_env
        except AgentCountError as error:
            agents_per_env = error.agents_per_env
        return max(AGENTS // agents_per_env, 2) * agents_per_env

    @cached_property
    def world(self) -> World:
        """The world of the first recording; `world.agents` is the actual number of agents."""
        agents = self.requested_agents
        with isolated_rng(0):
            return self.make_world(agents, self.seed)

    @property
    def spec(self) -> WorldSpec:
        """The world's spec."""
        return self.world.spec

    def make_world(self, agents: int, seed: int) -> World:
        """Make another world; raise if it cannot be made, or is not a world."""
        try:
            world = self.make(agents, seed)
        except HoldfastError:
            raise
        except Exception as error:
            raise ConfigError(f"The world cannot be made for {agents} agents: {error_text(error)}") from error
        if not isinstance(world, World) or not isinstance(world.spec, WorldSpec):
            raise ContractError(
                f"{type(world).__name__} is not a world; it needs agents, spec (a WorldSpec), reset(), step()."
            )
        return world

    @cached_property
    def recording(self) -> Recording:
        """The first recording: of `steps` steps, or until every agent ended some episodes."""
        actions = script(self.spec, self.world.agents, self.steps or MAX_STEPS)
        with isolated_rng(0):
            return record(self.world, self.world.agents, actions, recording_limit() if self.steps is None else None)

    @cached_property
    def after_reset(self) -> Recording:
        """The same actions in the same world, after another reset."""
        # Read first, because making it leaves the world in the middle of an episode.
        actions = self.recording.actions
        with isolated_rng(0):
            return record_strict(self.world, self.world.agents, actions)

    def rerun(self, actions: Tensor, *, seed: int | None = None) -> Recording:
        """Record actions in a new world."""
        seed = self.seed if seed is None else seed
        with isolated_rng(0), closing_world(self.make_world(self.requested_agents, seed)) as world:
            return record_strict(world, self.world.agents, actions)


def recording_limit() -> Callable[[Recorder], bool]:
    """Make a function that returns true once a recording has enough episodes, or takes too much time or memory."""
    started, ends = time.process_time(), torch.tensor(0)

    def enough(recorder: Recorder) -> bool:
        """Count the last step; the limits are checked every 16 steps."""
        nonlocal ends
        step, steps = recorder.rows[-1], len(recorder.rows)
        ends = ends.to(step["reward"].device) + (step["terminated"] | step["truncated"]).long()
        if steps % 16:
            return False
        size = sum(leaf.numel() * leaf.element_size() for leaf in step.values())
        if time.process_time() - started > SECONDS or steps * size > BYTES:
            return True
        return steps > MIN_STEPS and int(ends.min()) >= EPISODES

    return enough
