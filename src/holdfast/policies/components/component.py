"""What a component of a graph is: told the shapes of its sources once, it makes its output from theirs."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError
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

    def begin(self, *nothing: Any) -> None:
        """Hear what the sources say to an observation of nothing, before anything is learnt."""


def make_component(kind: type[Component], options: Mapping[str, Any]) -> Component:
    """Make a component from its options; wrong ones are told by name."""
    known = inspect.signature(kind, eval_str=True).parameters
    named = [name for name, each in known.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    if all(each.kind != each.VAR_KEYWORD for each in known.values()):
        for key in options:
            if key not in named:
                meant = did_you_mean(key, named, f"it has {', '.join(named) or 'none'}.")
                raise ConfigError(f"{kind.__name__} has no option {key!r}; {meant}")
    for name in named:
        if name not in options and known[name].default is inspect.Parameter.empty:
            raise ConfigError(f"{kind.__name__} needs the option {name!r}.")
    return kind(**{name: _fitting(known.get(name), name, value) for name, value in options.items()})


def _fitting(parameter: inspect.Parameter | None, name: str, value: Any) -> Any:
    """Refuse a value that is not what the option says it is."""
    if parameter is None or parameter.annotation is inspect.Parameter.empty:
        return value
    try:
        return TypeAdapter(parameter.annotation).validate_python(value, strict=True)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise ConfigError(f"{name}={value!r}: {message[0].lower() + message[1:]}.") from None


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
