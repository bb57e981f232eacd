"""What a component of a graph is: told the shapes of its sources once, it makes its output from theirs."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from torch import nn

from holdfast.errors import ConfigError, ContractError, did_you_mean
from holdfast.worlds.step import WorldSpec

Size = Annotated[int, Field(ge=1)]
"""A number of things, of which there is at least one."""
Shape = tuple[int | None, ...]
"""The sizes of an output without its batch axis; None where it varies, as the number of tokens does."""


class Component(nn.Module, ABC):
    """A named part of a graph. Its options come from the graph's file, by the names of `__init__`.

    `build` hears the shapes of the sources, in their order, makes the layers, and answers with the
    shape of the output; `forward` takes one batch `[N,...]` for each source.
    """

    reads: ClassVar[Literal["sources", "world", "nothing"]] = "sources"
    """`world`: the observation itself, as `_obs_` does; `nothing`: it is the same for all rows."""

    any_length: ClassVar[bool] = False
    """Of one that reads tokens: whether they may come without the padding that all rows end in."""

    def __init__(self) -> None:
        super().__init__()

    @abstractmethod
    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Make the layers that fit the sources, and tell the shape of the output."""


def make_component(kind: type[Component], options: Mapping[str, Any]) -> Component:
    """Make a component from its options; wrong ones are told by name."""
    try:
        return kind(**dict(_options_of(kind).model_validate(dict(options))))
    except ValidationError as error:
        first = min(error.errors(), key=_misspelt_first)
        key = ".".join(str(part) for part in first["loc"][:1])
        if first["type"] == "extra_forbidden":
            known = list(_options_of(kind).model_fields)
            meant = did_you_mean(key, known, f"it has {', '.join(known) or 'none'}.")
            raise ConfigError(f"{kind.__name__} has no option {key!r}; {meant}") from None
        if first["type"] == "missing":
            raise ConfigError(f"{kind.__name__} needs the option {key!r}.") from None
        message = first["msg"][0].lower() + first["msg"][1:]
        raise ConfigError(f"{key}={first['input']!r}: {message}.") from None


def _misspelt_first(error: Any) -> bool:
    """What is not an option explains what is missing."""
    return error["type"] != "extra_forbidden"


def _options_of(kind: type[Component]) -> type[BaseModel]:
    fields: dict[str, Any] = {
        name: (
            Any if parameter.annotation is parameter.empty else parameter.annotation,
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for name, parameter in inspect.signature(kind).parameters.items()
    }
    settings = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)
    return create_model("Options", __config__=settings, **fields)


def require_axes(sources: Sequence[Shape], *names: str) -> tuple[int, ...]:
    """Demand one source whose axes are such and such, and return their sizes."""
    (shape,) = require_sources(sources, 1)
    if len(shape) != len(names) or None in shape:
        raise ContractError(f"it reads [{', '.join(names)}]; its source gives {tell(shape)}")
    return tuple(size for size in shape if size is not None)


def require_sources(sources: Sequence[Shape], number: int) -> Sequence[Shape]:
    """Demand so many sources."""
    if len(sources) != number:
        raise ContractError(f"it reads {number} source{'s' * (number != 1)}; {len(sources)} are named")
    return sources


def tell(shape: Shape) -> str:
    """Write a shape for people."""
    return f"[{', '.join('tokens' if size is None else str(size) for size in shape)}]"
