"""The loop: collect, learn, report, save; then evaluate."""

import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdfast.build import build_policy, build_training_world, lessons_of, pick_device
from holdfast.config import Config, change
from holdfast.errors import ConfigError
from holdfast.exam import evaluation_on_the_way, final_evaluation, require_playable, score_of
from holdfast.experience.finite import require_finite_weights
from holdfast.keep import (
    Kept,
    RunFolder,
    StopRequest,
    create_folder,
    described,
    listening_for_stop,
    load_weights,
    made_with,
)
from holdfast.life import Life
from holdfast.monitor import Trace
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
from holdfast.resume import Resumed, find_resumed, holding
from holdfast.worlds import World, WorldSpec, closing_world
from holdfast.worlds.pool import Pool

Numbers = dict[str, int | float]


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


@dataclass(frozen=True)
class _Asked:
    """What somebody wants to run."""

    recipe: str
    config: Config
    command: str
    device: torch.device
    resumed: Resumed | None


@dataclass(frozen=True)
class _Stage:
    """Where it is run, and told."""

    asked: _Asked
    world: World
    policy: LSTMWrapper
    folder: RunFolder
    console: RunConsole
    tell: Tell


def train(
    recipe: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    resume: str | Path | None = None,
    command: str = "",
) -> Run:
    """Train as a recipe says, with some keys changed, and return what came of it; none: the world's own.

    With `resume`, a run's folder, that run goes on as if it had never been interrupted.
    """
    keys = dict(overrides or {})
    if resume is None:
        recipe = recipe or recipe_for(keys.get("world", keys.get("world.name")))
        command = command or f"holdfast.train({recipe!r}, {keys!r})"
        return _begin(recipe, change(find_recipe(recipe), keys), command, None)
    if recipe is not None:
        raise ConfigError(f"{resume} goes on by the config it has; leave out the recipe {recipe!r}.")
    command = command or f"holdfast.train(resume={str(resume)!r}, overrides={keys!r})"
    with holding(Path(resume)):
        resumed = find_resumed(Path(resume), keys)
        return _begin("", resumed.config, command, resumed)


def _begin(recipe: str, config: Config, command: str, resumed: Resumed | None) -> Run:
    device = pick_device(config)
    if config.threads:
        torch.set_num_threads(config.threads)
    with _own_randomness(config.seed, device):
        return _run(_Asked(recipe, config, command, device, resumed))


def _run(asked: _Asked) -> Run:
    config, resumed = asked.config, asked.resumed
    seed = config.seed if resumed is None else resumed.world_seed
    world = build_training_world(config, asked.device, seed)
    with closing_world(world):
        policy = build_policy(config if resumed is None else resumed.to_build, world, asked.device)
        require_playable(config, policy, asked.device)
        require_trackers(**_trackers(config))
        lessons = lessons_of(config, world, policy, None if resumed is None else resumed.folder.teachers)
        traced = None if config.trace is None else Trace(policy, world.agents, config.trace)
        if resumed is None:
            folder = create_folder(config, config.run or _name(config), asked.command, policy)
            for lesson in lessons:
                folder.keep_teacher(lesson.name, lesson.files)
        else:
            folder = resumed.folder
        # One that goes on is held since before anybody looked into it.
        with folder.locked() if resumed is None else nullcontext():
            console = _console(asked, folder, policy)
            if isinstance(world, Pool):
                world.tell(console.alarm, folder.path / "lost_workers.txt")
            if resumed is None:
                _announce(console, asked, folder, [lesson.unknown(world.spec) for lesson in lessons])
            tell = Tell(console, config.trainer.bptt_horizon, traced, folder.path / "trace.txt")
            life = Life(config, world, policy, lessons, tell)
            if resumed is not None:
                resumed.go_on(life, console.say, asked.command, policy)
            return _live(life, _Stage(asked, world, policy, folder, console, tell))


def _live(life: Life, stage: _Stage) -> Run:
    """Live to the end, or until somebody asks, and evaluate what came of it."""
    asked, folder, console = stage.asked, stage.folder, stage.console
    kept = _kept(stage)
    with (
        _mirrors(asked, folder, life, console) as mirrors,
        closing(MetricsFile(folder.metrics)) as file,
        listening_for_stop(console.say) as stop,
    ):

        def write(metrics: Numbers) -> None:
            file.write(metrics)
            mirrors.write(metrics)

        try:
            with console:
                metrics = _iterate(life, stage, kept, stop, write)
        finally:
            # Before anything else: what was learnt is not lost, whatever comes.
            told = kept.at_last()
            if sys.exception() is not None or stop:
                console.say(told)
        if kept.lost is not None:
            raise kept.lost
        if stop and kept.checkpoint is not None:
            # What was broken off in the middle of an update is no policy that anybody saved.
            load_weights(stage.policy, kept.checkpoint / "model.safetensors")
        scores = stop.until_asked(partial(_evaluated, stage, bool(life.episodes)))
        stage.tell.advise(scores or {})
        if scores:
            write({key: metrics[key] for key in ("iteration", "global_step")} | scores)
    found = metrics | (scores or {})
    return Run(folder.path, kept.checkpoint, stage.policy, stage.world.spec, found, scores is not None)


