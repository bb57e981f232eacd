"""CheckedWorld: a wrapper that raises at the first step that breaks the world contract."""

import math
from collections.abc import Callable, Mapping
from functools import partial, reduce
from operator import or_
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from tensordict import TensorDictBase

from holdfast.errors import ContractError, HoldfastError, located_error_text
from holdfast.state_tree import get_field, get_tensor_like, mismatch
from holdfast.types import Bool, Int, Shaped, Tensor
from holdfast.worlds.obs import Obs, StepSchema, has_discrete, out_of_range, tensors_of
from holdfast.worlds.reshard import reshard
from holdfast.worlds.save_restore import restore_world, save_world
from holdfast.worlds.step import ALL, AsyncWorld, PartialStep, Restarted, Step, World, as_array, latest

T = TypeVar("T")
LARGEST_REWARD = 1e15
"""The sum of squares of larger ones overflows float32, so the value loss would not be finite."""
VIOLATIONS = {
    "reward": f"got a reward that is not finite, or beyond {LARGEST_REWARD:g}, where losses overflow; scale rewards",
    "obs": "got an observation that is not finite",
    "outside": "got an observation outside of its discrete observation space",
    "last_obs": "was truncated, and its last_obs is not finite",
    "never": "was truncated, but the world declares truncates='never'; declare 'always' and give last_obs",
    "again": "ends (terminated, truncated) twice; set the flag once per episode",
    "no end": "starts an episode (first), but its previous episode has not ended; set terminated or truncated",
    "no first": "acts after its episode ended; set first where the next episode starts, and valid=False until then",
}
"""What can be wrong with an agent's row, in the order of precedence."""
TRACKED = {
    "over": torch.bool,
    "acting": torch.bool,
    "has_acted": torch.bool,
    "violations": torch.long,
    "violation_steps": torch.long,
}
"""State per agent: whether its episode is over, whether it acts now, whether it has acted in this episode; its first
violations as a bit mask, and their step."""


@runtime_checkable
class RecordsViolations(Protocol):
    """A world that records violations on the device and raises them on request."""

    def raise_violations(self) -> None:
        """Raise the first violation, if any."""


class Checked:
    """Marker of worlds that raise at the first step that breaks the contract."""


