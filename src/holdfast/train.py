"""The loop: collect, learn, report; then evaluate and save."""

import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from holdfast.build import build_policy, build_world, load_teacher, pick_device
from holdfast.check.watch import look
from holdfast.config import Config, change
from holdfast.errors import ConfigError
from holdfast.exam import final_evaluation, require_playable
from holdfast.experience import Clock, Collector
from holdfast.experience.finite import require_finite_weights
from holdfast.keep import Kept, RunFolder, create_folder, listening_for_stop
from holdfast.learn import Learner, Lesson, heard_by, knobs_at, weight_metrics
from holdfast.monitor import Observer, Trace
from holdfast.policies import LSTMWrapper
from holdfast.recipes import find_recipe, recipe_for
from holdfast.report import (
    MetricsFile,
    RunConsole,
    Tell,
    Trackers,
    difference,
    open_trackers,
    require_trackers,
    title_of,
)
from holdfast.trainer_knobs import Trainer, scheduled_from
from holdfast.values import due
from holdfast.worlds import World, WorldSpec, closing_world

Lessons = Sequence[Lesson]
LEARNING_RATE = "trainer.optimizer.learning_rate"


@dataclass(frozen=True)
class Run:
    """What a run left behind."""

    folder: Path
    checkpoint: Path | None
    policy: LSTMWrapper
    spec: WorldSpec
    metrics: dict[str, int | float]
    """What the last iteration and the final evaluation measured."""
    finished: bool
    """False if somebody stopped it."""


def train(recipe: str | None = None, overrides: Mapping[str, Any] | None = None, *, command: str = "") -> Run:
    """Train as a recipe says, with some keys changed, and return what came of it; none: the world's own."""
    world = (overrides or {}).get("world", (overrides or {}).get("world.name"))
    recipe = recipe or recipe_for(world)
    command = command or f"holdfast.train({recipe!r}, {dict(overrides or {})!r})"
    config = change(find_recipe(recipe), overrides or {})
    device = pick_device(config)
    if config.threads:
        torch.set_num_threads(config.threads)
    with _own_randomness(config.seed, device):
        return _run(recipe, config, device, command)


def _run(recipe: str, config: Config, device: torch.device, command: str) -> Run:
    with closing_world(build_world(config, device, agents=config.world.agents, seed=config.seed)) as world:
        return _run_in(world, recipe, config, device, command)


def _run_in(world: World, recipe: str, config: Config, device: torch.device, command: str) -> Run:
    policy = build_policy(config, world, device)
    require_playable(config, policy, device)
    require_trackers(**_trackers(config))
    lessons = _lessons(config, world, policy)
    traced = None if config.trace is None else Trace(policy, world.agents, config.trace)
    folder = create_folder(config, config.run or _name(config), command, policy)
    title = title_of(config, folder.path.name, policy, device)
    console = RunConsole(config.iterations, title=title, horizon=config.trainer.bptt_horizon)
    _announce(console, recipe, config, folder, [lesson.unknown(world.spec) for lesson in lessons])
    metrics, ended = dict[str, int | float](iteration=0, global_step=0), 0.0
    kept = Kept(folder, policy, config)
    tell = Tell(console, config.trainer.bptt_horizon, traced, folder.path / "trace.txt")
    with _mirrors(config, folder, console) as mirrors, closing(MetricsFile(folder.metrics)) as file:
        try:
            with console, listening_for_stop(console.say) as stop:
                for metrics in iterations(config, world, policy, lessons, tell):
                    file.write(metrics)
                    mirrors.write(metrics)
                    console.show(metrics)
                    ended += metrics["charts/episodes"]
                    if stop:
                        break
                    kept.saw(int(metrics["iteration"]))
                require_finite_weights(policy, f"after iteration {metrics['iteration']}")
        finally:
            # Before anything else: what was learnt is not lost, whatever comes.
            told = kept.at_last(int(metrics["iteration"]))
            if sys.exception() is not None:
                console.say(told)
        scores = None if stop else _evaluated(config, policy, device, console, bool(ended))
        tell.advise(scores or {})
        if scores:
            last = {key: metrics[key] for key in ("iteration", "global_step")} | scores
            file.write(last)
            mirrors.write(last)
    found = metrics | (scores or {})
    return Run(folder.path, kept.checkpoint, policy, world.spec, found, scores is not None)


def _trackers(config: Config) -> dict[str, Any]:
    return {"wandb": config.wandb, "tensorboard": config.tensorboard, "trackio": config.trackio}


def _mirrors(config: Config, folder: RunFolder, console: RunConsole) -> Trackers:
    told = config.model_dump(mode="json")
    try:
        return open_trackers(folder.path, folder.path.name, told, say=console.say, **_trackers(config))
    except ConfigError:
        # Nothing was trained: nothing is left.
        shutil.rmtree(folder.path)
        raise


