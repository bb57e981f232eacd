"""One PPO update of a policy."""

from holdfast.config.trainer import OptimizerConfig, PPOConfig, TrainerConfig
from holdfast.learn import Learner, replay
from holdfast.learn.ppo import compute_loss


def learner_for(policy, segments, ppo=None, *, lr=1e-2, epochs=1, rows=4, seed=0, optimizer=None, **settings):
    """Return a learner with minibatches of `rows` of these segments."""
    horizon = segments.steps.shape[1]
    trainer = TrainerConfig(
        batch_size=horizon * len(segments),
        minibatch_size=rows * horizon,
        bptt_horizon=horizon,
        update_epochs=epochs,
        # A test's own optimizer gets no momentum.
        optimizer=OptimizerConfig(learning_rate=lr, momentum=0.95 if optimizer is None else 0.0),
        ppo=ppo or PPOConfig(),
        **settings,
    )
    learner = Learner(policy, trainer, seed)
    if optimizer is not None:
        learner.optimizers = {"own": optimizer}
    return learner


def learn_from(policy, segments, ppo=None, **settings):
    """Update a policy once; return the metrics."""
    return learner_for(policy, segments, ppo, **settings).update(segments)


def replay_loss(policy, segments, targets, ppo, **kwargs):
    """Replay segments; return the loss, its metrics and the policy's outputs."""
    outputs = replay(policy, segments)
    loss, metrics = compute_loss(policy, outputs, segments, targets, ppo=ppo, **kwargs)
    return loss, metrics, outputs
