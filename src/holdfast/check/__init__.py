"""Proof: probes measure what a policy's memory does, laws say whether it is right."""

from holdfast.check.laws import check
from holdfast.check.results import Law, Laws, Measurement

__all__ = ["Law", "Laws", "Measurement", "check"]
