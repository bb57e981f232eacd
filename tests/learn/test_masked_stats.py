"""masked_normalize over several processes."""

import pytest
import torch
from torch import distributed, multiprocessing

from holdfast.learn import losses

PROCESSES = 2


def make_rows():
    """Rows of very different size; most steps of the first process are invalid."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 5, generator=generator) * torch.tensor([1, 1, 1, 50, 50, 50])[:, None] + 1000
    valid = torch.rand(6, 5, generator=generator) < torch.tensor([0.2, 0.2, 0.2, 0.8, 0.8, 0.8])[:, None]
    return x, valid


def normalize_a_share(rank, folder):
    distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=PROCESSES)
    x, valid = (each.chunk(PROCESSES)[rank] for each in make_rows())
    empty = losses.masked_normalize(x, torch.zeros_like(valid))
    torch.save((losses.masked_normalize(x, valid), empty), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def shares(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    multiprocessing.spawn(normalize_a_share, args=(folder,), nprocs=PROCESSES)
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


def test_masked_normalize_across_processes(shares):
    x, valid = make_rows()
    normalized = torch.cat([share for share, _ in shares])
    torch.testing.assert_close(normalized[valid], losses.masked_normalize(x, valid)[valid], rtol=1e-5, atol=1e-6)
    alone = torch.cat([losses.masked_normalize(*rows) for rows in zip(x.chunk(2), valid.chunk(2), strict=True)])
    assert (normalized - alone)[valid].abs().max() > 0.1


def test_masked_normalize_across_processes_without_valid_steps(shares):
    assert all(empty.isfinite().all() for _, empty in shares)


def test_masked_normalize_single_process_formula():
    x, valid = make_rows()
    centred = x - losses.masked_mean(x, valid)
    std = torch.sqrt(losses.masked_mean(centred.square(), valid))
    assert torch.equal(losses.masked_normalize(x, valid), centred / (std + 1e-8))
