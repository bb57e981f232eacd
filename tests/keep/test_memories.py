import os
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from holdfast.errors import ConfigError, ContractError
from holdfast.keep import memories
from holdfast.keep.memories import Memory, fingerprint, read_memory, write_memory
from small import make_small

MEMORY = Memory({"h": torch.arange(12.0).reshape(3, 4), "c": torch.ones(3, 2)}, "w" * 64, 3, 7, 99)


def same(one, other):
    told = [(each.weights, each.agents, each.seed, each.clock, sorted(each)) for each in (one, other)]
    return told[0] == told[1] and all(one[name].equal(other[name]) for name in one)


def test_what_is_written_is_read(tmp_path):
    write_memory(MEMORY, tmp_path / "kept")
    assert same(read_memory(tmp_path / "kept"), MEMORY)
    assert os.listdir(tmp_path) == ["kept"]


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_told_and_never_read_as_something_else(tmp_path_factory, place, bit):
    file = tmp_path_factory.mktemp("flipped") / "kept"
    write_memory(MEMORY, file)
    data = bytearray(file.read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    file.write_bytes(bytes(data))
    with pytest.raises(ContractError, match=r"damaged|holds no live memories|has the format"):
        read_memory(file)


@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_short_is_told(tmp_path_factory, share):
    file = tmp_path_factory.mktemp("cut") / "kept"
    write_memory(MEMORY, file)
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ContractError, match="damaged, or holds no memories"):
        read_memory(file)


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_pickle_is_refused_and_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_bytes(pickle.dumps(Payload()))
    torch.save({"h": Payload()}, tmp_path / "b")
    for name in "ab":
        with pytest.raises(ContractError, match="damaged, or holds no memories"):
            read_memory(tmp_path / name)
    assert not (tmp_path / "executed").exists()


def test_other_files_and_other_formats_are_told(tmp_path):
    save_file({"h": torch.zeros(1)}, tmp_path / "weights")
    with pytest.raises(ContractError, match="holds no live memories"):
        read_memory(tmp_path / "weights")
    save_file({"h": torch.zeros(1)}, tmp_path / "new", {"kind": "holdfast live memories", "format": "9"})
    with pytest.raises(ContractError, match="has the format 9; this version of Holdfast reads 1"):
        read_memory(tmp_path / "new")
    with pytest.raises(ConfigError, match="does not exist"):
        read_memory(tmp_path / "nothing")


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    write_memory(MEMORY, tmp_path / "kept")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match=r"kept cannot be written: .*No space left"):
        write_memory(Memory({}, "w", 3, 0, 0), tmp_path / "kept")
    assert same(read_memory(tmp_path / "kept"), MEMORY)
    assert os.listdir(tmp_path) == ["kept"]


def test_the_fingerprint_is_that_of_the_weights():
    one, same_again, other = make_small(), make_small(), make_small(seed=1)
    assert fingerprint(one) == fingerprint(same_again) != fingerprint(other)
    with torch.no_grad():
        same_again.outwards.bias[0] += 1e-7
    assert fingerprint(one) != fingerprint(same_again)


@pytest.mark.parametrize("told", [{"agents": "four"}, {"clock": None}, {"weights": None}])
def test_a_file_that_is_whole_but_says_not_whose_it_is_is_told(tmp_path, told):
    head = {**memories._head(MEMORY), **told}
    head = {name: word for name, word in head.items() if word is not None}
    leaves = dict(MEMORY.leaves)
    save_file(leaves, tmp_path / "kept", {**head, "sha256": memories._digest(leaves, head)})
    with pytest.raises(ContractError, match="kept does not say whose memories it holds"):
        read_memory(tmp_path / "kept")


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_memories_are_open_to_whom_any_new_file_is_open(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_memory(MEMORY, tmp_path / "kept")
    finally:
        os.umask(before)
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o666 & ~mask


def test_the_name_is_on_the_disk_too_when_it_is_written(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    write_memory(MEMORY, tmp_path / "kept")
    assert synced == [(tmp_path / "kept").stat().st_ino, tmp_path.stat().st_ino]
