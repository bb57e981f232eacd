"""Components of policy graphs, and their registry."""

from holdfast.policies.components import layers
from holdfast.policies.components.layers import Component
from holdfast.registry import Registry

__all__ = ["COMPONENTS", "Component", "register_component"]

BUILTIN = {
    "Encoder": layers.Encoder,
    "TokensToBox": layers.TokensToBoxComponent,
    "TokensToVectors": layers.TokensToVectors,
    "LatentAttention": layers.LatentAttention,
    "SelfAttention": layers.SelfAttentionComponent,
    "Conv2d": layers.Conv2d,
    "Linear": layers.Linear,
    "Flatten": layers.Flatten,
    "Centre": layers.Centre,
    "Concat": layers.Concat,
    "Memory": layers.MemoryComponent,
    "LSTM": layers.LSTMComponent,
    "Actor": layers.Actor,
    "ActionEmbeddings": layers.ActionEmbeddingsComponent,
    "Bilinear": layers.BilinearComponent,
}
COMPONENTS: Registry[Component] = Registry("component", "component: ", "holdfast.components", Component, BUILTIN)
"""Components by name. Add yours by `register_component("Name", Class)`, or in another package by an entry
point of the group `holdfast.components`."""
register_component = COMPONENTS.register
