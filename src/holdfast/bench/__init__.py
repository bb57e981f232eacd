"""Speed: what remembering costs against torch's dense call without clears, and whether it is right."""

from holdfast.bench.cases import CELLS, PRECISIONS, Case, Precision
from holdfast.bench.memory import Bench, Measured, Outcome, measure
from holdfast.bench.rivals import RIVALS

__all__ = ["CELLS", "PRECISIONS", "RIVALS", "Bench", "Case", "Measured", "Outcome", "Precision", "measure"]
