"""Monitoring of a run: gradients, memory usage, states, resets, replay checks, and the trace of one agent."""

from holdfast.monitor.agent_trace import AgentTrace, shapes
from holdfast.monitor.gradients import advice
from holdfast.monitor.training_monitor import TrainingMonitor

__all__ = ["AgentTrace", "TrainingMonitor", "advice", "shapes"]
