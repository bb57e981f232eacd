import os
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from helpers.small_policy import make_small
from holdfast.errors import ConfigError, ContractError
from holdfast.play import saved_memory
from holdfast.play.saved_memory import SavedMemory, read_memory, weights_hash, write_memory

MEMORY = SavedMemory({"h": torch.arange(12.0).reshape(3, 4), "c": torch.ones(3, 2)}, "w" * 64, 3, 7, 99)


def equal(one, other):
    fields = [(m.weights, m.agents, m.seed, m.clock, sorted(m)) for m in (one, other)]
    return fields[0] == fields[1] and all(one[name].equal(other[name]) for name in one)


def test_write_and_read_memory(tmp_path):
    write_memory(MEMORY, tmp_path / "saved")
    assert equal(read_memory(tmp_path / "saved"), MEMORY)
    assert os.listdir(tmp_path) == ["saved"]


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_flipped_bit_raises(tmp_path_factory, place, bit):
    file = tmp_path_factory.mktemp("flipped") / "saved"
    write_memory(MEMORY, file)
    data = bytearray(file.read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    file.write_bytes(bytes(data))
    with pytest.raises(ContractError, match=r"damaged|not a saved memory|has the format"):
        read_memory(file)


@given(share=st.floats(0, 1, exclude_max=True))
def test_truncated_file_raises(tmp_path_factory, share):
    file = tmp_path_factory.mktemp("cut") / "saved"
    write_memory(MEMORY, file)
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ContractError, match="damaged, or not a saved memory"):
        read_memory(file)


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_pickle_is_rejected_and_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_bytes(pickle.dumps(Payload()))
    torch.save({"h": Payload()}, tmp_path / "b")
    for name in "ab":
        with pytest.raises(ContractError, match="damaged, or not a saved memory"):
            read_memory(tmp_path / name)
    assert not (tmp_path / "executed").exists()


def test_other_files_and_formats_raise(tmp_path):
    save_file({"h": torch.zeros(1)}, tmp_path / "weights")
    with pytest.raises(ContractError, match="is not a saved memory"):
        read_memory(tmp_path / "weights")
    save_file({"h": torch.zeros(1)}, tmp_path / "new", {"kind": "holdfast live memories", "format": "9"})
    with pytest.raises(ContractError, match="has the format 9; this version of Holdfast reads 1"):
        read_memory(tmp_path / "new")
    with pytest.raises(ConfigError, match="does not exist"):
        read_memory(tmp_path / "nothing")


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    write_memory(MEMORY, tmp_path / "saved")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match=r"saved cannot be written: .*No space left"):
        write_memory(SavedMemory({}, "w", 3, 0, 0), tmp_path / "saved")
    assert equal(read_memory(tmp_path / "saved"), MEMORY)
    assert os.listdir(tmp_path) == ["saved"]


def test_weights_hash():
    one, same_again, other = make_small(), make_small(), make_small(seed=1)
    assert weights_hash(one) == weights_hash(same_again) != weights_hash(other)
    with torch.no_grad():
        same_again.outwards.bias[0] += 1e-7
    assert weights_hash(one) != weights_hash(same_again)


@pytest.mark.parametrize("change", [{"agents": "four"}, {"clock": None}, {"weights": None}])
def test_missing_metadata_raises(tmp_path, change):
    head = {"kind": "holdfast live memories", "format": "1", "weights": "w" * 64}
    head |= {"agents": "3", "seed": "7", "clock": "99"} | change
    head = {name: text for name, text in head.items() if text is not None}
    leaves = dict(MEMORY.leaves)
    save_file(leaves, tmp_path / "saved", {**head, "sha256": saved_memory._digest(leaves, head)})
    with pytest.raises(ContractError, match="saved lacks metadata of its agents"):
        read_memory(tmp_path / "saved")


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_file_mode_follows_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_memory(MEMORY, tmp_path / "saved")
    finally:
        os.umask(before)
    assert (tmp_path / "saved").stat().st_mode & 0o777 == 0o666 & ~mask


def test_file_and_folder_are_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    write_memory(MEMORY, tmp_path / "saved")
    assert synced == [(tmp_path / "saved").stat().st_ino, tmp_path.stat().st_ino]
