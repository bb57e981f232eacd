"""The default recipe: learn to remember on two CPU cores within a few minutes."""

from holdfast.config import Config, Policy
from holdfast.knobs import RecallWorld
from holdfast.recipes.falling import falling
from holdfast.trainer_knobs import PPO, Optimizer, Trainer


def recall() -> Config:
    """`fast` on `recall` with 4 cues and a delay of 8 steps: chance 0.25, best 1.0."""
    return Config(
        world=RecallWorld(agents=64, delay=8, cues=4),
        policy=Policy(name="fast"),
        schedule=falling(),
        trainer=Trainer(
            total_timesteps=300_000,
            batch_size=4096,
            minibatch_size=512,
            bptt_horizon=64,
            update_epochs=2,
            optimizer=Optimizer(learning_rate=1e-3),
            ppo=PPO(
                # Only the answer to the query matters: rewards far away would be noise to all other steps.
                gamma=0.9,
                gae_lambda=0.8,
                clip_coef=0.1,
                vf_coef=0.5,
                clip_vloss=False,
                ent_coef=0.02,
            ),
        ),
    )
