"""The loop: collect, learn, report; then evaluate and save."""

import copy
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from holdfast.check.watch import due, look
from holdfast.config import Config, change
from holdfast.errors import ConfigError, ContractError
from holdfast.experience import Collector, MemoryMode, evaluate
from holdfast.keep import RunFolder, create_folder, listening_for_stop
from holdfast.knobs import WorldKnobs
from holdfast.learn import update
from holdfast.policies import LSTMWrapper, PurePolicy, make_policy
from holdfast.recipes import find_recipe, recipe_for
from holdfast.report import MetricsFile, RunConsole, difference, title_of
from holdfast.which_world import MixtureKnobs
from holdfast.worlds import World, WorldSpec, closing_world, draws, make_world, options_of

EVALUATION_AGENTS = 250
EVALUATIONS: dict[str, MemoryMode] = {
    "eval/return_mean": "intact",
    "eval/return_mean_memory_cleared": "cleared",
}


@dataclass(frozen=True)
class Run:
    """What a run left behind."""

    folder: Path
    checkpoint: Path
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
    _require_playable(config, policy, device)
    folder = create_folder(config, config.run or _name(config), command, policy)
    title = title_of(config, folder.path.name, policy, device)
    console = RunConsole(config.iterations, title=title, horizon=config.trainer.bptt_horizon)
    _announce(console, recipe, config, folder)
    metrics: dict[str, int | float] = {"iteration": 0, "global_step": 0}
    ended = 0.0
    with closing(MetricsFile(folder.metrics)) as file:
        try:
            with console, listening_for_stop() as stop:
                for metrics in iterations(config, world, policy):
                    file.write(metrics)
                    console.show(metrics)
                    ended += metrics["charts/episodes"]
                    if stop:
                        break
        finally:
            # Before anything else: what was learnt is not lost, whatever comes.
            checkpoint = folder.save(policy, config, int(metrics["iteration"]))
            if sys.exception() is not None:
                console.say(f"what was learnt until the last whole iteration is saved: {checkpoint}")
        scores = None if stop else _evaluated(config, policy, device, console, bool(ended))
        if scores:
            file.write({key: metrics[key] for key in ("iteration", "global_step")} | scores)
    return Run(folder.path, checkpoint, policy, world.spec, metrics | (scores or {}), scores is not None)


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


def iterations(config: Config, world: World, policy: LSTMWrapper) -> Iterator[dict[str, int | float]]:
    """Collect and learn, again and again; yield what each iteration measured."""
    trainer = config.trainer
    collector = Collector(
        world, policy, length=config.rollout_length, horizon=trainer.bptt_horizon, seed=config.seed
    )
    adam = trainer.optimizer
    optimizer = torch.optim.Adam(policy.parameters(), betas=(adam.beta1, adam.beta2), eps=adam.eps)
    begun, lived = time.perf_counter(), 0
    for iteration in range(config.iterations):
        before, progress = time.perf_counter(), iteration / config.iterations
        learning_rate = _anneal(adam.learning_rate, adam.learning_rate_end, progress)
        ent_coef = _anneal(trainer.ppo.ent_coef, trainer.ppo.ent_coef_end, progress)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        segments = collector.rollout(version=iteration)
        looked = look(policy, segments, world.agents) if due(trainer.check, iteration) else {}
        learnt = update(
            policy,
            optimizer,
            segments,
            trainer.ppo,
            ent_coef=ent_coef,
            epochs=trainer.update_epochs,
            rows=trainer.minibatch_size // trainer.bptt_horizon,
            seed=config.seed,
        )
        now, lived = time.perf_counter(), lived + segments.lived
        yield {
            "iteration": iteration + 1,
            "global_step": lived,
            "seconds": now - begun,
            "charts/SPS": segments.lived / (now - before),
            "charts/learning_rate": learning_rate,
            "charts/ent_coef": ent_coef,
            **collector.episodes.take(),
            **learnt,
            **looked,
        }


def final_evaluation(config: Config, policy: LSTMWrapper, device: torch.device) -> dict[str, int | float]:
    """Play greedily on episodes the training never saw, with the memory intact and with it cleared.

    The worlds of a mixture are played one by one too, and so are `trainer.eval_worlds`.
    """
    episodes, scores = config.trainer.eval_episodes, dict[str, int | float]()
    seed = draws.seed_of(config.seed, draws.STREAM_UNSEEN)
    for label, knobs in _worlds_to_play(config).items():
        crowd, fewest = _crowd(knobs, device)
        agents = max(fewest, math.ceil(min(EVALUATION_AGENTS, episodes) / crowd) * crowd)
        with closing_world(_build(knobs, device, agents=agents, seed=seed)) as unseen:
            for name, memory in EVALUATIONS.items():
                found = evaluate(policy, unseen, episodes=episodes, memory=memory)
                scores[f"{name}@{label}" if label else name] = found.return_mean
    return scores


