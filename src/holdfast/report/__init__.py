"""What people see: the metrics dictionary and its files, trackers, the console and its dashboard."""

from holdfast.report.console import RunConsole
from holdfast.report.metrics import METRICS, Metric
from holdfast.report.metrics_file import MetricsFile
from holdfast.report.tell import Tell
from holdfast.report.trackers import Trackers, open_trackers, require_trackers
from holdfast.report.words import difference, lookup, title_of, typed

__all__ = [
    "METRICS",
    "Metric",
    "MetricsFile",
    "RunConsole",
    "Tell",
    "Trackers",
    "difference",
    "lookup",
    "open_trackers",
    "require_trackers",
    "title_of",
    "typed",
]
