"""Worlds in worker processes: a crash there does not end the trainer."""

from holdfast.errors import WorkerError
from holdfast.worlds.workers.pool import WorkerPool

__all__ = ["WorkerError", "WorkerPool"]