def _worlds_to_play(config: Config) -> dict[str, WorldKnobs]:
    inside = config.world.parts if isinstance(config.world, MixtureKnobs) else ()
    return {"": config.world} | {part.label: part.world for part in (*inside, *config.trainer.eval_worlds)}


def _crowd(knobs: WorldKnobs, device: torch.device) -> tuple[int, int]:
    """Say in what multiples a world takes agents, and how few; one of yours says it in its spec."""
    with closing_world(_build(knobs, device, agents=knobs.agents, seed=0)) as world:
        return world.spec.crowd, world.spec.crowd * max(1, len(world.spec.parts))


def _require_playable(config: Config, policy: LSTMWrapper, device: torch.device) -> None:
    """Refuse worlds that the policy cannot be evaluated in before anybody trains for hours."""
    for label, knobs in _worlds_to_play(config).items():
        if label:
            with closing_world(_build(knobs, device, agents=knobs.agents, seed=0)) as world:
                try:
                    copy.deepcopy(policy).bind(world.spec, learn=False)
                except ContractError as error:
                    raise ConfigError(f"trainer.eval_worlds: {label} cannot be played: {error}") from error


def pick_device(config: Config) -> torch.device:
    """Choose where to compute."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch finds no GPU here; use device=cpu or device=auto.")
    chosen = "cuda" if config.device == "auto" and torch.cuda.is_available() else config.device
    if chosen == "cuda":
        # float32 means float32: with tf32, replaying differs from living by 5e-4.
        torch.backends.cudnn.allow_tf32 = False
    return torch.device("cpu" if chosen == "auto" else chosen)


def build_world(config: Config, device: torch.device, *, agents: int, seed: int) -> World:
    """Build the configured world for some number of agents."""
    return _build(config.world, device, agents=agents, seed=seed)


def _build(knobs: WorldKnobs, device: torch.device, *, agents: int, seed: int) -> World:
    return make_world(knobs.name, agents=agents, seed=seed, device=device, **options_of(knobs))


def build_policy(config: Config, world: World, device: torch.device) -> LSTMWrapper:
    """Build the configured policy for a world."""
    knobs = config.policy
    asked = {
        "hidden_size": knobs.hidden_size,
        "num_layers": knobs.num_layers,
        "memory": knobs.memory,
        "memory_init": knobs.memory_init,
    }
    policy = make_policy(
        knobs.name,
        world,
        seed=config.seed,
        clear_on=config.memory.clear_on,
        **{key: value for key, value in asked.items() if value not in (None, "auto")},
    ).to(device)
    if knobs.compile:
        if not isinstance(policy, PurePolicy):
            raise ConfigError(f"policy.compile=true needs a RecurrentPolicy; {knobs.name} is none.")
        policy.compile_parts()
    return policy


@contextmanager
def _own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Let policies that draw from torch's global generators repeat too, and leave those as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _anneal(start: float, end: float | None, progress: float) -> float:
    return start if end is None else start + (end - start) * progress


def _name(config: Config) -> str:
    plain = re.sub(r"[^\w.+-]+", "-", config.world.name)
    return f"{plain}-{datetime.now():%Y%m%d-%H%M%S}"


def _announce(console: RunConsole, recipe: str, config: Config, folder: RunFolder) -> None:
    wanted = config.run
    if wanted and folder.path.name != wanted:
        console.say(f"{config.runs_dir}/{wanted} exists and is left alone; this run is {folder.path.name}.")
    console.say(
        f"run {folder.path} · {config.world.name} · {config.world.agents} agents · "
        f"{config.iterations} iterations of {config.trainer.batch_size:,} steps · seed {config.seed} · "
        f"recipe {recipe}"
    )
    if config.trainer.num_workers > 1:
        console.say(
            f"trainer.num_workers={config.trainer.num_workers}: {config.world.name} runs in this process; no "
            "workers are started."
        )
    changed = difference(find_recipe(recipe), config)
    if changed is not None:
        console.console.print(changed)
