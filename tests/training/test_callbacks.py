"""Callbacks read, log, stop, and change numbers of the config; resumed runs continue with what they set."""

import numpy as np
import pytest

import holdfast
from helpers.small_runs import TINY, apart, lines_of
from holdfast.errors import ConfigError, ContractError

RATE, ENTROPY = "trainer.optimizer.learning_rate", "trainer.ppo.ent_coef"


def train(folder, name="x", **arguments):
    keys = {**TINY, "runs_dir": str(folder), "run": name, "trainer.total_timesteps": 256}
    return holdfast.train("recall", {**keys, **arguments.pop("config", {})}, quiet=True, **arguments)


class Halve:
    """Halves the learning rate, sets the entropy bonus, and logs; it has no state of its own."""

    def __call__(self, iteration):
        iteration.log("doubled", 2 * iteration.number)
        iteration.set(RATE, iteration.value(RATE) / 2)
        iteration.set(ENTROPY, 0.1 * iteration.number)


def test_callbacks_are_called_once_in_every_iteration_with_its_metrics(tmp_path):
    calls = []

    def record(iteration):
        assert iteration.folder == tmp_path / "x"
        calls.append((iteration.number, iteration.total, dict(iteration.metrics), iteration.policy))
        with pytest.raises(TypeError):
            iteration.metrics["losses/entropy"] = 0

    run = train(tmp_path, callbacks=[record, Halve()])
    assert [call[:2] for call in calls] == [(number, 4) for number in (1, 2, 3, 4)]
    assert all(call[3] is run.policy for call in calls)
    for name in ("losses/entropy", "charts/SPS", "iteration"):
        assert run.metrics[name].tolist() == [call[2][name] for call in calls]
    assert run.metrics["custom/doubled"].tolist() == [2, 4, 6, 8]
    assert [line["custom/doubled"] for line in lines_of(run.folder)[:-1]] == [2, 4, 6, 8]


def test_numbers_that_are_set_hold_from_the_next_iteration_on_instead_of_schedules(tmp_path):
    constant = {"schedule": "none", RATE: 1e-3}
    run = train(tmp_path, callbacks=[Halve()], config=constant)
    assert run.metrics["charts/learning_rate"].tolist() == [1e-3 / 2**n for n in range(4)]
    # The recipe schedules the entropy bonus to 0; without a schedule it is logged once it is set.
    entropy = f"charts/scheduled@{ENTROPY}"
    np.testing.assert_array_equal(run.metrics[entropy], [np.nan, 0.1, 0.2, 0.1 * 3])
    scheduled = train(tmp_path, "scheduled", callbacks=[Halve()])
    assert scheduled.metrics[entropy].tolist() == [0.02, 0.1, 0.2, 0.1 * 3]


def test_set_numbers_change_the_update(tmp_path):
    plain = train(tmp_path, "plain")
    frozen = train(tmp_path, "frozen", callbacks=[lambda iteration: iteration.set(RATE, 0.0)])
    assert plain.metrics["losses/entropy"][0] == frozen.metrics["losses/entropy"][0]
    assert frozen.metrics["losses/approx_kl"][1:].tolist() == pytest.approx([0] * 3, abs=1e-9)
    assert (plain.metrics["losses/approx_kl"][1:] > 1e-9).all()


def test_a_resumed_run_continues_with_what_was_set_bit_for_bit(tmp_path):
    def stop_at_two(iteration):
        if iteration.number == 2:
            iteration.stop()

    full = train(tmp_path, "full", callbacks=[Halve()])
    parts = train(tmp_path, "parts", callbacks=[Halve(), stop_at_two])
    assert (parts.finished, parts.summary["iteration"], full.finished) == (False, 2, True)
    assert "eval/return_mean" not in parts.summary
    resumed = holdfast.train(resume=parts.folder, callbacks=[Halve()], quiet=True)
    assert resumed.finished
    assert apart(full.folder, parts.folder) == []


def test_a_key_typed_for_a_resumed_run_comes_before_what_was_set(tmp_path):
    parts = train(
        tmp_path,
        config={"schedule": "none"},
        callbacks=[lambda iteration: iteration.set(RATE, 0.5), lambda iteration: iteration.stop()],
    )
    resumed = holdfast.train(resume=parts.folder, config={RATE: 0.25}, quiet=True)
    assert resumed.metrics["charts/learning_rate"][1:].tolist() == [0.25] * 3


def test_a_schedule_typed_for_a_resumed_run_comes_before_what_was_set(tmp_path):
    callbacks = [lambda iteration: iteration.set(RATE, 0.5), lambda iteration: iteration.stop()]
    parts = train(tmp_path, config={"schedule": "none"}, callbacks=callbacks)
    resumed = holdfast.train(resume=parts.folder, config={f"schedule.{RATE}": "linear:0"}, quiet=True)
    rates = resumed.metrics["charts/learning_rate"][1:].tolist()
    assert max(rates) < 0.5
    assert rates == sorted(rates, reverse=True)


def test_an_exception_ends_the_run_saved_and_says_where(tmp_path):
    def fail(iteration):
        if iteration.number == 3:
            raise ValueError("too late")

    with pytest.raises(
        ContractError, match=r"callback fail, iteration 3: ValueError: too late \(test_callbacks.py:\d+\)"
    ):
        train(tmp_path, "parts", callbacks=[fail])
    assert "raise ValueError" in (tmp_path / "parts" / "error.txt").read_text()
    assert (tmp_path / "parts" / "checkpoints" / "latest").resolve().name == "000002"
    numbers = []
    holdfast.train(
        resume=tmp_path / "parts", callbacks=[lambda iteration: numbers.append(iteration.number)], quiet=True
    )
    assert numbers == [3, 4]
    full = train(tmp_path, "full")
    assert apart(full.folder, tmp_path / "parts") == []


@pytest.mark.usefixtures("annotations_asleep")
@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda iteration: iteration.set("trainer.ppo.entcoef", 1), "not a number that is read .* did you mean"),
        (lambda iteration: iteration.set("trainer.batch_size", 1), "read in every iteration; choose from trainer"),
        (lambda iteration: iteration.set("lr", 1), "; did you mean trainer.optimizer.learning_rate[?] [(]"),
        (lambda iteration: iteration.set("n_epochs", 1), "; choose from trainer"),
        (lambda iteration: iteration.set(RATE, -1), "learning_rate=-1.0: input should be greater than or equal to 0"),
        (lambda iteration: iteration.set(RATE, None), "learning_rate=None: float"),
        (lambda iteration: iteration.set(RATE, "fast"), "learning_rate=fast: could not convert"),
        (lambda iteration: iteration.value("trainer.ppo.entcoef"), "not a number that is read .* did you mean"),
        (lambda iteration: iteration.log("x", float("nan")), "custom/x is nan; log finite numbers"),
    ],
)
def test_wrong_calls_of_a_callback_say_what_to_type(tmp_path, act, message):
    with pytest.raises(ContractError, match=message):
        train(tmp_path, callbacks=[act])


@pytest.mark.usefixtures("annotations_asleep")
def test_callbacks_are_a_list_of_functions(tmp_path):
    for callbacks, message in ((print, "is not a list; write callbacks="), ([print, 3], "3 cannot be called")):
        with pytest.raises(ConfigError, match=message):
            train(tmp_path, callbacks=callbacks)
    assert list(tmp_path.iterdir()) == []
