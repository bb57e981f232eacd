"""The laws of memory on whole trainers: a scripted environment, a recording of calls, and what follows from both."""

from holdfast.check.trainer.run import INTERFACES, check_trainer

__all__ = ["INTERFACES", "check_trainer"]
