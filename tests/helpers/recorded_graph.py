"""A CUDA graph on the CPU: records the operations of a capture and runs them again on the same tensors."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast import rng
from holdfast.worlds.tensor_world import CudaGraphStep

HOST_READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "lift_fresh", "unique_dim")
"""Operations that a capture refuses: they read a value on the host, depend on one, or copy from it."""


class RecordedGraph(TorchDispatchMode):
    """Records operations; as in a real capture, tensors that exist before it keep their values."""

    def __init__(self):
        super().__init__()
        self.calls, self._before = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in HOST_READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._before.append((value, value.clone()))
        outputs = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, outputs))
        return outputs

    def end(self):
        """Undo what the capture has written."""
        for tensor, value in reversed(self._before):
            tensor.copy_(value)

    def replay(self):
        """Run all operations again, into the tensors of the capture."""
        for func, args, kwargs, outputs in self.calls:
            results, places = func(*args, **kwargs), {_place(tensor) for tensor in _tensors((args, kwargs))}
            for output, result in zip(_tensors(outputs), _tensors(results), strict=True):
                # A view, or an operation in place, shares the storage that was written.
                if _place(output) not in places:
                    output.copy_(result)


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _place(tensor):
    return tensor.untyped_storage().data_ptr()


@contextmanager
def _capture(graph):
    with graph:
        yield
    graph.end()


def capture_on_cpu(monkeypatch):
    """Let `torch.cuda` capture on the CPU."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {"CUDAGraph": RecordedGraph, "graph": _capture, "stream": nullcontext}
    fakes |= {"Stream": lambda: stream, "current_stream": lambda: stream}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    # On the CPU, NumPy computes them.
    monkeypatch.setattr(rng, "random_bits", _random_bits)


def _random_bits(seed, stream, agent, step):
    counter = rng._as_signed(step * rng._GOLDEN) if isinstance(step, int) else step.long() * rng._GOLDEN
    key = agent.long() * rng._GOLDEN + rng._as_signed(seed)
    return rng._mix(rng._mix(rng._mix(key) + rng._as_signed(stream * rng._GOLDEN)) + counter)


class RecordedWorld:
    """A world whose steps are replayed, as on a GPU."""

    def __init__(self, world):
        self.world, self.spec, self.recorded = world, world.spec, None
        self.agents, self.reset, self.state = world.agents, world.reset, world.state

    def step(self, actions):
        if self.recorded is None:
            self.recorded = self.world._graph_step = CudaGraphStep(self.world, self.world._advance, actions)
        self.recorded.load(self.world)
        return self.recorded.step(actions)

    def restore(self, state):
        self.world.restore(state)
