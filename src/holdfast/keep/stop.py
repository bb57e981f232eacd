"""Ctrl-C, SIGTERM and a terminal that closes end a run at once; it goes on from its last whole iteration."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Asked(BaseException):
    """Breaks off an iteration; no `except Exception` on the way takes it for an error."""


class StopRequest:
    """Becomes true when somebody asks the run to end; asked twice, nothing more is written."""

    def __init__(self, say: Callable[[str], object] | None) -> None:
        self.asked, self._say = False, say
        self._may_break_off = False

    def __bool__(self) -> bool:
        return self.asked

    def until_asked(self, work: Callable[[], T]) -> T | None:
        """Do some work, and break it off when somebody asks; none: somebody did."""
        try:
            self._may_break_off = True
            try:
                if not self.asked:
                    return work()
            finally:
                self._may_break_off = False
        except _Asked:
            self._may_break_off = False
        # Not where the signal was heard: that may have been in the middle of another line.
        if self._say is not None:
            self._say("stopping; the last whole iteration is saved. Asked again: at once, without saving.")
            self._say = None
        return None

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if self._may_break_off:
            raise _Asked


@contextmanager
def listening_for_stop(say: Callable[[str], object] | None = None) -> Iterator[StopRequest]:
    """Take over SIGINT, SIGTERM and SIGHUP for the time of a run; only the main thread can."""
    request = StopRequest(say)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    # Whoever started it so that a signal is ignored (nohup) means that.
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, request.ask) for number in heard}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
