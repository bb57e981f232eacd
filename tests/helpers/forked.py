"""Call functions in forked processes, which have imported everything and may be killed."""

import contextlib
import io
import json
import os
import select
import signal
import tempfile
import traceback
import warnings

from holdfast.errors import HoldfastError

SECONDS = 600
"""A call that takes longer hangs; on a busy machine a process may wait for minutes."""


def in_child(function, *args, kill_after=None, number=signal.SIGKILL):
    """Call a function in a forked process; return the outcome, the repr of the result, and the text it printed.

    Outcomes: `done`; `refused`, by one of our errors or the system's, or by None as the result; `raw`, by another
    exception; `killed`, by the signal `number` after `kill_after` seconds; `hang`.
    """
    with tempfile.TemporaryFile("w+") as file:
        child = os.fork()
        if not child:
            try:
                json.dump(_call(function, args), file)
                file.flush()
            finally:
                os._exit(0)
        is_late = kill_after is not None and not _ends(child, kill_after)
        if is_late:
            os.kill(child, number)
        is_hanging = not _ends(child, SECONDS)
        if is_hanging:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        file.seek(0)
        report = file.read()
    if report and not is_hanging:
        return tuple(json.loads(report))
    return "hang" if is_hanging else "killed" if is_late else "raw", "", "the process died"


def _ends(child, seconds):
    """Wait for the end of a process; return whether it came."""
    handle = os.pidfd_open(child)
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


def _call(function, args):
    text, result, outcome = io.StringIO(), None, "done"
    with (
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(text),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        try:
            result = function(*args)
            outcome = "refused" if result is None else "done"
        except (HoldfastError, OSError) as error:
            outcome = "refused"
            print(error)
        except BaseException:
            outcome = "raw"
            traceback.print_exc()
    return outcome, repr(result), "\n".join([text.getvalue(), *(str(warning.message) for warning in caught)])
