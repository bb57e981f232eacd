"""The recipe of `arena`: crowds learn to gather."""

from holdfast.config import PPO, Config, Optimizer, Policy, Trainer
from holdfast.knobs import ArenaWorld


def arena() -> Config:
    """8 maps of 32 x 32 cells; the best return is not known: see `holdfast.worlds.arena`."""
    return Config(
        world=ArenaWorld(agents=192),
        policy=Policy(name="fast", num_layers=1),
        trainer=Trainer(
            total_timesteps=1_500_000,
            batch_size=6144,
            minibatch_size=1536,
            bptt_horizon=16,
            update_epochs=2,
            # Two of each agent: episodes are long.
            eval_episodes=528,
            optimizer=Optimizer(learning_rate=1e-3, learning_rate_end=1e-4),
            ppo=PPO(
                gamma=0.95,
                gae_lambda=0.9,
                clip_coef=0.2,
                vf_coef=0.5,
                clip_vloss=False,
                ent_coef=0.01,
                ent_coef_end=0.0,
            ),
        ),
    )
