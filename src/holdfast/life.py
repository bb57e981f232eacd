"""The life of a run: rollout, update, rollout; all that changes in it, and how it is put back."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast.check.watch import look
from holdfast.config import Config
from holdfast.errors import ContractError
from holdfast.experience import Clock, Collector
from holdfast.keep import Checkpoint, DamagedError, Moment, copied, load_weights
from holdfast.learn import Learner, Lesson, heard_by, knobs_at, weight_metrics
from holdfast.monitor import Observer
from holdfast.policies import LSTMWrapper
from holdfast.report import Tell
from holdfast.saved import taken
from holdfast.shapes import Tensor
from holdfast.trainer_knobs import Trainer, scheduled_from
from holdfast.values import due
from holdfast.worlds import World
from holdfast.worlds.going_on import Anew, state_of
from holdfast.worlds.pool import WorkerError

Lessons = Sequence[Lesson]
LEARNING_RATE = "trainer.optimizer.learning_rate"
MISFITS = (
    ContractError,
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    OverflowError,
)
"""What becomes of a part that is not of this run."""


class Life:
    """Everything of a run that changes from iteration to iteration."""

    def __init__(
        self,
        config: Config,
        world: World,
        policy: LSTMWrapper,
        lessons: Lessons = (),
        tell: Tell | None = None,
    ) -> None:
        self._config, self._policy, self._lessons = config, policy, lessons
        self._tell, self._clock = tell or Tell(), Clock()
        self.iteration = 0
        """How many were lived."""
        self.global_step = 0
        """How many steps somebody acted in."""
        self.episodes = 0.0
        """How many ended."""
        self.lost: WorkerError | None = None
        """Why the world could not say where it was."""
        trainer = config.trainer
        self._observer = Observer(policy, world.agents, trainer.monitor, total_steps=config.steps)
        self._collector = Collector(
            world,
            policy,
            length=config.rollout_length,
            horizon=trainer.bptt_horizon,
            seed=config.seed,
            lead=trainer.burn_in if trainer.stale == "burn_in" else 0,
            shorten=all(lesson.policy.any_length for lesson in lessons),
            saw=self._observer.saw,
        )
        self._learner = Learner(policy, trainer, config.seed)

    def go_on(self) -> dict[str, int | float]:
        """Collect and learn once; return what was measured."""
        iteration, collector, observer = self.iteration, self._collector, self._observer
        progress = iteration / self._config.iterations
        knobs = knobs_at(self._config, progress)
        with observer.listening():
            segments = collector.rollout(version=iteration)
        self._tell.rollout(segments, iteration)
        checked = look(self._policy, segments, collector.world.agents) if due(knobs.check, iteration) else {}
        with collector.stopwatch.timing("update"):
            heard = [*heard_by(self._lessons, segments, self.global_step)]
            onlooker = observer.look(segments, iteration)
            learnt = self._learner.update(segments, knobs, progress=progress, heard=heard, onlooker=onlooker)
            learnt |= self._learner.refresh(segments, collector, knobs)
        self._tell.update(iteration, learnt)
        self.global_step += segments.lived
        self.iteration += 1
        ended = collector.episodes.take()
        self.episodes += ended["charts/episodes"]
        return self._tell.saw(
            {
                "iteration": self.iteration,
                "global_step": self.global_step,
                **self._clock.take(collector.stopwatch, segments.lived),
                **_scheduled(self._config, knobs),
                **ended,
                **learnt,
                **observer.take(segments, self.global_step),
                **checked,
                **_weights(self._policy, knobs.analyze_weights_interval, iteration),
            },
            observer.alarm(),
        )

    @torch.no_grad()
    def moment(self, score: float | None, files: Mapping[str, int]) -> Moment:
        """Copy all of it, between two iterations; `files` says how long the files of numbers are."""
        trainer = {
            "episodes": self.episodes,
            "seconds": self._clock.seconds,
            "reach": self._tell.reach,
            "files": dict(files),
            "collector": self._collector.state(),
            "learner": self._learner.state(),
            "observer": self._observer.state(),
            "randomness": _randomness(self._device),
        }
        memories = {"policy": self._policy.store.snapshot().as_tree()}
        memories["teachers"] = {
            lesson.name: lesson.policy.store.snapshot().as_tree() for lesson in self._lessons
        }
        return Moment(
            self.iteration,
            self.global_step,
            copied(self._policy.state_dict()),
            copied(trainer),
            copied(memories),
            copied(self._world_state()),
            score,
        )

    def _world_state(self) -> dict[str, Any] | None:
        """Say where the world is; if a worker is lost just now, what was learnt is kept all the same."""
        try:
            return state_of(self._collector.world)
        except WorkerError as error:
            self.lost = error
            return None

    def restore(self, saved: Checkpoint) -> Anew | None:
        """Go on from a checkpoint; say who could not, and begins a new episode without memories."""
        trainer, memories, world = saved.trainer(), saved.memories(), saved.world()
        try:
            load_weights(self._policy, saved.path / "model.safetensors")
            # Before anybody who begins anew forgets.
            self._policy.store.restore_tree(taken(memories, "policy", dict))
            for lesson in self._lessons:
                taught = taken(taken(memories, "teachers", dict), lesson.name, dict)
                lesson.policy.store.restore_tree(taught)
            self._learner.restore(taken(trainer, "learner", dict))
            collector = taken(trainer, "collector", dict)
            anew = self._collector.restore(collector, world, rollouts=saved.iteration)
            self.iteration, self.global_step = saved.iteration, saved.global_step or 0
            self._observer.restore(taken(trainer, "observer", dict), self.global_step)
            self.episodes = taken(trainer, "episodes", float)
            self._clock.restore(taken(trainer, "seconds", float))
            self._tell.restore(None if trainer["reach"] is None else taken(trainer, "reach", int))
            _draw_on(taken(trainer, "randomness", dict), self._device)
        except MISFITS as error:
            told = " ".join(str(error).split()) or type(error).__name__
            about = ": " if isinstance(error, ContractError) else " does not fit this run: "
            raise DamagedError(f"{saved.path}{about}{told}") from error
        if anew is not None:
            self._observer.forget(anew.who)
            for lesson in self._lessons:
                lesson.forget(anew.who)
        return anew

    @property
    def _device(self) -> torch.device:
        return next(self._policy.parameters()).device


def iterations(
    config: Config, world: World, policy: LSTMWrapper, lessons: Lessons = (), tell: Tell | None = None
) -> Iterator[dict[str, int | float]]:
    """Collect and learn, again and again; yield what each iteration measured."""
    life = Life(config, world, policy, lessons, tell)
    for _ in range(config.iterations):
        yield life.go_on()


def _randomness(device: torch.device) -> dict[str, Tensor]:
    """Say where torch's global generators are: policies that drop out draw from them."""
    found = {"cpu": torch.get_rng_state()}
    return found | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _draw_on(saved: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(taken(saved, "cpu", Tensor))
    # A run that goes on elsewhere has no such generator to go on with.
    if device.type == "cuda" and "cuda" in saved:
        torch.cuda.set_rng_state(taken(saved, "cuda", Tensor), device)


def _scheduled(config: Config, knobs: Trainer) -> dict[str, float]:
    """Tell the numbers that change in the course of a run; the step size always."""
    found = {"charts/learning_rate": knobs.optimizer.learning_rate}
    others = (each for each in config.schedule if each.key != LEARNING_RATE)
    return found | {f"charts/scheduled@{each.key}": scheduled_from(knobs, each) for each in others}


def _weights(policy: LSTMWrapper, interval: int, iteration: int) -> dict[str, float]:
    """Describe the weights after every so many iterations."""
    return weight_metrics(policy) if interval and (iteration + 1) % interval == 0 else {}
