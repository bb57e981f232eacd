import signal
import threading

import pytest

from holdfast.keep import listening_for_stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_and_the_second_insists(number):
    said = []
    with listening_for_stop(said.append) as stop:
        assert not stop
        signal.raise_signal(number)
        assert stop
        # Not in the handler: a signal may come in the middle of another line.
        assert said == []
        assert stop.until_asked(lambda: 5) is None
        assert stop.until_asked(lambda: 5) is None
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    # Who asks is told, once.
    assert said == ["stopping; the last whole iteration is saved. Asked again: at once, without saving."]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_work_is_broken_off_where_it_is_and_not_begun_again(number):
    done = []

    def work():
        done.append("begun")
        try:
            signal.raise_signal(number)
        except Exception:  # what worlds do around environments
            done.append("taken for an error")
        done.append("ended")
        return "result"

    with listening_for_stop() as stop:
        assert stop.until_asked(lambda: 5) == 5
        assert stop.until_asked(work) is None
        assert stop
        assert stop.until_asked(work) is None
    assert done == ["begun"]


def test_between_two_pieces_of_work_nothing_is_broken_off():
    with listening_for_stop() as stop:
        stop.until_asked(lambda: 5)
        signal.raise_signal(signal.SIGTERM)
        written = "whole"
        assert stop.until_asked(lambda: 5) is None
    assert written == "whole"


def test_the_handlers_from_before_come_back_even_after_an_error():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    during = []

    def break_down():
        with listening_for_stop():
            during.append(signal.getsignal(signal.SIGINT))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_down()
    assert during != [before[signal.SIGINT]]
    assert {number: signal.getsignal(number) for number in before} == before


def test_who_is_started_to_outlive_its_terminal_does():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listening_for_stop() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_may_train_but_hears_no_signals():
    before, heard = signal.getsignal(signal.SIGINT), []

    def work():
        with listening_for_stop() as stop:
            heard.append((bool(stop), signal.getsignal(signal.SIGINT) == before))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert heard == [(False, True)]
