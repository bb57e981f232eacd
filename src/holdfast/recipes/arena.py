"""The recipe of `arena`: crowds learn to gather."""

from holdfast.config import Config, Policy
from holdfast.knobs import ArenaWorld
from holdfast.recipes.falling import falling
from holdfast.trainer_knobs import PPO, Optimizer, Trainer


def arena() -> Config:
    """8 maps of 32 x 32 cells; the best return is not known: see `holdfast.worlds.arena`."""
    return Config(
        world=ArenaWorld(agents=192),
        policy=Policy(name="fast", num_layers=1),
        schedule=falling(),
        trainer=Trainer(
            total_timesteps=1_500_000,
            batch_size=6144,
            minibatch_size=1536,
            bptt_horizon=16,
            update_epochs=2,
            # Two of each agent: episodes are long.
            eval_episodes=528,
            optimizer=Optimizer(learning_rate=1e-3),
            ppo=PPO(
                gamma=0.95,
                gae_lambda=0.9,
                clip_coef=0.2,
                vf_coef=0.5,
                clip_vloss=False,
                ent_coef=0.01,
            ),
        ),
    )
