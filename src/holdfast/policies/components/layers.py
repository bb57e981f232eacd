"""The Component base class and the built-in components."""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import nn

from holdfast.errors import ConfigError, ContractError, did_you_mean
from holdfast.memory import Cell, MemoryInit, make_cell
from holdfast.policies import encoders, heads, latent_attn
from holdfast.policies.distributions import distribution_for
from holdfast.policies.encoders import orthogonal
from holdfast.policies.spaces import make_actor, make_encoder
from holdfast.types import Bool, Float, Tensor, UInt8
from holdfast.worlds.step import WorldSpec

Size = Annotated[int, Field(ge=1)]
Shape = tuple[int | None, ...]
"""The shape of an output without its batch axis; None: variable, as the number of tokens."""


class Component(nn.Module, ABC):
    """A node of a graph. The arguments of `__init__` are its options in the graph's file.

    `build` takes the shapes of the sources in order, makes the layers, and returns the shape of the
    output; `forward` takes one batch `[N,...]` for each source.
    """

    reads: ClassVar[Literal["sources", "world", "nothing"]] = "sources"
    """`world`: the observation, as `_obs_` does; `nothing`: its output is the same for all rows."""

    accepts_trimmed_obs: ClassVar[bool] = False
    """Whether tokens may come without the padding that all rows end in."""

    def __init__(self) -> None:
        super().__init__()

    @abstractmethod
    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Make the layers for the shapes of the sources, and return the shape of the output."""

    def begin(self, *blank: Any) -> None:
        """Initialize from the sources' outputs for a blank observation, before training."""


class ModuleComponent(Component):
    """A component that is one module, made by `build`."""

    def forward(self, *sources: Any) -> Any:
        """Call the module."""
        (module,) = self.children()
        return module(*sources)


def make_component(kind: type[Component], options: Mapping[str, Any]) -> Component:
    """Build a component from its options; errors name the wrong option."""
    params = inspect.signature(kind, eval_str=True).parameters
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [name for name, param in params.items() if param.kind not in variadic]
    if all(param.kind != param.VAR_KEYWORD for param in params.values()):
        for key in options:
            if key not in names:
                hint = did_you_mean(key, names, f"it has {', '.join(names) or 'none'}.")
                raise ConfigError(f"{kind.__name__} has no option {key!r}; {hint}")
    for name in names:
        if name not in options and params[name].default is inspect.Parameter.empty:
            raise ConfigError(f"{kind.__name__} needs the option {name!r}.")
    return kind(**{name: _validated(params.get(name), name, value) for name, value in options.items()})


def _validated(param: inspect.Parameter | None, name: str, value: Any) -> Any:
    """Check an option against its annotation."""
    if param is None or param.annotation is inspect.Parameter.empty:
        return value
    try:
        return TypeAdapter(param.annotation).validate_python(value, strict=True)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise ConfigError(f"{name}={value!r}: {message[0].lower() + message[1:]}.") from None


def require_axes(sources: Sequence[Shape], *names: str) -> tuple[int, ...]:
    """Require one source with these axes, and return their sizes."""
    (shape,) = require_sources(sources, 1)
    if len(shape) != len(names) or None in shape:
        raise ContractError(f"it reads [{', '.join(names)}]; its source gives {shape_text(shape)}")
    return tuple(size for size in shape if size is not None)


def require_sources(sources: Sequence[Shape], number: int) -> Sequence[Shape]:
    """Require this number of sources."""
    if len(sources) != number:
        raise ContractError(f"it reads {number} source{'s' * (number != 1)}; {len(sources)} are named")
    return sources


def shape_text(shape: Shape) -> str:
    """Format a shape."""
    return f"[{', '.join('tokens' if size is None else str(size) for size in shape)}]"


Nonlinearity = Literal["relu", "tanh", "none"]
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "tanh": torch.tanh, "none": lambda x: x}
Gain = float | int | Literal["sqrt2"]


def _to_float(gain: Gain) -> float:
    return math.sqrt(2) if gain == "sqrt2" else float(gain)


