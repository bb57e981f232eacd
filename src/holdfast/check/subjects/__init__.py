"""Policies of every make as subjects of the check, each in the hands of its own library."""

from holdfast.check.subject import Subject
from holdfast.check.subjects.bare import Bare
from holdfast.check.subjects.callables import Callables
from holdfast.check.subjects.cleanrl import CleanRL
from holdfast.check.subjects.puffer import Puffer
from holdfast.check.subjects.sb3 import SB3
from holdfast.check.subjects.torchrl import TorchRL
from holdfast.check.subjects.wrapper import Wrapped

__all__ = ["SB3", "Bare", "Callables", "CleanRL", "Puffer", "Subject", "TorchRL", "Wrapped"]
