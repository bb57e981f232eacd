"""Replaying: the policy runs over stored segments again, from their entry states."""

from tensordict import TensorDictBase

from holdfast.experience import Segments
from holdfast.experience.segments import READ
from holdfast.policies import LSTMWrapper


def replay(policy: LSTMWrapper, segments: Segments) -> TensorDictBase:
    """Run the policy over segments again, from their entry states, judging the actions taken."""
    td = segments.steps.select(*READ)
    with policy.replay(segments.entry):
        return policy(td, action=segments.steps["actions"])
