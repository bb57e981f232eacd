"""What the recipes of little worlds share: a small `fast`, short segments, many small updates."""

from holdfast.config import Config, Policy
from holdfast.knobs import WorldKnobs
from holdfast.recipes.falling import falling
from holdfast.trainer_knobs import PPO, Optimizer, Trainer


def little(
    world: WorldKnobs,
    ppo: PPO,
    *,
    steps: int,
    hidden_size: int = 64,
    horizon: int = 16,
    segments: int = 1,
    minibatches: int = 4,
    learning_rate: float = 1e-3,
    learning_rate_end: float = 1e-4,
    eval_episodes: int = 2000,
) -> Config:
    """`fast` with one layer of memory, and some 16 steps of the optimiser after each segment or two."""
    batch_size = world.agents * horizon * segments
    return Config(
        world=world,
        policy=Policy(name="fast", hidden_size=hidden_size, num_layers=1),
        schedule=falling(learning_rate_end),
        trainer=Trainer(
            total_timesteps=steps,
            batch_size=batch_size,
            minibatch_size=batch_size // minibatches,
            bptt_horizon=horizon,
            update_epochs=4,
            eval_episodes=eval_episodes,
            optimizer=Optimizer(learning_rate=learning_rate),
            ppo=ppo,
        ),
    )


def answers(ent_coef: float = 0.05) -> PPO:
    """Say how to learn where an answer is paid at once and changes nothing that comes.

    No later reward is any step's merit, so none counts. The entropy bonus is large at first: with less of it
    answers become certain before all are right, and some stay wrong. The more states there are to tell
    apart, the more of it is needed.
    """
    return PPO(
        gamma=0.0,
        gae_lambda=0.0,
        clip_coef=0.1,
        vf_coef=0.5,
        clip_vloss=False,
        ent_coef=ent_coef,
    )


def walks(gamma: float, gae_lambda: float) -> PPO:
    """Say how to learn where a way of some steps leads to what is paid."""
    return PPO(
        gamma=gamma,
        gae_lambda=gae_lambda,
        clip_coef=0.2,
        vf_coef=0.5,
        clip_vloss=False,
        ent_coef=0.02,
    )
