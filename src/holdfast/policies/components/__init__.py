"""The parts that component graphs are made of, and how to add your own."""

from holdfast.named import Registry
from holdfast.policies.components.acting import ActionEmbeddings, Bilinear
from holdfast.policies.components.component import Component, Shape, make_component
from holdfast.policies.components.layers import Centre, Concat, Conv2d, Flatten, Linear
from holdfast.policies.components.remembering import LSTM, Memory
from holdfast.policies.components.spaces import Actor, Encoder
from holdfast.policies.components.tokens import LatentAttention, SelfAttention, TokensToBox, TokensToVectors

__all__ = ["COMPONENTS", "LSTM", "Component", "Memory", "Shape", "make_component", "register_component"]

COMPONENTS: Registry[Component] = Registry(
    "component",
    "component: ",
    "holdfast.components",
    Component,
    {
        kind.__name__: kind
        for kind in (
            Encoder,
            TokensToBox,
            TokensToVectors,
            LatentAttention,
            SelfAttention,
            Conv2d,
            Linear,
            Flatten,
            Centre,
            Concat,
            Memory,
            LSTM,
            Actor,
            ActionEmbeddings,
            Bilinear,
        )
    },
)
register_component = COMPONENTS.register
