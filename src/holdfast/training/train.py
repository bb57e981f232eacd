"""Training: set up a run, then the loop: collect, update, log, save; then evaluate."""

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdfast import ranks, rng
from holdfast.build import (
    build_policy,
    build_teachers,
    build_training_world,
    require_same_policy,
    saved_policy_config,
    select_device,
    total_memory,
    with_env,
)
from holdfast.checkpoint.run_dir import ERRORS, RunDir, create_run_dir, load_weights, new_folder
from holdfast.config.run import Config, require_ranks
from holdfast.config.sizes import check_sizes, explaining_allocations
from holdfast.errors import ConfigError, OtherRankError, recording_errors
from holdfast.evaluation.periodic_and_final import check_eval_worlds, final_evaluation, periodic_evaluation, score_of
from holdfast.learn import Teacher
from holdfast.monitor import AgentTrace
from holdfast.monitor.timeline import TimelineRecorder
from holdfast.policies import LSTMWrapper, PolicyLike
from holdfast.recipes import names_of_recipe
from holdfast.report.alarms import LearningAlarms
from holdfast.report.console import RunConsole, RunNotices
from holdfast.report.metrics import MetricsFile, read_lines
from holdfast.report.text import title_of
from holdfast.report.trackers import Trackers, open_trackers, require_trackers
from holdfast.rollout.nan_checks import NonFiniteError, require_finite_weights
from holdfast.training.banner import format_arguments, name_of_run, print_banner
from holdfast.training.callbacks import Callback, TrainingIteration, call, require_callbacks
from holdfast.training.distributed import SharedCheckpoints, make_checkpoints
from holdfast.training.final_report import make_timeline, write_final_report
from holdfast.training.restart import find_restarted_run, mark_launch
from holdfast.training.resume import ResumePoint, locked_run, shared_resume_point
from holdfast.training.run_config import config_of_new_run
from holdfast.training.run_result import RunResult
from holdfast.training.stop import StopRequest, stop_on_signals
from holdfast.training.trainer import Trainer
from holdfast.trust import names_from, trusting
from holdfast.worlds import WorldSpec, closing_world
from holdfast.worlds.env_source import EnvLike
from holdfast.worlds.workers import WorkerPool

Metrics = dict[str, int | float]


class MetricsLogger:
    """Writes metrics to the run folder and to the trackers, if there are any."""

    def __init__(self, file: MetricsFile | None, trackers: Trackers | None, latest: Metrics) -> None:
        self._file, self._trackers, self.latest = file, trackers, latest

    def log(self, metrics: Metrics) -> None:
        """Write one line of metrics; ranks other than 0 write none."""
        if self._file is not None:
            self._file.write(metrics)
        if self._trackers is not None:
            self._trackers.write(metrics)
        self.latest = metrics


@dataclass(frozen=True)
class Run:
    """Everything the training loop needs."""

    config: Config
    device: torch.device
    policy: LSTMWrapper
    spec: WorldSpec
    folder: RunDir
    trainer: Trainer
    console: RunConsole
    notices: RunNotices
    logger: MetricsLogger
    checkpoints: SharedCheckpoints
    stop: StopRequest
    callbacks: Sequence[Callback] = ()
    timeline: TimelineRecorder | None = None
    """Records the last rollouts for the report; None: it is off."""

    def log_state(self) -> dict[str, dict[str, Any]]:
        """Return sizes and checksums of the log files, which rank 0 writes."""
        return self.folder.log_state() if ranks.is_main() else {}


@dataclass(frozen=True)
class Setup:
    """What a run is built from."""

    config: Config
    command: str
    policy: PolicyLike | None = None
    """An object or a class; none: the name in the config."""
    recipe: str = ""
    resume_point: ResumePoint | None = None
    quiet: bool = False


