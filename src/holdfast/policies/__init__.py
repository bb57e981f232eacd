"""Policies: encoders, memory, heads, and the registry that builds them by name."""

from holdfast.policies.components.component_policy import ComponentPolicy
from holdfast.policies.distributions import ActionDistribution, distribution_for
from holdfast.policies.example import Example
from holdfast.policies.fast import Fast
from holdfast.policies.latent_attn import LatentAttnMed, LatentAttnSmall, LatentAttnTiny
from holdfast.policies.lstm_wrapper import LSTMWrapper
from holdfast.policies.recurrent_policy import FunctionalPolicy, PolicyOutput, RecurrentPolicy
from holdfast.policies.registry import POLICIES, PolicyLike, make_policy, policy_name, register_policy

__all__ = ["POLICIES", "ActionDistribution", "ComponentPolicy", "Example", "Fast", "FunctionalPolicy"]
__all__ += ["LSTMWrapper", "LatentAttnMed", "LatentAttnSmall", "LatentAttnTiny", "PolicyLike", "PolicyOutput"]
__all__ += ["RecurrentPolicy", "distribution_for", "make_policy", "policy_name", "register_policy"]
