"""Build what a config names: device, world, policy, teachers; load policies of saved runs."""

import copy
import os
from pathlib import Path
from warnings import warn

import torch
from safetensors import SafetensorError, safe_open

from holdfast import ranks
from holdfast.checkpoint.format import CONFIG, WEIGHTS, Checkpoint, open_checkpoint
from holdfast.checkpoint.run_dir import GRAPH, Log, RunDir, load_weights, policy_files
from holdfast.checkpoint.serialization import pack_weights
from holdfast.config.run import Config, override, read_config, require_ranks
from holdfast.config.sizes import explaining_allocations
from holdfast.config.world_names import MixtureConfig
from holdfast.errors import AgentCountError, ConfigError, ContractError, TrustError, one_line
from holdfast.learn import Teacher
from holdfast.memory import require_kernel, use_kernel
from holdfast.policies import FunctionalPolicy, LSTMWrapper, PolicyLike, make_policy, policy_name
from holdfast.trust import names_from
from holdfast.worlds import World, closing_world, make_world, world_options
from holdfast.worlds.checked_world import CheckedWorld
from holdfast.worlds.env_source import PYTHON, EnvLike, EnvSource, find_source, function_source, source_of
from holdfast.worlds.step import Shardable
from holdfast.worlds.workers import WorkerPool


def select_device(config: Config) -> torch.device:
    """Return the configured device; `auto` is the GPU if there is one."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch finds no GPU here; use device=cpu or device=auto.")
    chosen = "cuda" if config.device == "auto" and torch.cuda.is_available() else config.device
    if chosen == "cuda":
        # With tf32, replay would differ from the rollout by 5e-4.
        torch.backends.cudnn.allow_tf32 = False
    return ranks.device_of_rank(torch.device("cpu" if chosen == "auto" else chosen))


def total_memory(device: torch.device) -> int:
    """Return the bytes of memory of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def build_world(config: Config, device: torch.device, *, agents: int, seed: int) -> World:
    """Build the configured world for a number of agents."""
    return make_world(config.world.name, agents=agents, seed=seed, device=device, **world_options(config.world))


def build_training_world(config: Config, device: torch.device, seed: int) -> World:
    """Build the configured world for training, in worker processes if `trainer.num_workers` is set."""
    world, trainer = config.world, config.trainer
    require_ranks(config, ranks.count())
    if not trainer.num_workers:
        if ranks.count() == 1:
            return build_world(config, device, agents=world.agents, seed=seed)
        return _build_shard(config, device, seed)
    if source_of(world) is not None:
        raise ConfigError(
            f"{world.name} is an object of this program, which worker processes cannot import; leave out "
            "trainer.num_workers, or pass a class of a module, or its name: env='package.module:Class'."
        )
    limit = world.family.max_shards
    if limit == 0:
        raise ConfigError(f"{world.name} has its own threads (world.threads=N); leave out trainer.num_workers.")
    if limit is not None and trainer.num_workers * trainer.async_factor > limit:
        raise ConfigError(
            f"{world.name} cannot be split over several workers; type trainer.num_workers=1 "
            "trainer.async_factor=1, or leave both out."
        )
    return WorkerPool(
        world.name,
        ranks.share(world.agents),
        options=world_options(world),
        workers=trainer.num_workers,
        groups=trainer.async_factor,
        seed=seed,
        device=device,
        timeout=trainer.worker_timeout,
        restart=trainer.restart_workers,
        first_agent=None if ranks.count() == 1 else ranks.first(world.agents),
    )


def _build_shard(config: Config, device: torch.device, seed: int) -> World:
    """Build this rank's agents of the configured world."""
    world, first = config.world, ranks.first(config.world.agents)
    source = source_of(world)
    if source is not None and source.is_object:
        raise ConfigError(
            f"{world.name} is one object, which {ranks.count()} ranks cannot share; pass a function or a class that "
            "makes an environment, or its name."
        )
    shard = build_world(config, device, agents=ranks.share(world.agents), seed=seed)
    if not isinstance(shard, Shardable):
        raise ConfigError(
            f"{world.name} cannot be split over {ranks.count()} ranks: it has no set_agent_offset(first_agent). "
            "Train it in one process."
        )
    shard.set_agent_offset(first)
    return CheckedWorld(shard, first_agent=first)


