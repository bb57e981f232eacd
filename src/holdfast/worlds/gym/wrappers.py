"""Wrappers of environments by name, with arguments."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium

from holdfast.config.wrapper_list import WrapperCall, parse_wrapper, split_wrappers
from holdfast.errors import ConfigError, did_you_mean, one_line
from holdfast.registry import import_named, import_object
from holdfast.trust import require_trust_in, require_trust_to_call

Wrap = str | Callable[[Any], Any]
NamedWrap = tuple[str, Callable[[Any], Any]]
KEY = "world.wrappers="


def import_wrappers(wrappers: Sequence[Wrap]) -> list[NamedWrap]:
    """Import wrappers given by name, and return each with its name and its arguments bound."""
    items: Sequence[Wrap] = split_wrappers(wrappers) if isinstance(wrappers, str) else wrappers
    return [_import_wrapper(wrap) if isinstance(wrap, str) else (name_of(wrap), wrap) for wrap in items]


def name_of(source: Any) -> str:
    """Return the name of an environment, wrapper or game in errors: as given, or that of a class or function."""
    return source if isinstance(source, str) else getattr(source, "__name__", repr(source))


def _import_wrapper(text: str) -> NamedWrap:
    try:
        call = parse_wrapper(text)
    except ValueError as error:
        raise ConfigError(f"{KEY}{text}: {error}.") from None
    if call.name in gymnasium.wrappers.__all__:
        raise ConfigError(f"{KEY}{text}: did you mean gymnasium.wrappers:{text}?")
    import_named(call.name, call.name.partition(":")[0], KEY)
    wrapper = import_object(call.name, KEY)
    if isinstance(wrapper, type) and not {"reset", "step"} <= set(dir(wrapper)):
        # Checked before the call: psutil.Popen could run any program.
        raise ConfigError(f"{KEY}{text}: {wrapper!r} is not a wrapper, which has reset() and step().")
    # The arguments of a file could make any function do anything, such as overwrite a file.
    require_trust_to_call(call.name, wrapper)
    require_trust_in([*call.args, call.kwargs])
    _require_arguments(text, call, wrapper)
    return text, partial(_wrap, wrapper, call)


def _wrap(wrapper: Callable[..., Any], call: WrapperCall, env: Any) -> Any:
    return wrapper(env, *call.args, **call.kwargs)


def _require_arguments(text: str, call: WrapperCall, wrapper: Callable[..., Any]) -> None:
    """Raise if the wrapper does not take these arguments, with those that it takes."""
    try:
        signature = inspect.signature(wrapper)
    except (TypeError, ValueError):
        # Not callable, or written in C: the call itself shows it.
        return
    try:
        signature.bind(None, *call.args, **call.kwargs)
    except TypeError as error:
        unknown = next((key for key in call.kwargs if key not in signature.parameters), None)
        hint = "" if unknown is None else did_you_mean(unknown, signature.parameters, "")
        write = f"{hint} Write" if hint else "write"
        raise ConfigError(f"{KEY}{text}: {one_line(error)}; {write} {call.name}{_own(signature)}.") from None


def _own(signature: inspect.Signature) -> str:
    """Format the parameters besides the environment, without annotations: whole modules would hide the names."""
    _, *parameters = signature.parameters.values()
    return str(inspect.Signature([parameter.replace(annotation=parameter.empty) for parameter in parameters]))
