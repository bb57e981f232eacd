"""How a user is told that something is wrong: what is, what must be, and what to type."""

from collections.abc import Iterable
from difflib import get_close_matches


class HoldfastError(Exception):
    """Something is wrong that a person can mend; the message says how."""


class ConfigError(HoldfastError):
    """The call is wrong: a key, a value, a name or a combination of them."""


class CrowdError(ConfigError):
    """So many agents do not make whole crowds; `crowd` is how many share a place."""

    def __init__(self, told: str, crowd: int) -> None:
        super().__init__(told)
        self.crowd = crowd


class ContractError(HoldfastError):
    """A world, policy or caller broke the contract it works under."""


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """Guess what a misspelt word was meant to be, or say something else."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else otherwise
