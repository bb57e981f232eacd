"""The exceptions of Holdfast, the one-line form of any exception, and did-you-mean."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from errno import EDQUOT, ENOSPC
from pathlib import Path


class HoldfastError(Exception):
    """Base class: an error the user can fix; the message says how."""


class ConfigError(HoldfastError):
    """A key, a value, a name or a combination of them is wrong."""


class AgentCountError(ConfigError):
    """The number of agents is not a multiple of `agents_per_env`."""

    def __init__(self, message: str, agents_per_env: int) -> None:
        super().__init__(message)
        self.agents_per_env = agents_per_env


class ContractError(HoldfastError):
    """A world, a policy or a caller broke the contract."""


class WorkerError(ContractError):
    """A worker process crashed, raised or hung; says which one, in which call, and its traceback."""


def one_line(error: BaseException, limit: int | None = None) -> str:
    """Return the message of an exception on one line; its type where the message is empty."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def error_text(error: BaseException, limit: int | None = None) -> str:
    """Return type and message of an exception on one line."""
    name, message = type(error).__name__, one_line(error, limit)
    return name if message == name else f"{name}: {message}"


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
