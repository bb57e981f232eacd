"""A life in a world: scripted actions, and a copy of all that was told."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from gymnasium import spaces

from holdfast.errors import ContractError
from holdfast.shapes import Bool, Shaped, Tensor
from holdfast.worlds import Step, World, WorldSpec, draws
from holdfast.worlds.kind import FLAGS, Kinds, flat_leaves

STREAM_SCRIPT = 1001
"""Far from the streams that worlds and policies draw from."""
KEPT = 64
"""So many steps are kept as they were handed out, to see whether they are written to later."""

Told = dict[str, Tensor]
"""A step as named tensors; what is seen goes by its leaves."""


def script(
    spec: WorldSpec, agents: int, steps: int, version: int = 0, device: torch.device | None = None
) -> Shaped[Tensor, "N A *action"]:
    """Draw what everybody does: a pure function of (version, agent, step), so it is the same in any crowd.

    In a Box a fifth of the draws lies outside of it: policies hand out raw samples, and the world clips.
    """
    space = spec.action
    width = 1 if space is None else space.shape[0]
    count = torch.arange(steps * width, device=device).view(steps, 1, width)
    agent = torch.arange(agents, device=device).view(1, agents, 1)
    if isinstance(space, spaces.Box):
        low, high = (torch.as_tensor(edge).to(count.device).nan_to_num() for edge in (space.low, space.high))
        low, high = low.clamp(min=-2.0), high.clamp(max=2.0)
        share = draws.uniform(version, STREAM_SCRIPT, agent, count)
        return low + (1.25 * share - 0.125) * (high - low)
    sizes = [len(spec.action_names)] if space is None else space.nvec.tolist()
    drawn = [
        draws.below(int(size), version, STREAM_SCRIPT, agent[..., 0], count[..., place])
        for place, size in enumerate(sizes)
    ]
    return drawn[0] if space is None else torch.stack(drawn, dim=-1)


@dataclass(frozen=True)
class Life:
    """All that was told in a life, `[N,A,...]` by name, and what was done."""

    told: Told
    actions: Shaped[Tensor, "S A *action"]
    given: Bool[Tensor, " N"]
    """In which steps there was a `last_obs`."""
    faults: dict[int, str]
    """What is of the wrong kind, by step."""
    last_faults: dict[int, str]
    """What is of the wrong kind in `last_obs`, by step."""
    raised: str = ""
    unreadable: str = ""
    """What is so wrong that the life ended there: nothing can be said of shapes that do not fit."""
    overwritten: tuple[str, ...] = ()
    """What was handed out and written to later, or handed in and written to."""

    def __getitem__(self, name: str) -> Tensor:
        return self.told[name]

    @property
    def ended(self) -> Bool[Tensor, "N A"]:
        """Where an episode ended."""
        return self["terminated"] | self["truncated"]

    def leaves(self, name: str) -> Told:
        """What is seen, by its leaves: of `obs` or of `last_obs`."""
        return {key: leaf for key, leaf in self.told.items() if key == name or key.startswith(f"{name}[")}


@dataclass
class Diary:
    """Takes down a life as it is lived."""

    world: World
    kinds: Kinds
    rows: list[Told] = field(default_factory=list)
    given: list[bool] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    last_faults: dict[int, str] = field(default_factory=dict)
    kept: list[tuple[Step, Told]] = field(default_factory=list)
    overwritten: list[str] = field(default_factory=list)
    raised: str = ""
    unreadable: str = ""

    def ask(self, what: Callable[[], Step]) -> bool:
        """Let the world take a step, take down what it says, and say whether life goes on."""
        number = len(self.rows)
        try:
            step = what()
        except Exception as error:
            told = " ".join(str(error).split())[:300]
            self.raised = f"{'reset()' if number == 0 else f'step {number}'} raised {_kind(error)}{told}"
            return False
        fault, readable = self.kinds.fault_of(step)
        if fault:
            self.faults[number] = fault
        if not readable:
            self.unreadable = f"step {number}: {fault}"
            return False
        if step.last_obs is not None:
            last_fault, _ = self.kinds.seen_fault(step.last_obs, "last_obs")
            self.last_faults |= {number: last_fault} if last_fault else {}
        self.rows.append(told_by(step))
        self.given.append(step.last_obs is not None)
        if number < KEPT:
            self.kept.append((step, self.rows[-1]))
        return True

    def act(self, actions: Tensor) -> bool:
        """Do something, and look whether what was handed in is left as it was."""
        own = actions.to(self.rows[-1]["reward"].device, copy=True)
        on = self.ask(lambda: self.world.step(own))
        if on and not torch.equal(own.to(actions.device), actions):
            self.overwritten.append(f"the actions of step {len(self.rows) - 1}")
        return on

    def close(self, actions: Tensor) -> Life:
        """Make a life of it."""
        for number, (step, copy) in enumerate(self.kept):
            now = told_by(step)
            changed = [key for key, was in copy.items() if not bool(same(now[key], was).all())]
            if changed:
                self.overwritten.append(f"step {number}, {', '.join(changed)}")
        stack = {key: torch.stack([row[key] for row in self.rows]) for key in (self.rows or [{}])[0]}
        done = actions[: max(len(self.rows) - 1, 0)]
        return Life(
            told=stack,
            actions=done.to(stack["reward"].device) if stack else done,
            given=torch.tensor(self.given, dtype=torch.bool),
            faults=self.faults,
            last_faults=self.last_faults,
            raised=self.raised,
            unreadable=self.unreadable,
            overwritten=tuple(self.overwritten),
        )


def live(world: World, agents: int, actions: Tensor, enough: Callable[[Diary], bool] | None = None) -> Life:
    """Reset and act until the script is over, nothing can be read any more, or it is enough."""
    diary = Diary(world, Kinds(world.spec, agents))
    on = diary.ask(world.reset)
    for each in actions:
        if not on or (enough is not None and enough(diary)):
            break
        on = diary.act(each)
    return diary.close(actions)


def relive(world: World, agents: int, actions: Tensor) -> Life:
    """Live a script to its end; a world that cannot is an error."""
    life = live(world, agents, actions)
    if life.raised or life.unreadable:
        raise ContractError(life.raised or life.unreadable)
    return life


def told_by(step: Step) -> Told:
    """Copy what a step says; where it has no last observation, or one of no use, there are zeros."""
    told = {key: leaf.clone() for key, leaf in flat_leaves(step.obs, "obs").items()}
    last = {} if step.last_obs is None else flat_leaves(step.last_obs, "last_obs")
    for key, leaf in list(told.items()):
        given = last.get(f"last_{key}")
        if given is None or given.shape != leaf.shape:
            told[f"last_{key}"] = torch.zeros_like(leaf)
        else:
            told[f"last_{key}"] = given.clone()
    told["reward"] = step.reward.clone()
    # Flags of another kind are a fault of their own; here they say what they mean.
    return told | {flag: getattr(step, flag).bool().clone() for flag in FLAGS}


def same(a: Tensor, b: Tensor) -> Bool[Tensor, "..."]:
    """Say where two tensors are bit for bit the same; NaN is the same as NaN."""
    if a.shape != b.shape:
        raise ContractError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} of what should be the same.")
    return (a == b) | ((a != a) & (b != b))


def _kind(error: Exception) -> str:
    return f"{type(error).__name__}: " if str(error) else type(error).__name__