class CheckedWorld(Checked):
    """A world with its contract checked at every step.

    On the CPU violations are raised at once. On a GPU reading them would synchronize, so they are recorded on the
    device, and `raise_violations()` is called once per rollout.
    """

    def __init__(self, world: World, name: str = "", first_agent: int = 0) -> None:
        self.world, self.agents, self.spec = world, world.agents, world.spec
        self.name = name or world.spec.name or type(world).__name__
        # Agents of a mixture are numbered over all its worlds.
        self._first_agent = first_agent
        self._schema = StepSchema(world.spec, world.agents)
        self._has_discrete_obs = has_discrete(world.spec.observation_space)
        self._layout: list[object] | None = None
        """Shapes, dtypes and devices of the last step: one like it needs no second look."""
        self._steps = -1
        # Whether all agents act in an episode, neither over nor new: most steps leave that so.
        self._all_act = False
        empty = torch.zeros(0)
        self._over = self._acting = self._has_acted = self._violations = self._violation_steps = empty
        self._start = empty
        """The number of the step before a rollout that is checked as a whole."""

    def reset(self) -> Step:
        """Start every agent's first episode."""
        step = self._call(self.world.reset)
        self._require(step, self._schema)
        self._steps, self._all_act = 0, False
        self._over = torch.ones_like(step.first)
        self._acting, self._has_acted = torch.zeros_like(step.first), torch.zeros_like(step.first)
        self._violations = torch.zeros(self.agents, dtype=torch.long, device=step.reward.device)
        self._violation_steps = torch.full_like(self._violations, -1)
        ends = step.terminated | step.truncated
        for wrong, message in ((~step.first, "first is false"), (ends, "an end (terminated, truncated) is set")):
            if bool(wrong.any()):
                agent = self._first_agent + int(wrong.nonzero()[0])
                raise self._error(f"agent {agent} starts its first episode, but {message}")
        return self._check_step(step)

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Take one action per agent."""
        self._steps += 1
        step = self._call(partial(self.world.step, actions))
        self._require(step, self._schema)
        return self._check_step(step)

    def begin_rollout(self, length: int) -> None:
        """Count the steps of a rollout that `check_rollout` checks next."""
        if self._start.device != self._over.device or not self._start.numel():
            self._start = torch.zeros_like(self._violation_steps[:1])
        self._start.fill_(self._steps)
        self._steps += length

    def check_rollout(self, steps: TensorDictBase, after: Step, last_obs_ok: Bool[Tensor, "A L"]) -> None:
        """Record the violations in a rollout `[A,L]` whose steps were not checked one by one."""

        def results(key: str, last: Tensor) -> Tensor:
            return torch.cat([steps[key][:, 1:], last[:, None]], dim=1)

        acting = steps["valid"]
        first, valid = results("first", after.first), results("valid", after.valid)
        truncated, ends = results("truncateds", after.truncated), results("dones", after.terminated)
        ends = ends | truncated
        # As in `_check_step`: an end sets `over`, `first` clears it; acting sets `has_acted`, `first` clears it.
        all_over = latest(ends, self._over) > latest(first, ~self._over)
        all_acted = latest(valid, self._has_acted) >= latest(first, ~self._has_acted)
        was_over, acted = all_over[:, :-1], all_acted[:, :-1]
        masks = {
            "reward": acting & ~(results("rewards", after.reward).abs() <= LARGEST_REWARD),
            "obs": torch.cat(
                [_non_finite_steps(steps["env_obs"], acting)[:, 1:], non_finite_rows(after.obs, after.valid)[:, None]],
                1,
            ),
            "again": ends & was_over,
            "no end": first & acted & ~(was_over | ends),
            "no first": valid & (was_over | ends) & ~first,
            "last_obs": truncated & ~last_obs_ok,
        }
        if self._has_discrete_obs:
            flat = out_of_range(steps["env_obs"].flatten(0, 1), self.spec.observation_space).unflatten(0, acting.shape)
            masks["outside"] = valid & torch.cat(
                [flat[:, 1:], out_of_range(after.obs, self.spec.observation_space)[:, None]], 1
            )
        if self.spec.truncates == "never":
            masks["never"] = truncated
        bits = [masks[name].long() << bit for bit, name in enumerate(VIOLATIONS) if name in masks]
        wrong = torch.stack(bits).sum(0)
        step = (wrong != 0).int().argmax(1)
        new = (self._violations == 0) & (wrong != 0).any(1)
        self._violations.copy_(torch.where(new, wrong.gather(1, step[:, None])[:, 0], self._violations))
        self._violation_steps.copy_(torch.where(new, self._start + 1 + step, self._violation_steps))
        self._over.copy_(all_over[:, -1])
        self._has_acted.copy_(all_acted[:, -1])
        self._acting.copy_(after.valid)
        self._all_act = False

    def state(self) -> dict[str, Any] | None:
        """Return the state of the world and of the checks."""
        world = save_world(self.world)
        if world is None:
            return None
        if self._steps < 0:
            raise self._error("call reset() before state()")
        tracked = {name: vars(self)[f"_{name}"].clone() for name in TRACKED}
        return {"world": world, "steps": self._steps, **tracked}

    def restore(self, state: Mapping[str, Any]) -> Restarted | None:
        """Restore the world and the checks; the state may be that of the world in worker processes."""
        (state,) = reshard(state, 0, 1, self.state)
        steps = get_field(state, "steps", int)
        likes = {name: torch.zeros(self.agents, dtype=dtype) for name, dtype in TRACKED.items()}
        tracked = {f"_{name}": get_tensor_like(state, name, like) for name, like in likes.items()}
        if bool((tracked["_violations"] >> len(VIOLATIONS)).any()):
            raise mismatch("'violations' has bits that stand for no violation")
        restarted = restore_world(self.world, get_field(state, "world", dict))
        self._steps, self._all_act = steps, False
        vars(self).update(tracked)
        if restarted is not None:
            mask, valid = restarted.mask, restarted.step.valid
            self._to(mask.device)
            self._over = self._over & ~mask
            self._acting = torch.where(mask, valid, self._acting)
            self._has_acted = torch.where(mask, valid, self._has_acted)
        return restarted

    def raise_violations(self) -> None:
        """Raise the first violation, if any."""
        raise_violations(self.world)
        wrong = self._violations != 0
        if not bool(wrong.any()):
            return
        first = torch.where(wrong, self._violation_steps, torch.iinfo(torch.long).max)
        agent = int(first.argmin())
        bits = int(self._violations[agent])
        # The lowest set bit is the violation that comes first in the table.
        violation = list(VIOLATIONS.values())[(bits & -bits).bit_length() - 1]
        self._steps = int(first[agent])
        raise self._error(f"agent {self._first_agent + agent} {violation}")

    def _call(self, method: Callable[[], T]) -> T:
        """Call a method of the world; its exceptions become errors of the world, with file and line."""
        try:
            return method()
        except HoldfastError:
            raise
        except (Exception, SystemExit) as error:
            # An environment that calls sys.exit(0) must not end a run as if it were finished.
            raise self._error(f"it raised {located_error_text(error)}") from error

    def _require(self, step: Step, schema: StepSchema) -> None:
        """Require the shapes and dtypes of the spec."""
        layout = _layout(step, schema.agents)
        if layout is not None and layout == self._layout:
            return
        error, _ = schema.find_error(step)
        if not error and self.spec.truncates == "always":
            if step.last_obs is None:
                error = (
                    "there is no last_obs, and the world declares truncates='always'; give the last "
                    "observation of truncated episodes, or declare truncates='never'"
                )
            else:
                error, _ = schema.find_obs_error(step.last_obs, "last_obs")
        if error:
            raise self._error(error)
        self._layout = layout

    def _check_step(self, step: Step, rows: slice | Tensor = ALL) -> Step:
        """Record the violations of a step of some rows; on the CPU, raise them."""
        self._to(step.reward.device)
        if self._all_act and self._is_ordinary(step):
            return step
        rows = as_array(rows) if isinstance(rows, Tensor) else rows
        terminated, truncated, first, valid = map(as_array, (step.terminated, step.truncated, step.first, step.valid))
        tracked_over, tracked_acting, tracked_acted = map(as_array, (self._over, self._acting, self._has_acted))
        ends, was_over = terminated | truncated, tracked_over[rows]
        over, has_acted = was_over | ends, tracked_acted[rows]
        masks = {
            # Not `>`: a comparison with NaN is false.
            "reward": tracked_acting[rows] & ~(abs(as_array(step.reward)) <= LARGEST_REWARD),
            "obs": non_finite_rows(step.obs, valid),
            "again": ends & was_over,
            "no end": first & has_acted & ~over,
            "no first": valid & over & ~first,
        }
        if self._has_discrete_obs:
            masks["outside"] = valid & as_array(out_of_range(step.obs, self.spec.observation_space))
        if self.spec.truncates == "never":
            masks["never"] = truncated
        elif step.last_obs is not None:
            masks["last_obs"] = non_finite_rows(step.last_obs, truncated)
        tracked_over[rows], tracked_acting[rows] = over & ~first, valid
        tracked_acted[rows] = (has_acted & ~first) | valid
        if step.reward.device.type == "cpu":
            self._all_act = bool(tracked_acting.all() and tracked_acted.all() and not tracked_over.any())
            # Most steps are right.
            if not reduce(or_, masks.values()).any():
                return step
            masks = {name: torch.from_numpy(mask) for name, mask in masks.items()}
        bits = [masks[name].long() << bit for bit, name in enumerate(VIOLATIONS) if name in masks]
        wrong = torch.stack(bits).sum(0)
        new = (self._violations[rows] == 0) & (wrong != 0)
        self._violations[rows] = torch.where(new, wrong, self._violations[rows])
        self._violation_steps[rows] = torch.where(new, self._steps, self._violation_steps[rows])
        if step.reward.device.type == "cpu":
            self.raise_violations()
        return step

    def _is_ordinary(self, step: Step) -> bool:
        """Whether a step is right and changes nothing that is tracked: all agents act, and each end is a start.

        Asked while all agents act. A quarter of the time of the exact checks, which follow where this does not hold.
        """
        ends, first, valid = (as_array(flags) for flags in (step.terminated, step.first, step.valid))
        return bool(
            not np.count_nonzero(as_array(step.truncated))
            and np.count_nonzero(valid) == len(valid)
            and not np.count_nonzero(ends != first)
            # Sums, which are not finite where a number is not; if a sum overflows, the exact checks decide.
            and step.reward.abs().sum().item() <= LARGEST_REWARD
            and all(math.isfinite(leaf.sum().item()) for leaf in _float_leaves(step.obs))
            and not (self._has_discrete_obs and out_of_range(step.obs, self.spec.observation_space).any())
        )

    def _to(self, device: torch.device) -> None:
        """Move to the device of the world; a restored state may be on another one."""
        if self._over.device != device:
            vars(self).update({f"_{name}": vars(self)[f"_{name}"].to(device) for name in TRACKED})

    def _error(self, message: str) -> ContractError:
        when = "reset()" if self._steps <= 0 else f"step {self._steps}"
        return ContractError(f"World {self.name}, {when}: {message}.")


class CheckedAsyncWorld(CheckedWorld):
    """An AsyncWorld with its contract checked at every step."""

    def __init__(self, world: AsyncWorld) -> None:
        super().__init__(world)
        self._async_world, self.groups, self._receives = world, world.groups, 0

    def send(self, rows: Int[Tensor, " N"], actions: Shaped[Tensor, "N ..."]) -> None:
        """Start the steps of some agents."""
        self._call(partial(self._async_world.send, rows, actions))

    def recv(self) -> PartialStep:
        """Wait for the steps of some agents."""
        # One receive per group is one step.
        self._steps += self._receives % len(self.groups) == 0
        self._receives += 1
        part = self._call(self._async_world.recv)
        rows = part.rows
        if bool((rows.bincount(minlength=self.agents) > 1).any()) or int(rows.max()) >= self.agents:
            raise self._error(f"recv() returns rows {rows.tolist()}; there are agents 0 to {self.agents - 1}")
        self._require(part.step, StepSchema(self.spec, len(rows)))
        self._check_step(part.step, rows.to(part.step.reward.device))
        return part


def checked(world: World) -> World:
    """Wrap a world in a CheckedWorld, unless it is Checked."""
    if isinstance(world, Checked):
        return cast("World", world)
    if not isinstance(world, World):
        raise ContractError(f"{world!r} is no world; write holdfast.make_world(env).")
    return CheckedAsyncWorld(world) if isinstance(world, AsyncWorld) else CheckedWorld(world)


def raise_violations(world: World) -> None:
    """Raise the first violation that a world has recorded, if any."""
    if isinstance(world, RecordsViolations):
        world.raise_violations()


def _layout(step: Any, agents: int) -> list[object] | None:
    """Return the shapes, dtypes and devices of a step of so many agents; None if they are not all plain tensors."""
    if not isinstance(step, Step):
        return None
    tensors = (step.obs, step.reward, step.terminated, step.truncated, step.first, step.valid, step.trial)
    tensors = tensors if step.last_obs is None else (*tensors, step.last_obs)
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return None
    return [agents, *((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)]


def _non_finite_steps(obs: Obs, among: Bool[Tensor, "A L"]) -> Bool[Tensor, "A L"]:
    """Return which steps of a mask have a NaN or an Inf."""
    steps = among & False
    for leaf in tensors_of(obs):
        if leaf.is_floating_point():
            steps = steps | (among & ~(leaf.abs() < torch.inf).flatten(2).all(2))
    return steps


def non_finite_rows(obs: Obs, among: Any) -> Any:
    """Return which rows of a mask have a NaN or an Inf."""
    rows = among & False
    for leaf in _float_leaves(obs):
        # Not `== inf`: a comparison with NaN is false.
        numbers = leaf if isinstance(among, Tensor) else as_array(leaf)
        finite = (abs(numbers) < torch.inf).reshape(len(leaf), -1).all(1)
        rows = rows | (among & ~finite)
    return rows


def _float_leaves(obs: Obs) -> list[Tensor]:
    return [leaf for leaf in tensors_of(obs) if leaf.is_floating_point()]
