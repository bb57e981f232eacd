"""Policies of sb3-contrib under test: they learn with `RecurrentPPO` and play with `evaluate_policy`."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import gymnasium
import numpy as np
import torch

from holdfast.check.script import Moments, Script
from holdfast.check.subject import Answer, Life, Subject
from holdfast.check.subjects.sight import imagine
from holdfast.check.tree import State
from holdfast.errors import ConfigError, ContractError
from holdfast.shapes import Bool, Float, Shaped, Tensor

APART = 1000
"""Step `t` of agent `a` is known as `1000 * a + t` wherever the library's buffer carries it."""


class SB3(Subject):
    """A `RecurrentActorCriticPolicy`, in the hands of sb3-contrib's own `RecurrentPPO`.

    What it says are values and the log-probabilities of scripted actions: only sampling is taken from it.
    """

    recuts = True

    module: Any

    def __init__(self, policy: Any) -> None:
        wanted = part("sb3_contrib.common.recurrent.policies").RecurrentActorCriticPolicy
        if not isinstance(policy, wanted):
            raise ConfigError(
                f"SB3 checks a RecurrentActorCriticPolicy, not {type(policy).__name__}; of a RecurrentPPO "
                "give its `.policy`."
            )
        if not isinstance(policy.action_space, gymnasium.spaces.Discrete | gymnasium.spaces.Box):
            raise ConfigError(f"SB3 scripts actions of a Discrete or a Box, not of {policy.action_space}.")
        self.module, space = policy, policy.action_space
        self._draw = imagine(policy.observation_space, policy)
        self.actions = int(space.n) if isinstance(space, gymnasium.spaces.Discrete) else 5

    def imagine(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw from its observation space, in the numbers that the library's buffer keeps."""
        drawn = self._draw(size, generator)
        return drawn.byte() if self.module.observation_space.dtype == np.uint8 else drawn

    def initial(self, rows: int) -> State:
        """Make zeros, as `RecurrentPPO` does before it learns: for the actor, and for the critic."""
        weights = self.module.lstm_actor.weight_hh_l0
        if weights.dtype != torch.float32:
            raise ContractError("sb3 makes every observation float32 before a policy sees it.")
        layers, _, hidden = self.module.lstm_hidden_state_shape
        pi, vf = (tuple(weights.new_zeros(layers, rows, hidden) for _ in range(2)) for _ in range(2))
        return part("sb3_contrib.common.recurrent.type_aliases").RNNStates(pi, vf)

    def act(self, moment: Moments, state: State) -> tuple[Answer, State]:
        """Call the policy as `collect_rollouts` does."""
        with _scripted(self.module, iter([self._done(moment)])):
            _, values, log_prob, after = self.module(moment.obs, state, moment.first.float())
        return {"values": values[:, 0], "log_prob": log_prob}, after

    def replay(self, moments: Moments, state: State) -> Answer:
        """Call the policy as `train` does, with sequences laid behind each other."""
        rows, steps = moments.batch
        values, log_prob, _ = self.module.evaluate_actions(
            moments.obs.flatten(0, 1),
            self._done(moments).flatten(0, 1),
            state,
            moments.first.flatten().float(),
        )
        return {"values": values.reshape(rows, steps), "log_prob": log_prob.reshape(rows, steps)}

    def value(self, moment: Moments, state: State) -> Answer:
        """Ask as `collect_rollouts` does at its end: from the critic's state."""
        return {"values": self.module.predict_values(moment.obs, state.vf, moment.first.float())[:, 0]}

    def live(self, script: Script) -> Life:
        """Let `RecurrentPPO` learn from the script at learning rate 0, and listen to it."""
        policy, agents = self.module, script.agents
        length = script.steps // self.rollouts
        # A class is asked for and called once; this one always makes the policy under test.
        trainer = part("sb3_contrib").RecurrentPPO(
            lambda *_, **__: policy,
            _worlds(policy, script),
            learning_rate=0.0,
            n_steps=length,
            batch_size=agents * length // self.segments,
            n_epochs=1,
            normalize_advantage=False,
            device="cpu",
        )
        trainer.set_logger(part("stable_baselines3.common.logger").Logger(None, []))
        # What nobody says stays NaN, which breaks every law.
        unsaid = torch.full((agents, script.steps, 2), torch.nan)
        diary, buffer = _Diary(unsaid, unsaid.clone()), trainer.rollout_buffer
        actions = iter(self._done(script).unbind(1))
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_same_luck())
            stack.enter_context(_scripted(policy, actions))
            stack.enter_context(_put(buffer, "get", diary.reading(buffer.get)))
            stack.enter_context(_put(policy, "evaluate_actions", diary.training(policy.evaluate_actions)))
            trainer.learn(script.steps * agents, callback=_listener(diary), log_interval=None)
        policy.optimizer.zero_grad()
        return Life(diary.lived, diary.replayed)

    def evaluate(self, script: Script) -> Float[Tensor, "A N K"]:
        """Let `evaluate_policy` play the script, up to its last step, where every episode ends.

        Play asks for no values: that column stays empty.
        """
        over, said = script.terminated.clone(), []
        over[:, -1] = ~script.truncated[:, -1]
        worlds = _worlds(self.module, replace(script, first=over | script.truncated, terminated=over))
        fewest = int((over | script.truncated).sum(1).min())
        own = self.module.get_distribution

        def listen(*arguments: Any) -> Any:
            distribution, state = own(*arguments)
            log_prob = distribution.log_prob(self._done(script.at(len(said))))
            said.append(torch.stack([torch.zeros_like(log_prob), log_prob], dim=-1))
            return distribution, state

        play = part("stable_baselines3.common.evaluation").evaluate_policy
        with _put(self.module, "get_distribution", listen):
            play(self.module, worlds, n_eval_episodes=fewest * script.agents, warn=False)
        return torch.stack(said, dim=1)

    def counted(self, script: Script) -> Bool[Tensor, "A N1"]:
        """Leave out agents that have played their episodes: `evaluate_policy` keeps clearing them."""
        ended = script.terminated | script.truncated
        ended[:, -1] = True
        return ended.cumsum(1) < ended.sum(1).min()

    def _done(self, moments: Moments) -> Shaped[Tensor, "*batch _"] | Shaped[Tensor, "*batch"]:
        """Read a script's actions as the action space means them."""
        space = self.module.action_space
        if isinstance(space, gymnasium.spaces.Discrete):
            return moments.action
        share = moments.action.float() / float(cast("int", self.actions))
        return share[..., None].expand(*share.shape, int(np.prod(space.shape)))


