"""Calls recorded as CUDA graphs, which the GPU replays without the host."""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from holdfast.errors import one_line
from holdfast.types import Tensor

Replay = Callable[[], None]
_recording = _preparing = False
_constants: dict[Hashable, tuple[Tensor, object]] = {}


class CannotRecordError(Exception):
    """A call cannot be recorded; the message says why."""


class OverwrittenError(CannotRecordError):
    """A tensor was to be stored, and has been overwritten meanwhile."""


def can_record(device: torch.device) -> bool:
    """Return whether calls on a device can be recorded."""
    return device.type == "cuda"


def is_recording() -> bool:
    """Return whether a call is being recorded now: its operations do not run."""
    return _recording


def caller_records() -> bool:
    """Return whether a caller records, or is about to, so that what it calls replays no graph of its own."""
    return _recording or _preparing


@contextmanager
def preparing() -> Iterator[None]:
    """Within this context, a call runs that is recorded next."""
    global _preparing
    _preparing = True
    try:
        yield
    finally:
        _preparing = False


def constant(source: object, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
    """Compute what depends on `source` alone; while a call without gradients is recorded, once until that changes."""
    if not _recording or torch.is_grad_enabled():
        return compute()
    version = source._version if isinstance(source, Tensor) else 0
    full_key = id(source), version, key
    if full_key not in _constants:
        # With the source, so that no other object gets its id.
        _constants[full_key] = compute(), source
    return _constants[full_key][0]


def _casting_once(device: torch.device) -> AbstractContextManager[object]:
    """Without gradients, cast weights once, not in every step; with them, older torch would cache casts without."""
    return nullcontext() if torch.is_grad_enabled() else torch.autocast(device.type, enabled=False, cache_enabled=True)


def record(call: Callable[[], None], device: torch.device) -> Replay:
    """Record a call as a CUDA graph, and return what replays it.

    The call has run before, so that nothing is initialized while it is recorded. It reads and writes tensors that stay
    where they are, and never reads one on the host. Python runs now, and not when the graph is replayed.
    """
    global _recording
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    # Freed now: freeing a graph while another one is recorded breaks it.
    gc.collect()
    _recording = True
    try:
        with (
            torch.cuda.device(device),
            _casting_once(device),
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            call()
    except CannotRecordError:
        # With its own words.
        raise
    except Exception as error:
        raise CannotRecordError(one_line(error)) from error
    finally:
        _recording = False
        _constants.clear()
    return graph.replay