def _iterate(
    life: Life, stage: _Stage, kept: Kept, stop: StopRequest, write: Callable[[Numbers], None]
) -> Numbers:
    """Live one iteration after the other; return what the last one measured."""
    config, sizes = stage.asked.config, stage.folder.sizes
    metrics: Numbers = {"iteration": life.iteration, "global_step": life.global_step}
    if stage.asked.resumed is None:
        # A run that is interrupted in its first iteration goes on, too.
        kept.saw(life.moment(None, sizes()))
    while life.iteration < config.iterations:
        if life.lost is not None:
            raise life.lost
        lived = stop.until_asked(partial(_iteration, life, stage))
        if lived is None:
            return metrics
        metrics = lived
        write(metrics)
        stage.console.show(metrics)
        judged, score = score_of(config, metrics)
        kept.saw(life.moment(score, sizes()), judged=judged)
    require_finite_weights(stage.policy, f"after iteration {life.iteration}")
    return metrics


def _iteration(life: Life, stage: _Stage) -> Numbers:
    """Live one iteration, and after some evaluate what was learnt so far."""
    metrics, config = life.go_on(), stage.asked.config
    due = config.trainer.eval_interval and life.iteration % config.trainer.eval_interval == 0
    # After the last one comes the final evaluation; and where no episode ends, nobody waits for one.
    if due and life.iteration < config.iterations and life.episodes:
        metrics |= evaluation_on_the_way(config, stage.policy, stage.asked.device)
    return metrics


def _console(asked: _Asked, folder: RunFolder, policy: LSTMWrapper) -> RunConsole:
    config, resumed = asked.config, asked.resumed
    return RunConsole(
        config.iterations,
        title=title_of(config, folder.path.name, policy, asked.device),
        horizon=config.trainer.bptt_horizon,
        begun=0 if resumed is None else resumed.saved.iteration,
        precision=config.policy.precision,
    )


def _kept(stage: _Stage) -> Kept:
    asked, trainer = stage.asked, stage.asked.config.trainer
    return Kept(
        stage.folder,
        described(asked.config, stage.policy),
        made_with(asked.device),
        interval=trainer.checkpoint_interval,
        keep=trainer.keep_checkpoints,
        alarm=stage.console.alarm,
        since=None if asked.resumed is None else asked.resumed.saved,
    )


def _trackers(config: Config) -> dict[str, Any]:
    return {"wandb": config.wandb, "tensorboard": config.tensorboard, "trackio": config.trackio}


def _mirrors(asked: _Asked, folder: RunFolder, life: Life, console: RunConsole) -> Trackers:
    told = asked.config.model_dump(mode="json")
    begun = None if asked.resumed is None else life.global_step
    try:
        return open_trackers(
            folder.path, folder.path.name, told, say=console.say, begun=begun, **_trackers(asked.config)
        )
    except ConfigError:
        if asked.resumed is None:
            # Nothing was trained: nothing is left.
            shutil.rmtree(folder.path)
        raise


def _evaluated(stage: _Stage, ended: bool) -> Numbers:
    """Evaluate what was learnt."""
    config, say = stage.asked.config, stage.console.say
    if not ended:
        say("no episode ended in the training, so none is waited for; holdfast eval plays some.")
        return {}
    say(f"evaluating {config.trainer.eval_episodes:,} episodes, with its memory and without")
    return final_evaluation(config, stage.policy, stage.asked.device)


@contextmanager
def _own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Let policies that draw from torch's global generators repeat too, and leave those as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _name(config: Config) -> str:
    plain = re.sub(r"[^\w.+-]+", "-", config.world.name)
    return f"{plain}-{datetime.now():%Y%m%d-%H%M%S}"


def _announce(console: RunConsole, asked: _Asked, folder: RunFolder, warnings: Iterable[str]) -> None:
    config, wanted, workers = asked.config, asked.config.run, asked.config.trainer.num_workers
    if wanted and folder.path.name != wanted:
        console.say(f"{config.runs_dir}/{wanted} exists and is left alone; this run is {folder.path.name}.")
    console.say(
        f"run {folder.path} · {config.world.name} · {config.world.agents} agents"
        f"{f' in {workers} worker' + 's' * (workers > 1) if workers else ''} · "
        f"{config.iterations} iteration{'s' if config.iterations > 1 else ''} of "
        f"{config.trainer.batch_size:,} steps · seed {config.seed} · "
        f"recipe {asked.recipe}"
    )
    changed = difference(find_recipe(asked.recipe), config)
    if changed is not None:
        console.console.print(changed)
    for warning in filter(None, warnings):
        console.say(warning)
