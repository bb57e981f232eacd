"""Rollout data: the collector, segments with their entry states, minibatches, episode statistics."""

from holdfast.rollout.bootstrap import bootstrap_value
from holdfast.rollout.collector import Collector, step_to_td
from holdfast.rollout.segments import Segments, policy_td

__all__ = ["Collector", "Segments", "bootstrap_value", "policy_td", "step_to_td"]
