import os
import pickle

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from holdfast.keep.packed import DamagedError, copied, pack, pack_weights, refuse_pickle, unpack

KINDS = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16]
tensors = st.builds(
    lambda shape, kind, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(
        kind
    ),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(KINDS),
    st.integers(0, 9),
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
keys = st.text(max_size=6) | st.integers(-5, 5)
trees = st.recursive(
    scalars | tensors,
    lambda inside: (
        st.lists(inside, max_size=3) | st.tuples(inside, inside) | st.dictionaries(keys, inside, max_size=3)
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
def test_every_tree_comes_back_as_it_was(tmp_path_factory, tree):
    file = tmp_path_factory.mktemp("tree") / "x.safetensors"
    file.write_bytes(pack(tree))
    assert same(unpack(file), tree)


def test_views_arrays_large_numbers_and_names_like_marks_come_back(tmp_path):
    view = torch.arange(12.0).reshape(3, 4)[:, 1]
    tree = {"view": view, "big": 2**127 + 1, "array": np.arange(6, dtype=np.int16).reshape(2, 3)}
    tree |= {"$tensor": "not one", "numpy": np.float32(0.5), "truth": np.bool_(True)}
    (tmp_path / "x").write_bytes(pack(tree))
    found = unpack(tmp_path / "x")
    assert torch.equal(found["view"], view)
    assert found["big"] == 2**127 + 1
    assert found["array"].dtype == np.int16
    assert (found["array"] == tree["array"]).all()
    assert found["$tensor"] == "not one"
    assert found["numpy"] == 0.5
    assert found["truth"] is True


def test_what_has_no_meaning_without_code_is_not_saved():
    with pytest.raises(TypeError, match="A function cannot be saved"):
        pack({"f": test_what_has_no_meaning_without_code_is_not_saved})


def test_a_copy_does_not_change_with_what_it_was_copied_from():
    tree = {"a": [torch.zeros(3)], "b": (torch.ones(2), 5)}
    copy = copied(tree)
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
def test_no_pickle_is_ever_loaded(tmp_path, protocol):
    (tmp_path / "x").write_bytes(pickle.dumps(Payload(tmp_path / "executed"), protocol))
    with pytest.raises(DamagedError):
        unpack(tmp_path / "x")
    if protocol >= 2:
        with pytest.raises(DamagedError, match="is a pickle, which can execute anything"):
            refuse_pickle(tmp_path / "x")
    assert not (tmp_path / "executed").exists()


def test_what_torch_saves_is_refused_by_name(tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "x")
    with pytest.raises(DamagedError, match="is a pickle"):
        refuse_pickle(tmp_path / "x")


def test_no_file_of_ours_is_taken_for_a_pickle(tmp_path):
    # A header of 128 or 640 bytes begins with the byte that pickles begin with.
    for length in range(600):
        file = tmp_path / "x"
        file.write_bytes(pack({"text": "x" * length}))
        refuse_pickle(file)
        assert unpack(file) == {"text": "x" * length}
    assert any(pack({"text": "x" * length})[0] == 0x80 for length in range(600)), (
        "some of them do begin like that"
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
def test_a_tree_that_makes_no_sense_is_damaged(tmp_path, structure):
    save_file({}, tmp_path / "x", {"tree": structure})
    with pytest.raises(DamagedError, match="cannot be read"):
        unpack(tmp_path / "x")


def test_a_file_without_a_tree_and_one_that_is_missing_are_told(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "x")
    with pytest.raises(DamagedError, match="cannot be read"):
        unpack(tmp_path / "x")
    with pytest.raises(DamagedError, match="nobody is missing"):
        unpack(tmp_path / "nobody")


def test_a_pipe_is_no_file_and_nobody_waits_for_it(tmp_path):
    os.mkfifo(tmp_path / "x")
    # A writer, so that whoever opens it would read nothing instead of waiting for ever.
    handle = os.open(tmp_path / "x", os.O_RDWR | os.O_NONBLOCK)
    os.write(handle, b"123456789")
    with pytest.raises(DamagedError, match="x is no file"):
        refuse_pickle(tmp_path / "x")
    os.close(handle)


def test_a_tensor_with_two_names_is_written_by_both(tmp_path):
    tied = torch.arange(4.0)
    (tmp_path / "x").write_bytes(pack({"a": tied, "b": [tied]}))
    found = unpack(tmp_path / "x")
    assert found["a"].equal(tied)
    assert found["b"][0].equal(tied)
    (tmp_path / "y").write_bytes(pack_weights({"a": tied, "b": tied}))
    weights = load_file(tmp_path / "y")
    assert sorted(weights) == ["a", "b"]
    assert all(weight.equal(tied) for weight in weights.values())
