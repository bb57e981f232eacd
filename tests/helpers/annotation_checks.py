"""Checks of annotations at less than half the cost of jaxtyping's: arguments are checked once and not bound."""

import dataclasses
import functools
import importlib
import inspect
import types
from typing import Any, get_type_hints

import jaxtyping
from jaxtyping import config, jaxtyped

AXIS_SIZES = jaxtyped("context")
"""In this scope an axis has one size; a call inside of it has its own scope."""


def install():
    """Replace the decorator that jaxtyping's import hook puts on every function and class."""
    # Imported by a module with the hook, packages are compiled anew, not read from their caches.
    for package in ("beartype", "gymnasium", "tensordict"):
        importlib.import_module(package)
    jaxtyping.jaxtyped = check_annotations


def check_annotations(checked=None, *, typechecker):
    """Check the arguments and the result of every call, for a dataclass the arguments of `__init__`."""
    if checked is None:
        return functools.partial(check_annotations, typechecker=typechecker)
    if not inspect.isclass(checked):
        return check_calls(checked, typechecker)
    init = vars(checked).get("__init__")
    if init and dataclasses.is_dataclass(checked) and inspect.unwrap(init) is init:
        checked.__init__ = check_calls(init, typechecker)
    return checked


def check_calls(function, typechecker):
    """A function that checks its arguments and its result, unless checks are disabled."""
    annotations = {name: resolve(hint, function) for name, hint in function.__annotations__.items()}
    checked = None

    @functools.wraps(function)
    def call(*args, **kwargs):
        __tracebackhide__ = True
        nonlocal checked
        if config.jaxtyping_disable:
            return function(*args, **kwargs)
        checked = checked or add_checks(function, annotations, typechecker)
        with AXIS_SIZES:
            return checked(*args, **kwargs)

    return call


def add_checks(function, annotations, typechecker):
    """A copy of the function with checks; made at its first call, since it takes milliseconds."""
    # An axis of the size of an argument needs bound arguments; a generator runs after the call, out of its scope.
    if any("{" in str(hint) for hint in annotations.values()) or inspect.isgeneratorfunction(function):
        return jaxtyped(function, typechecker=typechecker)
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, annotations
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    return typechecker(copy)


def resolve(hint, function):
    """The type that a string names; `Any` for a name that is not defined yet, such as the class's own."""

    def annotated(value: hint): ...

    try:
        return get_type_hints(annotated, function.__globals__, include_extras=True)["value"]
    except Exception:
        return Any
