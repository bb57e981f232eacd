"""The recipe of `constant`: nothing to do, and values to be learnt to the digit."""

from holdfast.config import Config
from holdfast.knobs import ConstantWorld
from holdfast.recipes.little import little
from holdfast.trainer_knobs import PPO


def constant() -> Config:
    """Values are within 2 % of what they must be, at every step, with world.truncate=true and without."""
    ppo = PPO(
        gamma=0.9,
        gae_lambda=0.9,
        vf_coef=0.5,
        clip_vloss=False,
        ent_coef=0.0,
        # No action is better than another: normalised, what is left of advantages would be noise of size 1.
        norm_adv=False,
    )
    return little(ConstantWorld(), ppo, steps=80_000, learning_rate_end=0.0)
