"""Ranks: the processes that train one policy together. A process alone is rank 0 of 1, and no call here costs it time.

Every collective call is made by all ranks, in the same order.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar
from uuid import uuid4

import psutil
import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from holdfast.errors import ConfigError, OtherRankError, RankError, one_line
from holdfast.launcher import launched_ranks
from holdfast.types import Tensor

T = TypeVar("T")
TIMEOUT = timedelta(hours=2)
"""A rank waits this long for the others: while rank 0 evaluates or a disk is slow, they wait."""
NOTICE_S = 3.0
"""Time within which the operating system shows that a process has ended."""
OPERATIONS = {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}


@dataclass(frozen=True)
class RankProcess:
    """Where a rank runs."""

    host: str
    pid: int
    boot: float
    """Start of the process, so that another one with its number is not mistaken for it."""

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more; unknown for another machine, so False."""
        if self.host != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.pid)
            return process.create_time() != self.boot or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


_processes: list[RankProcess] = []


def count() -> int:
    """Return the number of ranks."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """Return the number of this rank."""
    return distributed.get_rank() if count() > 1 else 0


def share(total: int) -> int:
    """Return this rank's part of a number that all ranks share evenly."""
    return total // count()


def first(total: int) -> int:
    """Return the first item of this rank's part, counted over all ranks."""
    return rank() * share(total)


def is_main() -> bool:
    """Return whether this is rank 0, which writes files and the console."""
    return rank() == 0


@contextmanager
def joined() -> Iterator[None]:
    """Join the other ranks that the launcher started, for the time of a run; a group that exists already is used.

    NCCL sums what is on GPUs, if every rank of this machine has its own; gloo does everything else.
    """
    if count() > 1 or launched_ranks() == 1:
        with _introduced():
            yield
        return
    has_own_gpu = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
    backend = "cpu:gloo,cuda:nccl" if has_own_gpu and distributed.is_nccl_available() else "gloo"
    try:
        store, number, total = next(rendezvous("env://", timeout=TIMEOUT))
        store = PrefixStore(_name_start(store, number, total), store)
        distributed.init_process_group(backend, store=store, rank=number, world_size=total, timeout=TIMEOUT)
    except (RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"This process is to be rank {os.environ['RANK']} of {launched_ranks()}, but the ranks cannot meet: "
            f"{one_line(error)}; start it with torchrun, or unset RANK."
        ) from error
    try:
        with _introduced():
            yield
    finally:
        distributed.destroy_process_group()


def _name_start(store: Store, number: int, total: int) -> str:
    """Agree on a name of this start: torchrun's store still holds the keys of those before a restart.

    Rank 0 makes it, and tells each rank in reply to a name that this one has just made.
    """
    name = uuid4().hex
    if number > 0:
        store.set(f"hello/{number}", name)
        start = store.get(f"reply/{name}").decode()
        store.set(f"{start}/{number}", "here")
        return start
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    for other in range(1, total):
        while not store.check([f"{name}/{other}"]):
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {other} has not come within {TIMEOUT}")
            if store.check([f"hello/{other}"]):
                store.set(f"reply/{store.get(f'hello/{other}').decode()}", name)
            time.sleep(0.01)
    return name


@contextmanager
def _introduced() -> Iterator[None]:
    """Know where the other ranks run, to name one that ends."""
    _processes[:] = gather(RankProcess(socket.gethostname(), os.getpid(), psutil.Process().create_time()))
    try:
        yield
    finally:
        _processes.clear()


def device_of_rank(device: torch.device) -> torch.device:
    """Return this rank's GPU: by its number on this machine, in turn if there are fewer."""
    if device.type != "cuda" or launched_ranks() == 1:
        return device
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def reduce(tensor: Tensor, operation: Literal["sum", "max"] = "sum") -> Tensor:
    """Sum a tensor over all ranks, in place, or take the maximum."""
    if count() == 1:
        return tensor
    # gloo alone: ranks that share a GPU.
    on_host = tensor.cpu() if tensor.is_cuda and distributed.get_backend() == "gloo" else tensor
    with _naming_lost_ranks():
        distributed.all_reduce(on_host, OPERATIONS[operation])
    return tensor if on_host is tensor else tensor.copy_(on_host)


def sums(*numbers: Tensor) -> list[Tensor]:
    """Sum several numbers over all ranks in one call; each keeps its dtype."""
    if count() == 1:
        return list(numbers)
    total = reduce(torch.stack([number.double() for number in numbers]))
    return [part.to(number.dtype) for part, number in zip(total, numbers, strict=True)]


