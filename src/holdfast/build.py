"""Building what a config names: the device, the world, the policy, and the policy of a run that was kept."""

from pathlib import Path
from warnings import warn

import torch

from holdfast.config import Config, change, read_config
from holdfast.errors import ConfigError, ContractError
from holdfast.keep import GRAPH, Checkpoint, RunFolder, described, load_weights, open_checkpoint
from holdfast.keep.folder import Say
from holdfast.keep.packed import pack_weights
from holdfast.knobs import WorldKnobs
from holdfast.learn import Lesson
from holdfast.memory import require_kernel, use_kernel
from holdfast.policies import LSTMWrapper, PurePolicy, make_policy
from holdfast.which_world import EnvpoolKnobs, MixtureKnobs
from holdfast.worlds import World, closing_world, make_world, options_of
from holdfast.worlds.pool import Blueprint, Pool


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
    return build_from(config.world, device, agents=agents, seed=seed)


def build_training_world(config: Config, device: torch.device, seed: int) -> World:
    """Build the configured world to train in, in workers if there are to be any."""
    knobs, trainer = config.world, config.trainer
    if not trainer.num_workers:
        return build_world(config, device, agents=knobs.agents, seed=seed)
    if isinstance(knobs, EnvpoolKnobs):
        raise ConfigError(
            f"{knobs.name} has threads of its own, world.threads=N of them; leave out trainer.num_workers."
        )
    if isinstance(knobs, MixtureKnobs) and trainer.num_workers * trainer.async_factor > 1:
        raise ConfigError(
            "The worlds of a mixture are not shared out; type trainer.num_workers=1 "
            "trainer.async_factor=1, or leave both out."
        )
    return Pool(
        Blueprint(knobs.name, options_of(knobs)),
        knobs.agents,
        workers=trainer.num_workers,
        shares=trainer.async_factor,
        seed=seed,
        device=device,
        timeout=trainer.worker_timeout,
        restart=trainer.restart_workers,
    )


def build_from(knobs: WorldKnobs, device: torch.device, *, agents: int, seed: int) -> World:
    """Build the world that some knobs describe."""
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
    use_kernel(policy, knobs.kernel)
    require_kernel(policy, device)
    if isinstance(policy, PurePolicy):
        policy.precision = knobs.precision
        if knobs.compile:
            policy.compile_parts()
    elif knobs.compile or knobs.precision != "float32":
        asked = "compile=true" if knobs.compile else f"precision={knobs.precision}"
        raise ConfigError(f"policy.{asked} needs a RecurrentPolicy; {knobs.name} is none.")
    return policy


def load_policy(folder: Path, device: torch.device, say: Say = warn) -> tuple[LSTMWrapper, Config]:
    """Build the policy of a run as it was saved last, bound to the world it was trained in.

    What is damaged is not used; `say` is told of it.
    """
    return policy_of(find_checkpoint(folder, say), device)


def policy_of(saved: Checkpoint, device: torch.device) -> tuple[LSTMWrapper, Config]:
    """Build the policy of a checkpoint, bound to the world it was trained in."""
    config = config_of(saved)
    # Eager: whoever wants it compiled does that; and our kernels are those of a GPU.
    here = {"policy.compile": False} | ({"policy.kernel": "auto"} if device.type == "cpu" else {})
    # As many agents as in the run: some worlds take no fewer.
    with closing_world(build_world(config, device, agents=config.world.agents, seed=0)) as world:
        policy = build_policy(change(policy_config(saved, config), here), world, device)
    load_weights(policy, saved.path / "model.safetensors")
    return policy, config


def find_checkpoint(folder: Path, say: Say) -> Checkpoint:
    """Find the newest whole checkpoint of a run, or take the one that is named."""
    if (folder / "model.safetensors").exists():
        return open_checkpoint(folder)
    return RunFolder(folder).newest(say)


def config_of(saved: Checkpoint) -> Config:
    """Read the config that a checkpoint was made by."""
    return _read(saved.path / "config.json")


def policy_config(saved: Checkpoint, config: Config) -> Config:
    """Say how to build the policy of a checkpoint: a component graph as it was saved, wherever it lay."""
    named = {"policy.name": f"component:{saved.path / GRAPH}"}
    return change(config, named) if GRAPH in saved.files else config


def load_teacher(run: str | Path, world: World, device: torch.device) -> tuple[LSTMWrapper, dict[str, bytes]]:
    """Build the policy of a run and bind it to another world, by the names of features and actions.

    Beside it come the files to build it again by, should that run go on or go away.
    """
    if not (Path(run) / "config.json").exists():
        raise ConfigError(f"trainer.teachers: {run} is no run's folder; give for example runs/NAME.")
    policy, config = load_policy(Path(run), device)
    files = {**described(config, policy), "model.safetensors": pack_weights(policy.state_dict())}
    try:
        if policy.binding.spec is None or policy.binding.spec.words != world.spec.words:
            policy.bind(world.spec, learn=False)
    except ContractError as error:
        raise ConfigError(f"trainer.teachers: {run} cannot live in this world: {error}") from error
    return policy, files


def lessons_of(config: Config, world: World, policy: LSTMWrapper, kept: Path | None = None) -> list[Lesson]:
    """Let all teachers live along, each by a name of its own; `kept` is where a run that goes on has them."""
    device, lessons = next(policy.parameters()).device, dict[str, Lesson]()
    rows = config.trainer.minibatch_size // config.trainer.bptt_horizon
    for number, teacher in enumerate(config.trainer.teachers, 1):
        name = Path(teacher.run).name
        name = f"{name}-{number}" if name in lessons else name
        there = None if kept is None else kept / name
        known, files = load_teacher(teacher.run if there is None else there, world, device)
        lesson = Lesson(name, known, teacher, agents=world.agents, at_once=rows, files=files)
        lesson.require_same_actions(policy)
        lessons[name] = lesson
    return list(lessons.values())


def _read(file: Path) -> Config:
    try:
        return read_config(file.read_text())
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{file}: {error}") from None
