"""One update of a policy, in few words."""

from holdfast.learn import Learner
from holdfast.trainer_knobs import PPO, Optimizer, Trainer


def learner_for(policy, segments, ppo=None, *, lr=1e-2, epochs=1, rows=4, seed=0, optimizer=None, **knobs):
    """A learner whose minibatches are so many rows of these segments."""
    horizon = segments.steps.shape[1]
    trainer = Trainer(
        batch_size=horizon * len(segments),
        minibatch_size=rows * horizon,
        bptt_horizon=horizon,
        update_epochs=epochs,
        # An optimiser of the test's own may have momentum; it gets none.
        optimizer=Optimizer(learning_rate=lr, momentum=0.95 if optimizer is None else 0.0),
        ppo=ppo or PPO(),
        **knobs,
    )
    learner = Learner(policy, trainer, seed)
    if optimizer is not None:
        learner.optimizer = optimizer
    return learner


def learn_from(policy, segments, ppo=None, **words):
    """Update a policy once; return what was measured."""
    return learner_for(policy, segments, ppo, **words).update(segments)
