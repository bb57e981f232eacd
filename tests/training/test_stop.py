import signal
import threading

import pytest

from holdfast.training.stop import MESSAGE, stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_first_signal_requests_a_stop_and_interrupts_nothing(number):
    lines, completed = [], []
    with stop_on_signals(lines.append) as stop:
        assert not stop.requested
        with stop.interruptible(signals=2):
            signal.raise_signal(number)
            completed.append("block")
        assert stop.requested
    assert completed == ["block"]
    # Printed once, from a thread.
    assert lines == [MESSAGE]


def test_stop_message_is_printed_while_the_iteration_continues():
    printed = threading.Event()
    with stop_on_signals(lambda line: printed.set()) as stop, stop.interruptible(signals=2):
        signal.raise_signal(signal.SIGINT)
        assert printed.wait(10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_interrupts_the_block_and_execution_continues_after_it(number):
    steps = []
    with stop_on_signals(steps.append) as stop:
        with stop.interruptible(signals=2):
            signal.raise_signal(number)
            steps.append("begun")
            try:
                signal.raise_signal(number)
            except Exception:  # worlds catch these around environments
                steps.append("taken for an error")
            steps.append("ended")
        # Saving: no signal up to the second interrupts it, the third does.
        steps.append("saved")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert [step for step in steps if step != MESSAGE] == ["begun", "saved"]


def test_signals_outside_interruptible_blocks_only_count_until_the_third():
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_first_signal_ends_the_final_evaluation():
    scores = None
    with stop_on_signals() as stop:
        with stop.interruptible(signals=1):
            signal.raise_signal(signal.SIGINT)
            scores = {}
        assert stop.requested
    assert scores is None


def test_keyboard_interrupt_without_a_signal_is_raised():
    def interrupt():
        with stop_on_signals() as stop, stop.interruptible(signals=2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_a_closed_terminal_does_not_break_the_message_thread():
    def closed(line):
        raise OSError(5, "Input/output error")

    with stop_on_signals(closed) as stop:
        signal.raise_signal(signal.SIGHUP)
    assert stop.requested


def test_previous_handlers_are_restored_even_after_an_error():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    during = []

    def fail():
        with stop_on_signals():
            during.append(signal.getsignal(signal.SIGINT))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert during != [before[signal.SIGINT]]
    assert {number: signal.getsignal(number) for number in before} == before


def test_ignored_signals_stay_ignored_as_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_training_in_another_thread_leaves_signal_handlers_alone():
    before, results = signal.getsignal(signal.SIGINT), []

    def work():
        with stop_on_signals() as stop:
            results.append((stop.requested, signal.getsignal(signal.SIGINT) == before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=60)
    assert results == [(False, True)]
