"""A stand-in for CUDA graphs on the CPU: it records operations on tensors, and replays them on the same tensors.

As with a CUDA graph, Python does not run in a replay: what it computed on the host stays as it was.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast import cuda_graphs
from holdfast.errors import one_line


class ReadOnHostError(RuntimeError):
    """A number was read on the host while operations were recorded."""


class Recorder(TorchDispatchMode):
    """Records the operations inside. Like a CUDA graph it refuses to let the host wait for a result."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self._made, self._before = set(), {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise ReadOnHostError(f"{function} makes the host wait")
        self._keep_written(function, args, kwargs)
        result = function(*args, **kwargs)
        # A result may be a view of an argument.
        self._made |= _storages(result) - (_storages((args, kwargs)) - self._made)
        self.calls.append((function, args, kwargs, result))
        return result

    def _keep_written(self, function, args, kwargs):
        arguments = function._schema.arguments
        pairs = [
            *zip(arguments, args, strict=False),
            *((each, kwargs[each.name]) for each in arguments if each.name in kwargs),
        ]
        for argument, value in pairs:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for leaf in tree_leaves(value):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in self._made | self._before.keys():
                    self._before[storage.data_ptr()] = storage, storage.clone()

    def undo(self):
        """Restore what the operations have overwritten: those that a CUDA graph records do not run."""
        for storage, saved in self._before.values():
            storage.copy_(saved)

    def replay(self):
        with torch.no_grad():
            for function, args, kwargs, result in self.calls:
                outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
                new = [leaf for leaf in tree_leaves(function(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
                for old, leaf in zip(outputs, new, strict=True):
                    if old.data_ptr() != leaf.data_ptr() and old.numel():
                        old.detach().copy_(leaf)


def _storages(tree):
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}


def record(call, device):
    """Record a call as `holdfast.cuda_graphs.record` does."""
    recorder = Recorder()
    cuda_graphs._recording = True
    try:
        with recorder:
            call()
    except cuda_graphs.CannotRecordError:
        raise
    except Exception as error:
        raise cuda_graphs.CannotRecordError(one_line(error)) from error
    finally:
        cuda_graphs._recording = False
        cuda_graphs._constants.clear()
        recorder.undo()
    return recorder.replay


def use_on_cpu(monkeypatch):
    """Record on the CPU within a test."""
    monkeypatch.setattr(cuda_graphs, "can_record", lambda device: True)
    monkeypatch.setattr(cuda_graphs, "record", record)
