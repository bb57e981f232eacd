"""Policies of every make as subjects of the check: `from holdfast.subjects import CleanRL`."""

from holdfast.check.subjects import SB3, Bare, Callables, CleanRL, Puffer, Subject, TorchRL, Wrapped

__all__ = ["SB3", "Bare", "Callables", "CleanRL", "Puffer", "Subject", "TorchRL", "Wrapped"]
