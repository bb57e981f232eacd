"""Recipes: functions that return the config of a complete run."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal

from holdfast.config import worlds
from holdfast.config.recipe_file import is_recipe_file, read_recipe_file
from holdfast.config.run import Config, PolicyConfig, override
from holdfast.config.trainer import OptimizerConfig, PPOConfig, Schedule, TrainerConfig
from holdfast.config.world_names import FAMILIES, GYM_ID
from holdfast.errors import ConfigError, TrustError, did_you_mean
from holdfast.trust import names_from

DEFAULT = "recall"
ELSEWHERE = "general"
"""The recipe for environments without a tuned one."""
SMALL = PolicyConfig(name="fast", hidden_size=64, num_layers=1)

_ppo = partial(PPOConfig, vf_coef=0.5, clip_vloss=False)


def _immediate_reward_ppo(ent_coef: float = 0.05) -> PPOConfig:
    """PPO for worlds where each answer is rewarded at once and changes nothing later.

    Later rewards depend on no earlier action, so gamma is 0. The entropy bonus starts large: with less, the policy
    becomes deterministic before all answers are right. More states to tell apart need more of it.
    """
    return _ppo(gamma=0.0, gae_lambda=0.0, ent_coef=ent_coef)


def _delayed_reward_ppo(gamma: float, gae_lambda: float) -> PPOConfig:
    """PPO for worlds where a sequence of actions leads to the reward."""
    return _ppo(gamma=gamma, gae_lambda=gae_lambda, clip_coef=0.2, ent_coef=0.02)


def _run(
    world: worlds.WorldConfig,
    ppo: PPOConfig,
    *,
    steps: int,
    policy: PolicyConfig = SMALL,
    horizon: int = 16,
    segments: int = 1,
    minibatches: int = 4,
    update_epochs: int = 4,
    learning_rate: float = 1e-3,
    learning_rate_end: float = 1e-4,
    eval_episodes: int = 2000,
    normalize_reward: bool = False,
    action_noise: Literal["white", "pink"] = "white",
) -> Config:
    """An update after every `segments` segments; learning rate and entropy bonus decay linearly."""
    batch_size = world.agents * horizon * segments
    ends = {"trainer.optimizer.learning_rate": learning_rate_end, "trainer.ppo.ent_coef": 0.0}
    return Config(
        world=world,
        policy=policy,
        schedule=tuple(Schedule(key=key, kind="linear", end=end) for key, end in ends.items()),
        trainer=TrainerConfig(
            total_timesteps=steps,
            batch_size=batch_size,
            minibatch_size=batch_size // minibatches,
            bptt_horizon=horizon,
            update_epochs=update_epochs,
            eval_episodes=eval_episodes,
            normalize_reward=normalize_reward,
            action_noise=action_noise,
            optimizer=OptimizerConfig(learning_rate=learning_rate),
            ppo=ppo,
        ),
    )


def recall() -> Config:
    """`fast` on `recall` with 4 cues and a delay of 8 steps: chance 0.25, best 1.0."""
    world, policy = worlds.RecallConfig(agents=64, delay=8, cues=4), PolicyConfig(name="fast")
    # Only the answer to the query is rewarded: distant rewards would be noise for other steps.
    ppo = _ppo(gamma=0.9, gae_lambda=0.8, ent_coef=0.02)
    return _run(world, ppo, policy=policy, steps=300_000, horizon=64, minibatches=8, update_epochs=2)


def repeat_first() -> Config:
    """4 symbols, 65 to 95 steps: about 0.26 without memory, best 1.0."""
    return _run(worlds.RepeatFirstConfig(), _immediate_reward_ppo(), steps=400_000)


def n_back() -> Config:
    """4 symbols, 2 steps back: 0.25 without memory, best 1.0."""
    return _run(worlds.NBackConfig(), _immediate_reward_ppo(), steps=100_000)


def tmaze() -> Config:
    """A corridor of 4 cells: 0.0 without memory, best 1.0."""
    # Missing the goal costs 1 after 20 steps: discounted by 0.9, that is next to nothing. Before the policy knows the
    # path, the cue is up to 20 steps back: segments must be longer.
    ppo = _delayed_reward_ppo(gamma=0.95, gae_lambda=0.95)
    return _run(worlds.TMazeConfig(), ppo, steps=120_000, horizon=32, minibatches=8)


def key_value() -> Config:
    """2 pairs, fewer than the world's 4: 0.25 without memory, best 1.0."""
    policy = PolicyConfig(name="fast", hidden_size=128, num_layers=1)
    return _run(worlds.KeyValueConfig(pairs=2), _immediate_reward_ppo(ent_coef=0.5), policy=policy, steps=200_000)


