"""The exceptions of Holdfast, the one-line form of any exception, where it was raised, and did-you-mean."""

import os
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import TypeVar

Error = TypeVar("Error", bound=BaseException)


class HoldfastError(Exception):
    """Base class: an error the user can fix; the message says how."""


class ConfigError(HoldfastError):
    """A key, a value, a name or a combination of them is wrong."""


class TrustError(ConfigError):
    """A file names code that is not trusted."""


class MakeError(ConfigError):
    """An environment or a wrapper raised while it was made. Its traceback is a note if that was in a worker."""


class AgentCountError(ConfigError):
    """The number of agents is not a multiple of `agents_per_env`."""

    def __init__(self, message: str, agents_per_env: int) -> None:
        super().__init__(message)
        self.agents_per_env = agents_per_env


class ContractError(HoldfastError):
    """A world, a policy or a caller broke the contract."""


class RankError(HoldfastError):
    """Another rank of the run ended, or cannot be reached. Only one of the ranks that are left prints it."""

    def __init__(self, message: str, *, prints: bool) -> None:
        super().__init__(message)
        self.prints = prints


class OtherRankError(RankError):
    """Another rank has failed and prints its error; all ranks have ended the same block, and can still gather."""

    def __init__(self, message: str) -> None:
        super().__init__(message, prints=False)


class WorkerError(ContractError):
    """A worker process crashed, raised or hung; says which one and in which call. Its traceback is a note."""


def with_note(error: Error, note: str) -> Error:
    """Add a note as `add_note` does, which Python 3.10 has not, and return the error."""
    vars(error)["__notes__"] = [*getattr(error, "__notes__", ()), note]
    return error


def one_line(error: BaseException, limit: int | None = None) -> str:
    """Return the message of an exception on one line; its type where the message is empty."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def error_text(error: BaseException, limit: int | None = None) -> str:
    """Return type and message of an exception on one line."""
    name, message = type(error).__name__, one_line(error, limit)
    return name if message == name else f"{name}: {message}"


def located_error_text(error: BaseException) -> str:
    """Return type and message of an exception of user code, and where it was raised: `ValueError: bad (env.py:42)`."""
    return error_text(error) + _place_of(error)


_HOLDFAST = str(Path(__file__).parent) + os.sep
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))


def _place_of(error: BaseException) -> str:
    """Return the innermost line of the user's own code, or else of an installed package; of ours there is none."""
    innermost = [frame for frame in _frames(error)[-1:] if not frame.filename.startswith(_HOLDFAST)]
    return "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in (_own_frames(error) or innermost)[-1:])


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the lines of the user's own code."""
    return [frame for frame in _frames(error) if not frame.filename.startswith((_HOLDFAST, *_INSTALLED))]


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_absolute()]


def user_traceback(error: BaseException) -> str:
    """Return the traceback of the code that made an error, if it was not our own: of its cause, or of a worker."""
    notes = "\n".join(getattr(error, "__notes__", ()))
    if isinstance(error, WorkerError) or (isinstance(error, MakeError) and notes):
        return notes
    cause = error.__cause__ if isinstance(error, HoldfastError) else error
    return "" if cause is None else "".join(traceback.format_exception(cause)).rstrip()


def record_error(error: BaseException, file: Path) -> str:
    """Append an error and its traceback to a file, and return a sentence that says so; a full disk ends no run."""
    try:
        with file.open("a", encoding="utf-8") as log:
            log.write("\n".join([str(error), user_traceback(error)]).rstrip() + "\n\n")
    except OSError as failure:
        return f"Its traceback could not be written to {file}: {failure}"
    return f"Its traceback is in {file}."


@contextmanager
def recording_errors(file: Callable[[], Path]) -> Iterator[None]:
    """Append the tracebacks of errors in user code to a file; their messages name it."""
    try:
        yield
    except (ContractError, MakeError) as error:
        if user_traceback(error):
            error.args = (f"{error} {record_error(error, file())}",)
        raise
    except (HoldfastError, OSError):
        raise
    except Exception as error:
        if not _own_frames(error):
            raise
        raised = ContractError(f"The policy, or code that it calls, raised {located_error_text(error)}.")
        raised.__cause__ = error
        raise ContractError(f"{raised} {record_error(raised, file())}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise a failed write as one line: which file, why, and what to do."""
    try:
        yield
    except OSError as error:
        hint = "; free some space on its disk" if error.errno in (ENOSPC, EDQUOT) else ""
        raise OSError(f"Could not write {path}: {error.strerror or one_line(error)}{hint}.") from error


def did_you_mean(word: str, words: Iterable[str], otherwise: str) -> str:
    """Return a guess at the intended word, or `otherwise`."""
    near = get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else otherwise
