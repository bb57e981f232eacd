"""A worker that raised, hung or died, by its name."""

from holdfast.errors import ContractError


class WorkerError(ContractError):
    """A worker can go on no more; says which, whose world it was, what it did last, and where it was."""