@dataclass
class _Diary:
    """What was said while acting and while training, brought back to agents and steps: `[A,N,K]`."""

    lived: Float[Tensor, "A N K"]
    replayed: Float[Tensor, "A N K"]
    past: int = 0
    """How many steps were lived in earlier rollouts."""
    read: list[Any] = field(default_factory=list)
    """The minibatch that is being trained on."""

    def close_rollout(self, buffer: Any) -> None:
        """Copy what acting said, and mark every step."""
        steps, agents = buffer.values.shape
        until = slice(self.past, self.past + steps)
        for column, said in enumerate((buffer.values, buffer.log_probs)):
            self.lived[:, until, column] = torch.from_numpy(said.T.copy())
        buffer.advantages[:] = np.arange(agents) * APART + np.arange(steps)[:, None] + self.past
        self.past += steps

    def reading(self, own: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """Keep each minibatch while it is trained on."""

        def get(*arguments: Any) -> Iterator[Any]:
            for minibatch in own(*arguments):
                self.read = [minibatch]
                yield minibatch

        return get

    def training(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Write down what training says, but for the padding it leaves out itself."""

        def evaluate_actions(*arguments: Any) -> Any:
            values, log_prob, entropy = own(*arguments)
            (minibatch,) = self.read
            real = minibatch.mask > 1e-8
            place = minibatch.advantages[real].long()
            with torch.no_grad():
                said = torch.stack([values.flatten(), log_prob], dim=-1)[real]
                self.replayed[place // APART, place % APART] = said
            return values, log_prob, entropy

        return evaluate_actions


class Actor(gymnasium.Env[Any, Any]):
    """One agent's part of a script; whatever it does, the script goes on."""

    def __init__(self, script: Script, agent: int, spaces: tuple[Any, Any]) -> None:
        self.observation_space, self.action_space = spaces
        self._seen, self._last = (each[agent].numpy() for each in (script.obs, script.other_obs))
        self._over = script.first[agent].tolist()
        self._truncated = (script.truncated & ~script.terminated)[agent].tolist()
        self._clock = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Read the line at which an episode begins."""
        return self._seen[self._clock], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Read the next line; where an episode ends, something else is seen last."""
        self._clock += 1
        over, truncated = self._over[self._clock], self._truncated[self._clock]
        seen = self._last if over else self._seen
        return seen[self._clock], 1.0, over and not truncated, over and truncated, {}


def part(name: str) -> Any:
    """Import a part of sb3, or say how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError("Checking such policies needs sb3-contrib: pip install 'holdfast[sb3]'.") from error


def _worlds(policy: Any, script: Script) -> Any:
    """Put an actor for each agent into the library's own vector of worlds, which restarts them itself."""
    spaces = (policy.observation_space, policy.action_space)
    makers = [lambda agent=agent: Actor(script, agent, spaces) for agent in range(script.agents)]
    return part("stable_baselines3.common.vec_env").DummyVecEnv(makers)


def _listener(diary: _Diary) -> Any:
    base = part("stable_baselines3.common.callbacks").BaseCallback

    class Listener(base):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            diary.close_rollout(self.model.rollout_buffer)

    return Listener()


@contextmanager
def _scripted(policy: Any, actions: Iterator[Tensor]) -> Iterator[None]:
    """Let the policy do what the script says wherever it would have drawn an action."""
    with _put(policy.action_dist, "sample", lambda: next(actions)):
        yield


@contextmanager
def _put(thing: Any, name: str, stand_in: Any) -> Iterator[None]:
    """Let something stand in for a method of one object."""
    setattr(thing, name, stand_in)
    try:
        yield
    finally:
        delattr(thing, name)


@contextmanager
def _same_luck() -> Iterator[None]:
    """Cut minibatches at the same place every time: the buffer draws it from numpy's global generator."""
    before = np.random.get_state()
    np.random.seed(0)
    try:
        yield
    finally:
        np.random.set_state(before)