class Linear(Component):
    """A linear layer and a nonlinearity; `out: actions` gives the logits of the world's actions."""

    def __init__(self, out: Size | Literal["actions"], nonlinearity: Nonlinearity = "relu", gain: Gain = 1.0) -> None:
        super().__init__()
        self.out, self.nonlinearity, self.gain = out, nonlinearity, _to_float(gain)

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read a vector."""
        (size,) = require_axes(sources, "size")
        out = distribution_for(spec).size or 0 if self.out == "actions" else int(self.out)
        self.layer = orthogonal(nn.Linear(size, out), self.gain)
        return (out,)

    def forward(self, x: Float[Tensor, "N D"]) -> Float[Tensor, "N out"]:
        """Transform each row."""
        return FUNCTIONS[self.nonlinearity](self.layer(x))


class Conv2d(Component):
    """A convolution and a nonlinearity."""

    def __init__(
        self,
        out_channels: Size,
        kernel_size: Size,
        stride: Size = 1,
        nonlinearity: Nonlinearity = "relu",
        gain: Gain = 1.0,
    ) -> None:
        super().__init__()
        self.out_channels, self.kernel_size, self.stride = out_channels, kernel_size, stride
        self.nonlinearity, self.gain = nonlinearity, _to_float(gain)

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read an image."""
        channels, rows, columns = require_axes(sources, "channels", "rows", "columns")
        if min(rows, columns) < self.kernel_size:
            raise ContractError(f"a kernel of {self.kernel_size} does not fit into {shape_text(sources[0])}")
        layer = encoders.Conv(channels, self.out_channels, self.kernel_size, self.stride)
        self.layer = orthogonal(layer, self.gain)
        shrunk = ((side - self.kernel_size) // self.stride + 1 for side in (rows, columns))
        return (self.out_channels, *shrunk)

    def forward(self, x: Float[Tensor, "N C R K"]) -> Float[Tensor, "N out R2 K2"]:
        """Transform each image."""
        return FUNCTIONS[self.nonlinearity](self.layer(x))


class Flatten(Component):
    """Flatten each row to a vector."""

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read anything of a fixed size."""
        sizes = require_axes(sources, *["size"] * len(sources[0]) if sources else "size")
        return (math.prod(sizes),)

    def forward(self, x: Float[Tensor, "N ..."]) -> Float[Tensor, "N D"]:
        """Flatten each row."""
        return x.flatten(1)


class Centre(Component):
    """All channels of the centre cell of an image."""

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read an image."""
        channels, rows, columns = require_axes(sources, "channels", "rows", "columns")
        self.row, self.column = rows // 2, columns // 2
        return (channels,)

    def forward(self, x: Float[Tensor, "N C R K"]) -> Float[Tensor, "N C"]:
        """Return the centre cell of each image."""
        return x[:, :, self.row, self.column]


class Concat(Component):
    """Concatenate vectors, in the order of the sources."""

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read vectors."""
        if len(sources) < 2:
            raise ContractError("it concatenates several sources; name two or more")
        return (sum(require_axes([shape], "size")[0] for shape in sources),)

    def forward(self, *vectors: Float[Tensor, "N _"]) -> Float[Tensor, "N D"]:
        """Concatenate each row."""
        return torch.cat(vectors, -1)


class Encoder(ModuleComponent):
    """A vector from any observation space."""

    reads = "world"
    accepts_trimmed_obs = True

    def __init__(self, size: Size = 128) -> None:
        super().__init__()
        self.size = size

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read the world."""
        self.encoder = make_encoder(spec, self.size)
        return (self.size,)


class Actor(ModuleComponent):
    """The logits for any action space."""

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read a vector."""
        (size,) = require_axes(sources, "size")
        self.actor = make_actor(spec, size)
        return (distribution_for(spec).size,)


class Vectors(NamedTuple):
    """Embedded tokens, and the mask of visible ones."""

    tokens: Float[Tensor, "N M D"]
    visible: Bool[Tensor, "N M"]


def _require_tokens(spec: WorldSpec) -> None:
    if not spec.features:
        raise ContractError(f"it reads tokens; the world has observations {spec.observation_space}. Encoder reads any")


class TokensToBoxComponent(ModuleComponent):
    """Tokens scattered into a box `[features,rows,columns]`."""

    reads = "world"
    accepts_trimmed_obs = True

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read the world's tokens."""
        _require_tokens(spec)
        self.box = encoders.TokensToBox(spec.features, spec.window)
        return (self.box.channels, self.box.rows, self.box.columns)


class TokensToVectors(Component):
    """Token embeddings: feature, position and value."""

    reads = "world"
    accepts_trimmed_obs = True

    def __init__(self, embedding: Size, frequencies: Size) -> None:
        super().__init__()
        self.embedding, self.frequencies = embedding, frequencies

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read the world's tokens."""
        _require_tokens(spec)
        self.token_embedding = latent_attn.TokenEmbedding(spec.features, spec.window, self.embedding, self.frequencies)
        return (None, self.token_embedding.size)

    def forward(self, obs: UInt8[Tensor, "N M 3"]) -> Vectors:
        """Embed each token."""
        return Vectors(*self.token_embedding(obs))


class LatentAttention(Component):
    """Cross-attention from learned queries to tokens; with `use_cls` only the first query's output."""

    def __init__(
        self, queries: Size, size: Size, heads: Size, layers: Size, out: Size | None = None, use_cls: bool = False
    ) -> None:
        super().__init__()
        if size % heads:
            raise ContractError(f"size {size} cannot be shared by {heads} heads")
        self.sizes = {"queries": queries, "size": size, "heads": heads, "layers": layers}
        self.out, self.use_cls = out, use_cls

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read token vectors."""
        (shape,) = require_sources(sources, 1)
        if len(shape) != 2 or shape[0] is not None or shape[1] is None:
            raise ContractError(f"it reads token vectors [tokens, size]; its source gives {shape_text(shape)}")
        self.attention = latent_attn.CrossAttention(shape[1], **self.sizes, out=self.out, use_cls=self.use_cls)
        size = self.out or self.sizes["size"]
        return (size,) if self.use_cls else (self.sizes["queries"], size)

    def begin(self, *blank: Any) -> None:
        """Initialize the output to zeros for a blank observation, if it is an encoding."""
        latent_attn.scale_down(self.attention, *blank[0])

    def forward(self, vectors: Vectors) -> Float[Tensor, "N *K out"]:
        """Attend to the tokens of each observation."""
        return self.attention(vectors.tokens, vectors.visible)


class SelfAttentionComponent(ModuleComponent):
    """Self-attention over vectors and a class token, which is the output."""

    def __init__(self, heads: Size, layers: Size, out: Size) -> None:
        super().__init__()
        self.heads, self.layers, self.out = heads, layers, out

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read a fixed number of vectors."""
        _, size = require_axes(sources, "vectors", "size")
        if size % self.heads:
            raise ContractError(f"vectors of {size} cannot be shared by {self.heads} heads")
        self.attention = latent_attn.SelfAttention(size, heads=self.heads, layers=self.layers, out=self.out)
        return (self.out,)

    def begin(self, *blank: Any) -> None:
        """Initialize the output to zeros for a blank observation."""
        latent_attn.scale_down(self.attention, *blank)


class MemoryComponent(Component):
    """A memory: `cell` is lstm, gru, a registered name or package.module:Class. The policy calls it, with its state."""

    def __init__(
        self, cell: str = "lstm", hidden_size: Size = 128, num_layers: Size = 2, init: MemoryInit = "standard"
    ) -> None:
        super().__init__()
        self.options = {"name": cell, "hidden_size": hidden_size, "num_layers": num_layers, "init": init}
        self.cell: Cell

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read one vector per step."""
        (size,) = require_axes(sources, "size")
        self.cell = make_cell(input_size=size, **self.options)
        return (self.cell.hidden_size,)


class LSTMComponent(MemoryComponent):
    """An LSTM, unless the run sets `policy.memory`."""

    def __init__(self, hidden_size: Size = 128, num_layers: Size = 2) -> None:
        super().__init__("lstm", hidden_size, num_layers)


class ActionEmbeddingsComponent(ModuleComponent):
    """A learned embedding for each named action, the same for all rows."""

    reads = "nothing"

    def __init__(self, size: Size = heads.EMBEDDING_SIZE, room: Size = heads.MAX_ACTIONS) -> None:
        super().__init__()
        self.size, self.room = size, room

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Make an embedding for each of the world's actions."""
        require_sources(sources, 0)
        if spec.action is not None:
            raise ContractError(f"it embeds named actions; the world takes {spec.action}: use Actor")
        self.embeddings = heads.ActionEmbeddings(spec.action_names, self.room, self.size)
        return (len(spec.action_names), self.size)


class BilinearComponent(ModuleComponent):
    """Logits from a vector and the embeddings of actions, its two sources in this order."""

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read a vector and the embeddings."""
        row, embeddings = require_sources(sources, 2)
        (size,) = require_axes([row], "size")
        if len(embeddings) != 2 or embeddings[0] != len(spec.action_names) or embeddings[1] is None:
            raise ContractError("its second source must be the embeddings of the actions")
        self.scores = heads.Bilinear(size, embeddings[1])
        return (len(spec.action_names),)
