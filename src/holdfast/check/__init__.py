"""Proof: probes measure what a policy's memory does and what a world says, laws say whether it is right."""

from holdfast.check.laws import check
from holdfast.check.results import Law, Laws, Measurement
from holdfast.check.world import check_world

__all__ = ["Law", "Laws", "Measurement", "check", "check_world"]
