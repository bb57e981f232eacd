"""What people see: the metrics dictionary, the metrics file, the console."""

from holdfast.report.console import RunConsole, difference, lookup, typed
from holdfast.report.metrics import METRICS, Metric, MetricsFile

__all__ = ["METRICS", "Metric", "MetricsFile", "RunConsole", "difference", "lookup", "typed"]