def parity() -> Config:
    """Episodes of 4 steps, shorter than the world's 16: 0.5 without memory, best 1.0.

    In longer episodes late answers cannot be right before early ones are, and learning stalls. A policy trained on
    short episodes is mostly right on longer ones.
    """
    return _run(worlds.ParityConfig(length=4), _immediate_reward_ppo(ent_coef=0.2), steps=60_000)


def forage() -> Config:
    """4 arms, 8 trials: 0.25 without memory, and with memory.clear_on=trial; best 0.8125."""
    # Finding the goal pays in all later trials, of three steps each. An episode is one segment long.
    return _run(
        worlds.ForageConfig(), _delayed_reward_ppo(gamma=0.95, gae_lambda=0.9), steps=500_000, horizon=24, segments=2
    )


def arena() -> Config:
    """8 maps of 32 x 32 cells; the best return is unknown: see `holdfast.worlds.builtin.arena`."""
    return _run(
        worlds.ArenaConfig(agents=192),
        _ppo(gamma=0.95, gae_lambda=0.9, clip_coef=0.2, ent_coef=0.01),
        policy=PolicyConfig(name="fast", num_layers=1),
        steps=1_500_000,
        segments=2,
        update_epochs=2,
        # Two per agent: episodes are long.
        eval_episodes=528,
    )


def ragged() -> Config:
    """4 cues, queried 0 to 8 steps later: 0.25 without memory, best 1.0."""
    return _run(worlds.RaggedConfig(), _immediate_reward_ppo(), steps=100_000)


def constant() -> Config:
    """Values come within 2 % of the exact ones, at every step, with and without world.truncate=true."""
    # No action is better than another: normalized advantages would be noise of size 1.
    ppo = _ppo(gamma=0.9, gae_lambda=0.9, ent_coef=0.0, norm_adv=False)
    return _run(worlds.ConstantConfig(), ppo, steps=80_000, learning_rate_end=0.0)


def _cartpole_run(world: worlds.WorldConfig, *, steps: int = 250_000, learning_rate_end: float = 2e-4) -> Config:
    """`fast` with one memory layer and gamma 0.99: actions matter for about a hundred steps.

    Without normalization the narrow layers of `fast` saturate at this learning rate, and nothing is learned.
    """
    return _run(
        world,
        _ppo(gamma=0.99, gae_lambda=0.95, clip_coef=0.2, ent_coef=0.005),
        policy=PolicyConfig(name="fast", num_layers=1, normalize_obs=True),
        steps=steps,
        horizon=64,
        learning_rate=2e-3,
        learning_rate_end=learning_rate_end,
        eval_episodes=100,
        normalize_reward=True,
    )


def general() -> Config:
    """For environments without a recipe of their own: normalized, chosen over several tasks."""
    # With 64 agents and rollouts of 64 steps all agents are in the same part of an episode: on Acrobot one of two runs
    # never saw its end.
    return _run(
        worlds.RecallConfig(agents=16),
        _ppo(gamma=0.99, gae_lambda=0.95, clip_coef=0.2, ent_coef=0.005),
        policy=PolicyConfig(name="fast", num_layers=1, normalize_obs=True),
        steps=250_000,
        horizon=64,
        segments=2,
        eval_episodes=100,
        normalize_reward=True,
        # With white noise MountainCarContinuous never finds its goal.
        action_noise="pink",
    )


def cartpole() -> Config:
    """CartPole-v1 without velocities in the observation: best 500."""
    return _cartpole_run(worlds.GymConfig(name="gym:CartPole-v1", keep=(0, 2)))


