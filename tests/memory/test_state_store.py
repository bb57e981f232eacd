import copy
import io

import pytest
import torch

from holdfast.errors import ContractError
from holdfast.memory import LSTM, StateStore


@pytest.fixture
def store():
    return StateStore(LSTM(3, 4, 2))


def state_of(store, length, number):
    return store._cell.initial(length).apply(lambda leaf: torch.full_like(leaf, number))


def test_unallocated_slice_starts_at_the_initial_state(store):
    assert (store.read(5, 3)["h"] == 0).all()
    assert store.slices == {5: 3}


def test_slices_do_not_share_states(store):
    store.allocate({0: 2, 2: 3})
    store.write(0, state_of(store, 2, 1.0))
    store.write(2, state_of(store, 3, 2.0))
    assert (store.read(0, 2)["c"] == 1).all()
    assert (store.read(2, 3)["c"] == 2).all()


def test_slices_are_views_of_one_tree(store):
    store.allocate({0: 2, 2: 3})
    with torch.no_grad():
        view = store.read(2, 3)
        store.write(2, state_of(store, 3, 7.0))
    assert (view["h"] == 7).all()


def test_read_with_gradients_is_a_copy(store):
    store.allocate({0: 2})
    before = store.read(0, 2)
    store.write(0, state_of(store, 2, 7.0))
    assert (before["h"] == 0).all()


def test_write_copies_and_detaches(store):
    state = state_of(store, 2, 1.0)
    state["h"].requires_grad_()
    store.write(0, state)
    stored = store.read(0, 2)["h"]
    assert not stored.requires_grad
    with torch.no_grad():
        state["h"].fill_(9.0)
    assert (stored == 1).all()


@pytest.mark.parametrize(
    ("start", "length"), [(1, 2), (0, 3), (4, 1), (0, 1)], ids=["inside", "longer", "unknown", "shorter"]
)
def test_unknown_slice_is_an_error_that_lists_the_allocated_ones(store, start, length):
    store.allocate({0: 2, 2: 2})
    with pytest.raises(ContractError, match="2 agents at 0, 2 agents at 2"):
        store.read(start, length)


def test_overlapping_slices_are_an_error(store):
    with pytest.raises(ContractError, match="overlaps"):
        store.allocate({0: 3, 2: 2})
    store.close()
    store.read(0, 3)
    with pytest.raises(ContractError, match="overlaps"):
        store.read(2, 2)


def test_another_slice_size_needs_a_reset(store):
    store.read(0, 3)
    with pytest.raises(ContractError, match="reset the memory"):
        store.read(0, 4)
    store.reset()
    assert len(store.read(0, 4)) == 4


def test_another_dtype_is_an_error_with_both_dtypes(store):
    store.allocate({0: 2})
    with pytest.raises(ContractError, match=r"float32 on cpu; the new state is .*float64"):
        store.write(0, state_of(store, 2, 1.0).double())


def test_another_shape_is_an_error(store):
    store.allocate({0: 2})
    wrong = LSTM(3, 5, 2).initial(2)
    with pytest.raises(ContractError, match=r"\[2, 2, 4\]"):
        store.write(0, wrong)


def test_reset_keeps_allocated_slices(store):
    store.allocate({0: 2, 2: 2})
    store.write(2, state_of(store, 2, 3.0))
    store.reset()
    assert store.slices == {0: 2, 2: 2}
    assert (store.read(2, 2)["h"] == 0).all()


def test_reset_slice_resets_single_agents(store):
    store.allocate({0: 2, 2: 4})
    store.write(0, state_of(store, 2, 1.0))
    store.write(2, state_of(store, 4, 1.0))
    store.reset_slice(2, [0, 3])
    assert store.read(2, 4)["c"][:, 0, 0].tolist() == [0, 1, 1, 0]
    assert (store.read(0, 2)["c"] == 1).all()
    store.reset_slice(2, torch.tensor([False, True, False, False]))
    assert store.read(2, 4)["c"][:, 0, 0].tolist() == [0, 0, 1, 0]
    store.reset_slice(2)
    assert (store.read(2, 4)["c"] == 0).all()


