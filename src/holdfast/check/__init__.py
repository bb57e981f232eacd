"""Laws of memory and laws of worlds: measured on any policy or world, with the known bug behind a failure."""

from holdfast.check.laws import check, check_world
from holdfast.check.results import Law, Laws, Measurement

__all__ = ["Law", "Laws", "Measurement", "check", "check_world"]
