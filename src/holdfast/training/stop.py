"""Stop signals: the first ends a run after the current iteration, the second at once; both save it."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

from holdfast import ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MESSAGE = "stopping after this iteration; press Ctrl-C again to stop now, saved at the last complete iteration"
MESSAGE_OF_RANKS = "stopping after this iteration"
FORCE_QUIT = 3
"""The signal that ends a run even while it is being saved."""


class StopRequest:
    """Counts stop signals: the first ends a run after the current iteration, the second at once; both save it."""

    def __init__(self) -> None:
        self.requested = False
        """Whether the run must end."""
        self._signals, self._interrupt_at = 0, FORCE_QUIT
        self.messages: SimpleQueue[str | None] = SimpleQueue()

    @contextmanager
    def interruptible(self, signals: int) -> Iterator[None]:
        """Leave this block, by KeyboardInterrupt, as soon as so many signals have arrived.

        With several ranks two do not suffice: one that leaves alone would not meet the others to save.
        """
        try:
            self._interrupt_at = signals if ranks.count() == 1 or signals == 1 else FORCE_QUIT
            try:
                yield
            finally:
                self._interrupt_at = FORCE_QUIT
        except KeyboardInterrupt:
            if not self.requested:
                raise

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self.requested = True
        self._signals += 1
        if self._signals >= self._interrupt_at:
            raise KeyboardInterrupt
        if self._signals == 1:
            self.messages.put(MESSAGE if ranks.count() == 1 else MESSAGE_OF_RANKS)

    def print_messages(self, log: Callable[[str], object]) -> None:
        """Print what the handler reports, until None arrives."""
        for message in iter(self.messages.get, None):
            try:
                log(message)
            except OSError:
                # SIGHUP: the terminal is gone.
                return


@contextmanager
def stop_on_signals(log: Callable[[str], object] = print) -> Iterator[StopRequest]:
    """Handle SIGINT, SIGTERM and SIGHUP during a run; only the main thread can."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    # A thread prints: the handler may interrupt the main thread inside another write to the same stream.
    printer = threading.Thread(target=request.print_messages, args=(log,), daemon=True)
    printer.start()
    # A signal that is ignored (nohup) stays ignored.
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, request.handle) for number in handled}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        request.messages.put(None)
        printer.join()
