"""A worker as the trainer sees it: what it is asked, what it answers, and how it ends."""

import os
import pickle
import signal
import socket
import struct
import time
from multiprocessing.connection import Connection
from typing import Any

from holdfast.errors import ConfigError, CrowdError
from holdfast.worlds.pool.nursery import GONE, Nursery
from holdfast.worlds.pool.shared import open_memory

GRACE_S = 2.0
"""How long a worker that is told to end may take for it."""
LAST_WORDS_S = 0.3
"""How long one that hangs may take to say where."""
LONGEST = 1 << 16
"""Bytes of last words that are read."""


class LostError(Exception):
    """A worker raised, hung or died."""

    def __init__(self, how: str, where: str = "") -> None:
        super().__init__(how)
        self.how, self.where = how, where


class Line:
    """One worker's process, and the way to it."""

    def __init__(self, nursery: Nursery, memory: int, timeout: float) -> None:
        self._timeout = timeout
        mine, theirs = socket.socketpair()
        # A worker that hangs reads and writes nothing: nobody waits for it longer than for an answer.
        patience = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
        for way in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            mine.setsockopt(socket.SOL_SOCKET, way, patience)
        self._last_words = open_memory()
        with mine, theirs:
            try:
                self._process = nursery.bear((theirs.fileno(), memory, self._last_words))
            except BaseException:
                os.close(self._last_words)
                raise
            self._way = Connection(os.dup(mine.fileno()))

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, what: str, **words: Any) -> None:
        """Tell it to do something; it answers when it has."""
        try:
            self._way.send_bytes(pickle.dumps((what, words)))
        except BlockingIOError:
            raise self._hangs(self._timeout) from None
        except OSError:
            raise self._died() from None

    def hear(self, patience: float = 0.0) -> Any:
        """Wait for an answer, with more patience if there is reason for it; raise if it fails or dies."""
        patience = max(patience, self._timeout)
        try:
            if not self._comes(patience):
                raise self._hangs(patience)
            kind, told = pickle.loads(self._way.recv_bytes())
        except BlockingIOError:
            raise self._hangs(self._timeout) from None
        except (EOFError, OSError):
            raise self._died() from None
        if kind == "crowd":
            raise CrowdError(*told)
        if kind == "config":
            raise ConfigError(told)
        if kind == "fault":
            raise LostError(f"failed: {told[0].rstrip('.')}", told[1])
        return told

    def end(self) -> None:
        """Ask it to end."""
        try:
            self._way.send_bytes(pickle.dumps(("end", {})))
        except OSError:
            # It has ended already, or does not listen.
            self._process.signal(signal.SIGKILL)

    def gone(self, until: float) -> None:
        """See to it that its process is gone: by itself until then, else by force."""
        if self._way.closed:
            return
        if self._process.ended(until - time.monotonic()) is None:
            self._process.signal(signal.SIGKILL)
            self._process.ended(GRACE_S)
        self._way.close()
        self._process.close()
        os.close(self._last_words)

    def kill(self) -> None:
        """End its process at once."""
        self._process.signal(signal.SIGKILL)
        self.gone(time.monotonic() + GRACE_S)

    def _comes(self, patience: float) -> bool:
        """Wait for an answer, a second at a time: to have been stopped for an hour is not to have waited."""
        whole, rest = divmod(patience, 1.0)
        return any(self._way.poll(each) for each in (rest, *[1.0] * int(whole)))

    def _hangs(self, patience: float) -> LostError:
        """Say where it is while it does not answer."""
        self._process.signal(signal.SIGUSR1)
        time.sleep(LAST_WORDS_S)
        return LostError(f"did not answer within {patience:g} seconds", self._said_last())

    def _died(self) -> LostError:
        code = self._process.ended(GRACE_S)
        if code is None:
            return LostError("closed its way to the trainer", self._said_last())
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if code == GONE:
            how = "ended with the process that it was copied from"
        return LostError(how, self._said_last())

    def _said_last(self) -> str:
        os.lseek(self._last_words, 0, os.SEEK_SET)
        return os.read(self._last_words, LONGEST).decode(errors="replace").strip()
