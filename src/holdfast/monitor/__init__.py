"""What goes on in a run: gradients, bytes, states, resets, and the life of one agent."""

from holdfast.monitor.gradients import advice, norms_by_module, reach, reach_back, reach_metrics
from holdfast.monitor.held import Held, bytes_of, counting_graph
from holdfast.monitor.observer import Observer
from holdfast.monitor.remembered import remembered
from holdfast.monitor.resets import Resets
from holdfast.monitor.trace import Trace, shapes

__all__ = [
    "Held",
    "Observer",
    "Resets",
    "Trace",
    "advice",
    "bytes_of",
    "counting_graph",
    "norms_by_module",
    "reach",
    "reach_back",
    "reach_metrics",
    "remembered",
    "shapes",
]
