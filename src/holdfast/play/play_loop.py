"""PlayLoop: a loaded policy in its world, step by step, with all that a replay or a page shows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from holdfast.config.run import Config
from holdfast.errors import ConfigError, ContractError
from holdfast.evaluation.held_out import held_out_seed, held_out_world, num_agents_for
from holdfast.memory import unit_values
from holdfast.monitor.state_audit import state_norms
from holdfast.play import Player
from holdfast.play.session import ActResult
from holdfast.policies.distributions import Categorical
from holdfast.report.replay import AXES, ReplayHeader, TokenFeature
from holdfast.worlds import Step, World
from holdfast.worlds.checked_world import checked
from holdfast.worlds.env_source import source_of
from holdfast.worlds.gym.frames import RGB_ARRAY
from holdfast.worlds.obs import subspaces, tensors_of
from holdfast.worlds.step import Drawable, Rendering
from holdfast.worlds.tokens import PADDING

PLAYED = 1000
"""Number of the first held-out seed: other episodes than those of evaluations."""
MOST_CELLS = 250_000
"""Cells of all grids together, above which they are not drawn."""
MOST_NUMBERS = 32
"""Numbers of an observation vector that are shown."""
Row = dict[str, np.ndarray]
"""Arrays of one step, `[A,...]`: those of a replay without their first axis."""


@contextmanager
def open_world(config: Config, device: torch.device, agents: int, seed: int, frames: bool) -> Iterator[World]:
    """Build the world of a run for held-out episodes, rendering frames if `frames` and it can; close it at the end."""
    world_config = config.world
    can_render = frames and "options" in type(world_config).model_fields and source_of(world_config) is None
    with held_out_world(world_config, device, agents, seed) as world:
        if not (can_render and isinstance(world, Rendering) and RGB_ARRAY in world.render_modes):
            yield world
            return
    options = {**dict(getattr(world_config, "options", None) or {}), "render_mode": RGB_ARRAY}
    with held_out_world(world_config.model_copy(update={"options": options}), device, agents, seed) as world:
        yield world


class PlayLoop:
    """Agents that act in the world of a run, on held-out episodes; as a context it closes the world.

    The first `follow` agents are those whose rows are returned; there may be more in the world.
    """

    def __init__(
        self,
        player: Player,
        agents: int = 8,
        *,
        follow: int = 8,
        seed: int = 0,
        greedy: bool = True,
        frames: bool = True,
    ) -> None:
        if player.config is None:
            raise ConfigError("This player was loaded without a run, so it has no world to act in; give runs/NAME.")
        config, device = player.config, next(player.policy.parameters()).device
        agents = num_agents_for(config.world, player.spec, agents)
        self._context = open_world(config, device, agents, held_out_seed(config, PLAYED + seed), frames)
        self.world = self._context.__enter__()
        self.config, self.player, self.greedy, self._checked = config, player, greedy, checked(self.world)
        self.agents, self.spec = self.world.agents, self.world.spec
        self.follow = min(follow, self.agents, AXES["A"])
        self.session = player.start(self.agents, seed)
        self.current: Step = self._checked.reset()
        self.no_frames = (
            "" if isinstance(self.world, Rendering) and frames else f"{config.world.name} renders no frames"
        )
        self.kinds: tuple[str, ...] = ()
        if isinstance(self.world, Drawable):
            view = self.world.grid_view()
            self.kinds = view.kinds if view.cells.numel() <= MOST_CELLS else ()

    def __enter__(self) -> "PlayLoop":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the world."""
        self._context.__exit__(None, None, None)

    def header(self, run: str, steps_trained: int) -> ReplayHeader:
        """Return what a replay or a page says about the run."""
        spec, config = self.spec, self.config
        ids = zip(spec.feature_ids, spec.features, strict=True)
        return ReplayHeader(
            run=run[:200],
            world=config.world.name[:200],
            policy=("fast" if config.policy.name == "auto" else config.policy.name)[:200],
            steps_trained=steps_trained,
            weights=self.player.weights_hash,
            memory=self.player.policy.has_memory(),
            greedy=self.greedy,
            horizon=config.trainer.bptt_horizon,
            agents_per_env=spec.agents_per_env,
            agents=tuple(range(self.follow)),
            actions=tuple(name[:200] for name in spec.named_actions),
            features=tuple(TokenFeature(id=id, name=each.name[:200], scale=each.normalization) for id, each in ids),
            window=spec.window,
            kinds=self.kinds,
        )

    def step(self) -> Row:
        """Act, step the world, and return what the followed agents saw, did and got."""
        result = self.session.step(**self._inputs())
        before = self.current
        self.current = self._checked.step(result.actions)
        row = self._row(before, result)
        ends = self.current.terminated + 2 * (self.current.truncated & ~self.current.terminated)
        # An agent that did not act gets no reward.
        row["reward"] = _array((self.current.reward * before.valid)[: self.follow], np.float32)
        row["end"] = _array(ends[: self.follow], np.uint8)
        return row

    def now(self) -> Row:
        """Return what the followed agents see and would do, with their memory as it is; nothing changes."""
        row = self._row(self.current, self.session.distribution(**self._inputs()))
        nothing = np.zeros(self.follow)
        return row | {"reward": nothing.astype(np.float32), "end": nothing.astype(np.uint8)}

    def grid(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the grids of the followed agents' environments `[E,R,C]`, and all agents on them `[G,2]`."""
        if not isinstance(self.world, Drawable):
            raise ContractError(f"{self.config.world.name} has no grid.")
        view, per_env = self.world.grid_view(), self.spec.agents_per_env
        envs = -(-self.follow // per_env)
        return _array(view.cells[:envs], np.uint8), _array(view.agents[: envs * per_env], np.int16)

    def frame(self, agent: int = 0) -> np.ndarray | None:
        """Return a frame of an agent's environment; None: there is none, and `no_frames` says why."""
        if self.no_frames or not isinstance(self.world, Rendering):
            return None
        try:
            frame = self.world.render_frame(agent)
        except ContractError as error:
            self.no_frames = str(error)
            return None
        if frame is None:
            self.no_frames = f"{self.config.world.name} renders no frames"
        return frame

    def _inputs(self) -> dict[str, Any]:
        step = self.current
        return {"obs": step.obs, "first": step.first, "trial": step.trial, "valid": step.valid, "greedy": self.greedy}

    def _row(self, step: Step, result: ActResult) -> Row:
        """Return what an agent sees, the policy's outputs, and its memory."""
        count = self.follow
        memory = TensorDict(dict(self.session.memory), batch_size=[self.agents])[:count]
        units = unit_values(self.player.policy.lstm.cell, memory).clamp(-1, 1)
        norms = torch.zeros(count) if memory.is_empty() else state_norms(memory)
        actions = result.actions.reshape(self.agents, -1)[:count]
        row = {
            "first": _array(step.first[:count], np.uint8),
            "valid": _array(step.valid[:count], np.uint8),
            "value": _finite(result.values[:count]),
            "norm": _finite(norms),
            "action": _finite(actions[:, : AXES["K"]]),
            "units": _array((units[:, : AXES["U"]] * 127).round(), np.int8),
        }
        if isinstance(self.player.policy.actions, Categorical) and result.distribution.shape[1] <= AXES["P"]:
            row["probs"] = _array((result.distribution[:count].exp() * 255).round(), np.uint8)
        return row | self._observation(step)

    def _observation(self, step: Step) -> Row:
        """Return tokens, or the numbers of a small vector; images and trees are not shown."""
        if self.spec.features:
            return {"tokens": _array(tensors_of(step.obs)[0][: self.follow, : AXES["M"]], np.uint8)}
        shape = self.spec.observation_space.shape
        if subspaces(self.spec.observation_space) or shape is None or len(shape) > 1 or np.prod(shape) > MOST_NUMBERS:
            return {}
        return {"obs": _finite(tensors_of(step.obs)[0][: self.follow].reshape(self.follow, -1))}


def trim_tokens(tokens: np.ndarray) -> np.ndarray:
    """Remove the slots that are padding in every row."""
    used = (tokens[..., 0] != PADDING).reshape(-1, tokens.shape[-2]).any(0)
    return tokens[..., : max(1, int(used.nonzero()[0].max(initial=0)) + 1), :]


def _array(tensor: torch.Tensor, dtype: type[np.generic]) -> np.ndarray:
    return tensor.cpu().numpy().astype(dtype)


def _finite(tensor: torch.Tensor) -> np.ndarray:
    """Return float32; infinite numbers become the largest, which JSON and canvases can hold."""
    return np.nan_to_num(_array(tensor, np.float32))
