"""Ctrl-C and SIGTERM end a run at its next whole iteration, with what was learnt saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Becomes true when somebody asks the run to end; asked twice, the second time ends it at once."""

    def __init__(self) -> None:
        self.asked = False

    def __bool__(self) -> bool:
        return self.asked

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def listening_for_stop() -> Iterator[StopRequest]:
    """Take over SIGINT and SIGTERM for the time of a run; only the main thread can."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
