import os
import pickle

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from holdfast.checkpoint.serialization import (
    CorruptFileError,
    clone_tree,
    pack,
    pack_weights,
    refuse_pickle,
    unpack,
)

KINDS = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16]
tensors = st.builds(
    lambda shape, kind, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(kind),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(KINDS),
    st.integers(0, 9),
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
keys = st.text(max_size=6) | st.integers(-5, 5)
trees = st.recursive(
    scalars | tensors,
    lambda children: (
        st.lists(children, max_size=3) | st.tuples(children, children) | st.dictionaries(keys, children, max_size=3)
    ),
    max_leaves=8,
)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@settings(deadline=None, max_examples=200)
@given(trees)
def test_pack_unpack_round_trip(tmp_path_factory, tree):
    file = tmp_path_factory.mktemp("tree") / "x.safetensors"
    file.write_bytes(pack(tree))
    assert same(unpack(file), tree)


def test_round_trip_of_views_arrays_big_ints_and_reserved_keys(tmp_path):
    view = torch.arange(12.0).reshape(3, 4)[:, 1]
    tree = {"view": view, "big": 2**127 + 1, "array": np.arange(6, dtype=np.int16).reshape(2, 3)}
    tree |= {"$tensor": "not one", "numpy": np.float32(0.5), "truth": np.bool_(True)}
    (tmp_path / "x").write_bytes(pack(tree))
    tree_read = unpack(tmp_path / "x")
    assert torch.equal(tree_read["view"], view)
    assert tree_read["big"] == 2**127 + 1
    assert tree_read["array"].dtype == np.int16
    assert (tree_read["array"] == tree["array"]).all()
    assert tree_read["$tensor"] == "not one"
    assert tree_read["numpy"] == 0.5
    assert tree_read["truth"] is True


def test_functions_cannot_be_saved():
    with pytest.raises(TypeError, match="A function cannot be saved"):
        pack({"f": test_functions_cannot_be_saved})


def test_clone_tree_copies_tensors():
    tree = {"a": [torch.zeros(3)], "b": (torch.ones(2), 5)}
    copy = clone_tree(tree)
    tree["a"][0] += 1
    tree["b"][0].zero_()
    assert torch.equal(copy["a"][0], torch.zeros(3))
    assert torch.equal(copy["b"][0], torch.ones(2))
    assert copy["b"][1] == 5


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_never_loaded(tmp_path, protocol):
    (tmp_path / "x").write_bytes(pickle.dumps(Payload(tmp_path / "executed"), protocol))
    with pytest.raises(CorruptFileError):
        unpack(tmp_path / "x")
    if protocol >= 2:
        with pytest.raises(CorruptFileError, match="is a pickle, which can execute code"):
            refuse_pickle(tmp_path / "x")
    assert not (tmp_path / "executed").exists()


def test_torch_save_files_are_refused(tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "x")
    with pytest.raises(CorruptFileError, match="is a pickle"):
        refuse_pickle(tmp_path / "x")


def test_safetensors_files_are_not_mistaken_for_pickles(tmp_path):
    # A header of 128 or 640 bytes has the first byte of a pickle.
    for length in range(600):
        file = tmp_path / "x"
        file.write_bytes(pack({"text": "x" * length}))
        refuse_pickle(file)
        assert unpack(file) == {"text": "x" * length}
    assert any(pack({"text": "x" * length})[0] == 0x80 for length in range(600)), (
        "some headers have the first byte of a pickle"
    )


@pytest.mark.parametrize(
    "structure",
    [
        "{",
        "5]",
        '{"$tensor": "7"}',
        '{"$tuple": 3}',
        '{"$pairs": [1]}',
        '{"$pairs": [[[], 1]]}',
        "[" * 100_000,
    ],
)
def test_an_invalid_tree_is_corrupt(tmp_path, structure):
    save_file({}, tmp_path / "x", {"tree": structure})
    with pytest.raises(CorruptFileError, match="cannot be read"):
        unpack(tmp_path / "x")


def test_a_file_without_a_tree_and_a_missing_file_are_corrupt(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "x")
    with pytest.raises(CorruptFileError, match="cannot be read"):
        unpack(tmp_path / "x")
    with pytest.raises(CorruptFileError, match="absent is missing"):
        unpack(tmp_path / "absent")


def test_a_named_pipe_is_refused_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "x")
    # With a writer, so that opening it would read instead of blocking for ever.
    handle = os.open(tmp_path / "x", os.O_RDWR | os.O_NONBLOCK)
    os.write(handle, b"123456789")
    with pytest.raises(CorruptFileError, match="x is not a file"):
        refuse_pickle(tmp_path / "x")
    os.close(handle)


def test_tied_tensors_are_written_under_both_names(tmp_path):
    tied = torch.arange(4.0)
    (tmp_path / "x").write_bytes(pack({"a": tied, "b": [tied]}))
    tree_read = unpack(tmp_path / "x")
    assert tree_read["a"].equal(tied)
    assert tree_read["b"][0].equal(tied)
    (tmp_path / "y").write_bytes(pack_weights({"a": tied, "b": tied}))
    weights = load_file(tmp_path / "y")
    assert sorted(weights) == ["a", "b"]
    assert all(weight.equal(tied) for weight in weights.values())
