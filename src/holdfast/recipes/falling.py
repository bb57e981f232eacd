"""What most recipes share: a step size and an entropy bonus that go down in a line."""

from holdfast.trainer_knobs import Schedule


def falling(learning_rate: float | None = 1e-4, ent_coef: float | None = 0.0) -> tuple[Schedule, ...]:
    """Say where the step size and the entropy bonus end; none: where they began."""
    ends = {"trainer.optimizer.learning_rate": learning_rate, "trainer.ppo.ent_coef": ent_coef}
    return tuple(Schedule(key=key, kind="linear", end=end) for key, end in ends.items() if end is not None)
