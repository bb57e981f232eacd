"""Ctrl-C and SIGTERM end a run at its next whole iteration, with what was learnt saved."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Becomes true when somebody asks the run to end; asked twice, the second time ends it at once."""

    def __init__(self, say: Callable[[str], object] | None) -> None:
        self.asked, self._say = False, say

    def __bool__(self) -> bool:
        return self.asked

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if self._say is not None:
            self._say("stopping after this iteration; asked again, at once.")


@contextmanager
def listening_for_stop(say: Callable[[str], object] | None = None) -> Iterator[StopRequest]:
    """Take over SIGINT and SIGTERM for the time of a run; only the main thread can."""
    request = StopRequest(say)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