def any_of(flag: bool) -> bool:
    """Return whether a flag is set on any rank."""
    return flag if count() == 1 else bool(reduce(torch.tensor(float(flag)), "max"))


def concat(tensor: Tensor) -> Tensor:
    """Join the tensors of all ranks, of equal shapes, along the first axis."""
    if count() == 1:
        return tensor
    parts = tensor.new_zeros(count(), *tensor.shape)
    parts[rank()] = tensor
    return reduce(parts).flatten(0, 1)


@torch.no_grad()
def copy_from_main(tensors: list[Tensor]) -> None:
    """Copy the weights of rank 0 to all ranks."""
    if count() > 1:
        for tensor, value in zip(tensors, broadcast([tensor.cpu() for tensor in tensors]), strict=True):
            tensor.copy_(value)


def gather(value: T) -> list[T]:
    """Return the values of all ranks, in order."""
    values: list[T] = [value] * count()
    if count() > 1:
        with _naming_lost_ranks():
            distributed.all_gather_object(values, value)
    return values


def gather_to_main(value: T) -> list[T] | None:
    """Return the values of all ranks, in order, on rank 0; elsewhere None."""
    if count() == 1:
        return [value]
    values: list[T] | None = [value] * count() if is_main() else None
    with _naming_lost_ranks():
        distributed.gather_object(value, values)
    return values


def broadcast(value: T) -> T:
    """Return the value of rank 0."""
    if count() == 1:
        return value
    values = [value if rank() == 0 else None]
    with _naming_lost_ranks():
        distributed.broadcast_object_list(values, device=torch.device("cpu"))
    return values[0]  # pyright: ignore[reportReturnType]


@torch.no_grad()
def average_gradients(weights: Sequence[Tensor], *numbers: Tensor) -> list[Tensor]:
    """Sum the gradients of all ranks, and some numbers, in one call; return the numbers.

    Each rank's loss is its share of the mean over all ranks, so the sum is the gradient of that mean.
    """
    if count() == 1:
        return list(numbers)
    for weight in weights:
        if weight.requires_grad and weight.grad is None:
            # A part of the policy that this rank's rows do not use.
            weight.grad = torch.zeros_like(weight)
    grads = [weight.grad for weight in weights if weight.grad is not None]
    flat = reduce(torch.cat([*(grad.flatten() for grad in grads), *(number.reshape(1) for number in numbers)]))
    *parts, last = flat.split([*(grad.numel() for grad in grads), len(numbers)])
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part.view_as(grad))
    return list(last)


@contextmanager
def failing_together(on_error: Callable[[], object] | None = None) -> Iterator[None]:
    """Run a block without collective calls, and end it by an error on all ranks if it raises one on any.

    All ranks call `on_error` before: they are at the same place, so it may make collective calls. Of ranks with the
    same error one raises it.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        if count() == 1:
            raise
        error = raised
    if not any_of(error is not None):
        return
    if on_error is not None:
        on_error()
    texts = gather(None if error is None else str(error))
    failed = next(number for number, text in enumerate(texts) if text is not None)
    if error is None or (failed != rank() and texts[failed] == str(error)):
        raise OtherRankError(f"rank {failed} of {count()} has failed: {texts[failed]}") from error
    raise error


@contextmanager
def _naming_lost_ranks() -> Iterator[None]:
    """Raise an error of a collective call as one line that names the ranks that have ended."""
    try:
        yield
    except RuntimeError as error:
        raise _loss(error) from error


def _loss(error: RuntimeError) -> RankError:
    deadline = time.monotonic() + NOTICE_S
    while True:
        ended = [number for number, process in enumerate(_processes) if process.has_ended]
        if ended or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if ended:
        names = " and ".join(f"rank {number} (process {_processes[number].pid})" for number in ended)
        message = f"{names} of {count()} ended, so the run ends; resume it with --resume runs/NAME."
        return RankError(message, prints=rank() == min(set(range(count())) - set(ended)))
    here = socket.gethostname()
    hosts = sorted({process.host for process in _processes} - {here})
    where = f"all ranks on {here} run; look for the error of a rank on {', '.join(hosts)}" if hosts else one_line(error)
    return RankError(f"rank {rank()} of {count()} has lost the others: {where}.", prints=True)


def host_of(number: int) -> str:
    """Name the machine of a rank, if the ranks are on several."""
    hosts = {process.host for process in _processes}
    return f" on {_processes[number].host}" if len(hosts) > 1 else ""