def train(
    recipe: str | None = None,
    config: Mapping[str, Any] | Config | None = None,
    *,
    env: EnvLike | None = None,
    policy: PolicyLike | None = None,
    callbacks: Sequence[Callback] = (),
    resume: str | Path | None = None,
    quiet: bool = False,
    trust_code: bool | None = None,
    command: str = "",
) -> RunResult:
    """Train a policy; return the run: `run.policy`, `run.metrics`, `run.folder`.

    A run is a recipe with some keys changed: `train("recall", {"seed": 1, "trainer.total_timesteps": 5000})`. Numbers
    and names are keys, those of the command line; `config` may also be a whole `Config`. `env`, `policy` and
    `callbacks` take what only Python has. Without a recipe it is that of the environment: `train(env="CartPole-v1")`.

    `env`: an id of Gymnasium, the name of a world, or an object. A function or class makes one environment for each of
    `world.agents`, and others for evaluations. An environment is one agent, a vector environment or world as many as
    it has; batch sizes that are not set are made to fit. Such an object is evaluated in when training is over, and
    stays open. `policy`: a name, a class, or an object, whose weights are trained in place.

    `callbacks` are called with a `TrainingIteration` after every update. An exception in one ends the run, saved.

    `resume` is a run's folder: continue it from its newest checkpoint, bit for bit, with the keys of `config` changed.
    An object that it was started with is passed again. Code that the config of a resumed run or of a teacher, or a
    recipe file, names is imported from installed packages; all of it with `trust_code`.

    Ctrl-C ends a run after the current iteration, saved, and returns it; in other threads than the main one no signal
    is handled. With `quiet` nothing is printed but alarms. `command` is what is written to command.txt.
    """
    if recipe is not None and not isinstance(recipe, str):
        raise ConfigError(f"{recipe!r} is not the name of a recipe; pass an environment as env=….")
    require_callbacks(callbacks)
    command = command or f"holdfast.train({', '.join(format_arguments(recipe, config, env, policy, resume))})"
    with ExitStack() as stack:
        stack.enter_context(trusting(trust_code))
        stack.enter_context(ranks.joined())
        if resume is None:
            stack.enter_context(names_of_recipe(recipe))
            run_config, recipe = config_of_new_run(recipe, config, env, policy)
            restarted = find_restarted_run(run_config)
            setup = Setup(run_config, command, policy, recipe if restarted is None else "", quiet=quiet)
            setup = setup if restarted is None else _resumed(stack, setup, restarted, {}, env)
        elif recipe is not None or isinstance(config, Config):
            reason = f"the recipe {recipe!r}" if recipe is not None else "the Config, or pass the keys that change"
            raise ConfigError(f"{resume} resumes with its own config; leave out {reason}.")
        else:
            setup = _resumed(stack, Setup(Config(), command, policy, quiet=quiet), Path(resume), config or {}, env)
        return _train_loop(_setup(stack, setup, callbacks))


def _resumed(stack: ExitStack, setup: Setup, path: Path, overrides: Mapping[str, Any], env: EnvLike | None) -> Setup:
    """Lock a run's folder, and return the setup of the run that continues it."""
    stack.enter_context(names_from(path))
    with ranks.failing_together():
        if ranks.is_main():
            stack.enter_context(locked_run(path))
    point = shared_resume_point(path, overrides)
    require_same_policy(point.config, setup.policy)
    return replace(setup, config=with_env(point.config, env), resume_point=point)


def _train_loop(run: Run) -> RunResult:
    """Train until done or stopped, save, and evaluate."""
    config, trainer, checkpoints, stop = run.config, run.trainer, run.checkpoints, run.stop
    try:
        if not ranks.any_of(checkpoints.latest is not None):
            # Iteration 0, so that a run stopped in its first iteration can be resumed.
            checkpoints.save_if_due(trainer.snapshot(None, run.log_state()))
        with run.console, stop.interruptible(signals=2):
            while _goes_on(run):
                with ranks.failing_together(checkpoints.gather_last):
                    segments = trainer.collect()
                checks = trainer.check_replay(segments)
                if run.timeline is not None:
                    run.timeline.record(segments, trainer.iteration)
                try:
                    metrics = trainer.update(segments) | checks
                except (NonFiniteError, OtherRankError):
                    # All ranks raise it at the same place.
                    checkpoints.gather_last()
                    raise
                with ranks.failing_together(checkpoints.gather_last):
                    metrics |= _evaluate_if_due(run)
                metrics = ranks.broadcast(metrics)
                with ranks.failing_together(checkpoints.gather_last):
                    _report_iteration(run, metrics)
                trainer.share_numbers()
                evaluated, score = score_of(config, metrics)
                snapshot = trainer.snapshot(score, run.log_state())
                checkpoints.save_if_due(snapshot, evaluated=evaluated)
            checkpoints.gather_last()
            if not stop.requested:
                require_finite_weights(run.policy, f"after iteration {trainer.iteration}")
    finally:
        # First of all, so that no later error can lose the last complete iteration.
        message = checkpoints.save_final()
        if message and (sys.exc_info()[0] is not None or stop.requested):
            run.console.print(message)
    if checkpoints.error is not None:
        raise checkpoints.error
    scores: Metrics | None = None
    if not stop.requested and ranks.is_main():
        with stop.interruptible(signals=1):
            scores = _final_evaluation(run)
    elif checkpoints.latest is not None:
        # An interrupted update leaves weights that are in no checkpoint.
        load_weights(run.policy, checkpoints.latest / "model.safetensors")
    metrics = run.logger.latest
    if scores:
        run.notices.print_advice(scores)
        run.logger.log({key: metrics[key] for key in ("iteration", "global_step")} | scores)
    # Rank 0 alone evaluates; the others are done.
    finished = scores is not None or not (ranks.is_main() or stop.requested)
    report = None
    if checkpoints.latest is not None:
        with stop.interruptible(signals=1):
            outputs = run.folder.path, run.timeline, trainer.global_step, run.console.print
            report = write_final_report(config, run.policy, run.spec, *outputs)
    summary = metrics | (scores or {})
    return RunResult(run.folder.path, checkpoints.latest, run.policy, run.spec, summary, finished, report)