def envpool_cartpole() -> Config:
    """CartPole-v1 in envpool, without velocities in the observation: best 500."""
    return _cartpole_run(worlds.EnvpoolConfig(name="envpool:CartPole-v1", keep=(0, 2)))


def popgym_repeat_first() -> Config:
    """RepeatFirstEasy, without previous action or start marker: -0.5 without memory, best 1.0.

    Episodes have 51 steps and segments 16: memory must be carried across segments and cleared at resets.
    """
    world = worlds.PopGymConfig(name="popgym:RepeatFirstEasy")
    return _run(world, _immediate_reward_ppo(), steps=300_000, eval_episodes=250)


def popgym_cartpole() -> Config:
    """PositionOnlyCartPoleEasy, 200 steps: best 1.0."""
    # With 64 agents and 250 k steps four of five seeds reach it, and some drop again; with 400 k one in five may end
    # at 0.93.
    world = worlds.PopGymConfig(name="popgym:PositionOnlyCartPoleEasy", agents=128)
    return _cartpole_run(world, steps=500_000, learning_rate_end=0.0)


def mettagrid_tmaze() -> Config:
    """A corridor of 4 cells: 0.0 without memory, best 1.0."""
    # The path is learned early, and the return stays at 0 until the cue is remembered. With a learning rate of 1e-3
    # one of two seeds solved it in 100 k steps, with 3e-3 all of five in 25 k to 50 k.
    return _run(
        worlds.MettaGridTMazeConfig(),
        _delayed_reward_ppo(gamma=0.95, gae_lambda=0.95),
        steps=100_000,
        horizon=32,
        minibatches=8,
        learning_rate=3e-3,
        eval_episodes=1000,
    )


def mettagrid_collect() -> Config:
    """24 agents on one map: best 4.0; needs no memory."""
    ppo = _delayed_reward_ppo(gamma=0.9, gae_lambda=0.9)
    return _run(worlds.MettaGridCollectConfig(), ppo, steps=200_000, horizon=32, minibatches=8, eval_episodes=480)


RECIPES: dict[str, Callable[[], Config]] = {
    recipe.__name__: recipe
    for recipe in (
        *(recall, repeat_first, n_back, tmaze, key_value, parity, forage, arena, ragged, constant),
        *(general, cartpole, envpool_cartpole, popgym_repeat_first, popgym_cartpole),
        *(mettagrid_tmaze, mettagrid_collect),
    )
}
"""One for each built-in world, by its name, and some for environments of other packages."""


def recipe_for(world: str | None) -> str:
    """Return the default recipe of a world."""
    if world is None:
        return DEFAULT
    recipe = world.replace(":", "_")
    if recipe in RECIPES and (world in RECIPES or world in FAMILIES):
        return recipe
    return ELSEWHERE if ":" in world else DEFAULT


def recipe_and_keys(name: str) -> tuple[str, dict[str, str]]:
    """Return the recipe that a recipe file changes, by default that of its world, and the keys that it changes."""
    with names_of_recipe(name):
        recipe, keys = read_recipe_file(Path(name))
    if recipe is not None and is_recipe_file(recipe):
        raise ConfigError(f"{name}: recipe: {recipe} is a file too; name one of {', '.join(RECIPES)}.")
    return recipe or recipe_for(keys.get("world", keys.get("world.name"))), keys


def names_of_recipe(name: str | None) -> AbstractContextManager[None]:
    """Take names of modules from a recipe file, which its user need not have written; from a recipe, as typed."""
    return names_from(Path(name)) if name is not None and is_recipe_file(name) else nullcontext()


def find_recipe(name: str) -> Config:
    """Return the config of a recipe, or of a recipe file."""
    if is_recipe_file(name):
        recipe, keys = recipe_and_keys(name)
        try:
            with names_of_recipe(name):
                return override(find_recipe(recipe), keys)
        except TrustError:
            raise
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES, f"choose from {', '.join(RECIPES)}.")
        if GYM_ID.fullmatch(name):
            hint = f"it is an environment: write world=gym:{name}, in Python env={name!r}."
        raise ConfigError(f"There is no recipe {name!r}; {hint}")
    return RECIPES[name]()
