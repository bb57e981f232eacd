"""Recipes of poles that must be balanced by who sees places and not speeds, and of worlds like that."""

from holdfast.config import Config, Policy
from holdfast.knobs import RecallWorld, WorldKnobs
from holdfast.recipes.falling import falling
from holdfast.trainer_knobs import PPO, Optimizer, Trainer
from holdfast.which_world import EnvpoolKnobs, GymKnobs


def balance(world: WorldKnobs, *, steps: int, learning_rate_end: float = 2e-4) -> Config:
    """`fast` with one layer of memory; what is done now tells for a hundred steps."""
    return Config(
        world=world,
        policy=Policy(name="fast", num_layers=1),
        schedule=falling(learning_rate_end),
        trainer=Trainer(
            total_timesteps=steps,
            batch_size=world.agents * 64,
            minibatch_size=world.agents * 16,
            bptt_horizon=64,
            update_epochs=4,
            eval_episodes=100,
            optimizer=Optimizer(learning_rate=2e-3),
            ppo=PPO(
                gamma=0.99,
                gae_lambda=0.95,
                clip_coef=0.2,
                vf_coef=0.5,
                clip_vloss=False,
                ent_coef=0.005,
            ),
        ),
    )


def general() -> Config:
    """Where to begin in a world that nobody has tuned anything for."""
    return balance(RecallWorld(), steps=250_000)


def cartpole() -> Config:
    """CartPole-v1 with its speeds hidden: best 500."""
    return balance(GymKnobs(name="gym:CartPole-v1", keep=(0, 2)), steps=250_000)


def envpool_cartpole() -> Config:
    """The same in envpool: best 500."""
    return balance(EnvpoolKnobs(name="envpool:CartPole-v1", keep=(0, 2)), steps=250_000)