def _report_iteration(run: Run, metrics: Metrics) -> None:
    """Call the callbacks, which all ranks do, then log and show the metrics, with what they have added."""
    folder = run.folder.path
    call(run.callbacks, TrainingIteration(run.trainer, metrics, policy=run.policy, folder=folder, stop=run.stop))
    run.logger.log(metrics)
    if ranks.is_main():
        run.console.show(metrics)


def _goes_on(run: Run) -> bool:
    """Whether there is another iteration; a signal to one rank ends the run on all of them."""
    run.stop.requested = ranks.any_of(run.stop.requested)
    return run.trainer.iteration < run.trainer.iterations and not run.stop.requested


def _setup(stack: ExitStack, setup: Setup, callbacks: Sequence[Callback]) -> Run:
    """Build everything a run needs; `stack` closes what must be closed."""
    config, resume_point = setup.config, setup.resume_point
    with ranks.failing_together():
        device = select_device(config)
        require_ranks(config, ranks.count())
        check_sizes(config, total_memory(device))
    stack.enter_context(explaining_allocations(config))
    if config.threads:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(config.threads)
    # Policies may draw from torch's global generators: seed them, and restore them after the run.
    stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
    torch.manual_seed(rng.derive_seed(config.seed, rng.STREAM_RANK, ranks.rank()) if ranks.rank() else config.seed)
    seed = config.seed if resume_point is None else resume_point.world_seed
    with ranks.failing_together(), recording_errors(partial(_error_file, config, resume_point)):
        world = stack.enter_context(closing_world(build_training_world(config, device, seed), config.world))
        policy_config = config if resume_point is None else saved_policy_config(resume_point.checkpoint, config)
        policy = build_policy(policy_config, world, device, setup.policy)
        check_eval_worlds(config, policy, device)
        require_trackers(**_tracker_modes(config))
        teachers = build_teachers(config, world, policy, resume_point and resume_point.folder.teachers)
    ranks.copy_from_main([*policy.parameters(), *policy.buffers()])
    trace = None if config.trace is None or not ranks.is_main() else AgentTrace(policy, world.agents, config.trace)
    # That of a resumed run is locked since before its checkpoint was read.
    folder = _create_folder(stack, setup, policy, teachers) if resume_point is None else resume_point.folder
    if ranks.is_main():
        stack.enter_context(recording_errors(lambda: folder.path / ERRORS))
    console = _make_console(setup, folder, policy, world.spec, device)
    if isinstance(world, WorkerPool):
        world.set_log(console.alarm, folder.path / ERRORS if ranks.is_main() else None)
    if resume_point is None:
        warnings = [teacher.unknown_names(world.spec) for teacher in teachers]
        print_banner(console, config, folder, setup.recipe, warnings)
    notices = RunNotices(console, config.trainer.bptt_horizon, trace, folder.path / "trace.txt")
    trainer = Trainer(config, world, policy, teachers, notices)
    if resume_point is not None:
        resume_point.restore_into(trainer, console.print, setup.command, policy)
        console.restore(trainer.seconds, read_lines(folder.metrics))
    return Run(
        config,
        device,
        policy,
        world.spec,
        folder,
        trainer,
        console,
        notices,
        checkpoints=make_checkpoints(config, folder, policy, console.alarm, resume_point and resume_point.checkpoint),
        logger=_make_logger(stack, config, folder, console, trainer, resume_point),
        stop=stack.enter_context(stop_on_signals(console.print)),
        callbacks=callbacks,
        timeline=make_timeline(config, policy),
    )


