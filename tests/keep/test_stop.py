import signal
import threading

import pytest

from holdfast.keep import listening_for_stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_insists(number):
    said = []
    with listening_for_stop(said.append) as stop:
        assert not stop
        signal.raise_signal(number)
        assert stop
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    # Who asks is told, once.
    assert said == ["stopping after this iteration; asked again, at once."]


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


def test_another_thread_may_train_but_hears_no_signals():
    before, heard = signal.getsignal(signal.SIGINT), []

    def work():
        with listening_for_stop() as stop:
            heard.append((bool(stop), signal.getsignal(signal.SIGINT) == before))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert heard == [(False, True)]
