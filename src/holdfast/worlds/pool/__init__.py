"""Worlds in processes of their own, which cannot hurt the training."""

from holdfast.worlds.pool.crew import Blueprint
from holdfast.worlds.pool.pool import Pool
from holdfast.worlds.pool.worker_error import WorkerError

__all__ = ["Blueprint", "Pool", "WorkerError"]