def _evaluated(
    config: Config, policy: LSTMWrapper, device: torch.device, console: RunConsole, ended: bool
) -> dict[str, int | float] | None:
    """Evaluate what was learnt; none: somebody would not wait for it."""
    if not ended:
        console.say("no episode ended, so there is no return to evaluate.")
        return {}
    console.say(f"evaluating {config.trainer.eval_episodes:,} episodes, with its memory and without")
    try:
        return final_evaluation(config, policy, device)
    except KeyboardInterrupt:
        return None


def iterations(
    config: Config, world: World, policy: LSTMWrapper, lessons: Lessons = (), tell: Tell | None = None
) -> Iterator[dict[str, int | float]]:
    """Collect and learn, again and again; yield what each iteration measured."""
    tell, clock, lived = tell or Tell(), Clock(), 0
    observer = Observer(policy, world.agents, config.trainer.monitor, total_steps=config.steps)
    collector = _collector(config, world, policy, lessons, observer)
    learner = Learner(policy, config.trainer, config.seed)
    for iteration in range(config.iterations):
        progress = iteration / config.iterations
        knobs = knobs_at(config, progress)
        with observer.listening():
            segments = collector.rollout(version=iteration)
        tell.rollout(segments, iteration)
        checked = look(policy, segments, world.agents) if due(knobs.check, iteration) else {}
        with collector.stopwatch.timing("update"):
            heard, onlooker = [*heard_by(lessons, segments, lived)], observer.look(segments, iteration)
            learnt = learner.update(segments, knobs, progress=progress, heard=heard, onlooker=onlooker)
            learnt |= learner.refresh(segments, collector, knobs)
        tell.update(iteration, learnt)
        lived += segments.lived
        yield tell.saw(
            {
                "iteration": iteration + 1,
                "global_step": lived,
                **clock.take(collector.stopwatch, segments.lived),
                **_scheduled(config, knobs),
                **collector.episodes.take(),
                **learnt,
                **observer.take(segments, lived),
                **checked,
                **_weights(policy, knobs.analyze_weights_interval, iteration),
            },
            observer.alarm(),
        )


def _collector(
    config: Config, world: World, policy: LSTMWrapper, lessons: Lessons, observer: Observer
) -> Collector:
    trainer = config.trainer
    return Collector(
        world,
        policy,
        length=config.rollout_length,
        horizon=trainer.bptt_horizon,
        seed=config.seed,
        lead=trainer.burn_in if trainer.stale == "burn_in" else 0,
        shorten=all(lesson.policy.any_length for lesson in lessons),
        saw=observer.saw,
    )


def _lessons(config: Config, world: World, policy: LSTMWrapper) -> list[Lesson]:
    """Let all teachers live along, each by a name of its own."""
    device, lessons = next(policy.parameters()).device, dict[str, Lesson]()
    rows = config.trainer.minibatch_size // config.trainer.bptt_horizon
    for number, teacher in enumerate(config.trainer.teachers, 1):
        name = Path(teacher.run).name
        name = f"{name}-{number}" if name in lessons else name
        known = load_teacher(teacher.run, world, device)
        lesson = Lesson(name, known, teacher, agents=world.agents, at_once=rows)
        lesson.require_same_actions(policy)
        lessons[name] = lesson
    return list(lessons.values())


def _scheduled(config: Config, knobs: Trainer) -> dict[str, float]:
    """Tell the numbers that change in the course of a run; the step size always."""
    found = {"charts/learning_rate": knobs.optimizer.learning_rate}
    others = (each for each in config.schedule if each.key != LEARNING_RATE)
    return found | {f"charts/scheduled@{each.key}": scheduled_from(knobs, each) for each in others}


def _weights(policy: LSTMWrapper, interval: int, iteration: int) -> dict[str, float]:
    """Describe the weights after every so many iterations."""
    return weight_metrics(policy) if interval and (iteration + 1) % interval == 0 else {}


@contextmanager
def _own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Let policies that draw from torch's global generators repeat too, and leave those as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _name(config: Config) -> str:
    plain = re.sub(r"[^\w.+-]+", "-", config.world.name)
    return f"{plain}-{datetime.now():%Y%m%d-%H%M%S}"


def _announce(
    console: RunConsole, recipe: str, config: Config, folder: RunFolder, warnings: Iterable[str]
) -> None:
    wanted = config.run
    if wanted and folder.path.name != wanted:
        console.say(f"{config.runs_dir}/{wanted} exists and is left alone; this run is {folder.path.name}.")
    console.say(
        f"run {folder.path} · {config.world.name} · {config.world.agents} agents · "
        f"{config.iterations} iteration{'s' if config.iterations > 1 else ''} of "
        f"{config.trainer.batch_size:,} steps · seed {config.seed} · "
        f"recipe {recipe}"
    )
    if config.trainer.num_workers > 1:
        console.say(
            f"trainer.num_workers={config.trainer.num_workers} starts no workers: worlds run in this "
            "process, but for world.vector=async."
        )
    changed = difference(find_recipe(recipe), config)
    if changed is not None:
        console.console.print(changed)
    for warning in filter(None, warnings):
        console.say(warning)