def test_reset_slice_outside_the_slices_is_an_error(store):
    store.allocate({0: 2})
    with pytest.raises(ContractError, match="No slice starts at agent 1"):
        store.reset_slice(1)
    with pytest.raises(ContractError, match=r"0\.\.1"):
        store.reset_slice(0, [2])


def test_reset_slice_with_no_agents_or_a_wrong_mask(store):
    store.allocate({0: 2})
    store.write(0, state_of(store, 2, 1.0))
    store.reset_slice(0, [])
    assert (store.read(0, 2)["h"] == 1).all()
    with pytest.raises(ContractError, match=r"mask \[1\]; the slice at agent 0 needs \[2\]"):
        store.reset_slice(0, torch.tensor([True]))


@pytest.mark.parametrize("other", [LSTM(3, 5, 2), LSTM(3, 4, 1), LSTM(3, 4, 2).double()])
def test_snapshot_of_another_size_or_dtype_is_an_error(store, other):
    source = StateStore(other)
    source.read(0, 2)
    with pytest.raises(ContractError, match="of the snapshot was"):
        store.restore(source.snapshot())


def test_snapshot_and_restore(store):
    store.allocate({0: 2})
    store.write(0, state_of(store, 2, 1.0))
    snapshot = store.snapshot()
    store.write(0, state_of(store, 2, 2.0))
    store.restore(snapshot)
    assert (store.read(0, 2)["h"] == 1).all()
    store.write(0, state_of(store, 2, 3.0))
    assert (snapshot.tree["h"] == 1).all()
    other = StateStore(LSTM(3, 4, 2))
    other.allocate({0: 3})
    with pytest.raises(ContractError, match="allocate the same slices"):
        other.restore(snapshot)


def test_replaying_reads_the_entry_state_and_writes_nothing(store):
    store.allocate({0: 2})
    store.write(0, state_of(store, 2, 1.0))
    with store.replaying(state_of(store, 5, 4.0)):
        assert (store.read(0, 5)["h"] == 4).all()
        store.write(0, state_of(store, 5, 6.0))
        with pytest.raises(ContractError, match="has 5 rows, the batch 2"):
            store.read(0, 2)
    assert (store.read(0, 2)["h"] == 1).all()


def test_replaying_does_not_nest_and_ends_on_an_exception(store):
    entry = state_of(store, 1, 0.0)
    with pytest.raises(ContractError, match="already open"), store.replaying(entry), store.replaying(entry):
        raise AssertionError("never reached")
    assert not store.is_replaying


def test_replayed_entry_state_is_detached(store):
    entry = state_of(store, 2, 1.0).apply(lambda leaf: leaf.requires_grad_())
    with store.replaying(entry):
        assert not store.read(0, 2)["h"].requires_grad


def test_copies_and_pickles_have_no_states(store):
    store.write(0, state_of(store, 2, 1.0))
    assert copy.deepcopy(store).slices == {}
    file = io.BytesIO()
    torch.save(store, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).slices == {}


def test_saved_tree_is_restored_and_one_of_other_leaves_refused(store):
    store.allocate({0: 2, 2: 3})
    store.write(2, state_of(store, 3, 7.0))
    saved = {"leaves": {key: leaf.clone() for key, leaf in store.snapshot().tree.items()}}
    store.reset()
    store.restore_tree(saved)
    assert (store.read(2, 3)["h"] == 7).all()
    assert (store.read(0, 2)["h"] == 0).all()
    del saved["leaves"]["c"]
    with pytest.raises(ContractError, match=r"^The saved state has leaves \['h'\], this memory \['c', 'h'\]\.$"):
        store.restore_tree(saved)


def test_errors_of_slices_are_complete(store):
    with store.replaying(state_of(store, 2, 0.0)), pytest.raises(ContractError) as caught:
        store.allocate({0: 2})
    assert str(caught.value) == "Cannot allocate slices within a replay; leave its `with` block first."
    store.allocate({0: 2})
    with pytest.raises(ContractError) as caught:
        store.write(0, state_of(store, 2, 0.0).double())
    assert str(caught.value) == (
        "Memory 'h' of the slice at agent 0 was [2, 2, 4] torch.float32 on cpu; the new state is [2, 2, 4] "
        "torch.float64 on cpu. Keep one size, dtype and device, or allocate the slices again after moving the policy."
    )