def with_env(config: Config, env: EnvLike | EnvSource | None) -> Config:
    """Return a config with the environment that it names as a Python object; `env` may be None or its name."""
    if env is None:
        return config
    if isinstance(env, type) and config.world.name == f"{PYTHON}{env.__name__}":
        # Its name was `__main__:Class` in the script that trained the run.
        source = function_source(env)
    else:
        source = env if isinstance(env, EnvSource) else find_source(env)
    name = source.name if isinstance(source, EnvSource) else source
    if name != config.world.name:
        raise ConfigError(f"env is {name}, but the run was trained in {config.world.name}; pass that one.")
    if not isinstance(source, EnvSource):
        return config
    return config.model_copy(update={"world": config.world.model_copy(update={"source": source})})


def require_same_policy(config: Config, policy: PolicyLike | None) -> None:
    """Raise if a policy that was passed is not that of the config."""
    # A class was `__main__:Class` in the script that trained the run.
    script_name = f"{PYTHON}{policy.__name__}" if isinstance(policy, type) else None
    if policy is not None and config.policy.name not in (policy_name(policy), script_name):
        raise ConfigError(f"policy is {policy_name(policy)}, but the run trained {config.policy.name}; pass that one.")


def build_policy(config: Config, world: World, device: torch.device, policy: PolicyLike | None = None) -> LSTMWrapper:
    """Build the configured policy for a world; `policy`, an object or a class, stands for its name."""
    options = config.policy
    if isinstance(policy, LSTMWrapper):
        # As it is: the keys of the config describe it.
        policy.require_bound(world.spec)
        require_kernel(policy.to(device), device)
        return policy
    sizes = options.model_dump(include={"hidden_size", "num_layers", "memory", "memory_init", "encoder_init"})
    policy = make_policy(
        policy if isinstance(policy, type) else options.name,
        world,
        seed=config.seed,
        clear_on=config.memory.clear_on,
        normalize_obs=options.normalize_obs,
        normalize_value=options.normalize_value,
        **{key: value for key, value in sizes.items() if value not in (None, "auto")},
    ).to(device)
    use_kernel(policy, options.kernel)
    require_kernel(policy, device)
    if isinstance(policy, FunctionalPolicy):
        policy.precision = options.precision
        if options.compile:
            policy.compile_parts()
    elif options.compile or options.precision != "float32":
        key = "compile=true" if options.compile else f"precision={options.precision}"
        raise ConfigError(f"policy.{key} needs a RecurrentPolicy; {options.name} is not one.")
    return policy


def load_policy(folder: Path, device: torch.device, log: Log = warn) -> tuple[LSTMWrapper, Config]:
    """Load the newest policy of a run, bound to the world it was trained in; `log` reports damaged files."""
    return load_policy_from(find_checkpoint(folder, log), device)


def load_policy_from(
    saved: Checkpoint, device: torch.device, *, env: EnvLike | None = None, policy: PolicyLike | None = None
) -> tuple[LSTMWrapper, Config]:
    """Load the policy of a checkpoint, bound to the world it was trained in.

    `env` and `policy` are those of a run that was trained with objects; they do not change.
    """
    config = with_env(config_from(saved), env)
    require_same_policy(config, policy)
    with names_from(saved.path):
        return _build_saved(saved, config, device, copy.deepcopy(policy)), config


def _build_saved(saved: Checkpoint, config: Config, device: torch.device, policy: PolicyLike | None) -> LSTMWrapper:
    # Not compiled: callers compile if they want to. Triton kernels need a GPU.
    local = {"policy.compile": False} | ({"policy.kernel": "auto"} if device.type == "cpu" else {})
    _require_sizes_of_weights(saved, config)
    with explaining_allocations(config), closing_world(_build_small_world(config, device), config.world) as world:
        policy = build_policy(override(saved_policy_config(saved, config), local), world, device, policy)
    load_weights(policy, saved.path / WEIGHTS)
    return policy