def _create_folder(stack: ExitStack, setup: Setup, policy: LSTMWrapper, teachers: Iterable[Teacher]) -> RunDir:
    """Create and lock the folder of a new run, with copies of its teachers. Rank 0 does; the others get its path."""
    path = Path()
    with ranks.failing_together():
        if ranks.is_main():
            folder = create_run_dir(setup.config, name_of_run(setup.config), setup.command, policy)
            for teacher in teachers:
                folder.keep_teacher(teacher.name, teacher.files)
            stack.enter_context(folder.locked())
            mark_launch(folder.path)
            path = folder.path
    return RunDir(ranks.broadcast(path))


def _make_console(
    setup: Setup, folder: RunDir, policy: LSTMWrapper, spec: WorldSpec, device: torch.device
) -> RunConsole:
    config, resume_point = setup.config, setup.resume_point
    return RunConsole(
        config.iterations,
        title=title_of(config, folder.path.name, policy, device),
        horizon=config.trainer.bptt_horizon,
        first_iteration=0 if resume_point is None else resume_point.checkpoint.iteration,
        precision=config.policy.precision,
        learning=LearningAlarms(config, spec),
        quiet=setup.quiet or not ranks.is_main(),
        label="" if ranks.is_main() else f"rank {ranks.rank()}: ",
    )


def _make_logger(
    stack: ExitStack,
    config: Config,
    folder: RunDir,
    console: RunConsole,
    trainer: Trainer,
    resume_point: ResumePoint | None,
) -> MetricsLogger:
    if not ranks.is_main():
        return MetricsLogger(None, None, {"iteration": trainer.iteration, "global_step": trainer.global_step})
    modes, trackers = _tracker_modes(config), None
    try:
        if modes:
            step = None if resume_point is None else trainer.global_step
            settings = config.model_dump(mode="json")
            trackers = open_trackers(
                folder.path, folder.path.name, settings, log=console.print, resumed_step=step, **modes
            )
            stack.enter_context(trackers)
    except ConfigError:
        if resume_point is None:
            # Nothing was trained: leave no run folder.
            shutil.rmtree(folder.path)
        raise
    file = stack.enter_context(closing(MetricsFile(folder.metrics)))
    return MetricsLogger(file, trackers, {"iteration": trainer.iteration, "global_step": trainer.global_step})


def _tracker_modes(config: Config) -> dict[str, str]:
    """Return the keys of the trackers that are on, with their values."""
    modes = {key: getattr(config, key) for key in ("tensorboard", "wandb", "trackio", "tracker")}
    return {key: mode for key, mode in modes.items() if mode != "off"}


def _evaluate_if_due(run: Run) -> Metrics:
    """Evaluate after every `trainer.eval_interval` iterations."""
    interval, iteration = run.config.trainer.eval_interval, run.trainer.iteration
    # The final evaluation follows the last iteration. Where no episode ends, an evaluation would not either.
    if not interval or iteration % interval or iteration == run.trainer.iterations or not run.trainer.episodes:
        return {}
    if not ranks.is_main():
        return {}
    return periodic_evaluation(run.config, run.policy, run.device, log=run.console.print)


def _final_evaluation(run: Run) -> Metrics:
    if not run.trainer.episodes:
        run.console.print("no episode ended during training, so there is no evaluation; try holdfast eval.")
        return {}
    episodes = run.config.trainer.eval_episodes
    run.console.print(f"evaluating {episodes:,} episodes, with memory intact and cleared; some with sampled actions")
    return final_evaluation(run.config, run.policy, run.device, log=run.console.print)


def _error_file(config: Config, resume_point: ResumePoint | None) -> Path:
    """Return the file for the traceback of a run that cannot be set up; a new run has no other."""
    folder = new_folder(config, name_of_run(config)) if resume_point is None else resume_point.folder.path
    return folder / ERRORS