def _build_small_world(config: Config, device: torch.device) -> World:
    """Build the world with as few agents as it takes, if its spec does not depend on their number."""
    world = config.world
    is_known = bool(world.family.constructor) and not isinstance(world, MixtureConfig)
    try:
        agents = min(world.agents, world.agents_per_env) if is_known else world.agents
        return build_world(config, device, agents=agents, seed=0)
    except AgentCountError as error:
        agents = error.agents_per_env
    except ConfigError:
        # It may take no fewer than the run has; another error is raised again.
        agents = world.agents
    return build_world(config, device, agents=agents, seed=0)


def _require_sizes_of_weights(saved: Checkpoint, config: Config) -> None:
    """Refuse sizes larger than any of the weights, whose shapes are read without their numbers."""
    file = saved.path / WEIGHTS
    try:
        with safe_open(file, framework="pt") as weights:
            # Not the bytes of names that a policy saves beside its weights.
            names = [name for name in weights.keys() if not name.endswith("_extra_state")]  # noqa: SIM118
            shapes = [weights.get_slice(name).get_shape() for name in names]
    except SafetensorError as error:
        raise ConfigError(f"{file} does not hold the weights of this policy: {one_line(error)}") from error
    limits = {"hidden_size": max((size for shape in shapes for size in shape), default=0), "num_layers": len(shapes)}
    for key, limit in limits.items():
        size = getattr(config.policy, key)
        if size is not None and size > limit:
            raise ConfigError(
                f"{saved.path / CONFIG} has policy.{key}={size}, but the weights in {file.name} have at most {limit}; "
                "they do not belong together."
            )


def find_checkpoint(folder: Path, log: Log) -> Checkpoint:
    """Open the newest valid checkpoint of a run, or the one that `folder` is."""
    if not (folder / WEIGHTS).exists():
        return RunDir(folder).newest(log)
    return open_checkpoint(folder, policy_only=True)


def config_from(saved: Checkpoint) -> Config:
    """Read the config of a checkpoint."""
    file = saved.path / CONFIG
    try:
        with names_from(saved.path):
            return read_config(file.read_text())
    except TrustError:
        raise
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{file}: {error}") from None


def saved_policy_config(saved: Checkpoint, config: Config) -> Config:
    """Return the config to build a saved policy from: a component graph comes from the checkpoint."""
    graph = {"policy.name": f"component:{saved.path / GRAPH}"}
    return override(config, graph) if GRAPH in saved.files else config


def load_teacher(run: str | Path, world: World, device: torch.device) -> tuple[LSTMWrapper, Config, dict[str, bytes]]:
    """Load the policy of a run and bind it to another world by names; return its files too: the run may change."""
    if not (Path(run) / CONFIG).exists():
        raise ConfigError(f"trainer.teachers: {run} is not a run's folder; give for example runs/NAME.")
    policy, config = load_policy(Path(run), device)
    files = {**policy_files(config, policy), WEIGHTS: pack_weights(policy.state_dict())}
    try:
        if policy.binding.spec is None or policy.binding.spec.interface != world.spec.interface:
            policy.bind(world.spec, learn=False)
    except ContractError as error:
        raise ConfigError(f"trainer.teachers: {run} cannot act in this world: {error}") from error
    return policy, config, files


def build_teachers(config: Config, world: World, policy: LSTMWrapper, folder: Path | None = None) -> list[Teacher]:
    """Load all teachers, each under a unique name; `folder` is that of a resumed run's copies."""
    device, teachers = next(policy.parameters()).device, dict[str, Teacher]()
    rows = config.trainer.minibatch_size // config.trainer.bptt_horizon
    for number, teacher in enumerate(config.trainer.teachers, 1):
        name = Path(teacher.run).name
        name = f"{name}-{number}" if name in teachers else name
        loaded, saved, files = load_teacher(teacher.run if folder is None else folder / name, world, device)
        if teacher.value and (config.trainer.normalize_reward or saved.trainer.normalize_reward):
            raise ConfigError(
                f"trainer.teachers: with normalized rewards the values of {teacher.run} and of this run have different "
                f"scales; write '{teacher.run} value=0', or train both with trainer.normalize_reward=false."
            )
        teachers[name] = Teacher(name, loaded, teacher, agents=world.agents, batch_size=rows, files=files)
        teachers[name].require_same_actions(policy)
    return list(teachers.values())
